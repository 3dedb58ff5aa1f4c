"""The pictures that all others are compared with: those of the plain workflow in a server with its default flags."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = "references"
_BEFORE_VERSION = "--comfyui-"

Arrays = Mapping[str, Any]
"""Latent [B, C, H, W] and picture [B, H, W, 3], or text [B, tokens, width], as float32, by these names."""


class References:
    """Pictures in a folder, one file a case and version of ComfyUI.

    They lie beside the model files that made them, so that a later command finds both or neither.

    Args:
        models: the folder of model files.
    """

    def __init__(self, models: Path) -> None:
        self._folder = models / FOLDER

    def has(self, case: str, comfyui: str) -> bool:
        """Whether there is a picture of a case."""
        return self._file(case, comfyui).is_file()

    def keep(self, case: str, comfyui: str, arrays: Arrays) -> None:
        """Make a picture the reference of its case."""
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._file(case, comfyui)
        unfinished = file.with_name(f"{os.getpid()}-{file.name}")
        np.savez(unfinished, **arrays)
        unfinished.replace(file)

    def forget(self, case: str) -> None:
        """Remove a case's pictures, of all versions of ComfyUI."""
        for file in self._folder.glob(f"{case}{_BEFORE_VERSION}*.npz"):
            file.unlink(missing_ok=True)

    def errors(self, case: str, comfyui: str, arrays: Arrays) -> dict[str, float]:
        """Return the relative error of each array, by name; empty where there is no reference."""
        if not self.has(case, comfyui):
            return {}
        with np.load(self._file(case, comfyui)) as known:
            return {name: relative_error(array, known[name]) for name, array in arrays.items() if name in known}

    def _file(self, case: str, comfyui: str) -> Path:
        return self._folder / f"{case}{_BEFORE_VERSION}{comfyui}.npz"


def relative_error(given: Any, reference: Any) -> float:
    """Return ‖given − reference‖ / ‖reference‖, infinite for arrays of other shapes, or with NaN or Inf in `given`."""
    if given.shape != reference.shape or not np.isfinite(given).all():
        return float("inf")
    distance = np.linalg.norm((given.astype(np.float64) - reference).ravel())
    return float(distance / max(np.linalg.norm(reference.astype(np.float64).ravel()), 1e-12))
