"""Carries out build requests in a process without a host, such as the command `slipstream ui`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from ...core.errors import UnsupportedModel
from ...core.progress import Progress
from ...core.spec import Role
from ...demo.model import WEIGHTS
from ...runtime.loaded.device_memory import give_back_unused
from ...runtime.provider import EngineProvider, HostHooks
from ...runtime.requests.build_requests import Wanted
from ...runtime.requests.make_engines import make_engines
from ..comfy.building.without_server import CHECKPOINT_PREFIX, LOADER_FOLDERS, VAE_PREFIX, find_checkout
from ..weight_files import parameter_count
from .model_by_file import DEMO, load_model

_SUFFIXES = (".safetensors", ".sft", ".ckpt", ".pt", ".pth")


class FileBuilder:
    """Loads models through the code of a ComfyUI that is not running, or the demo through diffusers.

    Args:
        comfyui: the checkout that the user named.
        files: further models that the user named.
    """

    roles: tuple[Role, ...] = (Role.UNET, Role.VAE_DECODE, Role.VAE_ENCODE)

    def __init__(self, provider: EngineProvider, comfyui: Path | None = None, files: Sequence[Path] = ()) -> None:
        self._provider = provider
        self._comfyui = comfyui
        self._files = files

    def device(self) -> torch.device:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def models(self) -> list[str]:
        return [DEMO, *self._found()]

    def file_of(self, model: str) -> str:
        file = None if model == DEMO else self._found().get(model)
        return "" if file is None else str(file.resolve())

    def parameter_count(self, model: str, role: Role) -> int | None:
        if model == DEMO:
            name = "unet" if role is Role.UNET else "vae"
            return parameter_count(WEIGHTS / f"{name}.safetensors", "")
        prefix = CHECKPOINT_PREFIX if role is Role.UNET else VAE_PREFIX
        file = self._found().get(model)
        return None if file is None else parameter_count(file, prefix)

    def make(self, wanted: Wanted, hooks: HostHooks) -> Iterator[str]:
        """
        Raises:
            SlipstreamError: the model cannot be loaded, or an engine could not be had.
        """
        hooks.progress(Progress("load", None, "loading the model"))
        model = load_model(self._place(wanted.model), self._comfyui, self._provider.weights_memo, wanted.role)
        hooks.check_interrupted()
        settings = self._provider.with_preferences(wanted.settings)
        calls = (model.call(resolution, wanted.batch, wanted.tokens) for resolution in settings.resolutions)
        for made in make_engines(self._provider, model.source, calls, settings, hooks):
            yield str(made)

    def rest(self) -> None:
        """Free the memory of the last model, so that other programs such as ComfyUI can use it."""
        self._provider.pool.clear()
        if "comfy.model_management" in sys.modules:
            management = importlib.import_module("comfy.model_management")
            management.unload_all_models()
            management.soft_empty_cache()
        give_back_unused(self.device())

    def _place(self, model: str) -> str:
        """
        Raises:
            UnsupportedModel: no such model is offered.
        """
        if model == DEMO:
            return model
        file = self._found().get(model)
        if file is None:
            raise UnsupportedModel(f"There is no model {model!r} any more; choose one from the list")
        return str(file)

    def _found(self) -> dict[str, Path]:
        """Files by the names that people choose them by."""
        named = {str(file): file for file in self._files}
        checkout = find_checkout(self._comfyui)
        if checkout is None:
            return named
        models = checkout / "models"
        files = (file for folder in LOADER_FOLDERS for file in sorted((models / folder).rglob("*")))
        return named | {file.relative_to(models).as_posix(): file for file in files if file.suffix in _SUFFIXES}
