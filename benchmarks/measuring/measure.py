"""One case in this process: every variant is set up, checked and timed; then all of them take turns.

The figures come from the turns, so that a busy moment hits every variant alike. What was measured before the turns is
written too, marked by being followed by another row of the same variant: a time limit loses only what was not reached.
"""

from __future__ import annotations

import gc
import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ...core.environment import Environment
from ...core.errors import UnsupportedModel
from ...core.protocols import Tensors
from ...runtime.checking.measure import statistics_of, versions
from ...runtime.checking.rounding_switches import exact_fp32
from ...runtime.loaded.device_memory import give_back_unused
from ..subjects.cases import Case
from ..subjects.jobs import Job
from ..subjects.models import SEED, Model
from ..subjects.rows import Row, complete
from ..subjects.setup import Ready, SetupContext
from ..subjects.subject import Example, Judge, Subject, synchronize
from ..subjects.variants import Variant
from . import job_variants, model_variants, trust
from .switching import Switch, sides_of
from .turns import GpuTurn

Write = Callable[[Row], None]


@dataclass(frozen=True)
class Schedule:
    """How often to call, what all rows have in common, and whom the GPU is shared with.

    Attributes:
        until: when setting up has to end, by `time.monotonic`; None: whenever it does.
    """

    repeats: int
    warmup: int
    common: Row
    place: GpuTurn = field(default_factory=lambda: GpuTurn(None))
    until: float | None = None

    @property
    def seconds_left(self) -> float:
        """To set up."""
        return math.inf if self.until is None else self.until + self.place.waited - time.monotonic()


@dataclass(frozen=True)
class Challenge:
    """What every variant of a case is put to.

    Attributes:
        engine_calls: of one call, where all of it runs on engines.
    """

    examples: Sequence[Example]
    judge: Judge
    engine_calls: int

    @classmethod
    def of(cls, subject: Subject) -> Challenge:
        """
        Raises:
            ValueError: results of this subject cannot be judged.
        """
        inputs = [subject.inputs(SEED + number) for number in range(subject.sets + subject.unseen)]
        with exact_fp32():
            references = subject.references(inputs)
        for reference in references:
            _check_size(reference)
        examples = [Example(*each) for each in zip(inputs, references, strict=True)]
        return cls(examples, subject.judge(examples), subject.engine_calls)


def _check_size(reference: Tensors) -> None:
    size = max(float(tensor.abs().max()) for tensor in reference.values())
    if not 1e-3 < size < 1e4:
        raise ValueError(f"The model's random weights make values of size {size:.1e}, by which nothing can be judged")


class TooLate(BaseException):
    """Setting up has to end. No `Exception`, which compilers take for a failure of theirs and go on."""


class Contender:
    """One variant: its calls, its errors, its samples."""

    def __init__(self, name: str, ready: Ready, challenge: Challenge) -> None:
        self.name = name
        self.ready = ready
        self.errors: dict[str, float] = {}
        self.calls = 0
        self.vram_mb: float | None = None
        self.build_s: float | None = None
        self._challenge = challenge
        self._taken = [ready.prepare(example.inputs) for example in challenge.examples]

    @property
    def error(self) -> float:
        """The largest of all."""
        return max(self.errors.values(), default=0.0)

    def call(self, number: int) -> Any:
        """Compute with one set of inputs."""
        self.calls += 1
        return self.ready.compute(self._taken[number])

    def check(self, numbers: Sequence[int]) -> None:
        """Compare with fp32; the largest error counts."""
        for number in numbers:
            given = self.ready.result(self._taken[number], self.call(number))
            found = self._challenge.judge.errors(given, self._challenge.examples[number].reference)
            self.errors = {output: max(error, self.errors.get(output, 0.0)) for output, error in found.items()}

    def row(self, samples: Sequence[float]) -> Row:
        """What was found out, with the reason why it may not be trusted, if there is one."""
        ready = self.ready
        found = {"build_s": self.build_s, **ready.facts, "vram_mb": self.vram_mb, "precision": ready.numbers}
        found |= {"engine_calls": ready.engine_calls() or 0, **self._challenge.judge.facts(self.errors)}
        return {**statistics_of(samples), "error": self.error, **found, "failed": self._failure()}

    def _failure(self) -> str | None:
        wanted = self.calls * (self.ready.wanted_calls or self._challenge.engine_calls)
        return trust.why_not(self.ready, self._challenge.judge, self.errors, wanted)


