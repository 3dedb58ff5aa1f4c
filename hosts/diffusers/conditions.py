"""What a pipeline gives its networks from step to step, besides the latent and the time."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..equal_by_value import equal_by_value

_LATENTS = ("sample", "hidden_states")


class Conditions:
    """Notices that a prompt, a strength, a shape or the networks themselves are others than in the step before.

    Attributes:
        changes: how often that was.
    """

    def __init__(self) -> None:
        self.changes = 0
        self._given: dict[tuple[str, int], Any] = {}
        self._called: list[tuple[str, int]] = []
        self._called_before: list[tuple[str, int]] = []

    def call(self, name: str, guidance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take note of a call.

        Args:
            name: of the network.
            guidance: scale of guidance at this time.
        """
        key = (name, sum(called == name for called, _ in self._called))
        given = [guidance, *_conditions(args, kwargs)]
        begins_otherwise = not self._called and self._called_before[:1] not in ([], [key])
        if begins_otherwise or (key in self._given and not equal_by_value(self._given[key], given)):
            self.changes += 1
        self._given[key] = given
        self._called.append(key)

    def end_step(self) -> None:
        if self._called_before and self._called_before != self._called:
            self.changes += 1
        self._called_before, self._called = self._called, []


def latent_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """What a network is to denoise, among its arguments."""
    latent = args[0] if args else next((kwargs[name] for name in _LATENTS if name in kwargs), None)
    return latent if isinstance(latent, Tensor) else None


def _conditions(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    latent = latent_of(args, kwargs)
    shape = None if latent is None else [*latent.shape, str(latent.dtype), str(latent.device)]
    named = {name: _condition(name, value) for name, value in kwargs.items() if name not in _LATENTS}
    return [shape, args[2:], named]  # the second one is the time


def _condition(name: str, value: Any) -> Any:
    if "timestep" in name:
        return None
    # A ControlNet's results are new in each step; what it was given itself is looked at instead.
    return value is not None if "residual" in name or ("controlnet" in name and name != "controlnet_cond") else value
