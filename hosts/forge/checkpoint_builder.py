"""What carries out requests of the engines' page inside of a WebUI: for the checkpoint that is loaded, and no other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ...core.dtypes import dtype_of
from ...core.errors import UnsupportedModel
from ...core.spec import Role
from ...runtime.planning.plan import CallShape
from ...runtime.provider import EngineProvider, HostHooks
from ...runtime.requests.build_requests import Wanted
from ...runtime.requests.make_engines import make_engines
from ...runtime.settings.model_settings import Resolution
from .families import FAMILIES
from .source import ForgeUNetSource


class CheckpointBuilder:
    """Builds with the WebUI's own model, which is loaded onto the device for it as for a picture."""

    roles: tuple[Role, ...] = (Role.UNET,)

    def __init__(self, provider: EngineProvider) -> None:
        self._provider = provider

    def device(self) -> torch.device:
        for family in FAMILIES.values():
            try:
                return torch.device(family.manager().get_torch_device())
            except ImportError:
                continue
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def models(self) -> list[str]:
        """The one that is loaded; none before the first picture."""
        loaded = _loaded()
        return [] if loaded is None else [_name_of(loaded)]

    def file_of(self, model: str) -> str:
        """Which file's weights an engine has used is not noted in WebUIs."""
        return ""

    def parameter_count(self, model: str, role: Role) -> int | None:
        loaded = _loaded()
        if loaded is None or role is not Role.UNET:
            return None
        return sum(tensor.numel() for tensor in loaded.forge_objects.unet.model.diffusion_model.parameters())

    def make(self, wanted: Wanted, hooks: HostHooks) -> Iterator[str]:
        """
        Raises:
            SlipstreamError: another checkpoint is loaded by now, or an engine could not be had.
        """
        if wanted.settings.bake:
            raise UnsupportedModel("pictures of a WebUI take engines without weights in them; build without baking")
        from modules.call_queue import queue_lock

        settings = self._provider.with_preferences(wanted.settings)
        with queue_lock, torch.inference_mode():  # no picture meanwhile
            hooks.check_interrupted()  # it may have waited for long
            patcher = _unet_of(wanted.model)
            source = ForgeUNetSource(patcher)
            source.family.manager().load_models_gpu([patcher])
            calls = (unet_call(source, size, wanted.batch, wanted.tokens) for size in settings.resolutions)
            for made in make_engines(self._provider, source, calls, settings, hooks):
                yield str(made)

    def rest(self) -> None:
        """Idle engines give their memory back; the WebUI's models are its own affair."""
        self._provider.pool.clear()


def unet_call(source: ForgeUNetSource, resolution: Resolution, batch: int, tokens: int) -> CallShape:
    """The shapes of an ordinary call.

    Args:
        batch: samples in it.
        tokens: length of the text.
    """
    config, dtype = source.architecture.config, dtype_of(source.precision)
    size = resolution.height // 8, resolution.width // 8
    inputs = [
        ("x", (batch, config["in_channels"], *size), dtype),
        ("timesteps", (batch,), torch.float32),
        ("context", (batch, tokens, config["context_dim"]), dtype),
    ]
    if config.get("adm_in_channels"):
        inputs.append(("y", (batch, config["adm_in_channels"]), dtype))
    return CallShape(tuple(inputs))


def _loaded() -> Any:
    """The WebUI's model; None before one is loaded: most WebUIs load one as soon as `shared.sd_model` is read."""
    from modules import sd_models

    model = sd_models.model_data.sd_model
    return model if getattr(model, "forge_objects", None) is not None else None


def _name_of(model: Any) -> str:
    info = getattr(model, "sd_checkpoint_info", None)
    return str(getattr(info, "model_name", None) or "loaded checkpoint")


def _unet_of(name: str) -> Any:
    """
    Raises:
        UnsupportedModel: it is not the one that is loaded.
    """
    loaded = _loaded()
    if loaded is None or _name_of(loaded) != name:
        raise UnsupportedModel(f"{name} is not loaded any more; load it in the WebUI, then request the build again")
    return loaded.forge_objects_original.unet
