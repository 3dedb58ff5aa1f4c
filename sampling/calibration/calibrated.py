"""The result of a calibration, and its report."""

from __future__ import annotations

from dataclasses import dataclass

from ..schedule import Steps
from .trial import Decibels, mean

FOUND = "calibrated"
SHORTENED = "shortened sigmas"


@dataclass(frozen=True)
class Candidate:
    """A way to spend a number of computed steps.

    Attributes:
        name: for people.
        held_out: closeness of each picture that nothing was fitted on.
        fitted: of those that the search looked at; empty where it did not.
    """

    name: str
    computed: Steps
    held_out: Decibels
    fitted: Decibels = ()


@dataclass(frozen=True)
class Choice:
    """The ways to spend one number of computed steps.

    Attributes:
        found: by the search.
        preset: what the nearest built-in preset computes with so many.
        shortened: the unmodified sampler on the sigmas of the steps of `found` or `preset`, whichever comes closer.
    """

    found: Candidate
    preset: Candidate
    shortened: Candidate

    @property
    def count(self) -> int:
        return len(self.found.computed)

    @property
    def gain(self) -> float:
        """In dB, what was found over the preset, on the held-out pictures."""
        return mean(self.found.held_out) - mean(self.preset.held_out)

    @property
    def closer(self) -> int:
        """In how many held-out pictures what was found is closer than the preset."""
        return sum(a > b for a, b in zip(self.found.held_out, self.preset.held_out, strict=True))

    @property
    def helps(self) -> bool:
        """Whether what was found is closer than the preset on pictures that it was not fitted on: in most, and in the
        mean, which a single picture can decide."""
        is_another = self.found.computed != self.preset.computed
        return is_another and self.gain > 0 and 2 * self.closer > len(self.found.held_out)

    @property
    def proposal(self) -> Candidate:
        return self.found if self.helps else self.preset


@dataclass(frozen=True)
class Calibration:
    """The result for each count of computed steps.

    Attributes:
        steps: of the run, N.
        count: of computed steps that was asked for.
        choices: for it and for others, which were searched less, ascending.
        fitted_runs, held_out_runs: of the whole sets of pictures.
    """

    steps: int
    count: int
    choices: tuple[Choice, ...]
    fitted_runs: int
    held_out_runs: int

    @property
    def choice(self) -> Choice:
        return next(choice for choice in self.choices if choice.count == self.count)

    def lines(self) -> list[str]:
        """For people: figures, and what is proposed."""
        choice = self.choice
        return [
            f"Closeness to your {self.steps}-step pictures with {self.count} steps computed: latent PSNR in dB, higher "
            "is closer.",
            *(_figures(each) for each in (choice.found, choice.preset, choice.shortened)),
            _verdict(choice, self.steps),
            f"Proposed, {choice.proposal.name}: steps {' '.join(map(str, choice.proposal.computed))}",
            *_warning(choice),
        ]


def _figures(candidate: Candidate) -> str:
    fitted = f", {mean(candidate.fitted):.2f} fitted" if candidate.fitted else ""
    return f"  {candidate.name}: {mean(candidate.held_out):.2f} held out{fitted}"


def _verdict(choice: Choice, steps: int) -> str:
    found, preset = choice.found, choice.preset
    if found.computed == preset.computed:
        return f"The search found nothing closer than {preset.name}."
    closer = f"closer in {choice.closer} of {len(found.held_out)} held-out pictures"
    if choice.helps:
        return f"What was found is {choice.gain:.2f} dB closer to them than {preset.name} in the mean, and {closer}."
    return (
        f"What was found is NOT closer to your {steps}-step pictures than {preset.name} both in the mean "
        f"({choice.gain:+.2f} dB) and in most of them ({closer}): what fits the fitted pictures does not carry over, "
        "so the preset is proposed."
    )


def _warning(choice: Choice) -> list[str]:
    behind = mean(choice.shortened.held_out) - mean(choice.proposal.held_out)
    if behind <= 0:
        return []
    return [
        f"The {SHORTENED} are {behind:.2f} dB closer than the proposal, with as many steps computed and nothing "
        "skipped: use Skip Sigmas here."
    ]
