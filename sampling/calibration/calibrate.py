"""Choose which K of N steps are computed, for one model, sampler, schedule and guidance.

The search first skips every gap alone and adds up what that costs, see `paths`; then moves single steps of the closest
start by one, as long as the pictures come closer to the full run: the hill climbing of Lei et al., "Budget-Constrained
Step-Level Diffusion Caching" (BudCache, arXiv 2606.13496), without its annealing. What comes out is judged on other
pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from ..presets import PRESETS, Preset
from ..schedule import Steps, count_of, power_law
from .calibrated import FOUND, SHORTENED, Calibration, Candidate, Choice
from .paths import cheapest_selections, gaps_up_to, least_gap, with_gap
from .trial import Sample, Trial, mean

Shortened = Callable[[Steps], Tensor]
"""The final latents [B, ...] of the unmodified sampler on the sigmas of these steps alone."""

AfterRun = Callable[[int, int], None]
"""Called after each run with the pictures sampled so far and the most there will be; what it raises ends the
calibration."""

LONGEST_GAP = 4
"""The widest gap that is measured by itself, each by a run; see `_longest_gap`."""

SWAP_RUNS = 40
"""The most runs for moving single steps."""

_POWERS = (1.5, 2.0)
"""Of the power laws among which the search starts."""

_CLOSER = 1e-6
"""In dB: less is rounding."""


@dataclass(frozen=True)
class Pictures:
    """The pictures to sample; those to fit on and those held out are disjoint.

    Attributes:
        fitted: that the search looks at.
        held_out: that it never sees.
        shortened: the held-out ones on fewer sigmas.
        sizes: how many there are of the first and of the second kind.
    """

    fitted: Sample
    held_out: Sample
    shortened: Shortened
    sizes: tuple[int, int] = (1, 1)


def most_runs(steps: int, count: int, others: Sequence[int] = ()) -> tuple[int, int]:
    """The most runs of all fitted pictures, and of all held-out ones: about 3 N for gaps, plus the swaps, plus 9 for
    each count."""
    counts = len({count, *others})
    gaps = len(gaps_up_to(_longest_gap(count, steps), steps))
    starts = 2 + len(_POWERS) + 1
    return 1 + gaps + SWAP_RUNS + counts * starts, 1 + counts * 4


def _longest_gap(count: int, steps: int) -> int:
    """`LONGEST_GAP`, or wider where K steps need it to reach the end, with one to spare."""
    return max(LONGEST_GAP, least_gap(count, steps) + 1)


def calibrate(
    pictures: Pictures,
    steps: int,
    count: int,
    others: Sequence[int] = (),
    after_run: AfterRun | None = None,
) -> Calibration:
    """Search for the K of N steps whose pictures come closest to those of the full run.

    Args:
        steps: N, of the run.
        count: K, of computed steps.
        others: further counts for comparison, for which the best start is not improved.

    Raises:
        ValueError: a number of computed steps that leaves none to skip, or is less than 2; or see `Trial`.
    """
    counts = sorted({count, *others})
    _check(counts, steps)
    fitted, held_out = pictures.sizes
    ran = _progress(after_run, sum(a * b for a, b in zip(most_runs(steps, count, others), pictures.sizes, strict=True)))
    trial = Trial(pictures.fitted, partial(ran, fitted))
    paths = _paths(trial, steps, _longest_gap(count, steps))
    found = {each: max(_starts(each, steps, paths), key=trial.mean) for each in counts}
    found[count] = moved(trial, found[count], SWAP_RUNS)
    judge = Trial(pictures.held_out, partial(ran, held_out))
    choices = tuple(_choice(trial, judge, pictures.shortened, found[each], steps) for each in counts)
    return Calibration(steps, count, choices, trial.runs, judge.runs)


def nearest_preset(count: int, steps: int) -> Preset:
    """The built-in preset, of those that choose by a law, whose own number of computed steps is nearest."""
    ordinary = [each for each in PRESETS.values() if not (each.selection.counts_down or each.selection.listed)]
    return min(ordinary, key=lambda preset: abs(count_of(preset.selection.share, steps) - count))


def moved(trial: Trial, start: Steps, most: int) -> Steps:
    """Move one step after another by one, wherever that is closer on the trial's pictures.

    Args:
        most: runs.
    """
    best, end = start, trial.runs + most
    while (closer := _closer(trial, best, end)) is not None:
        best = closer
    return best


def _closer(trial: Trial, best: Steps, end: int) -> Steps | None:
    for neighbour in _neighbours(best):
        if trial.runs >= end:
            return None
        if trial.mean(neighbour) > trial.mean(best) + _CLOSER:
            return neighbour
    return None


def _neighbours(computed: Steps) -> Iterator[Steps]:
    """All selections in which one step is moved by one; the first and the last stay."""
    for k in range(1, len(computed) - 1):
        for step in (computed[k] - 1, computed[k] + 1):
            if computed[k - 1] < step < computed[k + 1]:
                yield (*computed[:k], step, *computed[k + 1 :])


def _paths(trial: Trial, steps: int, longest: int) -> list[dict[int, Steps]]:
    """By the sum of the gaps' errors, to first order an upper bound, and of their squares, as if all were unrelated."""
    errors = {gap: trial.error(with_gap(gap, steps)) for gap in gaps_up_to(longest, steps)}
    squares = {gap: error**2 for gap, error in errors.items()}
    return [cheapest_selections(costs, steps) for costs in (errors, squares)]


def _starts(count: int, steps: int, paths: list[dict[int, Steps]]) -> list[Steps]:
    laws = [_preset_steps(count, steps), *(power_law(steps, count, power) for power in _POWERS)]
    return [*laws, *(path[count] for path in paths if count in path)]


def _preset_steps(count: int, steps: int) -> Steps:
    return replace(nearest_preset(count, steps).selection, count=count).computed(steps)


def _choice(trial: Trial, judge: Trial, shortened: Shortened, found: Steps, steps: int) -> Choice:
    count = len(found)
    preset, name = _preset_steps(count, steps), f"{nearest_preset(count, steps).name} ({count} steps)"
    shorter = [_shortened(judge, shortened, each) for each in dict.fromkeys((found, preset))]
    return Choice(
        Candidate(FOUND, found, judge.of(found), trial.of(found)),
        Candidate(name, preset, judge.of(preset), trial.of(preset)),
        max(shorter, key=lambda candidate: mean(candidate.held_out)),
    )


def _shortened(judge: Trial, shortened: Shortened, computed: Steps) -> Candidate:
    return Candidate(SHORTENED, computed, judge.compared(lambda: shortened(computed)))


def _progress(after_run: AfterRun | None, most: int) -> Callable[[int], None]:
    done = 0

    def ran(pictures: int) -> None:
        nonlocal done
        done += pictures
        if after_run is not None:
            after_run(done, most)

    return ran


def _check(counts: Sequence[int], steps: int) -> None:
    wrong = next((count for count in counts if not 2 <= count < steps), None)
    if wrong is not None:
        raise ValueError(
            f"{wrong} of {steps} steps cannot be chosen: compute at least 2, and fewer than all, so that some are "
            "skipped."
        )
