"""The demo model with ControlNet and VAE on a CUDA GPU, a step replayed as a whole. SLIPSTREAM_TEST_DEVICE=cuda.

`-k compiled` and `-k tensorrt` pick a backend.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import comfy.model_management
import pytest
import torch
from comfy.cli_args import args

from slipstream.engine_cache import EngineStore
from slipstream.hosts.comfy.accelerate import accelerate_model
from slipstream.hosts.comfy.accelerate_controlnet import accelerate_controlnet
from slipstream.hosts.comfy.accelerate_vae import accelerate_vae
from slipstream.hosts.comfy.models.demo_model import (
    encode_demo_prompt,
    load_demo_controlnet,
    load_demo_model,
    load_demo_vae,
)
from slipstream.hosts.comfy.step_graph.graphed_steps import GraphedSteps
from slipstream.hosts.comfy.step_graph.step import PARALLEL, SERIAL
from slipstream.runtime.module import AcceleratedModule
from slipstream.runtime.provider import EngineProvider
from slipstream.runtime.settings.model_settings import BackendChoice, BuildPolicy, Levers, Settings
from slipstream.tests.comfyui.support.models import tiny
from slipstream.tests.tensors import distance

from ..models.test_unet_engines import with_lora

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(args.cpu, reason="SLIPSTREAM_TEST_DEVICE is not cuda")]

SIZE, STEPS = 256, 8
CLOSE = 0.08
"""Relative difference of two pictures in fp16 that are meant to be the same; others are several times as far apart."""
CALM = 3.0
"""CFG at which few steps of a multistep sampler do not blow up what fp16 rounds: the plain model's own pictures in fp16
and fp32 are 0.1 apart at 7, 0.001 at 3."""
PROMPTS = ("a red circle left of a yellow square on a blue background", "a green square on a white background")


def say(what: str) -> None:
    """Figures, for those who run the tests with -s."""
    sys.stderr.write(f"{what}\n")


def edges(seed: int) -> torch.Tensor:
    """White frames on black, as canny edges of rectangles are."""
    hint = torch.zeros(1, 3, SIZE, SIZE)
    for number in range(3):
        left, top = 20 + 30 * seed + 25 * number, 30 + 40 * number
        hint[:, :, top : top + 60, [left, left + 50]] = 1
        hint[:, :, [top, top + 60], left : left + 50] = 1
    return hint


class Bench:
    """Model, ControlNet and VAE, plain and accelerated."""

    def __init__(self, folder: Path, backend: str, **levers: Any) -> None:
        self.provider = EngineProvider(EngineStore(folder))
        self.settings = Settings(backend=BackendChoice(backend), policy=BuildPolicy.FIRST_USE, levers=Levers(**levers))
        self.model, self.control, self.vae = load_demo_model(), load_demo_controlnet(), load_demo_vae()
        self.modules = [AcceleratedModule(self.provider, self.settings) for _ in range(3)]
        self.fast_model = accelerate_model(self.model, self.modules[0])
        self.fast_control = accelerate_controlnet(self.control, self.modules[1])
        self.fast_vae = accelerate_vae(self.vae, self.modules[2])

    def sample(self, model: Any, control: Any = None, prompt: int = 0, hint: int = 0, **options: Any) -> torch.Tensor:
        window = options.pop("strength", 1.0), options.pop("window", (0.0, 1.0))
        extras: dict[str, Any] = {}
        if control is not None:
            extras["control"] = control.copy().set_cond_hint(edges(hint), *window)
        given = {}
        for name, text in (("positive", PROMPTS[prompt]), ("negative", "")):
            given[name] = [[encode_demo_prompt(text)[0][0], {**extras, "control_apply_to_uncond": False}]]
        return tiny.sample(model, steps=STEPS, size=SIZE, **given, **options).float().cpu()

    def both(self, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Plain and accelerated."""
        return self.sample(self.model, self.control, **options), self.sample(
            self.fast_model, self.fast_control, **options
        )

    def assert_same(self, **options: Any) -> torch.Tensor:
        plain, fast = self.both(**options)
        say(f"apart: {distance(fast, plain):.1e} {sorted(options)}")
        assert distance(fast, plain) < CLOSE
        return fast

    @property
    def calls(self) -> list[int]:
        assert [module.status.eager_calls for module in self.modules] == [0, 0, 0], [
            module.status.to_json()["reasons"] for module in self.modules
        ]
        return [module.status.engine_calls for module in self.modules]

    @property
    def replayed_bytes(self) -> int:
        """Of graphs of whole steps."""
        loaded = [*self.provider.pool._idle.values(), *self.provider.pool._used.values()]
        return sum(each.steps.bytes for each in loaded)


@pytest.fixture(scope="module", params=["compiled", "tensorrt"])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    kept = os.environ.get("SLIPSTREAM_TEST_ENGINES")  # so that several runs build once
    return Bench(Path(kept) if kept else tmp_path_factory.mktemp("engines"), request.param)


