"""The beginning of a sampling run, kept so that it can begin anew."""

from __future__ import annotations

from typing import Any

import torch

from ...stand_in import copied


class SamplingStart:
    """What a guider samples from, as it is before it does.

    Args:
        args, kwargs: of OUTER_SAMPLE.
    """

    def __init__(self, guider: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> None:
        self._guider = guider
        self._conds = copied(guider.conds)  # prompts, which nobody writes into
        self._args, self._kwargs = copied(list(args), with_tensors=True), copied(kwargs, with_tensors=True)
        self._device = device
        self._state = torch.get_rng_state()
        self._state_of_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self) -> tuple[list[Any], dict[str, Any]]:
        """Put the guider and the generators of random numbers back; the arguments to sample with."""
        self._guider.conds = self._conds
        torch.set_rng_state(self._state)
        if self._state_of_device is not None:
            torch.cuda.set_rng_state(self._state_of_device, self._device)
        return self._args, self._kwargs
