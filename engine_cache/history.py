"""How long builds took: a small record that outlives the engines, so that the next one can be foretold."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..core.errors import StoreError
from .files import replace_text, store_errors
from .locks import locked

KEPT = 500

log = logging.getLogger(__name__)


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


class BuildHistory:
    """The builds that were made under one engine store, the newest last.

    It only helps to foretell: what cannot be read or written counts as not remembered.
    """

    def __init__(self, root: Path | str) -> None:
        self._folder = Path(root) / "memo"
        self._file = self._folder / "builds.json"

    def add(self, build: PastBuild) -> bool:
        """Remember a build; False where it was not kept, e.g. in a read-only store."""
        try:
            with store_errors("Remembering a build", self._folder):
                self._folder.mkdir(parents=True, exist_ok=True)
                with locked(self._folder / "builds.lock", "Another process is remembering builds", timeout=10):
                    kept = [*self.builds(), build][-KEPT:]
                    replace_text(self._file, json.dumps([asdict(known) for known in kept], indent=1), self._folder)
        except (OSError, StoreError) as error:
            log.debug("A build is not remembered: %s", error)
            return False
        return True

    def builds(self) -> list[PastBuild]:
        """All that are known; damaged records are left out."""
        try:
            data = json.loads(self._file.read_bytes())
        except (OSError, ValueError, RecursionError):
            return []
        found = map(_past_build, data if isinstance(data, list) else [])
        return [build for build in found if build is not None]


def _past_build(record: Any) -> PastBuild | None:
    try:
        values = {field.name: record[field.name] for field in fields(PastBuild)}
        counts = [values.pop(name) for name in ("threads", "layers", "operations")]
        seconds = values.pop("seconds")
    except (TypeError, KeyError):
        return None
    sound = all(type(count) is int and count >= 0 for count in counts) and type(seconds) in (int, float)
    if not sound or not 0 < seconds < math.inf or not all(isinstance(text, str) for text in values.values()):
        return None
    return PastBuild(**{field.name: record[field.name] for field in fields(PastBuild)})
