"""One case in this process: every variant is set up, checked and timed; then all of them take turns.

The figures come from the turns, so that a busy moment hits every variant alike. What was measured before the turns is
written too, marked by being followed by another row of the same variant: a time limit loses only what was not reached.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..core.environment import Environment
from ..core.protocols import Tensors
from ..runtime.measure import milliseconds, statistics_of, versions
from ..runtime.memory import give_back_unused
from ..runtime.verify import LIMITS, exact_fp32, relative_error
from .cases import SEED, Case, Subject
from .rows import Row, complete
from .variants import EAGER, Ready, Variant, Workshop, set_up

SETS = 3
"""Inputs that the calls rotate through; one more is kept for the end, which no variant has seen before."""

Write = Callable[[Row], None]


@dataclass(frozen=True)
class Schedule:
    """How often to call, and what all rows have in common."""

    repeats: int
    warmup: int
    common: Row


@dataclass(frozen=True)
class Example:
    """Inputs and what fp32 makes of them."""

    inputs: Tensors
    reference: Tensors


class Contender:
    """One variant: its calls, its error, its samples."""

    def __init__(self, name: str, ready: Ready, examples: Sequence[Example]) -> None:
        self.name = name
        self.ready = ready
        self.error = 0.0
        self.calls = 0
        self.vram_mb: float | None = None
        self.build_s: float | None = None
        self._examples = examples
        self._taken = [ready.prepare(example.inputs) for example in examples]

    def call(self, number: int) -> Any:
        """Compute with one set of inputs."""
        self.calls += 1
        return self.ready.compute(self._taken[number])

    def check(self, numbers: Sequence[int]) -> None:
        """Compare with fp32; the largest error counts."""
        for number in numbers:
            given = self.ready.result(self._taken[number], self.call(number))
            self.error = max(self.error, relative_error(given, self._examples[number].reference))

    def row(self, samples: Sequence[float]) -> Row:
        """What was found out, with the reason why it may not be trusted, if there is one."""
        ready = self.ready
        found = {"build_s": self.build_s, **ready.facts, "vram_mb": self.vram_mb, "precision": ready.precision.value}
        calls = {"engine_calls": ready.engine_calls() or 0}
        return {**statistics_of(samples), "error": self.error, **found, **calls, "failed": self._failure()}

    def _failure(self) -> str | None:
        served = self.ready.engine_calls()
        if served is not None and served != self.calls:
            return f"the engine served {served} of {self.calls} calls: {self.ready.reasons() or 'no reason was given'}"
        # Our engines are held to the limit that they serve under; what others compute is reported as it is.
        limit = LIMITS[self.ready.precision] if served is not None else sys.float_info.max
        if not self.error <= limit:
            return f"differs from fp32 by {self.error:.1e}, allowed is {limit:.0e} in {self.ready.precision.value}"
        return None


def measure(case: Case, variants: Sequence[Variant], schedule: Schedule, workshop: Workshop, write: Write) -> None:
    """Measure one case.

    Args:
        write: given each row when it is known; a later row of a variant replaces an earlier one, and a row of only
            `case`, `variant` and `left_out` says that a variant means nothing here.
    """
    with torch.no_grad():
        subject = case.build()
    with torch.inference_mode(), ExitStack() as ending:  # as ComfyUI runs its nodes
        Measurement(case, subject, schedule, workshop, write, ending).run(variants)


class Measurement:
    """The variants of one case, in one process."""

    def __init__(
        self, case: Case, subject: Subject, schedule: Schedule, workshop: Workshop, write: Write, ending: ExitStack
    ) -> None:
        self._case, self._subject, self._schedule = case, subject, schedule
        self._workshop, self._write, self._ending = workshop, write, ending
        self._device = subject.source.device
        self._examples = _examples(subject)
        self._common = {**schedule.common, **circumstances(subject), "case": case.name, "seed": SEED}
        self._common |= {"repeats": schedule.repeats, "warmup": schedule.warmup}
        self._model_bytes = self._held()

    def run(self, variants: Sequence[Variant]) -> None:
        """Set up, check and time each; then all of them in turns."""
        contenders = []
        for variant in variants:
            if reason := variant.why_left_out(self._case, self._subject):
                self._write({"case": self._case.name, "variant": variant.name, "left_out": reason})
            elif contender := self._enter(variant):
                contenders.append(contender)
        self._take_turns(contenders)

    def _enter(self, variant: Variant) -> Contender | None:
        self._workshop.tell(f"{variant.name}: setting up")
        ending = ExitStack()
        try:
            contender = self._set_up(variant, ending)
            alone = [milliseconds(lambda: contender.call(0), self._device) for _ in range(self._schedule.repeats)]
            self._put(contender.name, contender.row(alone))
        except Exception as error:
            ending.close()
            self._put_failure(variant.name, error)
            return None
        self._ending.push(ending)
        self._workshop.tell(f"{variant.name}: {statistics_of(alone)['ms']:.2f} ms alone, error {contender.error:.1e}")
        return contender

    def _set_up(self, variant: Variant, ending: ExitStack) -> Contender:
        others = self._held() - self._model_bytes
        started = time.perf_counter()
        contender = Contender(variant.name, set_up(variant, self._subject, self._workshop, ending), self._examples)
        contender.call(0)
        _synchronize(self._device)
        if variant.name != EAGER:
            contender.build_s = round(time.perf_counter() - started, 3)
        with self._peak(contender, others + contender.ready.copied_bytes):
            for number in range(self._schedule.warmup):
                contender.call(number % SETS)
            contender.check(range(SETS))
        return contender

    def _take_turns(self, contenders: list[Contender]) -> None:
        samples: dict[str, list[float]] = {contender.name: [] for contender in contenders}
        for turn in range(self._schedule.repeats):
            for contender in list(contenders):
                try:
                    took = milliseconds(lambda: contender.call(turn % SETS), self._device)  # noqa: B023
                except Exception as error:
                    contenders.remove(contender)
                    self._put_failure(contender.name, error)
                else:
                    samples[contender.name].append(took)
        for contender in contenders:
            try:
                contender.check(range(SETS + 1))
                self._put(contender.name, contender.row(samples[contender.name]))
            except Exception as error:
                self._put_failure(contender.name, error)

    def _put(self, name: str, row: Row) -> None:
        versions_of_all = {**self._common["versions"], **row.get("versions", {})}
        self._write(complete({**self._common, "variant": name, **row, "versions": versions_of_all}))

    def _put_failure(self, name: str, error: Exception) -> None:
        lines = str(error).strip().splitlines() or [""]
        self._put(name, {"samples": [], "failed": f"{type(error).__name__}: {lines[0]}"})

    def _held(self) -> int:
        """Bytes of the GPU's memory that stay with this process."""
        if self._device.type != "cuda":
            return 0
        gc.collect()
        give_back_unused(self._device)
        return torch.cuda.memory_reserved(self._device)

    @contextmanager
    def _peak(self, contender: Contender, others: int) -> Iterator[None]:
        """Memory of a variant alone with its model. Reserved, not allocated: a CUDA graph's memory is only that."""
        if self._device.type != "cuda":
            yield
            return
        self._held()
        torch.cuda.reset_peak_memory_stats(self._device)
        yield
        _synchronize(self._device)
        contender.vram_mb = round((torch.cuda.max_memory_reserved(self._device) - others) / 2**20, 1)


def circumstances(subject: Subject) -> Row:
    """On what a case was measured."""
    import comfyui_version

    environment = Environment.current(subject.source.device)
    return {
        "gpu": environment.gpu,
        "driver": environment.driver,
        "versions": {**versions(environment), "comfyui": comfyui_version.__version__},
        "shapes": {name: list(shape) for name, shape in subject.shapes.items()},
        "precision": subject.source.precision.value,
    }


def _examples(subject: Subject) -> list[Example]:
    made = []
    for number in range(SETS + 1):
        inputs = subject.inputs(SEED + number)
        with exact_fp32():
            reference = subject.source.reference(inputs)
        size = max(float(tensor.abs().max()) for tensor in reference.values())
        if not 1e-3 < size < 1e4:
            raise ValueError(
                f"The model's random weights make values of size {size:.1e}, by which nothing can be judged"
            )
        made.append(Example(inputs, reference))
    return made


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
