"""A real WebUI inside the process that runs the tests, on the CPU, with this repository as its extension.

What of it runs: its own start-up as far as its scripts and extensions, with all that these import; no page, no server,
no downloads.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

EXTENSION = "sd-webui-slipstream"
_PACKAGES = ("packages_3rdparty", "modules_forge/packages")


def enter(checkout: Path, data: Path, root: Path) -> None:
    """Start a WebUI of the Forge family as its `webui.py` does, up to where its page would be made.

    Args:
        checkout: with `webui.py`.
        data: a folder for its models, settings and extensions, so that the checkout stays clean.
        root: of this repository.
    """
    (data / "extensions").mkdir(parents=True)
    (data / "extensions" / EXTENSION).symlink_to(root, target_is_directory=True)
    flag = "--cpu" if '"--cpu"' in (checkout / "backend" / "args.py").read_text(encoding="utf-8") else "--always-cpu"
    sys.argv = ["webui.py", "--data-dir", str(data), "--skip-torch-cuda-test", flag]
    sys.path[:0] = [str(checkout), *(str(checkout / name) for name in _PACKAGES if (checkout / name).is_dir())]
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    os.chdir(checkout)
    importlib.import_module("modules_forge.initialization").initialize_forge()
    importlib.import_module("modules.shared_init").initialize()
    importlib.import_module("modules.processing")
    shared, upscaler = map(importlib.import_module, ("modules.shared", "modules.upscaler"))
    shared.sd_upscalers = upscaler.UpscalerNone().scalers  # the others are downloaded
    importlib.import_module("modules.sd_samplers").set_samplers()
    importlib.import_module("modules.extensions").list_extensions()
    importlib.import_module("modules.scripts").load_scripts()


def script_of(runner: Any) -> Any:
    """Our script among those of a WebUI's runner."""
    return next(script for script in runner.alwayson_scripts if script.title() == "Slipstream")
