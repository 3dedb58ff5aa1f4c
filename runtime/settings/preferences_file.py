"""The file that keeps what a user chose for all of Slipstream; the page and a text editor may change it."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ...engine_cache.files import replace_text, store_errors
from .preferences import NAMES, Preferences

log = logging.getLogger(__name__)

FILE_NAME = "settings.json"


class PreferencesFile:
    """The preferences of one machine's Slipstream.

    Args:
        home: the host's folder for engines, whatever folder the user prefers; see `default_home`.
        open_folders: gives those that others may write into, such as a host's folder for uploads. No engines are
            kept there, since what lies in a store is run.
    """

    def __init__(self, home: Path, open_folders: Callable[[], Iterable[Path]] = tuple) -> None:
        self.path = home / FILE_NAME
        self._open_folders = open_folders
        self._lock = threading.RLock()
        self._known: tuple[tuple[int, int] | None, Preferences] | None = None

    def read(self) -> Preferences:
        """As they are now; what is damaged counts as not chosen, with one warning. Cheap enough to be asked often."""
        with self._lock:
            stamp = self._stamp()
            if self._known is None or self._known[0] != stamp:
                self._known = stamp, self._parse()
            return self._known[1]

    def change(self, values: Mapping[str, Any]) -> Preferences:
        """
        Raises:
            ValueError: a value does not do; nothing was changed.
            StoreError: the file cannot be written.
        """
        with self._lock, store_errors("Saving the settings", self.path.parent):
            changed = self.read().changed(values)
            if "folder" in values:
                check_apart(changed.folder, self._open_folders())
                check_folder(changed.folder)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            kept = {**self._of_newer_versions(), **changed.to_json()}
            replace_text(self.path, json.dumps(kept, indent=1) + "\n", self.path.parent)
            self._known = self._stamp(), changed
        return changed

    def _stamp(self) -> tuple[int, int] | None:
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size

    def _parse(self) -> Preferences:
        found, complaints = Preferences(), []
        try:
            data = json.loads(self.path.read_bytes())
            for name in NAMES & data.keys():  # others are a newer version's
                try:
                    wanted = found.changed({name: data[name]})
                    if name == "folder":
                        check_apart(wanted.folder, self._open_folders())
                    found = wanted
                except ValueError as error:
                    complaints.append(str(error))
        except FileNotFoundError:
            return found
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            complaints = [f"{type(error).__name__}: {error}"]
        if complaints:
            log.warning("Slipstream: %s is damaged, and its defaults are used: %s", self.path, " ".join(complaints))
        return found

    def _of_newer_versions(self) -> dict[str, Any]:
        """What the file holds by names that are not known here."""
        try:
            data = json.loads(self.path.read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        return {name: data[name] for name in data.keys() - NAMES} if isinstance(data, dict) else {}


def check_apart(folder: str | None, open_folders: Iterable[Path]) -> None:
    """Make sure that nobody but Slipstream writes into a folder by way of the host.

    Raises:
        ValueError: it is one of `open_folders`, or one lies in the other.
    """
    if folder is None:
        return
    try:
        wanted = _real(Path(folder))
        found = next((each for each in open_folders if _overlap(wanted, _real(each))), None)
    except (OSError, ValueError, RuntimeError) as error:  # a loop of links, a name that cannot be one
        raise ValueError(f"folder: {folder!r:.200} is no folder: {error}.") from None
    if found is not None:
        raise ValueError(
            f"folder: {folder!r:.200} and {str(found)!r:.200} lie in one another. Others may upload files there, and "
            "what lies among the engines is run: choose a folder apart from it."
        )


def _overlap(one: Path, other: Path) -> bool:
    return one.is_relative_to(other) or other.is_relative_to(one)


def _real(path: Path) -> Path:
    return Path(os.path.normcase(path.resolve()))


def check_folder(folder: str | None) -> None:
    """Make sure that engines can be stored there; a folder that is missing is made.

    Raises:
        ValueError: why not.
    """
    if folder is None:
        return
    try:
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".slipstream-{os.getpid()}-{threading.get_ident()}"
        probe.touch(exist_ok=False)
        probe.unlink()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ValueError(f"folder: engines cannot be stored in {folder!r:.200}: {reason}.") from None
