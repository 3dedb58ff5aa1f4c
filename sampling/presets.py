"""Presets: which steps are computed, and how the others are extrapolated.

`benchmarks/step_skipping.md` says how the presets were chosen and judged, and what was measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from .reuse import Reuse
from .samplers import SamplerKind, rule_for
from .schedule import Steps, count_of, countdown_law, parse_steps, power_law
from .task import Task

FEWEST_STEPS = 12
"""A run of fewer leaves a preset nothing to skip: each step changes the picture too much."""

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
    """

    name: str
    selection: Selection
    note: str
    rule: Reuse | None = None
    uses: frozenset[Use] = frozenset()

    def rule_for(self, task: Task) -> Reuse:
        """The extrapolation rule. Packed latents hold: one line would not fit parts that are unrelated."""
        return self.rule or (Reuse.HOLD if task.has_parts else rule_for(task.kind))

    def why_not(self, task: Task) -> str | None:
        """Why every step is computed after all; None where it is not."""
        if task.kind is SamplerKind.SEVERAL_CALLS:
            return "this sampler calls the model several times a step, which leaves nothing to reuse"
        return _why_not_measured(task) or why_too_short(task.steps) or self._why_not_shipped(task)

    def remark(self, task: Task) -> str:
        """A note to the user about skipping steps in `task`; empty where there is none."""
        return ""

    def _why_not_shipped(self, task: Task) -> str | None:
        use = Use(task.kind, task.guided)
        if use not in self.uses:
            where = f"{task.kind.value} samplers at CFG {'above 1' if task.guided else '1'}"
            return (
                f"with {where}, a run without skipping in the time of {self.name} was measured closer; {_instead(use)}"
            )
        return None


def _why_not_measured(task: Task) -> str | None:
    if task.is_distilled:
        return f"this is a distilled model, for few steps of which each counts; {_CHOOSE}"
    if task.kind is SamplerKind.UNKNOWN:
        return f"the presets were not measured with this sampler; {_CHOOSE}"
    if task.has_parts:
        return f"the presets were not measured with latents of several parts, such as video with sound; {_CHOOSE}"
    if task.has_mask:
        measured = "balanced was measured ahead with Euler and behind with DPM++ 2M"
        return f"with a mask for inpainting, {measured}; {_CHOOSE}"
    return None


def _instead(use: Use) -> str:
    """What to choose where a preset is not shipped."""
    shipped = [preset.name for preset in PRESETS.values() if use in preset.uses and preset.uses != EVERYWHERE]
    return f"choose {' or '.join(shipped)} there" if shipped else _CHOOSE


def why_too_short(steps: int) -> str | None:
    """Why a run of so many steps skips none; None where it is long enough."""
    if steps >= FEWEST_STEPS:
        return None
    return f"a run of {steps} steps is short: each of fewer than {FEWEST_STEPS} steps counts"


_ONE_STEP = frozenset({Use(SamplerKind.ONE_STEP, True), Use(SamplerKind.ONE_STEP, False)})
_MULTISTEP = frozenset({Use(SamplerKind.MULTISTEP, True), Use(SamplerKind.MULTISTEP, False)})
_ANCESTRAL = frozenset({Use(SamplerKind.ANCESTRAL, True), Use(SamplerKind.ANCESTRAL, False)})
_GUIDED_ANCESTRAL = frozenset({Use(SamplerKind.ANCESTRAL, True)})
EVERYWHERE = frozenset(Use(kind, guided) for kind in SamplerKind for guided in (False, True))

PRESETS = {
    preset.name: preset
    for preset in (
        Preset("quality", Selection(0.75, power=1.5), "three steps in four", uses=_ONE_STEP),
        Preset("balanced", Selection(0.7, power=1.5), "seven steps in ten", uses=_ONE_STEP | _MULTISTEP),
        Preset("fast", Selection(0.5, power=2.0), "half of the steps", uses=_ONE_STEP | _GUIDED_ANCESTRAL),
        Preset("extreme", Selection(0.35, power=2.0), "one step in three", uses=_ANCESTRAL),
        Preset(
            "hackathon",
            Selection(0.5, power=2.5, counts_down=True),
            "historical: the TensorRT hackathon's list, each step held; with Euler and DDIM it is only a schedule",
            rule=Reuse.HOLD,
            uses=EVERYWHERE,
        ),
    )
}
DEFAULT = "balanced"


def custom(selection: Selection, rule: Reuse | None = None) -> Preset:
    """The user's own selection, for any sampler that calls the model once a step."""
    return _Custom(CUSTOM, selection, "your own choice", rule)


class _Custom(Preset):
    def why_not(self, task: Task) -> str | None:
        return super().why_not(task) if task.kind is SamplerKind.SEVERAL_CALLS else None
