"""One variant's turn at a case: warm-up pictures, the one that is compared, timed ones, and the row of them all."""

from __future__ import annotations

import itertools
import math
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..measuring.deadline import OutOfTime
from ..patching.patches import KSAMPLER, PATCHES
from ..subjects.references import References
from ..subjects.rows import Row
from .cases import CASES
from .client import Calls, Client, Picture, PictureFailed
from .gpu import Monitor
from .graph import OUR_NODES, Prompt, Wish, build_prompt, required_defaults
from .plan import Block
from .process import ServerDied
from .rows import complete, figures_of, highest_mb, medians_of, of_readings
from .variants import PLAIN, ServerVariant

COMPARED_SEED = 7
"""Of the picture that is compared with the reference."""

KEPT = "latent", "picture", "text"
"""What the probe keeps of the picture that is compared."""

PROFILES = "kernels", "functions"

_FIRST_SEED = 1000
_REST_SECONDS = 0.3


@dataclass(frozen=True)
class Schedule:
    """How many pictures a block makes.

    Attributes:
        warmup: before the timed ones; the first builds or compiles, the last is compared with the reference.
        pictures: that are timed.
        is_synchronised: one more follows, in which the GPU is waited for around every call of the model.
        profiles: a folder for tables of where the sampler's time goes, which one more picture each tells; None: none.
    """

    warmup: int
    pictures: int
    is_synchronised: bool = False
    profiles: Path | None = None


@dataclass
class Seen:
    """What a block has shown so far.

    Attributes:
        warmup_s: seconds of the warm-up pictures, by the client.
        timed: pictures.
        timed_from: when the first of them began, by `time.monotonic`; None before that.
        facts: further fields of the row.
        failed: why the pictures may not be trusted; None where nothing speaks against them.
    """

    began: float = field(default_factory=time.monotonic)
    warmup_s: list[float] = field(default_factory=list)
    timed: list[Picture] = field(default_factory=list)
    timed_from: float | None = None
    facts: Row = field(default_factory=dict)
    failed: str | None = None


class Pictures:
    """Makes a server's pictures, no two of them alike: ComfyUI computes nothing that it has computed before.

    Args:
        outputs: the server's folder of outputs, into which the probe writes.
        build: when Slipstream's nodes build what is missing, as their input of that name has it.
    """

    def __init__(self, client: Client, outputs: Path, build: str = "first use") -> None:
        self.client, self._outputs, self._build = client, outputs, build
        self._seeds: Iterator[int] = itertools.count(_FIRST_SEED)
        self._ours: dict[str, Mapping[str, Any]] = {}
        self._others: dict[str, Mapping[str, Any]] = {}

    def next(self, block: Block, number: int = 0, **wishes: bool) -> Picture:
        """Make a picture of a seed, and of a LoRA's strength, that no picture before it had.

        Args:
            number: chooses the length of the prompt, so that all variants meet them in the same order.
        """
        seed = next(self._seeds)
        strength = round(0.4 + (seed % 60) / 100, 2)
        return self._make(block, Wish(seed, number, strength), **wishes)

    def compared(self, block: Block) -> tuple[Picture, dict[str, Any]]:
        """Make the picture of the seed that all variants make, and return what the probe keeps of it."""
        picture = self._make(block, Wish(COMPARED_SEED, COMPARED_SEED, nonce=next(self._seeds)), keep=True)
        files = {what: self._outputs / f"slipstream-benchmark-{what}.npy" for what in KEPT}
        arrays = {what: np.load(file) for what, file in files.items() if file.exists()}
        for file in files.values():
            file.unlink(missing_ok=True)
        return picture, arrays

    def profile(self, block: Block, folder: Path) -> None:
        """Make a picture for each of the probe's tables, and keep these in a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        for what in PROFILES:
            self.next(block, **{what: True})
            file = self._outputs / f"slipstream-benchmark-{what}.txt"
            if file.exists():
                patch = f"-{block.patch}" if block.patch else ""
                shutil.move(file, folder / f"{block.case}-{block.variant}{patch}-{block.turn}-{what}.txt")

    def _make(self, block: Block, wish: Wish, **wishes: bool) -> Picture:
        """Make a picture; a node in KSampler's place is timed as that is."""
        patch = PATCHES[block.patch] if block.patch else None
        sampler = {"sampler": patch.node.class_type} if patch and patch.stands_for == KSAMPLER else {}
        return self.client.run(self._prompt(block, wish), **wishes, **sampler)

    def _prompt(self, block: Block, wish: Wish) -> Prompt:
        variant = ServerVariant.of(block.variant)
        if variant.is_ours and not self._ours:
            found = {node: required_defaults(self.client.node_info(node)) for node in OUR_NODES}
            build = {"build": self._build}
            self._ours = {node: each | build if "build" in each else each for node, each in found.items()}
        patch = PATCHES[block.patch] if block.patch else None
        for node in patch.node.classes if patch else ():
            if node not in self._others:
                self._others[node] = required_defaults(self.client.node_info(node))
        defaults = {**self._ours, **self._others}
        return build_prompt(CASES[block.case], variant, wish, defaults, patch, has_vae=block.patch is None)


