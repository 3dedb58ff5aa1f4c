"""A UNet that goes through engines and otherwise is the one it was made from."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from diffusers.models.unets.unet_2d_condition import UNet2DConditionOutput

from ...core.errors import SlipstreamError
from ...core.protocols import Tensors
from ...runtime.module import AcceleratedModule, Run
from ...runtime.provider import EngineProvider, HostHooks
from ...runtime.reporting.status import Status
from ...runtime.settings.model_settings import Settings
from ..live_model.account import why_changed
from ..live_model.held_weights import Hold
from .fallback_reasons import why_not_this_call, why_not_this_run
from .source import DiffusersUNetSource

_FORWARD = inspect.signature(UNet2DConditionModel.forward)


def accelerate_unet(
    unet: torch.nn.Module,
    provider: EngineProvider,
    settings: Settings | None = None,
    hooks: HostHooks | None = None,
) -> AcceleratedUNet:
    """A stand-in for `pipeline.unet` whose calls go through engines.

    Args:
        unet: stays as it is; the stand-in computes with its parameters.
        hooks: what happens while a run waits for a build.
    """
    plain = unet.unet if isinstance(unet, AcceleratedUNet) else unet
    return AcceleratedUNet(plain, AcceleratedModule(provider, settings or Settings()), hooks or HostHooks())


@dataclass
class _Sampling:
    """A run that is open, or why this one has no engines."""

    source: DiffusersUNetSource | None = None
    run: Run | None = None
    veto: str | None = None
    hold: Hold = field(default_factory=Hold)


class AcceleratedUNet(torch.nn.Module):
    """Has the attributes and the call of its UNet2DConditionModel, which `unet` holds, e.g. for saving a pipeline.

    Open a `run()` around each picture. A call outside one is a run of its own: it notices weights that changed, at the
    price of some milliseconds a call.
    """

    def __init__(self, unet: torch.nn.Module, module: AcceleratedModule, hooks: HostHooks) -> None:
        super().__init__()
        self.unet = unet
        self._module = module
        self._hooks = hooks
        self._sampling: _Sampling | None = None
        self._source: DiffusersUNetSource | None = None

    @property
    def status(self) -> Status:
        """Engine and eager calls, and reasons."""
        return self._module.status

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("unet"), name)

    @contextmanager
    def run(self) -> Iterator[None]:
        """One sampling run: the model's weights stay as they are inside it, and engines change only between runs."""
        if self._sampling is not None:  # inside another one
            yield
            return
        self._source = None  # weights written without a new version counter, as fused LoRAs are, count from here on
        with self._open() as self._sampling:
            try:
                yield
            finally:
                self._sampling = None

    def forward(self, *args: Any, **kwargs: Any) -> UNet2DConditionOutput | tuple[torch.Tensor]:
        """See `UNet2DConditionModel.forward`."""
        bound = _FORWARD.bind(self, *args, **kwargs)
        bound.apply_defaults()
        arguments = {name: value for name, value in bound.arguments.items() if name != "self"}
        if self._sampling is not None:
            out = self._compute(self._sampling, arguments)
        else:
            with self._open() as sampling:
                out = self._compute(sampling, arguments)
        return UNet2DConditionOutput(sample=out) if arguments["return_dict"] else (out,)

    def _compute(self, sampling: _Sampling, arguments: dict[str, Any]) -> torch.Tensor:
        def eager() -> Tensors:
            return {"out": self.unet(**{**arguments, "return_dict": False})[0]}

        if sampling.run is None or sampling.source is None:
            if sampling.veto:
                self._module.count_eager(sampling.veto)
            return eager()["out"]
        architecture = sampling.source.architecture
        veto = sampling.veto or why_changed(self.unet, architecture, hold=sampling.hold)
        veto = veto or why_not_this_call(self.unet, arguments, architecture)
        return sampling.run(_inputs(arguments) if veto is None else {}, eager, veto, eager)["out"]

    @contextmanager
    def _open(self) -> Iterator[_Sampling]:
        try:
            source = self._current_source()
        except SlipstreamError as error:
            yield _Sampling(veto=str(error))
            return
        with self._module.run(source, self._hooks) as run:
            yield _Sampling(source, run, why_not_this_run(self.unet))

    def _current_source(self) -> DiffusersUNetSource:
        if self._source is None or not self._source.is_current:
            self._source = DiffusersUNetSource(self.unet)
        return self._source


def _inputs(arguments: Mapping[str, Any]) -> Tensors:
    """The runtime's inputs of a call."""
    sample, timestep = arguments["sample"], arguments["timestep"]
    times = torch.as_tensor(timestep, device=sample.device).float().reshape(-1).expand(len(sample))
    inputs = {"x": sample, "timesteps": times, "context": arguments["encoder_hidden_states"]}
    for name, tensor in (arguments.get("added_cond_kwargs") or {}).items():
        # Whole numbers, which half precision would round.
        inputs[name] = tensor.float() if name == "time_ids" else tensor
    return inputs
