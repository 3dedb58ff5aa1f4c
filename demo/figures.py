"""From the pictures of two starts of a host to the figures that are shown."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .run import LOG, RESULT, VARIANTS, Case, Variant

ERROR_LIMITS = {"fp32": 1e-3, "fp16": 2e-2, "bf16": 1e-1}
"""Largest relative error of a latent against the plain model's. Rounding alone makes 1e-3 in fp16, 1e-2 in bf16."""

PRESET_PSNR = 20.0
"""In dB, the least of a picture with skipped steps against the plain model's of all steps: below, something is wrong.
How close a preset comes is measured elsewhere, over many pictures."""

PSNR_CAP = 100.0
"""Stands for "no byte differs", which no finite number of decibels does."""

_BUILT = "Slipstream: built "

PLAIN = VARIANTS[0].name


@dataclass(frozen=True)
class RunFigures:
    """One row: a case, by one variant, in one phase ("cold": first start, "warm": next start).

    Attributes:
        seconds: a picture; cold: the first one, with its build; warm: the median after the first.
        seconds_per_step: the median; with a preset the mean of computed and skipped steps.
        relative_error: of the latents, the largest over the pictures compared.
        psnr: of the pictures in dB, the smallest; `PSNR_CAP` where no byte differs.
        build_seconds: of the engine, where this run built one.
        load_seconds: how much longer the first picture of the next start took than those after it.
        preset: of step skipping, or nothing.
        steps: of all pictures together.
        computed_steps: how many of them step skipping computed; 0 without a preset.
    """

    name: str
    case: int
    variant: str
    phase: str
    seconds: float
    seconds_per_step: float
    relative_error: float
    psnr: float
    engine_calls: int
    eager_calls: int
    build_seconds: float | None = None
    load_seconds: float | None = None
    precision: str = "fp32"
    reasons: tuple[str, ...] = ()
    is_accelerated: bool = False
    preset: str = ""
    steps: int = 0
    computed_steps: int = 0

    @property
    def error_limit(self) -> float:
        """Of engines, which compute what the plain model does; skipped steps have a rule of their own."""
        return ERROR_LIMITS[self.precision]


@dataclass(frozen=True)
class Figures:
    """All that the demonstration found out."""

    host: str
    facts: Mapping[str, str]
    cases: tuple[Case, ...]
    runs: tuple[RunFigures, ...]
    cold_builds: int
    warm_builds: int

    def to_json(self) -> dict[str, Any]:
        """Plain data; what is no finite number becomes None, which JSON has a word for."""
        data = asdict(self)
        data["runs"] = [{name: _plain(value) for name, value in run.items()} for run in data["runs"]]
        return data

    def find(self, case: int, variant: str, phase: str) -> RunFigures | None:
        """One row."""
        wanted = (case, variant, phase)
        return next((run for run in self.runs if (run.case, run.variant, run.phase) == wanted), None)

    def failures(self) -> list[str]:
        """Why the demonstration failed, a line each; empty when it did not."""
        return list(self._failures())

    def _failures(self) -> Iterator[str]:
        if self.warm_builds:
            yield (
                f"The second start built {self.warm_builds} engine(s) although the first one had stored them; "
                f"sessions/warm/{LOG} says what differed"
            )
        for run in self.runs:
            if run.is_accelerated and not run.engine_calls:
                why = "; ".join(run.reasons) or f"no reason was given, see sessions/{run.phase}/{LOG}"
                yield f"{run.name}: no call went to an engine ({why})"
            if run.preset:
                yield from _preset_failures(run)
            elif not run.relative_error <= run.error_limit:
                yield (
                    f"{run.name}: differs from the plain model's by {run.relative_error:.1e}, "
                    f"allowed is {run.error_limit:.0e}; compare the pictures in the report"
                )


