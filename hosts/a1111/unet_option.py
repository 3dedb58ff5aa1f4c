"""The options that Slipstream adds to the "SD Unet" setting of AUTOMATIC1111."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...core.errors import SlipstreamError, UnsupportedModel
from ...core.protocols import Tensors
from ...runtime.module import AcceleratedModule
from ...runtime.settings.model_settings import BuildPolicy, Settings
from ..live_model.account import why_changed
from ..webui_process import module_of, waiting_hooks
from .fallback_reasons import WebUiCode, why_not_this_call
from .source import LdmUNetSource, plain_calls

_LABELS = {
    BuildPolicy.BACKGROUND: "[Slipstream] build in the background",
    BuildPolicy.FIRST_USE: "[Slipstream] build at first use",
}


def add_options(options: list[Any]) -> None:
    """For `on_list_unets`."""
    options += [_option(policy, label) for policy, label in _LABELS.items()]


def module_in_use() -> AcceleratedModule | None:
    """Of the option that is chosen now; None where it is none of ours."""
    from modules import sd_unet

    module = getattr(sd_unet.current_unet, "module", None)
    return module if isinstance(module, AcceleratedModule) else None


def _option(policy: BuildPolicy, text: str) -> Any:
    from modules import sd_unet

    class Option(sd_unet.SdUnetOption):
        model_name = None  # "Automatic" chooses none of ours
        label = text

        def create_unet(self) -> Any:
            return _unet(module_of(Settings(policy=policy)))

    return Option()


def _unet(module: AcceleratedModule) -> Any:
    from modules import sd_unet

    class Unet(sd_unet.SdUnet):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def activate(self) -> None:
            _bring_back()

        def forward(
            self, x: torch.Tensor, timesteps: torch.Tensor, context: torch.Tensor, *rest: Any, **more: Any
        ) -> torch.Tensor:
            return _compute(module, x, timesteps, context, rest, more)

    return Unet()


def _bring_back() -> None:
    """The WebUI put the model's weights into RAM, since other UNets have weights of their own."""
    from modules import devices, shared

    if not getattr(shared.cmd_opts, "lowvram", False):
        shared.sd_model.model.diffusion_model.to(devices.device)


def _compute(
    module: AcceleratedModule,
    x: torch.Tensor,
    timesteps: torch.Tensor,
    context: torch.Tensor,
    rest: tuple[Any, ...],
    more: dict[str, Any],
) -> torch.Tensor:
    from modules import devices, shared

    live = shared.sd_model.model.diffusion_model

    def eager() -> Tensors:
        with plain_calls():
            return {"out": live(x, timesteps, context, *rest, **more)}

    try:
        source = LdmUNetSource(live, lambda: config_of(shared.sd_model), torch.device(devices.device))
        source.precision  # noqa: B018  an unsupported dtype is a reason too
    except SlipstreamError as error:
        module.count_eager(str(error))
        return eager()["out"]
    given = {"x": x, "timesteps": timesteps, "context": context, "y": more.get("y")}
    inputs = {name: tensor for name, tensor in given.items() if isinstance(tensor, torch.Tensor)}
    others = {name: value for name, value in more.items() if name != "y"}
    veto = why_changed(live, source.architecture, code=WebUiCode) or why_not_this_call(rest, others)
    # A run of its own for each call: this host does not say when sampling begins and ends.
    with module.run(source, waiting_hooks()) as run:
        return run(inputs if veto is None else {}, eager, veto, eager)["out"].to(x.dtype)


def config_of(sd_model: Any) -> Mapping[str, Any]:
    """Of the UNet, by the file that the WebUI made the model from.

    Raises:
        UnsupportedModel: it does not say.
    """
    try:
        from omegaconf import OmegaConf

        parameters: Any = OmegaConf.to_container(OmegaConf.load(sd_model.used_config))
        found = parameters["model"]["params"]
        config: Mapping[str, Any] = (found.get("network_config") or found["unet_config"])["params"]
    except (ImportError, AttributeError, KeyError, TypeError, OSError) as error:
        raise UnsupportedModel(
            f"The model's config cannot be read ({error}); your model runs without an engine"
        ) from error
    return config
