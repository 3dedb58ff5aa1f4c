"""The benchmarks' command on a real ComfyUI, at a size that a CPU can bear."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import comfy.model_base
import comfy.supported_models
import pytest
import torch

from slipstream.benchmarks import cases, variants
from slipstream.benchmarks.rows import FIELDS
from slipstream.benchmarks.variants import Variant, Workshop
from slipstream.engine_cache import EngineStore
from slipstream.runtime.verify import relative_error


@pytest.mark.slow
def test_the_command_measures_engines_beside_the_plain_model(
    root: Path, comfyui_dir: Path, comfyui_version, tmp_path: Path
) -> None:
    words = ("--cases", "tiny-sd15-64-b2", "--variants", "eager,slipstream:compiled,eager+graph")
    counts = ("--repeats", "3", "--warmup", "2", "--commit", "abc", "--comfyui", str(comfyui_dir))
    done = subprocess.run(
        [sys.executable, str(root / "benchmarks" / "run.py"), *words, *counts, "--out", str(tmp_path)],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name not in ("COMFYUI_DIR", "PYTHONPATH")},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.iterdir()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["variant"] for row in rows] == ["eager", "slipstream:compiled"]
    for row in rows:
        assert tuple(row) == FIELDS and row["case"] == "tiny-sd15-64-b2" and row["commit"] == "abc"
        assert len(row["samples"]) == 3 and row["ms"] > 0 and row["error"] < 1e-4 and row["gpu"] is None
        assert row["versions"]["comfyui"] == ".".join(map(str, comfyui_version))
        assert row["shapes"] == {"x": [2, 4, 8, 8], "timesteps": [2], "context": [2, 77, 64]}
    eager, ours = rows
    assert [row["engine_calls"] for row in rows] == [0, 16]  # 1 + 2 warm + 3 checked + 3 + 3 timed + 4 checked
    assert ours["build_s"] > 1 and 0 < ours["load_s"] < 5 and ours["size_mb"] > 0 and ours["error"] > 0
    assert eager["build_s"] is None
    assert "eager+graph is left out: CUDA graphs need a CUDA GPU" in done.stderr


SMALL_SD3 = {
    **cases._SD3_MEDIUM,
    "depth": 2,
    "context_embedder_config": {"target": "torch.nn.Linear", "params": {"in_features": 4096, "out_features": 128}},
}
SMALL_SDXL = {
    **cases._SDXL,
    "model_channels": 32,
    "transformer_depth": [0, 0, 1, 1, 1, 1],
    "transformer_depth_middle": 1,
    "transformer_depth_output": [0, 0, 0, 1, 1, 1, 1, 1, 1],
}


def sdxl() -> cases.Subject:
    shapes = {"x": (2, 4, 8, 8), "timesteps": (2,), "context": (2, 77, 2048), "y": (2, 2816)}
    return cases._diffusion_model(comfy.supported_models.SDXL(SMALL_SDXL), comfy.model_base.SDXL, shapes)


def sd3() -> cases.Subject:
    shapes = {"x": (2, 16, 8, 8), "timesteps": (2,), "context": (2, 154, 4096), "y": (2, 2048)}
    return cases._diffusion_model(comfy.supported_models.SD3(SMALL_SD3), comfy.model_base.SD3, shapes)


def vae() -> cases.Subject:
    return cases._vae(64)


@pytest.mark.parametrize("make", [sdxl, sd3, vae])
@pytest.mark.parametrize("name", ["eager", "TorchCompileModel", "torch.compile+channels_last"])
def test_each_variant_computes_what_the_model_computes(make, name: str, tmp_path: Path, monkeypatch) -> None:
    """Apart from the compiler, which would take minutes; the numbers are of the order of one."""
    calls = []

    class Counted(torch.nn.Module):
        def __init__(self, model, **options):
            super().__init__()
            self.forward = lambda *args, **kwargs: calls.append(options) or model(*args, **kwargs)
            self.dtype = getattr(model, "dtype", None)

    monkeypatch.setattr(torch, "compile", Counted)
    subject = make()
    variant, case = Variant.of(name), cases.CASES["sdxl-1024-b2"]
    if reason := variant.why_left_out(case, subject):
        assert make is vae and "diffusion models only" in reason
        return
    with torch.inference_mode(), variants.ExitStack() as ending:
        workshop = Workshop(EngineStore(tmp_path / "engines"), tmp_path, print)
        ready = variants.set_up(variant, subject, workshop, ending)
        for seed in range(3):
            inputs = subject.inputs(seed)
            taken = ready.prepare(inputs)
            reference = subject.source.reference(inputs)
            assert 0.1 < reference["out"].std() < 10
            error = relative_error(ready.result(taken, ready.compute(taken)), reference)
            assert error < (2e-2 if make is vae else 1e-5)
    assert len(calls) == (0 if name == "eager" else 3)
