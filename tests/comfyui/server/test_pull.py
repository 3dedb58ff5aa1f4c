"""A new ComfyUI server, to which all is empty, serves what another one has built, by the command that measures it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.tests.comfyui.support.server import on_gpu

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("cryptography") is None, reason="no package to sign engines with"),
]


def test_a_new_server_serves_within_five_seconds_what_another_built(
    root: Path, comfyui_dir: Path, tmp_path: Path
) -> None:
    """The server's store, compiler caches, home and keys are empty, and it never builds."""
    device, out = "cuda" if on_gpu() else "cpu", tmp_path / "found.json"
    command = [sys.executable, str(root / "benchmarks" / "pull.py"), "--comfyui", str(comfyui_dir), "--device", device]
    environment = {name: value for name, value in os.environ.items() if name != "COMFYUI_DIR"}
    done = subprocess.run(
        [*command, "--out", str(out)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=580
    )
    assert out.exists(), done.stderr[-3000:]
    found = json.loads(out.read_text(encoding="utf-8"))
    assert done.returncode == 0, found
    assert found["engines"] >= 2 and found["engine_calls"] > 0 and found["with_builds_s"] > found["first_picture_s"]
