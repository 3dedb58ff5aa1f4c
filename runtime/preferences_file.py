"""The file that keeps what a user chose for all of Slipstream; the page and a text editor may change it."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..engine_cache.files import replace_text, store_errors
from .preferences import NAMES, Preferences

log = logging.getLogger(__name__)

FILE_NAME = "settings.json"


class PreferencesFile:
    """The preferences of one machine's Slipstream.

    Args:
        home: the host's folder for engines, whatever folder the user prefers; see `default_home`.
    """

    def __init__(self, home: Path) -> None:
        self.path = home / FILE_NAME
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
                check_folder(changed.folder)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(self.path, json.dumps(changed.to_json(), indent=1) + "\n", self.path.parent)
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
                    found = found.changed({name: data[name]})
                except ValueError as error:
                    complaints.append(str(error))
        except FileNotFoundError:
            return found
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            complaints = [f"{type(error).__name__}: {error}"]
        if complaints:
            log.warning("Slipstream: %s is damaged, and its defaults are used: %s", self.path, " ".join(complaints))
        return found


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
