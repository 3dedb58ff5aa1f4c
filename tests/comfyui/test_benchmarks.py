"""The benchmarks' command on a real ComfyUI, at a size that a CPU can bear."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import comfy.model_base
import comfy.supported_models
import pytest
import torch

from slipstream.benchmarks import cases, job_variants, model_variants, models
from slipstream.benchmarks.jobs import Job, errors_of
from slipstream.benchmarks.measure import Challenge
from slipstream.benchmarks.rows import FIELDS, OF_JOBS
from slipstream.benchmarks.variants import Variant
from slipstream.benchmarks.workshop import Workshop
from slipstream.engine_cache import EngineStore
from slipstream.runtime.verify import relative_error


@pytest.mark.slow
def test_the_command_measures_engines_beside_the_plain_model(
    root: Path, comfyui_dir: Path, comfyui_version, tmp_path: Path
) -> None:
    words = ("--cases", "tiny-sd15-64-b2", "--variants", "eager,slipstream:compiled,eager+graph")
    counts = ("--repeats", "3", "--warmup", "2", "--commit", "abc", "--comfyui", str(comfyui_dir))
    done = run(root, tmp_path, *words, *counts, "--out", str(tmp_path))
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


@pytest.mark.slow
def test_a_whole_picture_is_measured_and_profiled(root: Path, comfyui_dir: Path, tmp_path: Path) -> None:
    words = [
        "--cases",
        "tiny-sd15-canny-64-3steps",
        "--comfyui",
        str(comfyui_dir),
        "--store",
        str(tmp_path / "engines"),
    ]
    variants = "eager,slipstream:compiled,slipstream:compiled+engines,TorchCompileModel"
    counts = ["--repeats", "2", "--warmup", "1", "--out", str(tmp_path / "rows")]
    done = run(root, tmp_path, *words, "--variants", variants, *counts)
    assert done.returncode == 0, done.stderr
    assert "TorchCompileModel is left out: ComfyUI's node compiles the UNet alone" in done.stderr
    (file,) = (tmp_path / "rows").iterdir()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["variant"] for row in rows] == ["eager", "slipstream:compiled", "slipstream:compiled+engines"]
    for row in rows:
        assert tuple(row) == (*FIELDS, *OF_JOBS) and row["steps"] == 3 and row["ms"] > 0
        assert row["shapes"] == {"latent": [1, 4, 8, 8], "context": [1, 77, 64], "hint": [1, 3, 64, 64]}
        assert set(row["errors"]) == {"latent", "picture"} and row["error"] == max(row["errors"].values()) < 1e-4
        assert all(distance["picture"] > 1e-2 for distance in row["distances"].values())
    # 1 + 1 warm + 2 checked + 2 + 2 timed + 2 checked, of 3 steps of model and ControlNet, and a decoder
    assert [row["engine_calls"] for row in rows] == [0, 10 * 7, 10 * 7]
    assert all(row["error"] > 0 and row["build_s"] > 1 and row["size_mb"] > 0 for row in rows[1:])
    done = run(root, tmp_path, *words, "--variants", "eager,slipstream:compiled", "--profile")
    assert done.returncode == 0, done.stderr
    eager, ours = done.stdout.split("tiny-sd15-canny-64-3steps, ")[1:]
    assert eager.startswith("eager\nwall time") and ours.startswith("slipstream:compiled\nwall time")
    for part in (eager, ours):
        assert "no GPU here" in part and 5 < part.count("\n") < 25
    assert "aten::" in eager


def run(root: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(root / "benchmarks" / "run.py"), *words],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name not in ("COMFYUI_DIR", "PYTHONPATH")},
        capture_output=True,
        text=True,
        timeout=500,
    )


@pytest.fixture(scope="module")
def job() -> Job:
    made = cases.CASES["tiny-sd15-canny-64-3steps"].build()
    assert isinstance(made, Job)
    return made


@pytest.mark.parametrize("name", ["torch.compile", "torch.compile+channels_last", "torch.compile:reduce-overhead"])
def test_a_picture_by_compiled_networks_is_the_picture(name: str, job: Job, tmp_path: Path, monkeypatch) -> None:
    """Apart from the compiler; with CUDA graphs, what a call gave is gone with the next call of any network."""
    given: list[torch.Tensor] = []
    calls: list[str] = []

    def compile(function, mode):
        def call(*args, **kwargs):
            for tensor in given:
                tensor.fill_(float("nan"))
            found = function(*args, **kwargs)
            calls.append(mode)
            given[:] = tensors(found) if mode else []
            return found

        return call

    monkeypatch.setattr(torch, "compile", compile)
    with torch.inference_mode(), ExitStack() as ending:
        workshop = Workshop(EngineStore(tmp_path / "engines"), tmp_path, print)
        ready = job_variants.set_up(Variant.of(name), job, workshop, ending)
        for seed in range(2):
            wish = job.inputs(seed)
            plain = job.paint(job.parts, job.apply(job.parts, wish))
            assert not calls, "other variants must have the plain networks"
            found = ready.compute(ready.prepare(wish))
            assert max(errors_of(found, plain).values()) < 1e-5
            assert calls == [Variant.of(name).mode or None] * job.engine_calls
            calls.clear()
    assert bool(ready.copied_bytes) == ("channels_last" in name)


def tensors(found) -> list[torch.Tensor]:
    if torch.is_tensor(found):
        return [found]
    return [tensor for kind in found.values() for tensor in kind]


def test_pictures_differ_by_each_input_and_are_the_size_of_real_ones(job: Job) -> None:
    with torch.inference_mode():
        challenge = Challenge.of(job)
    for example in challenge.examples:
        latent, picture = example.reference["latent"], example.reference["picture"]
        assert latent.shape == (1, 4, 8, 8) and 2 < latent.std() < 20
        assert picture.shape == (1, 64, 64, 3) and 0.1 < picture.std() < 0.4
    distances = challenge.judge.facts({})["distances"]
    assert set(distances) == {"seed", "prompt", "hint"}
    assert all(distance["picture"] > 3e-2 for distance in distances.values())
    assert challenge.judge.doubts(job.precision) is None


SMALL_SD3 = {
    **models.SD3_MEDIUM,
    "depth": 2,
    "context_embedder_config": {"target": "torch.nn.Linear", "params": {"in_features": 4096, "out_features": 128}},
}
SMALL_SDXL = {
    **models.SDXL,
    "model_channels": 32,
    "transformer_depth": [0, 0, 1, 1, 1, 1],
    "transformer_depth_middle": 1,
    "transformer_depth_output": [0, 0, 0, 1, 1, 1, 1, 1, 1],
}


def sdxl() -> models.Model:
    shapes = {"x": (2, 4, 8, 8), "timesteps": (2,), "context": (2, 77, 2048), "y": (2, 2816)}
    return models.diffusion_model(comfy.supported_models.SDXL(SMALL_SDXL), comfy.model_base.SDXL, shapes)


def sd3() -> models.Model:
    shapes = {"x": (2, 16, 8, 8), "timesteps": (2,), "context": (2, 154, 4096), "y": (2, 2048)}
    return models.diffusion_model(comfy.supported_models.SD3(SMALL_SD3), comfy.model_base.SD3, shapes)


def vae() -> models.Model:
    return models.vae(64)


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
    with torch.inference_mode(), ExitStack() as ending:
        workshop = Workshop(EngineStore(tmp_path / "engines"), tmp_path, print)
        ready = model_variants.set_up(variant, subject, workshop, ending)
        for seed in range(3):
            inputs = subject.inputs(seed)
            taken = ready.prepare(inputs)
            reference = subject.source.reference(inputs)
            assert 0.1 < reference["out"].std() < 10
            error = relative_error(ready.result(taken, ready.compute(taken)), reference)
            assert error < (2e-2 if make is vae else 1e-5)
    assert len(calls) == (0 if name == "eager" else 3)
