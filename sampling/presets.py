"""What a user picks: how much is computed, which steps, and how the others are filled in.

`benchmarks/step_skipping.md` says how the presets were chosen and judged, and what was measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from .reuse import Reuse
from .samplers import SamplerKind, rule_for
from .schedule import Steps, count_of, countdown_law, parse_steps, power_law

FEWEST_STEPS = 12
"""A run of fewer leaves a preset nothing to skip: each step changes the picture too much."""

CUSTOM = "custom"


@dataclass(frozen=True)
class Selection:
    """Which steps are computed, whatever their number will be.

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

    def computed(self, steps: int) -> Steps:
        """
        Raises:
            ValueError: these steps are not in a run of that length.
        """
        if self.listed.strip():
            return parse_steps(self.listed, steps)
        count = self.count or count_of(self.share, steps)
        return countdown_law(steps, count, self.power) if self.counts_down else power_law(steps, count, self.power)


@dataclass(frozen=True)
class Preset:
    """
    Attributes:
        name: that the user picks.
        selection: of steps.
        rule: for skipped steps; None takes the sampler kind's own.
        kinds: of samplers that it was measured with and not found worse than plain sampling in the same time.
        note: for people, in a few words.
    """

    name: str
    selection: Selection
    note: str
    rule: Reuse | None = None
    kinds: frozenset[SamplerKind] = frozenset()

    def rule_for(self, kind: SamplerKind) -> Reuse:
        return self.rule or rule_for(kind)

    def why_not(self, kind: SamplerKind, steps: int) -> str | None:
        """Why every step is computed after all; None where it is not."""
        if kind is SamplerKind.SEVERAL_CALLS:
            return "this sampler calls the model several times a step, which leaves nothing to reuse"
        if kind is SamplerKind.UNKNOWN:
            return (
                f"the presets were not measured with this sampler; choose {CUSTOM} to skip steps with it all the same"
            )
        if kind not in self.kinds:
            return (
                f"{self.name} was measured with {kind.value} samplers, and plain sampling in the same time was closer"
            )
        if steps < FEWEST_STEPS:
            return f"a run of {steps} steps is short: each of fewer than {FEWEST_STEPS} steps counts"
        return None


_ALL = frozenset({SamplerKind.ONE_STEP, SamplerKind.MULTISTEP, SamplerKind.STOCHASTIC})

PRESETS = {
    preset.name: preset
    for preset in (
        Preset("quality", Selection(0.75, power=1.5), "three steps in four", kinds=_ALL),
        Preset("balanced", Selection(0.6, power=2.0), "three steps in five", kinds=_ALL),
        Preset("fast", Selection(0.5, power=2.0), "every other step", kinds=_ALL),
        Preset("extreme", Selection(0.35, power=2.0), "one step in three", kinds=_ALL),
        Preset(
            "hackathon",
            Selection(0.5, power=2.5, counts_down=True),
            "historical: the TensorRT hackathon's list, each step held; with Euler and DDIM it is only a schedule",
            rule=Reuse.HOLD,
            kinds=_ALL,
        ),
    )
}
DEFAULT = "balanced"


def custom(selection: Selection, rule: Reuse | None = None) -> Preset:
    """The user's own choice, with any sampler that calls the model once a step."""
    return _Custom(CUSTOM, selection, "your own choice", rule)


class _Custom(Preset):
    def why_not(self, kind: SamplerKind, steps: int) -> str | None:
        if kind is SamplerKind.SEVERAL_CALLS:
            return super().why_not(kind, steps)
        return None