def measure(
    case: Case, variants: Sequence[Variant], schedule: Schedule, setup_context: SetupContext, write: Write
) -> None:
    """Measure one case.

    Args:
        write: given each row when it is known; a later row of a variant replaces an earlier one, and a row of only
            `case`, `variant` and `left_out` says that a variant means nothing here.
    """
    with torch.no_grad():
        subject = case.build()
    with torch.inference_mode(), ExitStack() as ending:  # as ComfyUI runs its nodes
        Measurement(case, subject, schedule, setup_context, write, ending).run(variants)


class Measurement:
    """The variants of one case, in one process."""

    def __init__(
        self,
        case: Case,
        subject: Subject,
        schedule: Schedule,
        setup_context: SetupContext,
        write: Write,
        ending: ExitStack,
    ) -> None:
        self._case, self._subject, self._schedule = case, subject, schedule
        self._setup_context, self._write, self._ending = setup_context, write, ending
        self._device = subject.device
        self._challenge = Challenge.of(subject)
        if doubts := self._challenge.judge.doubts(subject.precision):
            setup_context.tell(doubts)
        self._common = {**schedule.common, **circumstances(subject), "case": case.name, "seed": SEED}
        self._common |= {"repeats": schedule.repeats, "warmup": schedule.warmup}
        self._model_bytes = self._held()

    def run(self, variants: Sequence[Variant]) -> None:
        """Set up, check and time each; then all of them in turns.

        Those that change between pictures come first, each by itself: its memory is given back before the next.
        """
        contenders = []
        for variant in sorted(variants, key=lambda each: each.switch is None):
            if reason := variant.why_left_out(self._case, self._subject):
                self._leave_out(variant, reason)
            elif variant.switch is not None:
                self._switch(variant)
            elif contender := self._enter(variant):
                contenders.append(contender)
        with self._schedule.place.alone():
            self._take_turns(contenders)

    def _enter(self, variant: Variant) -> Contender | None:
        self._setup_context.tell(f"{variant.name}: setting up")
        ending = ExitStack()
        try:
            with ended_after(self._schedule.seconds_left):
                contender = self._set_up(variant, ending)
            if not self._schedule.place.is_shared:
                self._time_by_itself(contender)
        except TooLate:
            ending.close()
            self._tell_too_late(variant)
            return None
        except Exception as error:
            ending.close()
            self._give_up(variant, error)
            return None
        self._ending.push(ending)
        return contender

    def _tell_too_late(self, variant: Variant) -> None:
        self._setup_context.tell(f"{variant.name}: not ready within the limit, and not measured")

    def _time_by_itself(self, contender: Contender) -> None:
        """Before its turns, so that something is kept where they are not reached."""
        spent = [self._subject.milliseconds(lambda: contender.call(0)) for _ in range(self._schedule.repeats)]
        self._put(contender.name, contender.row(spent))
        figure = f"{statistics_of(spent)['ms']:.2f} ms"
        self._setup_context.tell(f"{contender.name}: {figure} by itself, error {contender.error:.1e}")

    def _switch(self, variant: Variant) -> None:
        assert isinstance(self._subject, Model)
        self._setup_context.tell(f"{variant.name}: setting up")
        try:
            with ExitStack() as ending:
                with ended_after(self._schedule.seconds_left):
                    sides = sides_of(self._subject, variant)
                    challenges = [self._challenge, *(Challenge.of(each) for each in sides[1:])]
                    others = self._held() - self._model_bytes
                    ready = set_up(variant, self._subject, self._setup_context, ending)
                    switch = Switch(ready, sides, challenges)
                    with self._peak(switch, others + ready.copied_bytes):
                        switch.warm_up(self._schedule.warmup)
                with self._schedule.place.alone():
                    switch.take_turns(self._schedule.repeats)
                switch.check()
                self._put(variant.name, switch.row())
        except TooLate:
            self._tell_too_late(variant)
        except Exception as error:
            self._give_up(variant, error)

    def _give_up(self, variant: Variant, error: Exception) -> None:
        if variant.is_quantised and isinstance(error, UnsupportedModel):
            self._leave_out(variant, str(error))
        else:
            self._put_failure(variant.name, error)

    def _set_up(self, variant: Variant, ending: ExitStack) -> Contender:
        others = self._held() - self._model_bytes
        started = time.perf_counter()
        contender = Contender(
            variant.name, set_up(variant, self._subject, self._setup_context, ending), self._challenge
        )
        contender.call(0)
        synchronize(self._device)
        if not variant.is_plain:
            contender.build_s = round(time.perf_counter() - started, 3)
        with self._peak(contender, others + contender.ready.copied_bytes):
            for number in range(self._schedule.warmup):
                contender.call(number % self._subject.sets)
            contender.check(range(self._subject.sets))
        return contender

    def _take_turns(self, contenders: list[Contender]) -> None:
        sets = self._subject.sets
        samples: dict[str, list[float]] = {contender.name: [] for contender in contenders}
        for turn in range(self._schedule.repeats):
            for contender in list(contenders):
                try:
                    took = self._subject.milliseconds(lambda: contender.call(turn % sets))  # noqa: B023
                except Exception as error:
                    contenders.remove(contender)
                    self._put_failure(contender.name, error)
                else:
                    samples[contender.name].append(took)
        for contender in contenders:
            try:
                contender.check(range(sets + self._subject.unseen))
                self._put(contender.name, contender.row(samples[contender.name]))
            except Exception as error:
                self._put_failure(contender.name, error)

    def _leave_out(self, variant: Variant, reason: str) -> None:
        self._write({"case": self._case.name, "variant": variant.name, "left_out": reason})

    def _put(self, name: str, row: Row) -> None:
        self._write(whole_row(self._common, name, row))

    def _put_failure(self, name: str, error: Exception) -> None:
        self._put(name, failure_of(error))

    def _held(self) -> int:
        """Bytes of the GPU's memory that stay with this process."""
        if self._device.type != "cuda":
            return 0
        gc.collect()
        give_back_unused(self._device)
        return torch.cuda.memory_reserved(self._device)

    @contextmanager
    def _peak(self, contender: Contender | Switch, others: int) -> Iterator[None]:
        """Memory of a variant alone with its model. Reserved, not allocated: a CUDA graph's memory is only that."""
        if self._device.type != "cuda":
            yield
            return
        self._held()
        torch.cuda.reset_peak_memory_stats(self._device)
        yield
        synchronize(self._device)
        contender.vram_mb = round((torch.cuda.max_memory_reserved(self._device) - others) / 2**20, 1)


