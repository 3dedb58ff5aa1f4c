"""Builds engines on Modal's GPUs, a function call for each model and size: `modal run deploy/modal_app.py`.

The function itself is plain Python, `build`, which runs anywhere; Modal only says on which machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PACK = Path(os.environ.get("SLIPSTREAM_PACK", "/app/ComfyUI/custom_nodes/slipstream"))
GPU = os.environ.get("SLIPSTREAM_GPU", "H100")


def build(model: str, resolution: str, remote: str, pack: str = str(PACK)) -> dict[str, object]:
    """Build one model at one size and send the engine to `remote`; pulled where another machine was faster.

    Raises:
        RuntimeError: the build failed; the message is the command's.
    """
    words = ["build", "--model", model, "--resolution", resolution, "--remote", remote, "--json"]
    done = subprocess.run([sys.executable, pack, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-2000:] or f"ended with status {done.returncode}")
    found: dict[str, object] = json.loads(done.stdout)
    return found


def make_app() -> object:
    """The Modal app; its image and secrets are to be replaced by yours."""
    import modal

    app = modal.App("slipstream-build")
    image = modal.Image.from_registry("my/comfyui:latest").pip_install("cryptography", "fsspec", "s3fs", "pyyaml")
    secrets = [modal.Secret.from_name("engine-store-credentials"), modal.Secret.from_name("slipstream-key")]
    remote_build = app.function(image=image, gpu=GPU, secrets=secrets, timeout=3600, retries=2)(build)

    def main(model: str = "demo", resolutions: str = "256x256", remote: str = "s3://my-bucket/engines") -> None:
        arguments = [(model, resolution, remote) for resolution in resolutions.split(",")]
        for result in remote_build.starmap(arguments):
            sys.stdout.write(json.dumps(result) + "\n")

    app.local_entrypoint()(main)
    return app


if "modal" in sys.modules:
    app = make_app()
