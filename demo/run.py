"""One start of a host: every case by every variant, several times, kept on disk for the report."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

RESULT = "session.json"
LOG = "log.txt"

_SIGN_OF_LIFE_SECONDS = 15.0


@dataclass(frozen=True)
class Case:
    """One picture to make."""

    prompt: str
    width: int = 256
    height: int = 256
    seed: int = 1
    steps: int = 20
    cfg: float = 5.0

    @property
    def size(self) -> str:
        """In words."""
        return f"{self.width}×{self.height}"

    def __str__(self) -> str:
        return f"{self.prompt}, {self.size}"


@dataclass(frozen=True)
class Variant:
    """One way of making it. The first of a list is what the others are compared with.

    Attributes:
        preset: of step skipping; without one every step is computed.
    """

    name: str
    accelerate: bool
    preset: str = ""


CASES = (
    Case("a large red glossy circle on a blue background lit from the left", seed=5),
    Case("a large yellow star above a small purple square on a white background", seed=3),
    Case("a large green hexagon left of a small orange ring on a black background", width=384, seed=2),
)
VARIANTS = (
    Variant("eager", accelerate=False),
    Variant("accelerated", accelerate=True),
    Variant("eager+balanced", accelerate=False, preset="balanced"),
    Variant("accelerated+balanced", accelerate=True, preset="balanced"),
)
MOST_WITH_PRESET = 2
"""Repeats of a variant with a preset: it builds and loads nothing, so there is no first one to leave out."""


@dataclass(frozen=True)
class Sample:
    """One picture that was made.

    Attributes:
        seconds: from the prompt to the picture.
        step_seconds: from step to step, the first step left out.
        latent: [4, h, w] float32.
        picture: [H, W, 3] uint8.
        eager_calls: of the plain model; its steps where nothing is accelerated.
        computed_steps: that step skipping told of; 0 without a preset.
        precision: that the model computed in.
        reasons: why calls went to the plain model, or why no step was skipped.
    """

    seconds: float
    step_seconds: list[float]
    latent: NDArray[np.float32]
    picture: NDArray[np.uint8]
    engine_calls: int = 0
    eager_calls: int = 0
    computed_steps: int = 0
    precision: str = "fp32"
    reasons: list[str] = field(default_factory=list)


class Host(Protocol):
    """A program that samples; started when it is made."""

    name: str
    """With its version, e.g. "ComfyUI 0.33.0"."""

    def sample(self, case: Case, variant: Variant, seed: int) -> Sample: ...


class Teller:
    """Says what goes on: a changing line on a terminal, now and then a line elsewhere."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._status = self._console.status("")
        self._said = time.monotonic()

    def __enter__(self) -> Teller:
        self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def now(self, text: str) -> None:
        """What goes on at the moment."""
        self._status.update(text)
        if not self._console.is_terminal and time.monotonic() - self._said > _SIGN_OF_LIFE_SECONDS:
            self.line(f"  … {text}")

    def line(self, text: str) -> None:
        """What stays on the screen."""
        self._said = time.monotonic()
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def run_session(host: Host, folder: Path, repeats: int, teller: Teller, cases: Sequence[Case] = CASES) -> None:
    """Make all pictures and keep them in `folder`; repeat number k adds k to the seed.

    A repeat goes through all variants before the next one, so that whatever else the machine does meets them alike.
    Where there is but one, engines are built, which variants with a preset have no part in.
    """
    samples = []
    for index, case in enumerate(cases):
        teller.line(f"  {case}")
        for repeat in range(repeats):
            for variant in (variant for variant in VARIANTS if repeat < _repeats(variant, repeats)):
                teller.now(f"{case.size} {variant.name}, {repeat + 1} of {repeats}")
                sample = host.sample(case, variant, case.seed + repeat)
                samples.append(_keep(sample, folder, index, variant, repeat))
                if repeat == 0:
                    teller.line(f"    {variant.name}: first picture after {sample.seconds:.1f} s")
    data = {
        "host": host.name,
        "facts": machine(),
        "cases": [asdict(case) for case in cases],
        "samples": samples,
    }
    (folder / RESULT).write_text(json.dumps(data, indent=1), encoding="utf-8")


def _repeats(variant: Variant, repeats: int) -> int:
    if not variant.preset:
        return repeats
    return min(repeats, MOST_WITH_PRESET) if repeats > 1 else 0


def _keep(sample: Sample, folder: Path, case: int, variant: Variant, repeat: int) -> dict[str, Any]:
    file = f"{case}-{variant.name}-{repeat}.npz"
    np.savez_compressed(folder / file, latent=sample.latent, picture=sample.picture)
    plain = {name: value for name, value in vars(sample).items() if name not in ("latent", "picture")}
    return {"case": case, "variant": variant.name, "repeat": repeat, "file": file, **plain}


def machine() -> dict[str, str]:
    """What the report tells about the machine."""
    threads = f"{torch.get_num_threads()} of {os.cpu_count()} threads"
    return {
        "CPU": f"{_cpu_name()}, {torch.backends.cpu.get_cpu_capability()}, {threads}",
        "GPU": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "system": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        "torch": torch.__version__,
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def step_seconds(moments: Mapping[int, float]) -> list[float]:
    """Seconds from step to step, evened out over steps that the host did not tell of.

    Args:
        moments: number of a finished step -> when.
    """
    told = sorted(moments.items())
    gaps = [
        [(later - earlier) / (step - before)] * (step - before)
        for (before, earlier), (step, later) in zip(told, told[1:], strict=False)
    ]
    return [seconds for gap in gaps for seconds in gap]
