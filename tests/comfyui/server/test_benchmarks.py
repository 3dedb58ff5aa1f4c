"""The benchmarks' command on a real ComfyUI, at a size that a CPU can bear."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import comfy.ldm.modules.attention
import comfy.model_base
import comfy.ops
import comfy.supported_models
import pytest
import torch

from slipstream.benchmarks.measuring import building, job_variants, model_variants
from slipstream.benchmarks.measuring.measure import Challenge
from slipstream.benchmarks.measuring.profiling import TOP
from slipstream.benchmarks.subjects import cases, jobs, models, rivals
from slipstream.benchmarks.subjects.jobs import Job, errors_of, sd15_job, sdxl_job
from slipstream.benchmarks.subjects.rows import FIELDS, OF_COLD, OF_JOBS, OF_SWITCHED
from slipstream.benchmarks.subjects.setup import SetupContext
from slipstream.benchmarks.subjects.variants import Variant
from slipstream.core.errors import BuildFailed
from slipstream.engine_cache import EngineStore
from slipstream.hosts.comfy.models import model_classes
from slipstream.runtime.checking.verify import relative_error
from slipstream.runtime.settings.model_settings import BuildPolicy


def setup_context_in(folder: Path) -> SetupContext:
    return SetupContext(EngineStore(folder / "engines"), folder, print)


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
        assert "no GPU here" in part and 5 < part.count("\n") < TOP + 10
    assert "aten::" in eager


@pytest.mark.slow
def test_what_builders_build_is_what_the_picture_asks_for(tmp_path: Path, monkeypatch) -> None:
    """Part by part; afterwards nothing is left to build."""
    variant = Variant.of("slipstream:compiled")
    setup_context = setup_context_in(tmp_path)

    def labels() -> list[str]:
        return sorted(entry.manifest.label for entry in setup_context.store.list())

    case = cases.CASES["tiny-sd15-canny-64-3steps"]
    building.build(case, variant, jobs.MODEL, setup_context)
    assert labels() == ["SD15 64×64 batch 2 with control"]
    building.build(case, variant, jobs.OTHERS, setup_context)
    assert labels() == ["ControlNet 64×64 batch 2", "SD15 64×64 batch 2 with control", "VAE decoder 64×64 batch 1"]
    with torch.inference_mode(), ExitStack() as ending:
        ready = job_variants.set_up(variant, case.build(), replace(setup_context, builds=BuildPolicy.MANUAL), ending)
        assert ready.facts["size_mb"] > 0 and not ready.reasons()
    empty = setup_context_in(tmp_path / "without a compiler")
    monkeypatch.setenv("CXX", "no-compiler")
    for part in jobs.PARTS:
        with pytest.raises(BuildFailed, match="no-compiler"):
            building.build(case, variant, part, empty)


@pytest.mark.slow
def test_changes_between_pictures_are_measured(root: Path, comfyui_dir: Path, tmp_path: Path) -> None:
    words = ("--cases", "tiny-sd15-64-b2", "--variants", "eager+switch-size,slipstream:compiled+switch-size")
    counts = ("--repeats", "3", "--warmup", "1", "--comfyui", str(comfyui_dir), "--out", str(tmp_path))
    done = run(root, tmp_path, *words, *counts)
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.iterdir()
    eager, ours = (json.loads(line) for line in file.read_text().splitlines())
    for row in (eager, ours):
        assert tuple(row) == (*FIELDS, *OF_SWITCHED) and row["error"] < 1e-4
        assert row["shapes"]["x"] == [2, 4, 8, 8] and row["other"]["shapes"]["x"] == [2, 4, 8, 12]
        assert min(row["ms"], row["steady_ms"], row["other"]["ms"], row["other"]["again_ms"]) > 0
    # 1 + 3 turns of two pictures of each kind, 3 calls a picture, and 4 checked of each kind
    assert eager["engine_calls"] == 0 and ours["engine_calls"] == 4 * 4 * 3 + 2 * 4
    assert ours["error"] > 0 and ours["build_s"] > 1


@pytest.mark.slow
def test_cold_starts_are_measured(root: Path, comfyui_dir: Path, tmp_path: Path) -> None:
    words = ("--cold-start", "--cases", "tiny-sd15-canny-64-3steps", "--comfyui", str(comfyui_dir), "--commit", "abc")
    done = run(root, tmp_path, *words, "--repeats", "2", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "torch.compile:reduce-overhead+cold is left out: CUDA graphs need a CUDA GPU" in done.stderr
    (file,) = tmp_path.iterdir()
    eager, ours = (json.loads(line) for line in file.read_text().splitlines())
    for row in (eager, ours):
        assert tuple(row) == (*FIELDS, *OF_JOBS, *OF_COLD) and row["error"] < 1e-4 and row["commit"] == "abc"
        assert len(row["samples"]) == row["repeats"] == 2 and row["ms"] > row["steady_ms"] > 0
        assert list(row["marks"]) == ["imports", "model", "ready", "picture"]
        assert sorted(row["marks"].values()) == list(row["marks"].values()) and row["marks"]["imports"] > 0
        assert row["ms"] == pytest.approx(1000 * row["marks"]["picture"], abs=1)
    # Of both starts: 2 later pictures and 2 checked, of 3 steps of model and ControlNet, and a decoder
    assert eager["engine_calls"] == 0 and ours["engine_calls"] == 2 * 4 * 7
    assert ours["error"] > 0 and ours["ms"] < 1000 * ours["build_s"], "engines were there before"


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
        setup_context = setup_context_in(tmp_path)
        ready = job_variants.set_up(Variant.of(name), job, setup_context, ending)
        for seed in range(2):
            wish = job.inputs(seed)
            plain = job.paint(job.parts, job.apply(job.parts, wish))
            assert not calls, "other variants must have the plain networks"
            found = ready.compute(ready.prepare(wish))
            assert max(errors_of(found, plain).values()) < 1e-5
            assert calls == [Variant.of(name).mode or None] * job.engine_calls
            calls.clear()
    assert bool(ready.copied_bytes) == ("channels_last" in name)


def test_a_start_that_finds_no_engine_builds_none_and_says_so(job: Job, tmp_path: Path, monkeypatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(job, "tell", told.append)
    with torch.inference_mode(), ExitStack() as ending:
        setup_context = replace(setup_context_in(tmp_path), builds=BuildPolicy.MANUAL)
        ready = job_variants.set_up(Variant.of("slipstream:compiled+cold"), job, setup_context, ending)
    assert ready.engine_calls() == 0 and "no engine for" in ready.reasons()
    assert told == ["ready"] * 3 + ["picture"], "each step is told of, then the picture"


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


UNET = "comfy.ldm.modules.diffusionmodules.openaimodel"
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


def small_unet(config: dict[str, Any]) -> dict[str, Any]:
    """Of the same blocks, each narrow."""
    return {**config, "model_channels": 32, "transformer_depth_output": [min(1, n) for n in config[OUTPUT]]} | {
        "transformer_depth": [min(1, n) for n in config["transformer_depth"]]
    }


OUTPUT = "transformer_depth_output"
SMALL_PIXART = {**models.PIXART_ALPHA, "depth": 2, "hidden_size": 48, "num_heads": 2}
SMALL_FLUX = {**models.FLUX_DEV, "hidden_size": 128, "num_heads": 1, "depth": 1, "depth_single_blocks": 2}


def vae() -> models.Model:
    return models.vae(64)


def ssd1b() -> models.Model:
    return models.sdxl(64, 4, small_unet(models.SSD1B), "SSD1B")


def vega() -> models.Model:
    return models.sdxl(64, 2, small_unet(models.VEGA), "Segmind_Vega")


def pixart() -> models.Model:
    return models.pixart(512, 2, SMALL_PIXART)


def flux() -> models.Model:
    return models.flux(64, 1, SMALL_FLUX)


@pytest.mark.parametrize(
    ("module", "name", "family", "config", "billions"),
    [
        (UNET, "UNetModel", "SDXL", models.SDXL, 2.567),
        (UNET, "UNetModel", "SSD1B", models.SSD1B, 1.331),
        (UNET, "UNetModel", "Segmind_Vega", models.VEGA, 0.745),
        ("comfy.ldm.pixart.pixartms", "PixArtMS", "PixArtAlpha", models.PIXART_ALPHA, 0.611),
        ("comfy.ldm.flux.model", "Flux", "Flux", models.FLUX_DEV, 11.901),
    ],
)
def test_models_have_their_published_size(module: str, name: str, family: str, config: Any, billions: float) -> None:
    known = models.flux_config(config) if name == "Flux" else dict(config)
    made = getattr(comfy.supported_models, family)(known)
    network = getattr(importlib.import_module(module), name)(
        **made.unet_config, dtype=torch.float16, device="meta", operations=comfy.ops.disable_weight_init
    )
    assert sum(parameter.numel() for parameter in network.parameters()) / 1e9 == pytest.approx(billions, abs=1e-3)


def test_a_class_without_engines_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    variant, case = Variant.of("slipstream:compiled"), cases.CASES["pixart-1024-b2"]
    assert variant.why_left_out(case, pixart()) is None
    assert variant.why_left_out(cases.CASES["flux-1024-b1"], flux()) is None
    others = tuple(row for row in model_classes.MODEL_CLASSES if row.name != "PixArtMS")
    monkeypatch.setattr(model_classes, "MODEL_CLASSES", others)
    subject = pixart()
    assert "have no engines yet; your model runs without an engine" in str(variant.why_left_out(case, subject))
    inputs = subject.inputs(seed=1)
    assert inputs["c_size"].tolist() == [[512, 512]] * 2 and inputs["c_ar"].tolist() == [[1]] * 2


def test_samples_of_a_flow_model_differ_in_their_timesteps() -> None:
    subject = flux()
    steps = [float(subject.inputs(seed)["timesteps"]) for seed in range(3)]
    assert len(set(steps)) == 3 and all(0 < step <= 1 for step in steps)


@pytest.mark.parametrize("name", ["eager+fp32", "eager+bf16-math"])
@pytest.mark.parametrize("make", [sdxl, pixart])
def test_the_lower_rungs_compute_what_the_model_computes(make, name: str, tmp_path: Path, monkeypatch) -> None:
    """By numbers of their own: the model that the other variants share stays as it is."""
    products = []
    attention = comfy.ldm.modules.attention.attention_basic
    monkeypatch.setattr(
        comfy.ldm.modules.attention,
        "attention_basic",
        lambda q, *args, **kwargs: products.append(q.dtype) or attention(q, *args, **kwargs),
    )
    subject = make()
    variant, case = Variant.of(name), cases.CASES["sdxl-1024-b2"]
    if reason := variant.why_left_out(case, subject):
        assert make is pixart and "only a UNet's attention" in reason
        return
    with torch.inference_mode(), ExitStack() as ending:
        setup_context = setup_context_in(tmp_path)
        ready = model_variants.set_up(variant, subject, setup_context, ending)
        inputs = subject.inputs(seed=0)
        found = ready.result(None, ready.compute(ready.prepare(inputs)))
        error = relative_error(found, subject.source.reference(inputs))
    assert ready.precision.value == name[6:10] and ready.copied_bytes > 0
    if name == "eager+fp32":
        assert error < 1e-5 and found["out"].dtype == torch.float32 and not products
    else:
        assert 1e-4 < error < 3e-2 and set(products) == {torch.bfloat16}
    assert {parameter.dtype for parameter in subject.module.parameters()} == {torch.float32}


SMALL_SDXL_JOB = {**SMALL_SDXL, "num_res_blocks": [1, 1], "channel_mult": [1, 2], "transformer_depth": [0, 1]} | {
    "transformer_depth_output": [0, 0, 1, 1]
}


def test_a_picture_of_sdxl_is_made_from_both_kinds_of_text() -> None:
    made = sdxl_job(64, 3, SMALL_SDXL_JOB, models.TINY_VAE)
    with torch.inference_mode():
        challenge = Challenge.of(made)
        wish = made.inputs(seed=0)
        plain = made.paint(made.parts, made.apply(made.parts, wish))
        other = made.paint(made.parts, made.apply(made.parts, replace(wish, pooled=-wish.pooled)))
    for example in challenge.examples:
        latent, picture = example.reference["latent"], example.reference["picture"]
        assert latent.shape == (1, 4, 8, 8) and 2 < latent.std() < 20
        assert picture.shape == (1, 64, 64, 3) and 0.1 < picture.std() < 0.4
    assert set(challenge.judge.facts({})["distances"]) == {"seed", "prompt"}
    assert challenge.judge.doubts(made.precision) is None
    assert errors_of(other, plain)["latent"] > 1e-3, "the text as a whole must arrive"
    assert made.engine_calls == 4 and made.shapes["pooled"] == (1, 1280)


def test_presets_skip_steps_of_the_plain_model(tmp_path: Path) -> None:
    """And leave it as it was for the other variants."""
    made = sd15_job(64, 20, control=False, unet=models.TINY_SD15, vae=models.TINY_VAE)
    with torch.inference_mode(), ExitStack() as ending:
        setup_context = setup_context_in(tmp_path)
        wish = made.inputs(seed=0)
        plain = made.paint(made.parts, made.apply(made.parts, wish))
        calls: list[object] = []
        made.parts.model.model.diffusion_model.register_forward_hook(lambda *each: calls.append(each))
        counts = []
        for name in ("quality", "balanced", "fast"):
            ready = job_variants.set_up(Variant.of(f"eager+{name}"), made, setup_context, ending)
            calls.clear()
            errors = errors_of(ready.compute(ready.prepare(wish)), plain)
            assert len(calls) == ready.facts["computed"] < 20 and ready.skips
            assert 1e-4 < errors["picture"] < 0.5
            counts.append(len(calls))
        assert counts == sorted(counts, reverse=True) and counts[0] > counts[-1]
        again = made.paint(made.parts, made.apply(made.parts, wish))
    assert max(errors_of(again, plain).values()) < 1e-6


@pytest.mark.slow
def test_presets_skip_steps_over_engines(tmp_path: Path) -> None:
    """Of several pictures at once: one call of the model, one of the decoder for each."""
    made = sd15_job(64, 20, control=False, unet=models.TINY_SD15, vae=models.TINY_VAE, batch=3)
    with torch.inference_mode(), ExitStack() as ending:
        setup_context = setup_context_in(tmp_path)
        ready = job_variants.set_up(Variant.of("slipstream:compiled+balanced"), made, setup_context, ending)
        computed = ready.facts["computed"]
        assert computed < 20 and ready.wanted_calls == computed + 3
        for number in range(2):
            painted = ready.compute(ready.prepare(made.inputs(seed=number)))
            assert painted["picture"].shape == (3, 64, 64, 3)
        assert ready.engine_calls() == 2 * ready.wanted_calls and not ready.reasons()


@pytest.mark.parametrize("make", [sdxl, sd3, vae, ssd1b, vega, pixart, flux])
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
        setup_context = setup_context_in(tmp_path)
        ready = model_variants.set_up(variant, subject, setup_context, ending)
        for seed in range(3):
            inputs = subject.inputs(seed)
            taken = ready.prepare(inputs)
            reference = subject.source.reference(inputs)
            assert 0.1 < reference["out"].std() < 10
            error = relative_error(ready.result(taken, ready.compute(taken)), reference)
            assert error < (2e-2 if make is vae else 1e-5)
    assert len(calls) == (0 if name == "eager" else 3)


SMALL_SD15 = {**models.SD15, "model_channels": 32, "context_dim": 64}


def sd15() -> models.Model:
    return models.sd15(64, 64, SMALL_SD15)


@pytest.mark.parametrize("make", [sd15, sdxl, vae])
@pytest.mark.parametrize("name", ["diffusers", "diffusers:compile"])
def test_diffusers_computes_what_the_model_computes(make, name: str, tmp_path: Path, monkeypatch) -> None:
    """Apart from the compiler. The recipe is followed where it is named, and nowhere else."""
    from diffusers.models.attention_processor import FusedAttnProcessor2_0

    options, layouts, joined = [], [], []

    def compile(function, **given):
        options.append(given)
        (network,) = (cell.cell_contents for cell in function.__closure__)
        filters = [each for each in network.parameters() if each.ndim == 4 and each.shape[-1] == 3]
        layouts.append(all(each.is_contiguous(memory_format=torch.channels_last) for each in filters))

        def call(*args, **kwargs):
            layouts.append(args[0].is_contiguous(memory_format=torch.channels_last))
            return function(*args, **kwargs)

        return call

    process = FusedAttnProcessor2_0.__call__
    counted = lambda *args, **kwargs: joined.append(1) or process(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr(FusedAttnProcessor2_0, "__call__", counted)
    monkeypatch.setattr(torch, "compile", compile)
    subject = make()
    before = {key: tensor.clone() for key, tensor in subject.module.state_dict().items()}
    with torch.inference_mode(), ExitStack() as ending:
        setup_context = setup_context_in(tmp_path)
        ready = model_variants.set_up(Variant.of(name), subject, setup_context, ending)
        for seed in range(2):
            inputs = subject.inputs(seed)
            found = ready.result(None, ready.compute(ready.prepare(inputs)))
            assert relative_error(found, subject.source.reference(inputs)) < (2e-2 if make is vae else 1e-5)
    assert all(torch.equal(before[key], tensor) for key, tensor in subject.module.state_dict().items())
    assert ready.facts["versions"].keys() == {"diffusers"} and ready.copied_bytes > 0
    if name == "diffusers":
        assert not options and not joined
    else:
        assert options == [{"fullgraph": True, "options": rivals.compiler_options(False)}]
        assert layouts == [True] * 3 and len(joined) >= 2, "weights, then the pictures of both calls"


def test_the_recipes_int8_is_int8(tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("torchao")
    import torch._inductor.config as config

    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    subject, before = sdxl(), config.coordinate_descent_tuning
    with torch.inference_mode(), ExitStack() as ending:
        setup_context = setup_context_in(tmp_path)
        ready = model_variants.set_up(Variant.of("diffusers:compile+int8"), subject, setup_context, ending)
        inputs = subject.inputs(seed=0)
        found = ready.result(None, ready.compute(ready.prepare(inputs)))
        error = relative_error(found, subject.source.reference(inputs))
    assert 1e-3 < error < 5e-2 and ready.numbers == "int8" and "torchao" in ready.facts["versions"]
    assert config.coordinate_descent_tuning == before, "other variants are compiled as torch would"


def test_attention_by_sage_is_counted(tmp_path: Path, monkeypatch) -> None:
    """With a stand-in for the package, which refuses wide heads as the real one does."""
    attention = comfy.ldm.modules.attention
    asked: list[int] = []
    refused = 16

    def sageattn(q, k, v, tensor_layout, **_):
        asked.append(q.shape[-1])
        if q.shape[-1] >= refused:
            raise ValueError("heads are too wide")
        if tensor_layout == "HND":
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)

    monkeypatch.setattr(attention, "sageattn", sageattn, raising=False)
    monkeypatch.setitem(attention.REGISTERED_ATTENTION_FUNCTIONS, "sage", attention.attention_sage)
    subject, told = sd15(), []
    setup_context = SetupContext(EngineStore(tmp_path / "engines"), tmp_path, told.append)
    with torch.inference_mode(), ExitStack() as ending:
        inputs = subject.inputs(seed=0)
        subject.source.eager(inputs)
        assert not asked
        ready = model_variants.set_up(Variant.of("eager+sage"), subject, setup_context, ending)
        assert set(asked) == {4, 8, 16} and told == [
            f"eager+sage: sageattention computes {sum(width < refused for width in asked)} of {len(asked)} attentions, "
            "torch the rest"
        ]
        error = relative_error(ready.compute(ready.prepare(inputs)), subject.source.reference(inputs))
        assert error < 1e-5 and attention.sageattn is sageattn
        refused = 0
        with pytest.raises(RuntimeError, match="sageattention computed none of 32 attentions"):
            model_variants.set_up(Variant.of("eager+sage"), subject, setup_context, ending)
