"""Graphs of the host's own models, written anew as for a GPU, compute what the models do. Nothing is compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.benchmarks.skipping.samples.subject import Subject
from slipstream.compile_backend import AOTInductorBackend
from slipstream.compile_backend.engine import CompiledEngine
from slipstream.compile_backend.inductor.options import JOINED_PERCENT, PACKAGED, REWRITES
from slipstream.compile_backend.program import export_program, load_constants
from slipstream.compile_backend.rewrites.traced_module import assign
from slipstream.core.progress import ignore_progress
from slipstream.core.protocols import BuildJob, ModelSource
from slipstream.core.spec import BackendConfig, Quantised
from slipstream.hosts.comfy.models.autoencoders import HALVES
from slipstream.hosts.comfy.models.controlnet import ComfyControlNetSource
from slipstream.hosts.comfy.models.unet_source import ComfyUNetSource
from slipstream.hosts.comfy.models.vae import open_vae
from slipstream.runtime.checking.verify import relative_error
from slipstream.runtime.planning.plan import CallShape, plans
from slipstream.runtime.settings.model_settings import Settings
from slipstream.sampling.metrics import psnr
from slipstream.tests.comfyui.models.test_dit import SHAPES as OF_TRANSFORMERS
from slipstream.tests.comfyui.support.models import tiny

aten = torch.ops.aten

Shapes = dict[str, tuple[int, ...]]


def unet(family: str) -> tuple[ModelSource, Shapes]:
    source = ComfyUNetSource(tiny.model(family))
    config = source.architecture.config
    pooled = {"y": (2, config["adm_in_channels"])} if config.get("adm_in_channels") else {}
    return source, {"x": (2, 4, 32, 24), "timesteps": (2,), "context": (2, 77, config["context_dim"]), **pooled}


def transformer(family: str) -> tuple[ModelSource, Shapes]:
    return ComfyUNetSource(tiny.transformer(family)), OF_TRANSFORMERS[family]


def vae(make: Callable[[], Any], part: str) -> tuple[ModelSource, Shapes]:
    source = open_vae(make(), HALVES[part])
    half = source.architecture.half
    side = 32 if source.architecture.channels == 4 else 64
    return source, {half.input: (1, source.architecture.channels, side, side)}


def controlnet(family: str) -> tuple[ModelSource, Shapes]:
    source = ComfyControlNetSource(tiny.controlnet(family))
    config = source.architecture.config
    pooled = {"y": (2, config["adm_in_channels"])} if config["num_classes"] else {}
    text = {"context": (2, 77, config["context_dim"])}
    hint = {name: tuple(value.shape) for name, value in source.embed(torch.zeros(2, 3, 256, 192), None).items()}
    return source, {"x": (2, 4, 32, 24), "timesteps": (2,), **text, **pooled, **hint}


MODELS: dict[str, Callable[[], tuple[ModelSource, Shapes]]] = {
    **{family: lambda family=family: unet(family) for family in tiny.FAMILIES},
    **{family: lambda family=family: transformer(family) for family in tiny.TRANSFORMERS},
    **{f"vae {part}": lambda part=part: vae(tiny.vae, part) for part in HALVES},
    **{f"taesd {part}": lambda part=part: vae(tiny.taesd, part) for part in HALVES},
    **{f"controlnet {family}": lambda family=family: controlnet(family) for family in ("sd15", "sdxl")},
}


def job_of(source: ModelSource, shapes: Shapes, folder: Path, quantised: Quantised | None = None) -> BuildJob:
    call = CallShape(tuple((name, shape, torch.float32) for name, shape in shapes.items()))
    backend = AOTInductorBackend()
    plan = plans(source.architecture, call, source.precision, source.device, Settings(), [backend])[0]
    options = {**plan.spec.backend.options, REWRITES: True, JOINED_PERCENT: 100, PACKAGED: True}
    spec = replace(plan.spec, backend=BackendConfig(backend.name, options), quantised=quantised)
    return BuildJob(folder, spec, source.architecture, source.device, plan.key.environment)


def engine_of(job: BuildJob) -> tuple[CompiledEngine, Any]:
    """As the backend makes it, but for the compiler."""
    program, signature = export_program(job, ignore_progress)
    module = program.module()

    def supply(weights: dict[str, torch.Tensor]) -> None:
        for name, tensor in weights.items():
            assign(module, name, tensor)

    constants = load_constants(job.directory, job.device)
    outputs = job.architecture.outputs
    engine = CompiledEngine(
        signature, job.spec.profile, outputs, job.device, lambda given: tuple(module(**given)), supply, constants
    )
    return engine, program


@pytest.mark.parametrize("name", MODELS)
def test_what_is_compiled_computes_what_the_model_does(name: str, tmp_path: Path) -> None:
    source, shapes = MODELS[name]()
    job = job_of(source, shapes, tmp_path)
    engine, program = engine_of(job)
    engine.update_weights(source.bind(source.precision).tensors)
    for seed in (1, 2):
        inputs = source.architecture.random_inputs(shapes, dict.fromkeys(shapes, torch.float32), source.device, seed)
        with torch.no_grad():
            assert relative_error(engine(**inputs), source.reference(inputs)) < 2e-5
    of_pictures = [node for node in program.graph.nodes if node.target == aten.group_norm.default]
    assert all(node.meta["val"].ndim != 4 for node in of_pictures)


@pytest.mark.parametrize(
    ("name", "quantised"), [("sdxl", Quantised.FP8), ("sd3", Quantised.INT8), ("flux", Quantised.FP8)]
)
def test_eight_bits_follow_a_change_of_the_weights(
    name: str, quantised: Quantised, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.core.eight_bits.LEAST_COLUMNS", 32)
    monkeypatch.setattr("slipstream.core.eight_bits.LEAST_PRODUCT", 1)
    source, shapes = MODELS[name]()
    engine, _ = engine_of(job_of(source, shapes, tmp_path, quantised))
    inputs = source.architecture.random_inputs(shapes, dict.fromkeys(shapes, torch.float32), source.device, 1)
    weights = dict(source.bind(source.precision).tensors)
    quantised_ones = {name for weight in engine._signature.derived.values() for name in weight.sources}
    with torch.no_grad():
        engine.update_weights(weights)
        wanted = source.reference(inputs)
        usual = relative_error(engine(**inputs), wanted)
        assert 1e-4 < usual < 5e-2
        engine.update_weights({key: value * 1.5 if key in quantised_ones else value for key, value in weights.items()})
        assert relative_error(engine(**inputs), wanted) > 3 * usual
        engine.update_weights(weights)
        assert relative_error(engine(**inputs), wanted) == usual


_PICTURES = 3


@pytest.mark.slow  # minutes, where the CPU has no such numbers
@pytest.mark.parametrize(("quantised", "least", "most"), [(Quantised.FP8, 34.0, 2e-2), (Quantised.INT8, 44.0, 8e-3)])
def test_pictures_in_eight_bits_are_near_those_of_the_model(
    quantised: Quantised, least: float, most: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demo's pictures, all feed-forward layers in eight bits: more than of a large model, where only some gain.

    `least` is of the worst picture, in dB; `most` of a step in the mean, relative: of the last ones, where little noise
    is left to predict, the error is several times as large.
    """
    monkeypatch.setattr("slipstream.core.eight_bits.LEAST_COLUMNS", 16)
    monkeypatch.setattr("slipstream.core.eight_bits.LEAST_PRODUCT", 1)
    captions = ["a large red circle left of a small blue square on a white background"] * _PICTURES
    noise = torch.randn(_PICTURES, 4, 32, 32, generator=torch.Generator().manual_seed(6))
    plain = Subject(captions, noise)
    sigmas = plain.sigmas("euler", "normal", 20)
    wanted = plain.decode(plain.sample("euler", sigmas, 4.0).latents)
    source = ComfyUNetSource(plain.model)
    calls: list[float] = []
    engines: dict[Any, CompiledEngine] = {}

    def compute(x: torch.Tensor, timesteps: torch.Tensor, context: torch.Tensor, **_: Any) -> torch.Tensor:
        given = {"x": x, "timesteps": timesteps, "context": context}
        if not engines:
            engine, program = engine_of(
                job_of(source, {name: tuple(t.shape) for name, t in given.items()}, tmp_path, quantised)
            )
            assert engine._signature.eight_bits > 8
            engine.update_weights(source.bind(source.precision).tensors)
            engines[0] = engine
        found = engines[0](**given)
        calls.append(relative_error(found, {"out": forward(x, timesteps, context)}))
        return found["out"]

    network = plain.model.model.diffusion_model
    forward = network.forward
    monkeypatch.setattr(network, "forward", compute)
    found = plain.decode(plain.sample("euler", sigmas, 4.0).latents)
    quality = psnr(found, wanted)
    assert len(calls) == 20 and 1e-5 < sum(calls) / len(calls) < most
    assert quality.min() > least