def test_whole_steps_make_the_plain_picture(bench: Bench) -> None:
    first = bench.assert_same()
    model, control, _ = bench.calls
    assert (model, control) == (STEPS, STEPS)
    assert bench.replayed_bytes > 0, "no whole step was captured"
    graphs = bench.replayed_bytes
    another = bench.assert_same(prompt=1, hint=2, seed=11)
    assert distance(another, first) > 4 * CLOSE, "the pictures are alike: no proof"
    assert bench.replayed_bytes == graphs, "another prompt and hint were captured anew"
    bench.assert_same(strength=0.4)
    bench.assert_same(cfg=3.0)
    bench.assert_same(batch=2)
    bench.assert_same(window=(0.2, 0.7))
    bench.assert_same(sampler="dpmpp_2m", scheduler="karras", cfg=CALM)
    assert bench.calls[0] == 7 * STEPS


def test_later_pictures_begin_with_a_replay(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = Bench(Path(bench.provider.store.root), bench.settings.backend.value, first_step=True)
    shown: list[int] = []
    usual = GraphedSteps._first

    def first(*given: Any) -> Any:
        shown.append(1)
        return usual(*given)

    fast.assert_same()
    monkeypatch.setattr(GraphedSteps, "_first", first)
    for number, options in enumerate(
        ({}, {"prompt": 1, "hint": 2, "seed": 11}, {"sampler": "dpmpp_2m", "seed": 3, "cfg": CALM})
    ):
        fast.assert_same(**options)
        assert not shown, f"picture {number} showed once more what its steps consist of"
    wanted = fast.sample(with_lora(fast.model), fast.control)
    found = fast.sample(with_lora(fast.fast_model), fast.fast_control)
    assert distance(found, wanted) < CLOSE
    assert fast.calls[:2] == [5 * STEPS, 5 * STEPS]


def test_without_control_a_step_is_whole_too(bench: Bench) -> None:
    """Nothing holds these pictures together, so that rounding in fp16 moves them further than those with control."""
    plain, fast = bench.sample(bench.model), bench.sample(bench.fast_model)
    other = bench.sample(bench.model, seed=12)
    say(f"without control: {distance(fast, plain):.1e}, another {distance(other, plain):.1e}")
    assert bench.calls[0] >= STEPS and bench.replayed_bytes > 0
    assert distance(fast, plain) < min(2 * CLOSE, distance(other, plain) / 4)


def test_lora_reaches_captured_steps(bench: Bench) -> None:
    before = bench.assert_same()
    wanted = bench.sample(with_lora(bench.model), bench.control)
    found = bench.sample(with_lora(bench.fast_model), bench.fast_control)
    say(f"LoRA: apart {distance(found, wanted):.1e}, moves {distance(wanted, before):.1e}")
    assert distance(found, wanted) < CLOSE < distance(wanted, before) / 2
    assert distance(bench.assert_same(), before) < 1e-3


@torch.inference_mode()
def test_vae_both_ways(bench: Bench) -> None:
    latent = bench.sample(bench.fast_model, bench.fast_control)
    picture, found = bench.vae.decode(latent), bench.fast_vae.decode(latent)
    say(f"decode: apart {distance(found.cpu(), picture.cpu()):.1e}")
    assert picture.std() > 0.05 and distance(found.cpu(), picture.cpu()) < CLOSE
    wanted, found = bench.vae.encode(picture), bench.fast_vae.encode(picture)
    say(f"encode: apart {distance(found.cpu(), wanted.cpu()):.1e}")
    assert distance(found.cpu(), wanted.cpu()) < CLOSE
    assert bench.calls[2] == 2


def test_a_cancel_in_the_midst_of_replays(bench: Bench) -> None:
    wanted = bench.sample(bench.fast_model, bench.fast_control)

    def stop(step: int, *_: Any) -> None:
        if step == 3:
            raise comfy.model_management.InterruptProcessingException()

    with pytest.raises(comfy.model_management.InterruptProcessingException):
        bench.sample(bench.fast_model, bench.fast_control, callback=stop)
    assert distance(bench.sample(bench.fast_model, bench.fast_control), wanted) < 1e-3


def test_memory_comes_back(bench: Bench) -> None:
    bench.sample(bench.fast_model, bench.fast_control)
    bench.provider.pool.clear()
    assert bench.replayed_bytes == 0
    bench.assert_same()


@pytest.mark.parametrize("way", ["on", "off", "auto"])
def test_streams_beside_each_other_change_nothing(bench: Bench, way: str) -> None:
    if bench.settings.backend is BackendChoice.TENSORRT:
        pytest.skip("TensorRT runs the model whole")
    folder = Path(bench.provider.store.root)
    other = Bench(folder, "compiled", parallel=way)
    for seed in range(4):
        other.assert_same(seed=seed, hint=seed % 3)
    assert other.calls[:2] == [4 * STEPS, 4 * STEPS]
    if way == "auto":
        measured = list(other.provider.choices._known().values())
        say(f"measured: {measured}")
        assert measured and all(set(each) == {SERIAL, PARALLEL} for each in measured)