def _preset_failures(run: RunFigures) -> Iterator[str]:
    engine, eager = (run.computed_steps, 0) if run.is_accelerated else (0, run.computed_steps)
    if not run.computed_steps:
        yield f"{run.name}: nothing was told of skipped steps, see sessions/{run.phase}/{LOG}"
    elif run.computed_steps >= run.steps:
        yield f"{run.name}: no step was skipped ({'; '.join(run.reasons) or 'no reason was given'})"
    elif (run.engine_calls, run.eager_calls) != (engine, eager):
        yield (
            f"{run.name}: {run.computed_steps} of {run.steps} steps were computed, with {run.engine_calls} calls of "
            f"engines and {run.eager_calls} of the plain model; {engine} and {eager} were expected"
        )
    if not (math.isfinite(run.relative_error) and run.psnr >= PRESET_PSNR):
        yield (
            f"{run.name}: the picture has {run.psnr:.1f} dB of PSNR to the plain model's of all steps, at least "
            f"{PRESET_PSNR:.0f} are expected; compare the pictures in the report"
        )


class Session:
    """One start of a host, read from its folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        data = json.loads((folder / RESULT).read_text(encoding="utf-8"))
        self.host: str = data["host"]
        self.facts: dict[str, str] = data["facts"]
        self.cases = tuple(Case(**case) for case in data["cases"])
        self._samples: list[dict[str, Any]] = data["samples"]

    @property
    def builds_logged(self) -> int:
        """How often the host's log says that an engine was built."""
        log = self._folder / LOG
        return log.read_text(encoding="utf-8", errors="replace").count(_BUILT) if log.exists() else 0

    def samples(self, case: int, variant: str) -> list[dict[str, Any]]:
        """In the order of their repeats."""
        return [sample for sample in self._samples if (sample["case"], sample["variant"]) == (case, variant)]

    def array(self, sample: Mapping[str, Any], name: str) -> NDArray[Any]:
        """The `latent` or `picture` of a sample."""
        with np.load(self._folder / sample["file"]) as arrays:
            found: NDArray[Any] = arrays[name]
        return found

    def picture(self, case: int, variant: str) -> NDArray[np.uint8]:
        """The first one, whose seed is the case's own."""
        return self.array(self.samples(case, variant)[0], "picture")

    def pictures(self, case: int) -> dict[str, NDArray[np.uint8]]:
        """The first one of each variant."""
        return {variant.name: self.picture(case, variant.name) for variant in VARIANTS}

    def differences(self, case: int, variant: str) -> tuple[float, float]:
        """Largest relative error of a latent and smallest PSNR of a picture, against the plain model's."""
        pairs = list(zip(self.samples(case, variant), self.samples(case, PLAIN), strict=False))  # presets have fewer
        errors = [relative_error(self.array(a, "latent"), self.array(b, "latent")) for a, b in pairs]
        return max(errors), min(psnr(self.array(a, "picture"), self.array(b, "picture")) for a, b in pairs)


@dataclass(frozen=True)
class StoredEngine:
    """What a store's manifest says, read from the file itself."""

    digest: str
    created: str
    label: str
    latent: tuple[int, int]  # height, width
    seconds: float


def engines_in(store: Path) -> set[StoredEngine]:
    """The engines in a store."""
    manifests = [json.loads(file.read_bytes()) for file in store.glob("engines/*/manifest.json")]
    return {
        StoredEngine(
            data["digest"],
            data["created"],
            data["label"],
            (data["profile"]["x"][2][1], data["profile"]["x"][3][1]),
            data["build"]["seconds"],
        )
        for data in manifests
    }


