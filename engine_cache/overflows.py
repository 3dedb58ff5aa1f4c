"""Models whose numbers are too large for fp16: found out once, by an engine that was refused."""

from __future__ import annotations

from pathlib import Path

from .memo_file import MemoFile

KEPT = 1000

Model = tuple[str, str]
"""Digest of the architecture, digest of the weights."""


class OverflowMemo:
    """Architectures and weights that overflow in fp16, kept under the engine store."""

    def __init__(self, root: Path | str) -> None:
        self._memo = MemoFile(root, "overflows", "an overflow", "overflows")

    def add(self, model: Model) -> bool:
        """Remember a model; False where it was not kept, e.g. in a read-only store."""
        return self._memo.write(
            "An overflow", lambda: [*(known for known in self.models() if known != model), model][-KEPT:]
        )

    def models(self) -> list[Model]:
        """All that are known, the newest last; damaged records are left out."""
        data = self._memo.read()
        records = data if isinstance(data, list) else []
        return [(record[0], record[1]) for record in records if _is_model(record)]


def _is_model(record: object) -> bool:
    return isinstance(record, list) and len(record) == 2 and all(isinstance(digest, str) for digest in record)
