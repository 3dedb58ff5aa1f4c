"""The noise levels of a run's calls, read without waiting for the GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ....sampling.run import SAME_SIGMA
from ....sampling.samplers import SamplerKind

IN_ORDER = frozenset(SamplerKind) - {SamplerKind.SEVERAL_CALLS, SamplerKind.UNKNOWN}
"""Kinds of samplers that ask for their schedule's sigmas one after another."""


class CallSigmas:
    """What a call's sigma is, as the schedule lets one expect it.

    A sigma lies on the GPU, behind all that is still to be computed there: to read it would let the GPU stand still
    until the host has prepared the next call. So it is taken for granted, and looked at when the run is over.

    Args:
        sigmas: N + 1 of them, falling.
        in_order: whether calls are expected to ask for them one after another; else each is read.
    """

    def __init__(self, sigmas: Sequence[float], in_order: bool) -> None:
        # Calls have them in 32 bits, whatever the schedule has.
        self._expected = torch.tensor(sigmas[:-1], dtype=torch.float32).tolist() if in_order else []
        self._taken: list[float] = []
        self._found: list[torch.Tensor] = []
        self._last: torch.Tensor | None = None

    def of(self, timestep: torch.Tensor) -> float:
        """The sigma of a call.

        Args:
            timestep: [B], all the same.
        """
        if timestep is self._last:  # who asks again means the same step
            sigma = self._taken[-1]
        elif self._expected and is_waited_for(timestep.device):
            sigma = self._expected.pop(0)
        else:
            self._expected = []
            return float(timestep.flatten()[0])
        self._last = timestep
        self._taken.append(sigma)
        self._found.append(timestep.flatten()[:1].clone())
        return sigma

    def were_right(self) -> bool:
        """Whether all calls had the sigmas that they were taken to have. Waits for the GPU.

        Some samplers begin a little below the first; no other may be off, since prompts and ControlNets begin at one.
        """
        found = [float(each) for each in self._found]
        is_first_near = not found or abs(self._taken[0] - found[0]) <= SAME_SIGMA * abs(found[0])
        return is_first_near and self._taken[1:] == found[1:]


def is_waited_for(device: torch.device) -> bool:
    """Whether what is to be read from a device may still have to be computed."""
    return device.type == "cuda"