def figures(cold: Session, warm: Session, built: set[StoredEngine], built_again: set[StoredEngine]) -> Figures:
    """
    Args:
        built: engines that the cold start left in the store.
        built_again: those that the warm start added.
    """
    runs = []
    seen: set[str] = set()
    for index, case in enumerate(cold.cases):
        runs.append(_warm(warm, index, case, VARIANTS[0]))
        engines = [engine for engine in built if engine.latent == (case.height // 8, case.width // 8)]
        for variant in (variant for variant in VARIANTS[1:] if not variant.preset):
            new = [engine for engine in engines if engine.digest not in seen]
            seen.update(engine.digest for engine in new)
            runs.append(_cold(cold, index, case, variant, sum(engine.seconds for engine in new) if new else None))
            runs.append(_warm(warm, index, case, variant))
        runs += [_preset(warm, index, case, variant) for variant in VARIANTS if variant.preset]
    warm_builds = max(len(built_again), warm.builds_logged)
    return Figures(warm.host, warm.facts, warm.cases, tuple(runs), len(built), warm_builds)


def _cold(session: Session, index: int, case: Case, variant: Variant, build: float | None) -> RunFigures:
    (sample,) = session.samples(index, variant.name)[:1]
    error, decibels = session.differences(index, variant.name)
    return RunFigures(
        name=f"{case}: {variant.name}, cold",
        case=index,
        variant=variant.name,
        phase="cold",
        seconds=sample["seconds"],
        seconds_per_step=_per_step([sample], case),
        relative_error=error,
        psnr=decibels,
        engine_calls=sample["engine_calls"],
        eager_calls=sample["eager_calls"],
        build_seconds=build,
        precision=sample["precision"],
        reasons=tuple(sample["reasons"]),
        is_accelerated=True,
        steps=case.steps,
    )


def _warm(session: Session, index: int, case: Case, variant: Variant) -> RunFigures:
    first, *later = session.samples(index, variant.name)
    seconds = median(sample["seconds"] for sample in later)
    error, decibels = session.differences(index, variant.name)
    return RunFigures(
        name=f"{case}: {variant.name}" + (", warm" if variant.accelerate else ""),
        case=index,
        variant=variant.name,
        phase="warm",
        seconds=seconds,
        seconds_per_step=_per_step(later, case),
        relative_error=error,
        psnr=decibels,
        engine_calls=sum(sample["engine_calls"] for sample in (first, *later)),
        eager_calls=sum(sample["eager_calls"] for sample in (first, *later)),
        load_seconds=max(0.0, first["seconds"] - seconds) if variant.accelerate else None,
        precision=first["precision"],
        reasons=tuple(first["reasons"]),
        is_accelerated=variant.accelerate,
        steps=case.steps * (1 + len(later)),
    )


def _preset(session: Session, index: int, case: Case, variant: Variant) -> RunFigures:
    samples = session.samples(index, variant.name)
    error, decibels = session.differences(index, variant.name)
    return RunFigures(
        name=f"{case}: {variant.name}",
        case=index,
        variant=variant.name,
        phase="warm",
        seconds=median(sample["seconds"] for sample in samples),
        seconds_per_step=median(_mean_step(sample, case) for sample in samples),
        relative_error=error,
        psnr=decibels,
        engine_calls=sum(sample["engine_calls"] for sample in samples),
        eager_calls=sum(sample["eager_calls"] for sample in samples),
        precision=samples[0]["precision"],
        reasons=tuple(dict.fromkeys(reason for sample in samples for reason in sample["reasons"])),
        is_accelerated=variant.accelerate,
        preset=variant.preset,
        steps=case.steps * len(samples),
        computed_steps=sum(sample["computed_steps"] for sample in samples),
    )


def _mean_step(sample: dict[str, Any], case: Case) -> float:
    """Over computed and skipped steps, and over the first one, which no host times: it took as long as the others that
    were computed."""
    steps = sorted(sample["step_seconds"], reverse=True)
    if not steps:
        return float(sample["seconds"]) / case.steps
    computed = steps[: max(1, sample["computed_steps"] - 1)]
    return float((sum(steps) + median(computed)) / (len(steps) + 1))


def _per_step(samples: list[dict[str, Any]], case: Case) -> float:
    """The median step; of whole pictures where the host did not tell its steps."""
    steps: list[float] = [step for sample in samples for step in sample["step_seconds"]]
    pictures: list[float] = [sample["seconds"] / case.steps for sample in samples]
    return median(steps or pictures)


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def relative_error(found: NDArray[Any], wanted: NDArray[Any]) -> float:
    """‖found − wanted‖ / ‖wanted‖; infinite where a value is not finite."""
    wanted = wanted.astype(np.float64)
    error = float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
    return error if math.isfinite(error) else math.inf


def psnr(found: NDArray[np.uint8], wanted: NDArray[np.uint8]) -> float:
    """Peak signal-to-noise ratio of two 8-bit pictures in dB, at most `PSNR_CAP`."""
    mean = float(np.mean((found.astype(np.float64) - wanted) ** 2))
    return PSNR_CAP if mean == 0 else min(PSNR_CAP, 20 * math.log10(255) - 10 * math.log10(mean))
