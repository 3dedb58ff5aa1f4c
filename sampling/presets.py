"""Presets: which steps are computed, and how the others are extrapolated.

`benchmarks/step_skipping.md` says how the presets were chosen and judged, and what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from .block_caching import BlockCaching
from .measured import Figure, figures, nearest
from .reuse import Reuse
from .samplers import SamplerKind, method_of, rule_for
from .schedule import Steps, count_of, countdown_law, parse_steps, power_law
from .task import Task

FEWEST_STEPS = 12
"""A run of fewer is not worth a calibration: each step changes the picture too much."""

FEWEST_MEASURED = 20
"""Steps of the shortest runs that the presets were measured in, begun with noise or with a picture."""

MOST_MEASURED_CFG = 7.5

DEFAULT_FLOOR, CHOSEN_FLOOR = 40.0, 30.0
"""PSNR in dB that the decoded pictures of the preset that is on by default, and of the others, have to reach in the
mean."""

CUSTOM = "custom"
_CHOOSE = f"choose {CUSTOM} to skip steps all the same"


@dataclass(frozen=True)
class Selection:
    """A rule that selects the computed steps of a run of any length.

    Attributes:
        share: of the steps, without a list and a count.
        count: of computed steps; 0 leaves it to the share.
        power: see `power_law`.
        listed: see `parse_steps`; wins over the rest where it is not empty.
        counts_down: see `countdown_law`.
    """

    share: float = 0.6
    count: int = 0
    power: float = 2.0
    listed: str = ""
    counts_down: bool = False

    def why_not(self, steps: int) -> str | None:
        """Why these steps are not for a run of that length; None where nothing is known against it."""
        return None

    def computed(self, steps: int) -> Steps:
        """The computed steps of a run of `steps`.

        Raises:
            ValueError: these steps are not in a run of that length.
        """
        if self.listed.strip():
            return parse_steps(self.listed, steps)
        if math.isnan(self.power):
            raise ValueError(
                "The power is not a number. Choose one above 0: 1 spreads the steps evenly, 2 computes more of them "
                "early."
            )
        count = self.count or count_of(self.share, steps)
        return countdown_law(steps, count, self.power) if self.counts_down else power_law(steps, count, self.power)


@dataclass(frozen=True)
class Use:
    """A kind of sampler, with or without guidance by a negative prompt (CFG above 1)."""

    kind: SamplerKind
    guided: bool


@dataclass(frozen=True)
class Preset:
    """A selection of steps, a rule for the others, and the samplers that it is for.

    Attributes:
        name: that the user picks.
        selection: of steps.
        rule: for skipped steps; None takes the sampler kind's own.
        uses: where it was measured to be closer than sampling without skipping in the same time.
        note: for people, in a few words.
        floor: PSNR in dB that its decoded pictures have to reach, see `DEFAULT_FLOOR`.
        closer: by method of sampling, a selection of more steps for runs in which `selection` misses the floor.
        caching: what computed steps reuse inside of the network; None computes all of it.
    """

    name: str
    selection: Selection
    note: str
    rule: Reuse | None = None
    uses: frozenset[Use] = frozenset()
    floor: float = CHOSEN_FLOOR
    closer: Mapping[str, Selection] = field(default_factory=dict, hash=False)
    caching: BlockCaching | None = None

    def computed(self, task: Task) -> Steps:
        """The computed steps of a run.

        Raises:
            ValueError: the preset's steps do not belong to a run of that length.
        """
        return self.selection_for(task).computed(task.steps)

    def selection_for(self, task: Task) -> Selection:
        """`selection`, or the one of more steps where only that reaches the floor."""
        more = self.closer.get(method_of(task.sampler))
        if more is None or not self._misses(nearest(self.name, self.selection.share, task)):
            return self.selection
        figure = nearest(self.name, more.share, task)
        return self.selection if figure is None or self._misses(figure) else more

    def figure_for(self, task: Task) -> Figure | None:
        """The measurement that is most like a run; None where nothing like it was measured."""
        return nearest(self.name, self.selection_for(task).share, task)

    def rule_for(self, task: Task) -> Reuse:
        """The extrapolation rule. Packed latents hold: one line would not fit parts that are unrelated."""
        return self.rule or (Reuse.HOLD if task.has_parts else rule_for(task.kind))

    def why_not(self, task: Task) -> str | None:
        """Why every step is computed after all; None where it is not."""
        if task.kind is SamplerKind.SEVERAL_CALLS:
            return "this sampler calls the model several times a step, which leaves nothing to reuse"
        reason = _why_not_measured(task)
        if reason is None and (reason := self._why_not_shipped(task)) is not None:
            reason = f"{reason}; {self._instead(task)}"
        return reason

    def remark(self, task: Task) -> str:
        """A note to the user about skipping steps in `task`; empty where there is none."""
        if task.cfg is not None and task.cfg > MOST_MEASURED_CFG + 1:
            return f"measured up to CFG {MOST_MEASURED_CFG:g}"
        return ""

    def _misses(self, figure: Figure | None) -> bool:
        return figure is not None and figure.picture_db < self.floor

    def _why_not_shipped(self, task: Task) -> str | None:
        """Why this preset is not for this kind of sampler, or not for such a run."""
        use, figure = Use(task.kind, task.guided), self.figure_for(task)
        if use not in self.uses:
            return f"with {task.kind.value} samplers at CFG {'above 1' if task.guided else '1'}, {self._lost(use)}"
        if figure is None or not self._misses(figure):
            return None
        return (
            f"with {figure.sampler}, {figure.scheduler}, {figure.steps} steps and CFG {figure.cfg:g}, {self.name} was "
            f"measured too far from the picture of all steps: {figure.picture_db:.1f} dB, where {self.floor:.0f} are "
            "asked for"
        )

    def _lost(self, use: Use) -> str:
        """In words, what the rows of a use say against this preset."""
        gains = [each.gain_db for each in figures(self.name) if Use(each.kind, each.guided) == use]
        behind = [gain for gain in gains if gain <= 0]
        if behind:
            return (
                f"a run without skipping in the time of {self.name} was measured closer in {len(behind)} of "
                f"{len(gains)} cases, by up to {-min(behind):.1f} dB"
            )
        if gains:
            return (
                f"{self.name} was measured closer than a run without skipping in the same time, but not surely in "
                f"each of {len(gains)} cases (the least lead is {min(gains):.1f} dB)"
            )
        return f"{self.name} was not measured"

    def _instead(self, task: Task) -> str:
        """What to choose where this preset is not for a run."""
        others = [each for each in PRESETS.values() if each.name not in (self.name, HISTORICAL)]
        shipped = [each.name for each in others if each._why_not_shipped(task) is None]
        return f"choose {' or '.join(shipped)} there" if shipped else _CHOOSE


def _why_not_measured(task: Task) -> str | None:
    if (what := _few_step(task)) is not None:
        return f"{what}, for few steps of which each counts; {_CHOOSE}"
    if task.is_cfg_pp:
        return f"{_CFG_PP}; {_CHOOSE}"
    if task.kind is SamplerKind.UNKNOWN:
        return f"the presets were not measured with this sampler; {_CHOOSE}"
    if task.has_parts:
        return f"the presets were not measured with latents of several parts, such as video with sound; {_CHOOSE}"
    if task.has_mask:
        measured = "balanced was measured ahead with Euler and behind with DPM++ 2M"
        return f"with a mask for inpainting, {measured}; {_CHOOSE}"
    short = _short(task)
    return None if short is None else f"{short}; {_CHOOSE}"


_CFG_PP = "CFG++ samplers go on from the negative prompt's part too, which a skipped step leaves as it was"


def _few_step(task: Task) -> str | None:
    """What kind of model for few steps it is; None where it is not known to be one."""
    if not task.is_distilled:
        return None
    return f"this is a distilled model ({task.distilled_by})" if task.distilled_by else "this is a distilled model"


def _short(task: Task) -> str | None:
    """That a run has fewer steps of its own than those that were measured; None where it has not. A part of a longer
    schedule is as short: with few steps nobody measured it."""
    if task.steps >= FEWEST_MEASURED:
        return None
    return f"a run of {task.steps} steps is short: the presets were measured with {FEWEST_MEASURED} and more"


def why_too_short(steps: int) -> str | None:
    """Why a run of so many steps is not worth a calibration; None where it is long enough."""
    if steps >= FEWEST_STEPS:
        return None
    return f"a run of {steps} steps is short: each of fewer than {FEWEST_STEPS} steps counts"


_ONE_STEP = frozenset({Use(SamplerKind.ONE_STEP, True), Use(SamplerKind.ONE_STEP, False)})
_MULTISTEP = frozenset({Use(SamplerKind.MULTISTEP, True), Use(SamplerKind.MULTISTEP, False)})
_ANCESTRAL = frozenset({Use(SamplerKind.ANCESTRAL, True), Use(SamplerKind.ANCESTRAL, False)})
_GUIDED_ANCESTRAL = frozenset({Use(SamplerKind.ANCESTRAL, True)})
HISTORICAL = "hackathon"
"""Not judged beside plain ways, and not in the lists that people choose from."""
EVERYWHERE = frozenset(Use(kind, guided) for kind in SamplerKind for guided in (False, True))

PRESETS = {
    preset.name: preset
    for preset in (
        Preset("quality", Selection(0.75, power=1.5), "three steps in four", uses=_ONE_STEP),
        Preset(
            "balanced",
            Selection(0.7, power=1.5),
            "seven steps in ten",
            uses=_ONE_STEP | _MULTISTEP,
            floor=DEFAULT_FLOOR,
            closer={"dpmpp_2m": Selection(0.85, power=1.5)},
        ),
        Preset("fast", Selection(0.5, power=2.0), "half of the steps", uses=_ONE_STEP | _GUIDED_ANCESTRAL),
        Preset("extreme", Selection(0.35, power=2.0), "one step in three", uses=_ANCESTRAL),
        Preset(
            HISTORICAL,
            Selection(0.5, power=2.5, counts_down=True),
            "historical: the TensorRT hackathon's list, each step held; with Euler and DDIM it is only a schedule",
            rule=Reuse.HOLD,
            uses=EVERYWHERE,
        ),
    )
}
DEFAULT = "balanced"


def custom(selection: Selection, rule: Reuse | None = None, caching: BlockCaching | None = None) -> Preset:
    """The user's own selection, for any sampler that calls the model once a step."""
    return _Custom(CUSTOM, selection, "your own choice", rule, caching=caching)


class _Custom(Preset):
    def why_not(self, task: Task) -> str | None:
        return super().why_not(task) if task.kind is SamplerKind.SEVERAL_CALLS else None

    def remark(self, task: Task) -> str:
        """What is known of the run that speaks against skipping steps."""
        known = [_few_step(task), _CFG_PP if task.is_cfg_pp else None, _short(task)]
        return "; ".join(filter(None, known))
