"""Which of a sampler's N steps are computed.

Steps are numbered from 0, the noisiest. A selection is ascending and begins with 0, without which there is nothing to
go on from.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

Steps = tuple[int, ...]


def power_law(steps: int, count: int, power: float) -> Steps:
    """`count` of `steps`, the last included: step `round((steps - 1) * (k / (count - 1)) ** power)` for each k.

    Args:
        power: 1 spreads them evenly; above 1 there are more of them early, where the picture is decided.

    Raises:
        ValueError: fewer than 2 or more than `steps` are asked for, or the power is not above 0.
    """
    _check_count(steps, count)
    _check_power(power)
    if count == 1:
        return (0,)
    places = [round((steps - 1) * (k / (count - 1)) ** power) for k in range(count)]
    return _apart(places, steps)


def countdown_law(steps: int, count: int, power: float = 2.5) -> Steps:
    """The TensorRT hackathon's selection (xiatwhu/trt2023): step `max(k, round(steps * (k / count) ** power))`.

    The steps after the last one that is computed go on from it. 10 of 20 is the published list
    19,18,17,16,15,14,13,11,8,4 in its own way of counting, see `parse_steps`.

    Raises:
        ValueError: as `power_law`.
    """
    _check_count(steps, count)
    _check_power(power)
    return _apart([round(steps * (k / count) ** power) for k in range(count)], steps)


def parse_steps(text: str, steps: int | None = None) -> Steps:
    """A list of steps as people write it.

    Args:
        text: whole numbers between commas or blanks. Falling numbers count down as the hackathon does, from
            `steps - 1`, the first step, to 0, the last. Rising numbers count up from 0, the first.
        steps: of the run; None checks the list alone and returns it as it stands.

    Raises:
        ValueError: not such a list, or one that does not belong to a run of so many steps.
    """
    listed = _numbers(text)
    falls = len(listed) > 1 and listed[0] > listed[1]
    if steps is None:
        return tuple(listed)
    if max(listed) >= steps:
        raise ValueError(f"Step {max(listed)} of the list {text!r} is not in a run of {steps} steps, 0 to {steps - 1}.")
    found = tuple(steps - 1 - number for number in listed) if falls else tuple(listed)
    if found[0] != 0:
        first = steps - 1 if falls else 0
        raise ValueError(
            f"The list {text!r} leaves out the first step of {steps}, and there is nothing before it to go on from. "
            f"Begin it with {first}."
        )
    return found


def _numbers(text: str) -> list[int]:
    try:
        listed = [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise ValueError(f"{text!r} is not a list of steps; write it as 19,18,17,15,11,4 or 0 1 2 4 8 15.") from None
    if not listed or min(listed) < 0:
        raise ValueError(f"{text!r} names no steps; write them as 19,18,17,15,11,4 or 0 1 2 4 8 15.")
    pairs = list(itertools.pairwise(listed))
    if not (all(a < b for a, b in pairs) or all(a > b for a, b in pairs)):
        raise ValueError(f"The steps {text!r} neither rise nor fall throughout; name each once, in order.")
    return listed


def count_of(share: float, steps: int) -> int:
    """How many steps that share of them is, at least 2.

    Raises:
        ValueError: the share is not above 0 and at most 1.
    """
    if not 0 < share <= 1:
        raise ValueError(f"A share of {share} of the steps cannot be computed; choose one above 0 and at most 1.")
    return min(steps, max(2, round(share * steps)))


def count_within(seconds: float, steps: int, computed_seconds: float, skipped_seconds: float = 0.0) -> int:
    """The most computed steps with which a run of `steps` fits into `seconds`, at least 2.

    Args:
        computed_seconds: that a computed step takes.
        skipped_seconds: that a skipped one does.

    Raises:
        ValueError: a computed step is said to take no longer than a skipped one, or not even 2 of them fit.
    """
    if computed_seconds <= skipped_seconds:
        raise ValueError("A computed step must take longer than a skipped one; measure both again.")
    count = int((seconds - steps * skipped_seconds) / (computed_seconds - skipped_seconds) + 1e-9)
    fewest = min(2, steps)
    if count < fewest:
        least = fewest * computed_seconds + (steps - fewest) * skipped_seconds
        raise ValueError(f"{seconds:g} s are too few for {steps} steps, which take at least {least:g} s.")
    return min(count, steps)


def shortened(sigmas: Tensor, computed: Sequence[int]) -> Tensor:
    """The sigmas of the computed steps, and the last: a schedule for a sampler that knows nothing of skipping.

    With Euler's and DDIM's method it gives what holding the denoised latent in the other steps gives.

    Args:
        sigmas: [N + 1], falling.

    Raises:
        ValueError: a step that is not among the N.
    """
    steps = len(sigmas) - 1
    if not computed or min(computed) < 0 or max(computed) >= steps:
        raise ValueError(f"The steps {tuple(computed)} do not belong to {steps} steps; name some of 0 to {steps - 1}.")
    return torch.cat([sigmas[list(computed)], sigmas[-1:]])


def gaps(computed: Steps, steps: int) -> tuple[int, ...]:
    """From each computed step to the next one, from the last to the end: 1 where nothing is skipped."""
    return tuple(after - before for before, after in itertools.pairwise((*computed, steps)))


def _check_count(steps: int, count: int) -> None:
    if not min(2, steps) <= count <= steps:
        raise ValueError(f"{count} of {steps} steps cannot be computed; choose from {min(2, steps)} to {steps}.")


def _check_power(power: float) -> None:
    if power <= 0:
        raise ValueError(
            f"A power of {power} selects nothing; 1 spreads the steps evenly, 2 computes more of them early."
        )


def _apart(places: list[int], steps: int) -> Steps:
    """Rounded places made different: pushed up from the front, then back down from the end."""
    for k in range(1, len(places)):
        places[k] = max(places[k], places[k - 1] + 1)
    last = steps - 1
    for k in reversed(range(len(places))):
        places[k] = min(places[k], last)
        last = places[k] - 1
    return tuple(places)
