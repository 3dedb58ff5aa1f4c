"""Where a call's time goes: how long the GPU works and waits between kernels, and which kernels take longest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from ..subjects.cases import Case
from ..subjects.jobs import Job
from ..subjects.setup import SetupContext
from ..subjects.subject import Subject, synchronize
from ..subjects.variants import Variant
from .measure import set_up

TOP = 40
_WARMUP, _TIMED = 3, 5
_NO_KERNELS = ("Memcpy", "Memset")
_GRAPH_LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch")


@dataclass(frozen=True)
class Work:
    """Something that the GPU did, or the CPU; times in µs."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Profile:
    """
    Attributes:
        wall_ms: of one call that nobody looks at.
        steps: of a whole picture; 1 for a single call.
        work: of the GPU where there is one, else of the CPU.
    """

    title: str
    wall_ms: float
    steps: int
    has_gpu: bool
    graph_launches: int
    work: Sequence[Work]

    def lines(self) -> list[str]:
        """A short table for people."""
        found = [self.title, f"wall time               {self.wall_ms:10.2f} ms"]
        found += self._gpu_lines() if self.has_gpu else ["no GPU here: operations of the CPU below"]
        found += ["", f"{'ms':>10} {'%':>6} {'times':>7}  longest together"]
        total = sum(each.end - each.start for each in self.work) or 1.0
        for name, times, spent in _longest(self.work):
            found.append(f"{spent / 1000:10.3f} {100 * spent / total:6.1f} {times:7d}  {name[:100]}")
        return found

    def _gpu_lines(self) -> list[str]:
        busy, span = busy_and_span(self.work)
        idle = span - busy
        kernels = sum(not each.name.startswith(_NO_KERNELS) for each in self.work)
        return [
            f"GPU busy                {busy / 1000:10.2f} ms",
            f"GPU idle between kernels{idle / 1000:10.2f} ms, {idle / 1000 / self.steps:.3f} ms a step, "
            f"{100 * idle / (span or 1):.1f} % of the time from the first kernel to the last",
            f"kernels                 {kernels:10d}",
            f"graph launches          {self.graph_launches:10d}",
        ]


def busy_and_span(work: Iterable[Work]) -> tuple[float, float]:
    """How long at least one piece was under way, and the time from the first's start to the last's end."""
    busy = first = last = 0.0
    for number, each in enumerate(sorted(work, key=lambda each: each.start)):
        if number == 0:
            first = last = each.start
        busy += max(0.0, each.end - max(each.start, last))
        last = max(last, each.end)
    return busy, last - first


def _longest(work: Iterable[Work]) -> list[tuple[str, int, float]]:
    """Name, times and µs together."""
    found: dict[str, list[float]] = defaultdict(list)
    for each in work:
        found[each.name].append(each.end - each.start)
    ordered = sorted(found.items(), key=lambda item: -sum(item[1]))
    return [(name, len(spent), sum(spent)) for name, spent in ordered[:TOP]]


def profile_case(case: Case, variants: Sequence[Variant], setup_context: SetupContext) -> Iterator[Profile]:
    """One profile of each variant; those that mean nothing here are left out."""
    with torch.no_grad():
        subject = case.build()
    for variant in variants:
        reason = "changes between pictures are timed, not profiled" if variant.switch else None
        if reason := reason or variant.why_left_out(case, subject):
            setup_context.tell(f"{variant.name} is left out: {reason}")
            continue
        setup_context.tell(f"{variant.name}: setting up")
        with torch.inference_mode(), ExitStack() as ending:
            found = _profile(f"{case.name}, {variant.name}", variant, subject, setup_context, ending)
        yield found


def _profile(title: str, variant: Variant, subject: Subject, setup_context: SetupContext, ending: ExitStack) -> Profile:
    ready = set_up(variant, subject, setup_context, ending)
    taken = ready.prepare(subject.inputs(seed=0))

    def compute() -> None:
        ready.compute(taken)

    for _ in range(_WARMUP):
        compute()
    wall = median(subject.milliseconds(compute) for _ in range(_TIMED))
    has_gpu = subject.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if has_gpu else [])]
    with profile(activities=activities) as profiler:
        compute()
        synchronize(subject.device)
    events = [event for event in profiler.events() if not getattr(event, "is_user_annotation", False)]
    return Profile(
        title,
        wall,
        subject.steps if isinstance(subject, Job) else 1,
        has_gpu,
        sum(event.name in _GRAPH_LAUNCHES for event in events),
        [*_kernels(events)] if has_gpu else [*_operations(events)],
    )


def _kernels(events: Iterable[Any]) -> Iterator[Work]:
    for event in events:
        if event.device_type == DeviceType.CUDA:
            yield Work(event.name, event.time_range.start, event.time_range.end)


def _operations(events: Iterable[Any]) -> Iterator[Work]:
    """Each with the time that it did not spend in others."""
    for event in events:
        start = event.time_range.start
        yield Work(event.name, start, start + event.self_cpu_time_total)
