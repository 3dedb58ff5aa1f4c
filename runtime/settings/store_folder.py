"""Where engines are kept."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from ...engine_cache import DEFAULT_LIMIT_BYTES, EngineStore
from .preferences import Preferences
from .preferences_file import PreferencesFile

VARIABLE = "SLIPSTREAM_HOME"
BASES_VARIABLE = "SLIPSTREAM_BASE"
"""Stores that are only read, under the user's own: folders, separated as in PATH."""


def default_home(host_default: Path | None = None) -> Path:
    """The host's own place for models, else the user's cache folder. The preferences lie there, always."""
    return host_default or Path.home() / ".cache" / "slipstream" / "engines"


def configured_home() -> Path | None:
    """What the environment says; it goes before anything else."""
    configured = os.environ.get(VARIABLE)
    return Path(configured).expanduser() if configured else None


def store_home(host_default: Path | None = None) -> Path:
    """`SLIPSTREAM_HOME`, else the host's own place for models, else the user's cache folder."""
    return configured_home() or default_home(host_default)


def preferences_file(
    host_default: Path | None = None, open_folders: Callable[[], Iterable[Path]] = tuple
) -> PreferencesFile:
    """Where a host's users have their preferences; see `PreferencesFile` for `open_folders`."""
    return PreferencesFile(default_home(host_default), open_folders)


def engines_folder(preferences: Preferences, host_default: Path | None = None) -> Path:
    """`SLIPSTREAM_HOME`, else the folder that the user prefers, else as `default_home`."""
    preferred = Path(preferences.folder) if preferences.folder else None
    return configured_home() or preferred or default_home(host_default)


def store_at(root: Path, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> EngineStore:
    """The engines in a folder, and under them those of the bases that the environment names."""
    names = [name for name in os.environ.get(BASES_VARIABLE, "").split(os.pathsep) if name.strip()]
    return EngineStore(root, limit_bytes, bases=[Path(name.strip()).expanduser() for name in names])


def open_store(preferences: Preferences, host_default: Path | None = None) -> EngineStore:
    """The engines of a host, in the folder and within the limit that the user prefers."""
    return store_at(engines_folder(preferences, host_default), preferences.limit_bytes)
