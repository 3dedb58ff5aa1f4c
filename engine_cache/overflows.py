"""Models whose numbers are too large for fp16: found out once, by an engine that was refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from ..core.errors import StoreError
from .files import replace_text, store_errors
from .locks import locked

KEPT = 1000

Model = tuple[str, str]
"""Digest of the architecture, digest of the weights."""

log = logging.getLogger(__name__)


class OverflowMemo:
    """Architectures and weights that overflow in fp16, kept under the engine store.

    It only saves builds: what cannot be read or written counts as not remembered.
    """

    def __init__(self, root: Path | str) -> None:
        self._folder = Path(root) / "memo"
        self._file = self._folder / "overflows.json"

    def add(self, model: Model) -> bool:
        """Remember a model; False where it was not kept, e.g. in a read-only store."""
        try:
            with store_errors("Remembering an overflow", self._folder):
                self._folder.mkdir(parents=True, exist_ok=True)
                with locked(self._folder / "overflows.lock", "Another process is remembering overflows", timeout=10):
                    others = [known for known in self.models() if known != model]
                    replace_text(self._file, json.dumps([*others, model][-KEPT:], indent=1), self._folder)
        except (OSError, StoreError) as error:
            log.debug("An overflow is not remembered: %s", error)
            return False
        return True

    def models(self) -> list[Model]:
        """All that are known, the newest last; damaged records are left out."""
        try:
            data = json.loads(self._file.read_bytes())
        except (OSError, ValueError, RecursionError):
            return []
        records = data if isinstance(data, list) else []
        return [(record[0], record[1]) for record in records if _is_model(record)]


def _is_model(record: object) -> bool:
    return isinstance(record, list) and len(record) == 2 and all(isinstance(digest, str) for digest in record)
