"""Engines that the command line builds are those that the ComfyUI server looks for."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.tests.comfyui.support.graph import Graph

# The shapes and the threads (in conftest.py of all tests) of the harness's servers.
SIZE = ("--resolution", "64x64", "--batch", "2", "--tokens", "77")


@dataclass(frozen=True)
class Engines:
    """A store that the command line has built one engine in."""

    home: Path
    checkpoint: Path
    document: dict[str, Any]

    @property
    def digest(self) -> str:
        return self.document["engines"][0]["digest"]


def command(root: Path, comfyui: Path, *words: object) -> list[str]:
    return [sys.executable, str(root), *map(str, words), "--comfyui", str(comfyui)]


def run(root: Path, comfyui: Path, *words: object, path: Path | None = None) -> dict[str, Any]:
    """Run a command to its good end; its JSON document.

    Args:
        path: a folder that others have put on Python's path.
    """
    line = command(root, comfyui, *words, "--json")
    environment = {**os.environ, "PYTHONPATH": str(path)} if path else None
    done = subprocess.run(line, capture_output=True, text=True, timeout=400, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def engines(root: Path, comfyui_dir: Path, model_files, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    home = tmp_path_factory.mktemp("home")
    checkpoint = model_files.folder / "checkpoints" / model_files.checkpoint("sd15")
    # Other packs put their folders on Python's path; a package there would pass for ComfyUI's, which has no __init__.
    others = tmp_path_factory.mktemp("others")
    for name in ("comfy", "slipstream", "nodes"):
        (others / name).mkdir()
        (others / name / "__init__.py").write_text("raise ImportError('not the one that you think')")
    document = run(root, comfyui_dir, "build", "--home", home, "--model", checkpoint, *SIZE, path=others)
    return Engines(home, checkpoint, document)


def test_build_tells_what_it_built(engines: Engines, comfyui_version) -> None:
    (row,) = engines.document["engines"]
    assert row["built"] and row["label"] == "SD15 64×64 batch 2" and row["state"] == "ok"
    assert row["error"] < 1e-4
    assert engines.document["host"] == f"ComfyUI {'.'.join(map(str, comfyui_version))}"


def test_the_server_uses_the_engine_and_builds_none(engines: Engines, start_comfy, model_files) -> None:
    server = start_comfy(home=engines.home)
    with server.client() as client:
        plain, fast = (client.run(accelerated(model_files, on)) for on in (False, True))
        assert plain.ok and fast.ok, (plain.error, fast.error)
        text = str(fast.outputs)
        assert re.search(r"calls on engines: [1-9]\d*, on your model: 0", text), text
        assert engines.digest[:12] in text
        assert np.abs(plain.latents()[0] - fast.latents()[0]).max() < 1e-3 * np.abs(plain.latents()[0]).max()
        log = server.log()
    assert f"cache hit, SD15 64×64 batch 2 from {engines.digest[:12]}" in log
    assert "Slipstream: built" not in log and "no engine for" not in log
    assert "Slipstream: checked" not in log  # the build has checked it on these weights
    assert len(list((engines.home / "engines").iterdir())) == 1


def accelerated(model_files, on: bool) -> Graph:
    graph = Graph()
    loader = graph.add("CheckpointLoaderSimple", ckpt_name=model_files.checkpoint("sd15"))
    model = graph.add(
        "SlipstreamAccelerateModel",
        model=loader,
        backend="auto" if on else "off",
        precision="auto",
        optimize="balanced",
        build="manual",
        resolutions="auto",
    )
    samples = graph.sample(model, steps=2)
    graph.save(samples)
    graph.add("SlipstreamEngineInfo", model=model, after=samples)
    return graph


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn], ids=["fp16", "fp8"])
def test_a_unet_file_of_the_architecture_shares_the_engine(
    engines: Engines, root: Path, comfyui_dir: Path, model_files, dtype: torch.dtype
) -> None:
    unet = model_files.folder / "diffusion_models" / model_files.unet("sd15", dtype=dtype)
    document = run(root, comfyui_dir, "build", "--home", engines.home, "--model", unet, *SIZE)
    assert [(row["digest"], row["built"]) for row in document["engines"]] == [(engines.digest, False)]


def test_bench_runs_the_engine(engines: Engines, root: Path, comfyui_dir: Path) -> None:
    words = ("bench", "--home", engines.home, "--model", engines.checkpoint, *SIZE)
    eager, fast = run(root, comfyui_dir, *words, "--repeats", 2, "--warmup", 1)["rows"]
    assert (eager["engine_calls"], fast["engine_calls"]) == (0, 3)
    assert fast["digest"] == engines.digest and eager["error"] < 1e-5 and 0 < fast["error"] < 1e-4
    assert eager["ms"] > 0 and fast["ms"] > 0 and fast["load_s"] < 5


def test_a_file_that_is_no_model(root: Path, comfyui_dir: Path, model_files, tmp_path: Path) -> None:
    lora = model_files.folder / "loras" / model_files.lora()
    failing = command(root, comfyui_dir, "build", "--home", tmp_path / "home", "--model", lora, *SIZE, "--json")
    done = subprocess.run(failing, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and f"cannot load {lora}" in json.loads(done.stdout)["error"]
    last = done.stderr.splitlines()[-1]
    assert last.startswith("slipstream: ComfyUI") and f"cannot load {lora}" in last
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(os.name == "nt", reason="a signal to one process needs POSIX")
@pytest.mark.parametrize(
    ("moment", "pause"), [pytest.param("tracing the model", 0.2, marks=pytest.mark.slow), ("compiling", 2.0)]
)
def test_ctrl_c_leaves_no_files_and_no_processes(
    engines: Engines, root: Path, comfyui_dir: Path, tmp_path: Path, moment: str, pause: float
) -> None:
    home = tmp_path / "home"
    words = ("build", "--home", home, "--model", engines.checkpoint, *SIZE)
    process = subprocess.Popen(command(root, comfyui_dir, *words), stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert any(moment in line for line in process.stderr), "the build ended before it was interrupted"
    time.sleep(pause)
    assert list(home.glob("tmp/*"))
    assert moment != "compiling" or processes_about(home)
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and "Cancelled" in err and "Traceback" not in err
    assert time.monotonic() - started < 6  # 2 s, and what a busy machine adds
    time.sleep(0.5)  # the worker notices that its host is gone
    assert not processes_about(home)
    kept = home / "keep"  # what builds learnt of this machine's compiler stays for the next one
    left = [path for path in home.rglob("*") if path.is_file() and path.suffix != ".lock"]
    assert not [path for path in left if kept not in path.parents]


def processes_about(home: Path) -> Sequence[str]:
    """Command lines of living processes that name a folder."""
    found = subprocess.run(["ps", "-Aww", "-o", "args="], capture_output=True, text=True, check=True)
    return [line for line in found.stdout.splitlines() if f"worker {home}" in line]
