"""A model by the name of its file, loaded through a host's own code in a process that is no host."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import Any

import torch

from ...core.errors import BackendUnavailable, UnsupportedModel
from ...core.spec import Role
from ...engine_cache import Entry, WeightsMemo
from ...runtime.module import AcceleratedModule
from ...runtime.planning.plan import CallShape
from ...runtime.requests.make_engines import LoadedModel
from ...runtime.settings.model_settings import Resolution
from ..comfy.building import without_server
from ..comfy.building.build_engines import build_blocks, open_unet, unet_call
from ..comfy.models.autoencoders import HALVES
from ..comfy.models.demo_model import load_demo_model, load_demo_vae
from ..comfy.models.vae import open_vae, vae_call

log = logging.getLogger(__name__)

DEMO = "demo"


def load_model(model: str, comfyui: Path | None, memo: WeightsMemo, role: Role = Role.UNET) -> LoadedModel:
    """Load "demo" or a file, through ComfyUI; the demo through diffusers where no ComfyUI can be used.

    Args:
        comfyui: the checkout that the user named.
        memo: remembers the digests of checkpoint files.
        role: the part of it that engines are for: its UNet, or a half of its VAE.

    Raises:
        BackendUnavailable: there is no host here that could load it.
        UnsupportedModel: it cannot be loaded, or has no engines.
    """
    try:
        return _load_in_comfyui(model, comfyui, memo, role)
    except BackendUnavailable as error:
        if model != DEMO or role is not Role.UNET or comfyui is not None or not _has_diffusers():
            raise
        log.warning("%s. diffusers runs the demo model instead.", error)
    return _load_in_diffusers()


def build_blocks_of(
    model: str, comfyui: Path | None, module: AcceleratedModule, batch: int, tokens: int
) -> tuple[str, list[Entry]]:
    """Build (or find), load and compare the engines of the blocks of a UNet or transformer, through ComfyUI.

    Args:
        model, comfyui: see `load_model`.
        batch, tokens: see `build_blocks`.

    Returns:
        The host, as in `LoadedModel`, and the engines.

    Raises:
        BackendUnavailable: there is no ComfyUI here that could load it.
        SlipstreamError: no engine could be had.
    """
    file = _file_in_comfyui(model, comfyui)
    return _comfyui(), build_blocks(module, _patcher(file), batch, tokens)


def _load_in_comfyui(model: str, comfyui: Path | None, memo: WeightsMemo, role: Role) -> LoadedModel:
    file = _file_in_comfyui(model, comfyui)
    load = _load_unet if role is Role.UNET else _load_vae
    return load(file, memo, role)


def _file_in_comfyui(model: str, comfyui: Path | None) -> Path | None:
    """The file, or None for the demo, with ComfyUI ready to load it."""
    checkout = without_server.find_checkout(comfyui)
    if checkout is None:
        raise BackendUnavailable(
            "No ComfyUI was found, and engines are built for the code that runs them. Name the folder of yours with "
            "--comfyui DIR or COMFYUI_DIR"
        )
    file = None if model == DEMO else without_server.find_file(model, checkout)
    without_server.enter(checkout)
    return file


def _patcher(file: Path | None) -> Any:
    return without_server.load_file(file) if file else load_demo_model()


def _comfyui() -> str:
    return f"ComfyUI {without_server.version()}"


def _load_unet(file: Path | None, memo: WeightsMemo, role: Role) -> LoadedModel:
    source = open_unet(_patcher(file), memo)

    def call(resolution: Resolution, batch: int, tokens: int) -> CallShape:
        return unet_call(source, resolution, batch, tokens)

    return LoadedModel(_comfyui(), source, call)


def _load_vae(file: Path | None, memo: WeightsMemo, role: Role) -> LoadedModel:
    if role not in HALVES:
        raise UnsupportedModel(f"Engines for a {role.value} are built when a workflow first uses it")
    vae = without_server.load_vae_file(file) if file else load_demo_vae()
    source = open_vae(vae, HALVES[role])

    def call(resolution: Resolution, batch: int, tokens: int) -> CallShape:
        return vae_call(source, resolution, batch)

    return LoadedModel(_comfyui(), source, call)


def _has_diffusers() -> bool:
    return importlib.util.find_spec("diffusers") is not None


def _load_in_diffusers() -> LoadedModel:
    from diffusers import __version__ as version
    from diffusers.utils.logging import set_verbosity_error

    from ...demo.model import load_unet
    from ..diffusers.source import DiffusersUNetSource

    set_verbosity_error()
    on_gpu = torch.cuda.is_available()
    unet = load_unet(dtype=torch.float16 if on_gpu else torch.float32).to("cuda" if on_gpu else "cpu")
    source = DiffusersUNetSource(unet)

    def call(resolution: Resolution, batch: int, tokens: int) -> CallShape:
        config = source.architecture.config
        x = (batch, config["in_channels"], resolution.height // 8, resolution.width // 8)
        context = (batch, tokens, config["cross_attention_dim"])
        return CallShape(
            (("x", x, unet.dtype), ("timesteps", (batch,), torch.float32), ("context", context, unet.dtype))
        )

    return LoadedModel(f"diffusers {version}", source, call)
