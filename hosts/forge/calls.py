"""The calls of a UNet in one sampling run: to an engine, or to the plain model with a reason."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...core.protocols import Tensors
from ...runtime.module import Run
from ..control_residuals import residuals_of
from ..live_model.account import why_changed
from ..live_model.held_weights import Hold
from ..model_patches import why_not_these_tensors
from ..stand_in import Compute, Plain, stand_in, undisturbed
from .fallback_reasons import why_not_this_call
from .source import ForgeUNetSource


class UNetCalls:
    """
    Args:
        veto: why no call of this run may go to an engine.
    """

    def __init__(self, run: Run, source: ForgeUNetSource, veto: str | None) -> None:
        self._run = run
        self._source = source
        self._run_veto = veto
        self._hold = Hold()

    def __call__(self, module: Any, plain: Plain, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """See `stand_in.Compute`."""

        def eager() -> Tensors:
            return {"out": plain(*args, **kwargs)}

        try:
            given = _arguments(module, args, kwargs)
        except TypeError as error:
            return self._run({}, eager, self._veto_of_run or f"the model is called in an unknown way ({error})")["out"]
        inputs = {name: value for name, value in given.items() if torch.is_tensor(value)}
        veto = self._why_not(module, inputs, given)
        residuals: Tensors | str = {}
        if veto is None:
            residuals = residuals_of(given.get("control"), inputs["x"])
        if isinstance(residuals, str):
            veto, residuals = residuals, {}
        inputs = {**inputs, **residuals} if veto is None else {}
        return self._run(inputs, eager, veto, lambda: {"out": undisturbed(plain, args, kwargs)})["out"]

    def _why_not(self, module: Any, inputs: Tensors, given: dict[str, Any]) -> str | None:
        if veto := self._veto_of_run:
            return veto
        if module is not self._source.unet:
            return "the model was exchanged in the midst of the run"
        if not self._source.is_current:
            return "the model's weights were changed in the midst of the run"
        if "x" not in inputs or "timesteps" not in inputs:
            return "the model is called in an unknown way"
        if veto := why_not_these_tensors(inputs.values()):
            return veto
        return why_not_this_call({name: value for name, value in given.items() if name not in inputs})

    @property
    def _veto_of_run(self) -> str | None:
        """Asked at each call, as other extensions may change the model at any time."""
        return self._run_veto or why_changed(self._source.unet, self._source.architecture, hold=self._hold)


def _arguments(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    signature = inspect.signature(type(module).forward)
    given: dict[str, Any] = {}
    for name, value in signature.bind(module, *args, **kwargs).arguments.items():
        is_rest = signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
        given |= value if is_rest else {name: value}
    given.pop("self", None)
    return given


@contextmanager
def calls_led(model: Any, compute: Compute) -> Iterator[None]:
    """Lead the UNet's calls inside of `model.apply_model`, and so of all that extensions put around that.

    Args:
        model: of a `UnetPatcher`.
    """
    before, attributes, is_over = model.apply_model, vars(model), False
    own = attributes.get("apply_model")

    def apply_model(*args: Any, **kwargs: Any) -> torch.Tensor:
        if is_over:  # somebody wrapped this one and did not let go of it
            plain: torch.Tensor = before(*args, **kwargs)
            return plain
        with stand_in(model, compute):
            result: torch.Tensor = before(*args, **kwargs)
            return result

    attributes["apply_model"] = apply_model
    try:
        yield
    finally:
        is_over = True
        if attributes.get("apply_model") is apply_model:
            del attributes["apply_model"]
            if own is not None:
                attributes["apply_model"] = own
