"""Which of two ways was faster on this machine: measured once for a set of engines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .memo_file import MemoFile

KEPT = 1000


class ChoiceMemo:
    """Milliseconds of each way of doing something with the same engines, kept under the engine store."""

    def __init__(self, root: Path | str) -> None:
        self._memo = MemoFile(root, "choices", "a measurement", "measurements")

    def add(self, subject: str, milliseconds: Mapping[str, float]) -> bool:
        """Remember a measurement; False where it was not kept, e.g. in a read-only store."""

        def content() -> dict[str, dict[str, float]]:
            known = self._known()
            known.pop(subject, None)
            return {name: known[name] for name in list(known)[1 - KEPT :]} | {subject: dict(milliseconds)}

        return self._memo.write("A measurement", content)

    def fastest(self, subject: str, ways: tuple[str, ...]) -> str | None:
        """The way that took least; None where not all of them were measured."""
        measured = self._known().get(subject, {})
        return min(ways, key=measured.__getitem__) if all(way in measured for way in ways) else None

    def _known(self) -> dict[str, dict[str, float]]:
        """All records; damaged ones are left out."""
        data = self._memo.read()
        records = data.items() if isinstance(data, dict) else ()
        return {subject: record for subject, record in records if _is_record(record)}


def _is_record(record: object) -> bool:
    return isinstance(record, dict) and all(isinstance(value, (int, float)) for value in record.values())