@dataclass(frozen=True)
class Bench:
    """Where blocks are measured.

    Args:
        references: what pictures are compared with.
        patched: the same of pictures with a patch, by this command: a pack may be another one in the next.
        monitor: of the GPU.
        comfyui: the version.
    """

    schedule: Schedule
    references: References
    patched: References
    monitor: Monitor
    comfyui: str

    def measure(self, block: Block, pictures: Pictures) -> tuple[Row | None, Exception | None]:
        """Measure a block.

        Returns:
            Its row, None where there is nothing to tell; and what ended it early: `ServerDied`, `PictureFailed` or
            `OutOfTime`.
        """
        seen, error = Seen(), None
        try:
            self._make(block, pictures, seen)
        except (ServerDied, PictureFailed, OutOfTime) as stopped:
            error = stopped
        is_told = bool(seen.timed) or not (error is None or isinstance(error, OutOfTime))
        return self._row(block, seen, error) if is_told else None, error

    def _make(self, block: Block, pictures: Pictures, seen: Seen) -> None:
        pictures.client.unload_models()  # some patches act at a load, and leave their traces until the next
        is_warm = bool(block.patch) and not ServerVariant.of(block.variant).is_ours  # by the base's pictures
        for number in range(0 if is_warm else max(self.schedule.warmup - 1, CASES[block.case].first_pictures)):
            seen.warmup_s.append(pictures.next(block, number).client_s)
        self._compare(block, pictures, seen)
        if block.is_reference_only:
            return
        stopped = self._time(block, pictures, seen)
        if seen.timed:
            self._look_back(block, pictures, seen)
        if stopped is not None:
            raise stopped
        if self.schedule.is_synchronised:
            slow = pictures.next(block, synchronised=True)
            seen.facts["step_ms_synchronised"] = medians_of([figures_of(slow.client_s, slow.nodes)]).get("step_ms")
        if self.schedule.profiles is not None:
            pictures.profile(block, self.schedule.profiles)

    def _time(self, block: Block, pictures: Pictures, seen: Seen) -> OutOfTime | None:
        """Make the timed pictures; those that were made when the time is over count."""
        seen.timed_from = time.monotonic()
        try:
            for number in range(self.schedule.pictures):
                seen.timed.append(pictures.next(block, number))
        except OutOfTime as stopped:
            return stopped
        finally:
            seen.facts.update(of_readings(self.monitor.between(seen.timed_from, time.monotonic())))
        return None

    def _look_back(self, block: Block, pictures: Pictures, seen: Seen) -> None:
        """Read what the timed pictures have left behind: memory in use at rest, and who computed them."""
        time.sleep(_REST_SECONDS)
        used = self.monitor.used_mb()
        seen.facts["vram_mb"] = None if used is None else round(used, 1)
        if ServerVariant.of(block.variant).is_ours:
            seen.facts.update(_calls(pictures.client, seen.timed))

    def _compare(self, block: Block, pictures: Pictures, seen: Seen) -> None:
        picture, arrays = pictures.compared(block)
        seen.warmup_s.append(picture.client_s)
        if not all(np.isfinite(array).all() for array in arrays.values()):
            seen.failed = "the picture is not finite"
            return
        is_plain = ServerVariant.of(block.variant).kind == PLAIN and not block.flags
        name, references = block.case, self.references
        if block.patch:
            name, references = f"{block.case}-{block.patch}", self.patched
            effects = self.references.errors(block.case, self.comfyui, arrays) if is_plain else {}
            seen.facts["effect"] = max(effects.values(), default=None)
        if is_plain and arrays and not references.has(name, self.comfyui):
            references.keep(name, self.comfyui, arrays)
        errors = references.errors(name, self.comfyui, arrays)
        if errors:
            seen.facts.update(error=max(errors.values()), errors=errors)
        if math.inf in errors.values():
            seen.failed = "the picture is of another size than the reference"

    def _row(self, block: Block, seen: Seen, error: Exception | None) -> Row:
        begun = time.monotonic() if seen.timed_from is None else seen.timed_from
        row = medians_of([figures_of(picture.client_s, picture.nodes) for picture in seen.timed])
        row["samples"]["warmup_s"] = [round(seconds, 6) for seconds in seen.warmup_s]
        calls = {sum(node.get("calls", 0) for node in picture.nodes) for picture in seen.timed}
        failed = str(error) if isinstance(error, (ServerDied, PictureFailed)) else seen.failed
        return complete(
            {
                "case": block.case, "flags": list(block.flags), "comfyui": self.comfyui, "variant": block.variant,
                "patch": block.patch, "turn": block.turn, **row, "pictures": len(seen.timed),
                "build_s": round(seen.warmup_s[0], 3) if seen.warmup_s else None,
                "build_peak_mb": highest_mb(self.monitor.between(seen.began, begun)),
                "model_calls": max(calls, default=None), "died": isinstance(error, ServerDied), **seen.facts,
                "failed": failed,
            }
        )  # fmt: skip


def _calls(client: Client, pictures: list[Picture]) -> Row:
    """Calls of engines and of eager models, over all pictures; None where one says nothing of them."""
    known = [found for found in map(client.calls, pictures) if found is not None]
    if len(known) < len(pictures):
        return {}
    total = sum(known, Calls())
    found = {"engine_calls": total.engine, "eager_calls": total.eager, "reasons": dict(total.reasons)}
    by_blocks = {"blocks": total.blocks, "blocks_on_engines": total.blocks_on_engines}
    return {**found, **(by_blocks if total.blocks else {})}
