"""ComfyUI inside the process that runs the tests: on the CPU, or on the GPU with SLIPSTREAM_TEST_DEVICE=cuda."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def enter(checkout: Path, base: Path) -> None:
    """Make a checkout's own modules importable, set up for its device; cheap until `comfy` is really used.

    Args:
        checkout: The ComfyUI to import from.
        base: Folder for its models, input, output and user data, so that the checkout stays clean.
    """
    for name in ("models", "custom_nodes", "input", "output", "temp", "user"):
        (base / name).mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(checkout))
    from comfy.cli_args import args

    # Read once, when `comfy.model_management` and `folder_paths` are imported.
    args.cpu = os.environ.get("SLIPSTREAM_TEST_DEVICE", "cpu") != "cuda"
    args.use_pytorch_cross_attention = True
    args.base_directory = str(base)
    args.database_url = "sqlite:///:memory:"
