"""Calibration of step skipping on the user's own model and prompts: by ComfyUI's samplers, with bar and cancel."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ....core.errors import StoreError, UnsupportedModel
from ....runtime.planning.build_estimate import say_roughly
from ....sampling import saved
from ....sampling.calibration.calibrate import Pictures, calibrate
from ....sampling.calibration.calibrated import Calibration
from ....sampling.calibration.conclusion import built_in, conclusion
from ....sampling.calibration.trial import mean
from ....sampling.presets import DEFAULT, PRESETS, Preset, Selection, custom, why_too_short
from ....sampling.run import AfterRun
from ....sampling.saved import SavedPreset
from ....sampling.schedule import count_of, count_within, power_law
from ....sampling.task import Task
from ..process.build_waiting import throw_if_cancelled
from ..process.server_events import PRESETS as PRESETS_CHANGED
from ..process.server_events import send
from . import saved_presets
from .calibration_pictures import CalibrationPictures, Job, Picture
from .sampling_task import model_class, task_of
from .step_skip import skip_steps

_HELD_OUT = 4
"""Pictures at least that the proposal is judged on."""
_UNNAMED = "calibrated"


@dataclass(frozen=True)
class Wish:
    """How much is computed, and what becomes of it.

    Attributes:
        computed_steps: 0 takes the default preset's share.
        seconds: for one sampling run, in place of `computed_steps` where it is above 0.
        name: to save under; empty does not.
    """

    computed_steps: int = 0
    seconds: float = 0.0
    name: str = ""


@dataclass(frozen=True)
class Proposal:
    model: Any
    calibration: Calibration
    report: str


def calibrate_model(
    job: Job,
    positives: Sequence[Any],
    seed: int,
    seeds: int,
    wish: Wish,
    after_run: AfterRun | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Proposal:
    """
    Args:
        positives: the last of several is held out; of a single one, other seeds are.
        seed, seeds: the first, and how many follow one another for each prompt.
        after_run: of the proposed model, see `skip_steps`.
        tell: told how far it is, and how long it may take yet.

    Raises:
        UnsupportedModel: this sampler or a run of that length skips no steps.
        ValueError: what is wished for cannot be.
    """
    if wish.name:
        saved.check_name(wish.name)
    steps = _steps(job)
    fitted, held_out = _calibration_pictures(job, positives, seed, seeds)
    count = _count(held_out, steps, wish)
    sizes = len(fitted.pictures), len(held_out.pictures)
    pictures = Pictures(fitted.sample, held_out.sample, held_out.shortened, sizes)
    calibration = calibrate(pictures, steps, count, _others(steps), after_run=_progress(tell))
    preset = _saved_preset(job, calibration, wish.name)
    task = _task(job)
    builtin = built_in(task, preset.computed)
    kept = _kept(preset, wish.name, builtin)
    lines = [conclusion(calibration, builtin, task, wish.name, _time_saved(calibration, held_out))]
    lines += [_heading(job, preset, fitted, held_out, len(positives)), *calibration.lines()]
    lines += [*_seconds(calibration, held_out), _runs(calibration, fitted), kept]
    return Proposal(skip_steps(job.model, preset.preset(), after_run), calibration, "\n".join(lines))


def _steps(job: Job) -> int:
    """
    Raises:
        UnsupportedModel: no steps are skipped in such a run.
    """
    steps = len(job.sigmas()) - 1
    reason = custom(Selection()).why_not(Task(job.sampler, steps)) or why_too_short(max(steps, 0))
    if reason is not None:
        raise UnsupportedModel(f"There is nothing to calibrate for {job.sampler}: {reason}.")
    return steps


def _calibration_pictures(
    job: Job, positives: Sequence[Any], seed: int, seeds: int
) -> tuple[CalibrationPictures, CalibrationPictures]:
    """What is fitted, and what is held out: no prompt in both where there are several, and no seed."""
    looked_at = positives[:-1] or positives
    fitted = [Picture(positive, seed + k) for positive in looked_at for k in range(seeds)]
    held_out = [Picture(positives[-1], seed + seeds + k) for k in range(max(seeds, _HELD_OUT))]
    return CalibrationPictures(job, fitted, again=True), CalibrationPictures(job, held_out)


def _others(steps: int) -> list[int]:
    """Other counts of computed steps, which the chart shows beside the proposal."""
    shares = {preset.selection.share for preset in PRESETS.values()}
    return sorted(count for count in {count_of(share, steps) for share in shares} if count < steps)


def _count(calibration_pictures: CalibrationPictures, steps: int, wish: Wish) -> int:
    if wish.seconds > 0:
        return _count_within(wish.seconds, calibration_pictures, steps)
    return wish.computed_steps or count_of(PRESETS[DEFAULT].selection.share, steps)


def _count_within(seconds: float, calibration_pictures: CalibrationPictures, steps: int) -> int:
    few = power_law(steps, max(2, steps // 3), 1.0)
    for computed in (None, None, few, few):  # the first loads the model, and builds its engines
        throw_if_cancelled()
        calibration_pictures.one(0, computed)
    whole, part = calibration_pictures.measured[None], calibration_pictures.measured[few]
    a_computed = whole.seconds / steps
    a_skipped = max(0.0, (part.seconds - part.computed * a_computed) / max(1, steps - part.computed))
    count = count_within(seconds, steps, a_computed, a_skipped)
    if count >= steps:
        raise ValueError(f"All {steps} steps take {whole.seconds:.3g} s, so {seconds:g} s leave nothing to skip.")
    return count


def _progress(tell: Callable[[str], None]) -> Callable[[int, int], None]:
    """ComfyUI's progress bar and its cancel button, and how long it may take yet."""
    import comfy.utils

    bar, started = comfy.utils.ProgressBar(1), time.monotonic()

    def after_run(done: int, most: int) -> None:
        bar.update_absolute(done, most)
        left = (time.monotonic() - started) * (most - done) / done
        tell(f"{done} of at most {most} pictures, at most about {say_roughly(left)} left" if left else "done")
        throw_if_cancelled()

    return after_run


