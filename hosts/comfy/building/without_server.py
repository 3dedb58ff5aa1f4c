"""ComfyUI's own code without its server: find a checkout, enter it, load a model as its loaders do.

Nothing of ComfyUI is imported before `enter`, for its first import decides on the device.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ....core.errors import BackendUnavailable, UnsupportedModel
from ..process.checkout import use_checkout

ROOT = Path(__file__).resolve().parents[3]
CACHE = Path.home() / ".cache" / "slipstream"
LOADER_FOLDERS = ("checkpoints", "diffusion_models", "unet", "vae")
CHECKPOINT_PREFIX, VAE_PREFIX = "model.diffusion_model.", "first_stage_model."
_SAFETENSORS = (".safetensors", ".sft")


# Finding


def find_checkout(named: Path | None = None) -> Path | None:
    """The ComfyUI to work with: `named`, else the first of COMFYUI_DIR, the pack's own, the last in the cache by name.

    Raises:
        BackendUnavailable: `named` or COMFYUI_DIR is no ComfyUI.
    """
    if chosen := _chosen_checkout(named):
        return chosen
    hosts = (folder for folder in _bases() if _is_comfyui(folder))
    cached = (folder for folder in sorted(CACHE.glob("ComfyUI*"), reverse=True) if _is_comfyui(folder))
    return next(hosts, None) or next(cached, None)


def models_folder(named: Path | None = None) -> Path | None:
    """Where the ComfyUI that the user means keeps its models; None when no ComfyUI was meant.

    Raises:
        BackendUnavailable: as `find_checkout`.
    """
    if chosen := _chosen_checkout(named):
        return chosen / "models"
    # A base directory may be apart from ComfyUI's code, as with ComfyUI Desktop.
    return next((base / "models" for base in _bases() if (base / "models").is_dir()), None)


def _chosen_checkout(named: Path | None) -> Path | None:
    parts = [part for part in os.environ.get("COMFYUI_DIR", "").split(os.pathsep) if part.strip()]
    given = named or (Path(parts[0]) if parts else None)
    if given is None:
        return None
    folder = given.expanduser().resolve()
    if not _is_comfyui(folder):
        source = "--comfyui" if named else "COMFYUI_DIR"
        raise BackendUnavailable(
            f"{source} names {folder}, which holds no ComfyUI (no main.py and comfy/ there); "
            "name the folder that ComfyUI is started from"
        )
    return folder


def _bases() -> Iterator[Path]:
    """Folders in whose `custom_nodes` the pack lies: as it was called, through links, and as it really is."""
    called = Path(os.path.abspath(sys.argv[0]))
    for pack in (called, called.parent, ROOT):
        if pack.parent.name == "custom_nodes":
            yield pack.parent.parent


def _is_comfyui(folder: Path) -> bool:
    return (folder / "main.py").is_file() and (folder / "comfy").is_dir()


def find_file(model: str, checkout: Path) -> Path:
    """The checkpoint or UNet file that a user means.

    Args:
        model: a path, or a file's name in ComfyUI's model folders.

    Raises:
        UnsupportedModel: there is no such file.
    """
    path = Path(model).expanduser()
    named = [checkout / "models" / folder / model for folder in LOADER_FOLDERS]
    for candidate in (path, *named):
        if candidate.is_file():
            return candidate.resolve()
    raise UnsupportedModel(
        f"There is no file {path.absolute()}, and none of that name in {checkout / 'models'}; "
        "give the path of a checkpoint or UNet file, or demo for the built-in model"
    )


# Entering


def enter(checkout: Path) -> None:
    """Make ComfyUI's modules importable, on the CPU where there is nothing else.

    Raises:
        BackendUnavailable: this Python cannot load them.
    """
    try:
        use_checkout(str(checkout))
        from comfy.cli_args import args

        args.cpu = args.cpu or not torch.accelerator.is_available()
        import comfy.model_management
        import comfy.sd  # noqa: F401
    except Exception as error:  # a missing package, or whatever a driver or another torch raises
        sys.path.remove(str(checkout))
        sys.modules.pop("comfy", None)
        raise BackendUnavailable(
            f"ComfyUI in {checkout} cannot be loaded by {sys.executable}: {error}. {_which_python(checkout)}"
        ) from error


def version() -> str:
    """Of the ComfyUI that was entered."""
    return str(importlib.import_module("comfyui_version").__version__)


def _which_python(checkout: Path) -> str:
    for python in _pythons(checkout):
        if python.is_file() and python.parent != Path(sys.executable).parent:
            return f"Run the same command with ComfyUI's Python: {python} {ROOT} …"
    return (
        "Run the same command with the Python that starts ComfyUI, "
        f"or install what is missing: {sys.executable} -m pip install -r {checkout / 'requirements.txt'}"
    )


def _pythons(checkout: Path) -> Iterator[Path]:
    yield checkout.parent / "python_embeded" / "python.exe"  # ComfyUI's Windows portable, which spells it so
    inside = "Scripts/python.exe" if os.name == "nt" else "bin/python"
    homes = (checkout / "venv", checkout / ".venv", checkout.parent / "venv", checkout.parent / ".venv")
    for home in (*homes, CACHE / "venvs" / checkout.name):
        yield home / inside


# Loading


def load_file(file: Path) -> Any:
    """The `ModelPatcher` of a checkpoint or UNet file, as ComfyUI's stock loaders make it.

    Raises:
        UnsupportedModel: ComfyUI knows no such model.
    """
    import comfy.sd

    try:
        if _is_unet_alone(file):
            return comfy.sd.load_diffusion_model(str(file))
        return comfy.sd.load_checkpoint_guess_config(str(file), output_vae=False, output_clip=False)[0]
    except Exception as error:  # torch and safetensors raise many kinds for a broken file
        lines = str(error).splitlines() or [type(error).__name__]
        raise UnsupportedModel(
            f"ComfyUI {version()} cannot load {file}: {lines[0]}. Name a checkpoint or a UNet file"
        ) from error


def load_vae_file(file: Path) -> Any:
    """The `comfy.sd.VAE` of a checkpoint or VAE file, as ComfyUI's stock loaders make it.

    Raises:
        UnsupportedModel: ComfyUI finds no VAE in it.
    """
    import comfy.sd
    import comfy.utils

    try:
        if _has_names(file, VAE_PREFIX):
            found = comfy.sd.load_checkpoint_guess_config(str(file), output_vae=True, output_clip=False)[2]
        else:
            found = comfy.sd.VAE(sd=comfy.utils.load_torch_file(str(file)))
        found.throw_exception_if_invalid()
    except Exception as error:  # as above
        lines = str(error).splitlines() or [type(error).__name__]
        raise UnsupportedModel(
            f"ComfyUI {version()} finds no VAE in {file}: {lines[0]}. Name a checkpoint or a VAE file"
        ) from error
    return found


def _is_unet_alone(file: Path) -> bool:
    """Whether a file is one for UNETLoader: it keeps the metadata that the checkpoint loader drops."""
    return file.suffix in _SAFETENSORS and not _has_names(file, CHECKPOINT_PREFIX)


def _has_names(file: Path, prefix: str) -> bool:
    """Whether a checkpoint has tensors under `prefix`; one that is no safetensors file has them all."""
    from safetensors import safe_open

    if file.suffix not in _SAFETENSORS:
        return True
    with safe_open(str(file), framework="pt") as tensors:
        return any(name.startswith(prefix) for name in tensors.keys())  # noqa: SIM118
