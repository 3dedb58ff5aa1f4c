"""A small JSON file under the engine store, which several processes add to."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..core.errors import StoreError
from .files import replace_text, store_errors
from .locks import locked

log = logging.getLogger(__name__)


class MemoFile:
    """It only helps: what cannot be read or written counts as not remembered.

    Args:
        root: of the engine store.
        name: of the file, without its ending.
        one, many: what is remembered, for messages: "a build", "builds".
    """

    def __init__(self, root: Path | str, name: str, one: str, many: str) -> None:
        self.folder = Path(root) / "memo"
        self.path = self.folder / f"{name}.json"
        self._lock = self.folder / f"{name}.lock"
        self._one, self._many = one, many

    def read(self) -> Any:
        """What the file holds; None where it is missing or damaged."""
        try:
            return json.loads(self.path.read_bytes())
        except (OSError, ValueError, RecursionError):
            return None

    def write(self, subject: str, content: Callable[[], Any]) -> bool:
        """Replace what the file holds.

        Args:
            subject: what is remembered by it, for the log.
            content: asked for while no other process writes.

        Returns:
            False where it was not kept, e.g. in a read-only store.
        """
        try:
            with store_errors(f"Remembering {self._one}", self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
                with locked(self._lock, f"Another process is remembering {self._many}", timeout=10):
                    replace_text(self.path, json.dumps(content(), indent=1), self.folder)
        except (OSError, StoreError) as error:
            log.debug("%s is not remembered: %s", subject, error)
            return False
        return True
