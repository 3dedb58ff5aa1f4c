"""reForge's and Classic's own model code in this process: `ldm_patched`, their patcher, and their sampling function.

What of the WebUI lies above that is a stand-in, since it asks for a repository that is no more.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from .boot_a1111 import stand_ins


def enter(checkout: Path, data: Path) -> None:
    """
    Args:
        data: a folder for its models.
    """
    sys.argv = ["webui.py", "--always-cpu", "--data-dir", str(data)]
    sys.path.insert(0, str(checkout))
    importlib.import_module("ldm_patched.modules.args_parser").args.always_cpu = True
    stand_ins(checkout, data)
    importlib.import_module("modules_forge.forge_sampler")