def _task(job: Job) -> Task:
    """What Step Skip is told of a KSampler's run of the job."""
    from comfy.samplers import CFGGuider, sampler_object

    guider = CFGGuider(job.model)
    guider.set_cfg(job.cfg)
    return task_of(guider, sampler_object(job.sampler), job.sigmas(), job.latent.get("noise_mask"), parted=False)


def _saved_preset(job: Job, calibration: Calibration, name: str) -> SavedPreset:
    proposal = calibration.choice.proposal
    return SavedPreset(
        name=name or _UNNAMED,
        steps=calibration.steps,
        computed=proposal.computed,
        model=model_class(job.model),
        sampler=job.sampler,
        scheduler=job.scheduler,
        cfg=float(job.cfg),
        held_out_db=mean(proposal.held_out),
        saved=datetime.date.today().isoformat(),
        has_mask=job.latent.get("noise_mask") is not None,
        sigmas=tuple(job.sigmas().tolist()),
    )


# ------------------------------------------------------------------------------------------------------ the report


def _heading(
    job: Job, preset: SavedPreset, fitted: CalibrationPictures, held_out: CalibrationPictures, prompts: int
) -> str:
    what = "a prompt that was not fitted on" if prompts > 1 else "the same prompt with other seeds"
    more = "" if prompts > 1 else "; connect positive_2 to judge on another prompt"
    return (
        f"{preset.model}, {job.sampler}, {job.scheduler}, CFG {job.cfg:g}, {preset.steps} steps. Pictures fitted on: "
        f"{len(fitted.pictures)}; held out: {len(held_out.pictures)}, of {what}{more}."
    )


def _time_saved(calibration: Calibration, held_out: CalibrationPictures) -> float:
    """Share of a run's time."""
    whole, part = held_out.measured[None], held_out.measured[calibration.choice.proposal.computed]
    return max(0.0, 1.0 - part.seconds / whole.seconds)


def _seconds(calibration: Calibration, held_out: CalibrationPictures) -> list[str]:
    whole, part = held_out.measured[None], held_out.measured[calibration.choice.proposal.computed]
    lines = [f"A run took {part.seconds:.3g} s in place of {whole.seconds:.3g} s."]
    if part.computed > calibration.count:
        lines.append(
            f"It computed {part.computed} steps: one is always computed where a ControlNet, a prompt or a hook begins "
            "or ends."
        )
    return lines


def _runs(calibration: Calibration, fitted: CalibrationPictures) -> str:
    return (
        f"Runs: {calibration.fitted_runs} of each fitted picture ({len(fitted.pictures)}), "
        f"{calibration.held_out_runs} of each held-out one."
    )


def _kept(preset: SavedPreset, name: str, builtin: Preset | None) -> str:
    """Save it, if it has a name and is nothing that there is already. What took so long to find is not lost to a full
    disk: the report says so."""
    if builtin is not None:
        return f"Not saved: these are the steps of {builtin.name}."
    if not name:
        return "Not saved, since it has no name."
    try:
        saved.save(preset, saved_presets.folder())
    except StoreError as error:
        return f"NOT saved: {error}"
    send(PRESETS_CHANGED, {"name": name})
    return f"Saved as {name}: choose it as the preset of Step Skip, for runs of exactly {preset.steps} steps."
