"""Builds engines on Modal's GPUs, a function call for each model and size: `modal run deploy/modal_app.py`.

The function itself is plain Python, `build`, which runs anywhere; Modal only says on which machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

PACK = Path(os.environ.get("SLIPSTREAM_PACK", "/app/ComfyUI/custom_nodes/slipstream"))
GPU = os.environ.get("SLIPSTREAM_GPU", "H100")
KEY = "SLIPSTREAM_SECRET_KEY"
"""An environment variable, of a Modal secret: the key that signs, as `slipstream trust export-key` writes it."""


def build(model: str, resolution: str, remote: str, pack: str = str(PACK)) -> dict[str, object]:
    """Build one model at one size and send the engine to `remote`; pulled where another machine was faster.

    Raises:
        RuntimeError: the build failed; the message is the command's.
    """
    take_key(pack)
    words = ["build", "--model", model, "--resolution", resolution, "--remote", remote, "--json"]
    found: dict[str, object] = json.loads(_run(pack, words))
    return found


def take_key(pack: str) -> None:
    """Sign by the key of the secret: the one that a container makes for itself is lost with it, and nobody trusts it.

    Raises:
        RuntimeError: the secret is no key.
    """
    if KEY not in os.environ:
        return
    with tempfile.NamedTemporaryFile("w", encoding="ascii") as file:  # which this user alone can read
        file.write(os.environ[KEY])
        file.flush()
        _run(pack, ["trust", "import-key", file.name])


def main(model: str = "demo", resolutions: str = "256x256", remote: str = "s3://my-bucket/engines") -> None:
    """Build a model at sizes such as `256x256,512x512`, each in a container of its own; a line of JSON for each."""
    rows = [(model, resolution, remote) for resolution in resolutions.split(",")]
    for result in remote_build.starmap(rows):
        sys.stdout.write(json.dumps(result) + "\n")


def _run(pack: str, words: list[str]) -> str:
    done = subprocess.run([sys.executable, pack, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-2000:] or f"ended with status {done.returncode}")
    return done.stdout


if modal := sys.modules.get("modal"):  # which has imported this file; the image and the secrets are yours to name
    app = modal.App("slipstream-build")
    image = modal.Image.from_registry("my/comfyui:latest").pip_install("cryptography", "fsspec", "s3fs", "pyyaml")
    secrets = [modal.Secret.from_name("engine-store-credentials"), modal.Secret.from_name("slipstream-key")]
    remote_build = app.function(image=image, gpu=GPU, secrets=secrets, timeout=3600, retries=2)(build)
    app.local_entrypoint()(main)
