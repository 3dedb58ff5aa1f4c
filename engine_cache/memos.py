"""Caches beside the engines: small JSON files under the store, which several processes share.

They only save time: a file that cannot be read or written counts as empty.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..core.errors import StoreError
from .files import Identity, identity, replace_text, store_errors
from .locks import locked

KEPT = 1000
"""Records of each file; the oldest are forgotten."""
BUILDS_KEPT = 500
SETTLED_SECONDS = 2.0
"""Younger files are not trusted: rewritten within one tick of the clock (2 s on FAT), a file keeps its mtime."""

log = logging.getLogger(__name__)


class _MemoFile:
    """One of these files.

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


class WeightsMemo:
    """File identity (path, size, mtime, inode) -> digest, kept under the engine store."""

    def __init__(self, root: Path | str) -> None:
        self._memo = _MemoFile(root, "weights", "a digest", "digests")

    def get(self, path: Path | str, part: str = "") -> str | None:
        """The digest remembered for a file that is unchanged since.

        Args:
            part: which of several digests of one file, e.g. "unet" of a checkpoint.
        """
        try:
            wanted = identity(Path(path))
        except OSError:
            return None
        record = self._read().get(_name(path, part))
        return record["digest"] if record is not None and tuple(record["identity"]) == wanted else None

    def put(self, path: Path | str, digest: str, seen: Identity, part: str = "") -> bool:
        """Remember a digest.

        Args:
            seen: `files.identity` of the file from before it was read.

        Returns:
            False where it was not kept: the file has changed, is too young, or the store is read-only.
        """
        try:
            young = abs(time.time() - seen[1] / 1e9) < SETTLED_SECONDS
            if young or identity(Path(path)) != seen:
                return False
        except OSError as error:
            log.debug("The digest of %s is not remembered: %s", path, error)
            return False
        name, record = _name(path, part), {"identity": list(seen), "digest": digest}
        return self._memo.write(f"The digest of {path}", lambda: self._with(name, record))

    def files(self) -> dict[str, set[str]]:
        """Digest -> the files that have such weights, as far as they were met. They may have changed since."""
        found: dict[str, set[str]] = {}
        for name, record in self._read().items():
            found.setdefault(record["digest"], set()).add(name.partition("\n")[0])
        return found

    def _with(self, name: str, record: dict[str, Any]) -> dict[str, Any]:
        known = self._read()
        known.pop(name, None)
        return dict([*known.items(), (name, record)][-KEPT:])

    def _read(self) -> dict[str, dict[str, Any]]:
        data = self._memo.read()
        records = data if isinstance(data, dict) else {}
        return {name: record for name, record in records.items() if _is_weights_record(record)}


def _name(path: Path | str, part: str) -> str:
    return f"{Path(path).resolve()}\n{part}" if part else str(Path(path).resolve())


def _is_weights_record(record: Any) -> bool:
    return (
        isinstance(record, dict) and isinstance(record.get("digest"), str) and isinstance(record.get("identity"), list)
    )


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
        self._memo = _MemoFile(root, "builds", "a build", "builds")

    def add(self, build: PastBuild) -> bool:
        """Remember a build; False where it was not kept, e.g. in a read-only store."""
        return self._memo.write("A build", lambda: [asdict(known) for known in [*self.builds(), build][-BUILDS_KEPT:]])

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


class ChoiceMemo:
    """Measured milliseconds of alternatives that use the same engines, kept under the engine store."""

    def __init__(self, root: Path | str) -> None:
        self._memo = _MemoFile(root, "choices", "a measurement", "measurements")

    def add(self, subject: str, milliseconds: Mapping[str, float]) -> bool:
        """Remember a measurement; False where it was not kept, e.g. in a read-only store."""

        def content() -> dict[str, dict[str, float]]:
            known = self._known()
            known.pop(subject, None)
            return {name: known[name] for name in list(known)[1 - KEPT :]} | {subject: dict(milliseconds)}

        return self._memo.write("A measurement", content)

    def fastest(self, subject: str, ways: tuple[str, ...]) -> str | None:
        """The fastest of `ways`; None where one of them was not measured."""
        measured = self._known().get(subject, {})
        return min(ways, key=measured.__getitem__) if all(way in measured for way in ways) else None

    def _known(self) -> dict[str, dict[str, float]]:
        """All records; damaged ones are left out."""
        data = self._memo.read()
        records = data.items() if isinstance(data, dict) else ()
        return {subject: record for subject, record in records if _is_choice(record)}


def _is_choice(record: object) -> bool:
    return isinstance(record, dict) and all(isinstance(value, (int, float)) for value in record.values())


OverflowingModel = tuple[str, str]
"""Digest of the architecture, digest of the weights."""


class OverflowMemo:
    """Models that overflow in fp16, by architecture and weights: noted when an engine computes NaN or Inf."""

    def __init__(self, root: Path | str) -> None:
        self._memo = _MemoFile(root, "overflows", "an overflow", "overflows")

    def add(self, model: OverflowingModel) -> bool:
        """Remember a model; False where it was not kept, e.g. in a read-only store."""
        return self._memo.write(
            "An overflow", lambda: [*(known for known in self.models() if known != model), model][-KEPT:]
        )

    def models(self) -> list[OverflowingModel]:
        """All that are known, the newest last; damaged records are left out."""
        data = self._memo.read()
        records = data if isinstance(data, list) else []
        return [(record[0], record[1]) for record in records if _is_model(record)]


def _is_model(record: object) -> bool:
    return isinstance(record, list) and len(record) == 2 and all(isinstance(digest, str) for digest in record)