@contextmanager
def ended_after(seconds: float) -> Iterator[None]:
    """Whatever this thread, the process's first, does for longer is ended in the midst: a picture, a compiler, a wait.

    Raises:
        TooLate: it was, or no time is left to begin.
    """
    if seconds == math.inf:
        yield
        return
    if seconds <= 0:
        raise TooLate

    def ring(*_: object) -> None:
        raise TooLate

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def set_up(variant: Variant, subject: Subject, setup_context: SetupContext, ending: ExitStack) -> Ready:
    """Make a variant ready; what it holds is let go with `ending`.

    Raises:
        Exception: whatever stops it; no variant's failure concerns another.
    """
    if isinstance(subject, Job):
        return job_variants.set_up(variant, subject, setup_context, ending)
    assert isinstance(subject, Model)
    return model_variants.set_up(variant, subject, setup_context, ending)


def whole_row(common: Row, name: str, row: Row) -> Row:
    """A variant's row with what all rows have in common."""
    return complete({**common, "variant": name, **row, "versions": {**common["versions"], **row.get("versions", {})}})


def failure_of(error: Exception) -> Row:
    """What a row says where there is nothing else to say."""
    lines = str(error).strip().splitlines() or [""]
    return {"samples": [], "failed": f"{type(error).__name__}: {lines[0]}"}


def circumstances(subject: Subject) -> Row:
    """On what a case was measured."""
    import comfyui_version

    environment = Environment.current(subject.device)
    return {
        "gpu": environment.gpu,
        "driver": environment.driver,
        "versions": {**versions(environment), "comfyui": comfyui_version.__version__},
        "shapes": {name: list(shape) for name, shape in subject.shapes.items()},
        "precision": subject.precision.value,
        **({"steps": subject.steps} if isinstance(subject, Job) else {}),
    }
