"""How long builds took: a small record that outlives the engines, so that the next one can be foretold."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from .memo_file import MemoFile

KEPT = 500


@dataclass(frozen=True)
class PastBuild:
    """One build that succeeded.

    Attributes:
        machine: name of the computer: others may share the store.
        device: the GPU's name, or "cpu".
        threads: CPU threads of the builder.
        architecture: digest of what was built.
        layers: weight tensors of the model; 0 where unknown.
        operations: of the traced graph; 0 where unknown.
        seconds: it ran, pauses left out.
        role: what the engine stands for, as a `Role`'s text; empty in records that were made before it was noted.
    """

    machine: str
    device: str
    threads: int
    backend: str
    optimize: str
    architecture: str
    layers: int
    operations: int
    seconds: float
    role: str = ""


_NAMES = [field.name for field in fields(PastBuild)]


class BuildHistory:
    """The builds that were made under one engine store, the newest last."""

    def __init__(self, root: Path | str) -> None:
        self._memo = MemoFile(root, "builds", "a build", "builds")

    def add(self, build: PastBuild) -> bool:
        """Remember a build; False where it was not kept, e.g. in a read-only store."""
        return self._memo.write("A build", lambda: [asdict(known) for known in [*self.builds(), build][-KEPT:]])

    def builds(self) -> list[PastBuild]:
        """All that are known; damaged records are left out."""
        data = self._memo.read()
        found = map(_past_build, data if isinstance(data, list) else [])
        return [build for build in found if build is not None]


def _past_build(record: Any) -> PastBuild | None:
    try:
        values = {"role": "", **{name: record[name] for name in _NAMES if name != "role" or name in record}}
        counts = [values.pop(name) for name in ("threads", "layers", "operations")]
        seconds = values.pop("seconds")
    except (TypeError, KeyError):
        return None
    sound = all(type(count) is int and count >= 0 for count in counts) and type(seconds) in (int, float)
    if not sound or not 0 < seconds < math.inf or not all(isinstance(text, str) for text in values.values()):
        return None
    return PastBuild(**{name: record[name] for name in _NAMES if name in record})
