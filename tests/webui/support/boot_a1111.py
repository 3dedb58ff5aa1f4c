"""AUTOMATIC1111's own seam for UNets in this process: its `modules/sd_unet.py` over Stability's `ldm`.

Its `shared`, `devices` and `script_callbacks` are stand-ins, since the real ones ask for packages that are installed no
more; so are what starts a page and what samples.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

_LDM = "repositories/stable-diffusion-stability-ai"


def has_parts(checkout: Path) -> bool:
    """Whether a folder is a checkout of AUTOMATIC1111 with the repository that it is built on."""
    return (checkout / "modules" / "sd_unet.py").is_file() and (checkout / _LDM / "ldm").is_dir()


def enter(checkout: Path, data: Path) -> None:
    """
    Args:
        data: a folder for its models.
    """
    sys.path[:0] = [str(checkout / _LDM), str(checkout)]
    stand_ins(checkout, data)
    importlib.import_module("modules.sd_unet")


def stand_ins(checkout: Path, data: Path) -> None:
    """Modules of a WebUI that are not its own."""
    callbacks: list[Any] = []
    package = _module("modules", __path__=[str(checkout / "modules")])
    package.script_callbacks = _module(
        "modules.script_callbacks",
        on_ui_tabs=print,
        on_before_ui=print,
        on_list_unets=callbacks.append,
        list_unets_callback=lambda: _listed(callbacks),
    )
    package.devices = _module("modules.devices", device=torch.device("cpu"), cpu=torch.device("cpu"), torch_gc=int)
    state = SimpleNamespace(interrupted=False, skipped=False, textinfo=None, job="")
    options = SimpleNamespace(sd_unet="None")
    package.shared = _module(
        "modules.shared", opts=options, cmd_opts=SimpleNamespace(lowvram=False, medvram=False), state=state
    )
    package.paths_internal = _module("modules.paths_internal", models_path=str(data / "models"), data_path=str(data))
    interrupted = type("InterruptedException", (BaseException,), {})
    package.sd_samplers_common = _module("modules.sd_samplers_common", InterruptedException=interrupted)


def _module(name: str, **contents: Any) -> Any:
    made = ModuleType(name)
    vars(made).update(contents)
    sys.modules[name] = made
    return made


def _listed(callbacks: list[Any]) -> list[Any]:
    found: list[Any] = []
    for callback in callbacks:
        callback(found)
    return found
