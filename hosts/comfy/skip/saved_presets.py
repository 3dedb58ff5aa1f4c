"""Presets that were calibrated in this ComfyUI, beside the engine store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ....sampling import saved
from ....sampling.presets import Preset
from ..process.shared_provider import home


def folder() -> Path:
    return saved.presets_folder(home())


def saved_presets() -> dict[str, Preset]:
    """By name, for lists to choose from; each is for runs of one length."""
    return {name: preset.preset() for name, preset in saved.saved_presets(folder()).items()}


def records() -> dict[str, dict[str, Any]]:
    """All that is known of each, by name."""
    return {name: preset.record() for name, preset in saved.saved_presets(folder()).items()}
