"""Presets that a calibration found, kept as files: `<folder>/<name>.json`, one each."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

from ..engine_cache import file_identity
from ..engine_cache.files import replace_text, store_errors
from .presets import CUSTOM, PRESETS
from .saved_preset import SavedPreset, from_record

__all__ = ["SavedPreset", "check_name", "delete", "load", "presets_folder", "save", "saved_presets"]

log = logging.getLogger(__name__)

_LONGEST_NAME = 120  # bytes: with what is written beside it, a file's name may have 255
_NAME = re.compile(r"\w(?:[\w .()+-]*[\w)+-])?")
_WINDOWS_KEEPS = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)
_warned: set[tuple[object, ...]] = set()


def presets_folder(home: Path) -> Path:
    """The folder of saved presets inside Slipstream's home folder."""
    return home / "step_skipping"


def check_name(name: str) -> None:
    """Check that a preset can be saved under `name`.

    Raises:
        ValueError: no preset can be saved under it.
    """
    if name.casefold() in {*PRESETS, CUSTOM}:
        raise ValueError(f"{name} is a preset that Slipstream brings. Choose another name.")
    if not _NAME.fullmatch(name) or _WINDOWS_KEEPS.fullmatch(name) or len(name.encode()) > _LONGEST_NAME:
        raise ValueError(
            f"A preset cannot be saved as {name!r}. Choose a short name of letters, digits, spaces and - _ . ( ) + "
            "that begins with a letter or a digit."
        )


def save(preset: SavedPreset, folder: Path) -> Path:
    """Keep a preset; one of the same name is replaced.

    Raises:
        ValueError: see `check_name`.
        StoreError: it cannot be written.
    """
    check_name(preset.name)
    path = _path(preset.name, folder)
    with store_errors(f"Saving the preset {preset.name}", folder):
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(preset.record(), indent=1), folder)
    return path


def load(name: str, folder: Path) -> SavedPreset:
    """Read the preset `name`.

    Raises:
        ValueError: there is none of that name, or its file is damaged.
    """
    check_name(name)
    try:
        return from_record(name, json.loads(_path(name, folder).read_bytes()))
    except FileNotFoundError:
        raise ValueError(f"There is no saved preset {name!r} in {folder}. Calibrate it, or choose another.") from None
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise ValueError(f"The saved preset {_path(name, folder)} cannot be read: {error!r}. Delete it.") from error


def saved_presets(folder: Path) -> dict[str, SavedPreset]:
    """All that can be read, by name. What cannot is left out with a warning."""
    try:
        names = sorted(path.stem for path in folder.iterdir() if path.suffix == ".json")
    except FileNotFoundError:
        return {}
    except OSError as error:
        _warn_once(f"No saved presets: {folder} cannot be read ({error})", folder)
        return {}
    found = {name: _loaded(name, folder) for name in names}
    return {name: preset for name, preset in found.items() if preset is not None}


def delete(name: str, folder: Path) -> bool:
    """Whether there was one.

    Raises:
        ValueError: see `check_name`.
        StoreError: it cannot be deleted.
    """
    check_name(name)
    with store_errors(f"Deleting the preset {name}", folder):
        try:
            _path(name, folder).unlink()
        except FileNotFoundError:
            return False
    return True


def _path(name: str, folder: Path) -> Path:
    return folder / f"{name}.json"


def _loaded(name: str, folder: Path) -> SavedPreset | None:
    try:
        return load(name, folder)
    except ValueError as error:
        _warn_once(f"{error} It is left out.", *_version(_path(name, folder)))
        return None


def _version(path: Path) -> tuple[object, ...]:
    try:
        return path, *file_identity(path)
    except OSError:
        return (path,)


def _warn_once(message: str, *about: object) -> None:
    """Lists of presets are made again and again."""
    if about not in _warned:
        _warned.add(about)
        log.warning("%s", message)
