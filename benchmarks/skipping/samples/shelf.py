"""What was made is kept on disk, so that processes share it and a run that was cut off goes on."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from .costs import Costs


@dataclass(frozen=True)
class Made:
    """
    Attributes:
        latents: of all samples, [B, 4, 32, 32].
        calls: steps that were computed.
        steps: of its sigmas.
    """

    latents: Tensor
    calls: int
    steps: int


class Shelf:
    """Runs and costs of one subject.

    Args:
        name: all that every run hangs on: seeds, number of samples, engines or none.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder / name
        self._folder.mkdir(parents=True, exist_ok=True)

    def within(self, name: str) -> Shelf:
        """For runs that are others under the same keys."""
        return Shelf(self._folder, name)

    def has(self, key: str) -> bool:
        return self._file(key).exists()

    def add(self, key: str, made: Made) -> None:
        part = self._file(key).with_suffix(f".{os.getpid()}")
        figures = {"calls": made.calls, "steps": made.steps}
        torch.save((made.latents.half() if made.latents.isfinite().all() else made.latents, json.dumps(figures)), part)
        part.replace(self._file(key))

    def take(self, key: str) -> Made:
        """
        Raises:
            FileNotFoundError: it was not made.
        """
        latents, figures = torch.load(self._file(key), weights_only=True)
        return Made(latents.float(), **json.loads(figures))

    def costs(self, sampler: str, cfg: float) -> Costs:
        """
        Raises:
            FileNotFoundError: that sampler was not timed at that CFG.
        """
        return Costs(**json.loads(self._costs_file(sampler, cfg).read_text()))

    def has_costs(self, sampler: str, cfg: float) -> bool:
        return self._costs_file(sampler, cfg).exists()

    def add_costs(self, sampler: str, cfg: float, costs: Costs) -> None:
        part = self._costs_file(sampler, cfg).with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(asdict(costs)))
        part.replace(self._costs_file(sampler, cfg))

    def _file(self, key: str) -> Path:
        return self._folder / f"{key}.pt"

    def _costs_file(self, sampler: str, cfg: float) -> Path:
        return self._folder / f"costs-{sampler}-cfg{cfg:g}.json"
