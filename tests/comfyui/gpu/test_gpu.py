"""Engines on a CUDA GPU, at SD1.5's and SDXL's real sizes with random weights. Run with SLIPSTREAM_TEST_DEVICE=cuda.

Building takes a minute or two for each engine. `-k sd15`, `-k sdxl`, `-k small` (SDXL's class at less width) and
`-k demo` (the small trained model) pick one, `-k compiled` and `-k tensorrt` a backend: GPUs can share the work.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import comfy.model_base
import comfy.model_management
import comfy.model_patcher
import comfy.supported_models
import pytest
import torch
from comfy.cli_args import args

import slipstream
from slipstream.demo.model import comfy_unet_config
from slipstream.engine_cache import EngineStore
from slipstream.hosts.comfy.accelerate import accelerate_model
from slipstream.hosts.comfy.building.build_engines import open_unet, unet_call
from slipstream.hosts.comfy.models.demo_model import encode_demo_prompt, unet_weights
from slipstream.runtime.module import AcceleratedModule
from slipstream.runtime.planning.plan import CallShape
from slipstream.runtime.provider import EngineProvider
from slipstream.runtime.settings.model_settings import BackendChoice, BuildPolicy, Resolution, Settings, ShapeChoice
from slipstream.tests.comfyui.support.models import tiny
from slipstream.tests.comfyui.support.models.weights import randomise_unet
from slipstream.tests.tensors import distance
from slipstream.trt_backend import TensorRTBackend

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(args.cpu, reason="SLIPSTREAM_TEST_DEVICE is not cuda")]

COMMON = {
    "image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 320, "use_spatial_transformer": True,
    "use_temporal_attention": False, "legacy": False, "use_checkpoint": False,
}  # fmt: skip
SD15 = {
    **COMMON, "num_res_blocks": [2, 2, 2, 2], "channel_mult": [1, 2, 4, 4], "context_dim": 768,
    "transformer_depth": [1, 1, 1, 1, 1, 1, 0, 0], "transformer_depth_middle": 1,
    "transformer_depth_output": [1] * 9 + [0] * 3, "use_linear_in_transformer": False, "adm_in_channels": None,
    "num_heads": 8, "num_head_channels": -1,
}  # fmt: skip
SDXL = {
    **COMMON, "num_res_blocks": [2, 2, 2], "channel_mult": [1, 2, 4], "context_dim": 2048,
    "transformer_depth": [0, 0, 2, 2, 10, 10], "transformer_depth_middle": 10,
    "transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10], "use_linear_in_transformer": True,
    "adm_in_channels": 2816, "num_classes": "sequential", "num_heads": -1, "num_head_channels": 64,
}  # fmt: skip
SMALL_SDXL = {
    **SDXL, "model_channels": 128, "num_res_blocks": [1, 1, 1], "transformer_depth": [0, 1, 2],
    "transformer_depth_middle": 2, "transformer_depth_output": [0, 0, 1, 1, 2, 2],
}  # fmt: skip
FAMILIES = {
    "sd15": (comfy.supported_models.SD15, comfy.model_base.BaseModel, SD15, 512, 640),
    "sdxl": (comfy.supported_models.SDXL, comfy.model_base.SDXL, SDXL, 1024, 832),
    "small": (comfy.supported_models.SDXL, comfy.model_base.SDXL, SMALL_SDXL, 512, 640),
    "demo": (comfy.supported_models.SD15, comfy.model_base.BaseModel, comfy_unet_config(), 256, 192),
}
BACKENDS = {BackendChoice.COMPILED: "aotinductor", BackendChoice.TENSORRT: "tensorrt"}
STEPS = 8
DEMO_PROMPTS = ("", "a red circle left of a yellow square on a blue background", "a green square on a white background")


class Bench:
    """One family on one backend: its model, a store, an accelerated model, and the pictures that it makes."""

    def __init__(self, family: str, backend: str, folder: Path) -> None:
        config, base, unet, self.size, self.other_size = FAMILIES[family]
        self.family = family
        self.backend = BackendChoice(backend)
        self.model = _make(config, base, unet, torch.float16)
        self.exact = _make(config, base, unet, torch.float32)
        if family == "demo":
            self.model.model.diffusion_model.load_state_dict(unet_weights())
        self.exact.model.load_state_dict(self.model.model.state_dict())
        self.width = unet["context_dim"]
        self.pooled = 1280 if unet["adm_in_channels"] else 0
        self.store = EngineStore(folder)
        self.provider = EngineProvider(self.store)

    def module(self, policy: BuildPolicy = BuildPolicy.FIRST_USE, **choices: Any) -> AcceleratedModule:
        return AcceleratedModule(self.provider, Settings(backend=self.backend, policy=policy, **choices))

    def assert_equal(self, found: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor, say: Any) -> None:
        """As close to the picture in fp32 as the plain model's in fp16 is, twice its rounding allowed.

        TensorRT chooses itself where it sums up in fp16.
        """
        errors = distance(found, exact), distance(plain, exact)
        apart = distance(found, plain)
        say(f"picture: {errors[0]:.1e} from fp32, the plain model's {errors[1]:.1e}, apart {apart:.1e}")
        least = 0.1 if self.backend is BackendChoice.TENSORRT else 0.0
        assert exact.isfinite().all() and errors[0] <= max(least, 2 * errors[1]) and errors[1] < 0.2

    def picture(self, patcher: Any, size: int | None = None, prompt: int = 1) -> torch.Tensor:
        """A latent through ComfyUI's own sampling code."""
        prompts = {name: self._prompt(seed) for name, seed in (("positive", prompt), ("negative", 0))}
        latent = tiny.sample(patcher, steps=STEPS, size=size or self.size, **prompts)
        return latent.float().cpu()

    def timed(self, patcher: Any, size: int | None = None) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        self.picture(patcher, size)
        return time.perf_counter() - started

    def _prompt(self, seed: int) -> list[Any]:
        if self.family == "demo":
            return encode_demo_prompt(DEMO_PROMPTS[seed])
        generator = torch.Generator().manual_seed(seed)
        pooled = torch.randn(1, self.pooled, generator=generator) if self.pooled else None
        return [[torch.randn(1, 77, self.width, generator=generator), {"pooled_output": pooled}]]

    def with_lora(self, model: Any, seed: int) -> Any:
        """A clone whose attention projections and convolutions a LoRA changes."""
        clone = model.clone()
        generator = torch.Generator().manual_seed(seed)
        patches = {}
        for name, weight in model.model.state_dict().items():
            if name.endswith(("to_q.weight", "to_out.0.weight", "in_layers.2.weight")):
                up = torch.randn(weight.shape[0], 8, generator=generator)
                down = torch.randn(8, weight[0].numel(), generator=generator)
                patches[name] = ("diff", ((up @ down).view(weight.shape).mul(0.05 / weight[0].numel() ** 0.5),))
        added = clone.add_patches(patches, 1.0)
        assert len(added) == len(patches) > 10
        return clone


def _make(config_class: Any, base: Any, unet: dict[str, Any], dtype: torch.dtype) -> Any:
    config = config_class({**unet, "dtype": dtype})
    config.unet_config.update(unet)
    device = comfy.model_management.get_torch_device()
    with torch.inference_mode(False):
        model = base(config, device=device)
        randomise_unet(model.diffusion_model, seed=1)
    return comfy.model_patcher.ModelPatcher(model, device, comfy.model_management.unet_offload_device())


@pytest.fixture(scope="module", params=[f"{family}-{backend.value}" for family in FAMILIES for backend in BACKENDS])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    family, backend = request.param.split("-")
    reason = TensorRTBackend().why_cannot_build(torch.device("cuda", 0))
    if backend == BackendChoice.TENSORRT.value and reason:
        pytest.skip(reason)
    made = Bench(family, backend, tmp_path_factory.mktemp("engines"))
    yield made
    made.provider.pool.clear()


@pytest.fixture
def say(capsys: Any) -> Any:
    """Print past pytest: timings for the person who ran it."""

    def show(*words: object) -> None:
        with capsys.disabled():
            print("   ", *words, flush=True)

    return show


@pytest.fixture(scope="module", autouse=True)
def _exact_convolutions() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.backends.cudnn, "allow_tf32", False)
        yield


def test_pictures_are_the_plain_models(bench: Bench, say: Any) -> None:
    wanted = bench.picture(bench.model)
    module = bench.module()
    fast = accelerate_model(bench.model, module)
    found = bench.picture(fast)
    assert module.status.eager_calls == 0, module.status.to_json()["reasons"]
    assert module.status.engine_calls == STEPS
    exact = bench.picture(bench.exact)
    bench.assert_equal(found, wanted, exact, say)
    away = distance(bench.picture(bench.exact, prompt=2), exact)
    say(f"another prompt's picture is {away:.1e} away")
    assert distance(found, wanted) < 0.5 * away
    (entry,) = bench.store.list()
    (checked,) = entry.manifest.verifications.values()
    say(
        bench.family, f"built in {entry.manifest.build.seconds:.0f} s by {entry.manifest.backend}", entry.manifest.build
    )
    say(f"error {checked.relative_error:.1e}, plain {checked.eager_error:.1e}; pictures {distance(found, wanted):.1e}")
    plain, engine = (min(bench.timed(model) for _ in range(3)) / STEPS for model in (bench.model, fast))
    say(f"a step takes {plain * 1e3:.1f} ms plain, {engine * 1e3:.1f} ms accelerated")
    assert entry.manifest.backend == BACKENDS[bench.backend], "the first of the chain was passed over"
    if bench.backend is BackendChoice.COMPILED:
        assert checked.relative_error <= 2 * checked.eager_error
    assert engine < plain


def test_a_lora_is_switched_without_a_build_and_soon(bench: Bench, say: Any) -> None:
    module = bench.module()
    plain, exact = ([bench.with_lora(model, seed) for seed in (3, 4)] for model in (bench.model, bench.exact))
    fast = [accelerate_model(model, module) for model in plain]
    wanted = [bench.picture(model) for model in exact]
    assert distance(wanted[0], wanted[1]) > 0.05
    for index in (0, 1, 0):
        own, ours = (bench.timed(models[index]) - bench.timed(models[index]) for models in (plain, fast))
        say(f"switched to another LoRA: {ours:.2f} s longer than the next picture, {own:.2f} s with the plain model")
        assert ours - own < 1.0
        bench.assert_equal(bench.picture(fast[index]), bench.picture(plain[index]), wanted[index], say)
    without = bench.picture(accelerate_model(bench.model, module))
    bench.assert_equal(without, bench.picture(bench.model), bench.picture(bench.exact), say)
    assert len(bench.store.list()) == 1 and module.status.eager_calls == 0, module.status.to_json()["reasons"]


def test_a_second_resolution_is_built_while_the_first_serves(bench: Bench, say: Any) -> None:
    first, second = bench.module(), bench.module(BuildPolicy.BACKGROUND)
    model = accelerate_model(bench.model, first)
    bench.picture(model)
    bench.picture(accelerate_model(bench.model, second), bench.other_size)
    assert second.status.engine_calls == 0
    (reason,) = second.status.to_json()["reasons"]
    assert "being built in the background" in reason
    meanwhile = 0
    while bench.provider.queue.pending():
        bench.picture(model)
        meanwhile += 1
        time.sleep(4)
    assert meanwhile > 1 and first.status.eager_calls == 0
    found = bench.picture(accelerate_model(bench.model, second), bench.other_size)
    assert second.status.engine_calls == STEPS, second.status.to_json()["reasons"]
    bench.assert_equal(found, *(bench.picture(model, bench.other_size) for model in (bench.model, bench.exact)), say)
    say(f"{meanwhile} pictures were made by the first engine while the second was built")


def test_two_resolutions_alternate_at_no_cost(bench: Bench, say: Any) -> None:
    module = bench.module(BuildPolicy.MANUAL)
    model = accelerate_model(bench.model, module)
    sizes = (bench.size, bench.other_size)
    alone = [min([bench.timed(model, size) for _ in range(4)][1:]) for size in sizes]
    turns = [[bench.timed(model, size) for size in sizes] for _ in range(4)][1:]
    alternating = [min(found) for found in zip(*turns, strict=True)]
    say("seconds a picture, alone and alternating:", [round(x, 3) for x in alone], [round(x, 3) for x in alternating])
    assert module.status.eager_calls == 0, module.status.to_json()["reasons"]
    assert all(b < 1.1 * a + 0.05 for a, b in zip(alone, alternating, strict=True))


COLD = """
import json, runpy, sys, time
sys.argv = ["pytest"]
runpy.run_path({root!r} + "/__main__.py")["register"]()
import slipstream.tests.comfyui.conftest
from slipstream.tests.comfyui.gpu.test_gpu import Bench, time_to_ready
from pathlib import Path
print(json.dumps(time_to_ready(Bench({family!r}, {backend!r}, Path({store!r})))))
"""


def time_to_ready(bench: Bench) -> dict[str, float]:
    """Seconds from "this model, these shapes" to an engine that was checked, in a process that never loaded one."""
    source = open_unet(bench.model, bench.provider.weights_memo)
    torch.cuda.synchronize()
    source.weights_digest()  # of checkpoint files it is remembered; of a model without a file it is not
    started = time.perf_counter()
    seconds: dict[str, float] = {}
    call: CallShape = unet_call(source, Resolution(bench.size, bench.size), 2, 77)
    settings = Settings(backend=bench.backend, policy=BuildPolicy.MANUAL)
    found = bench.provider.prepare(source, call, settings).found
    assert found is not None, "the engine was not found in the store"
    plan, entry = found
    seconds["found"] = round(time.perf_counter() - started, 2)
    loaded = bench.provider.ready(source, plan, entry)
    torch.cuda.synchronize()
    seconds["ready"] = round(time.perf_counter() - started, 2)
    bench.provider.pool.give_back(loaded)
    return seconds


def test_a_cached_engine_is_ready_within_seconds_in_a_new_process(bench: Bench, say: Any) -> None:
    root = str(Path(slipstream.__file__).parent)
    script = COLD.format(root=root, family=bench.family, backend=bench.backend.value, store=str(bench.store.root))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=200, cwd=bench.store.root
    )
    assert done.returncode == 0, done.stderr[-3000:]
    seconds = json.loads(done.stdout.strip().splitlines()[-1])
    say("a new process, from the store to checked and ready:", seconds)
    assert seconds["ready"] < 5.0


def test_one_engine_for_a_range_of_sizes(bench: Bench, say: Any) -> None:
    if bench.backend is not BackendChoice.TENSORRT or bench.family not in ("demo", "small"):
        pytest.skip("asked of TensorRT alone, at small sizes")
    sizes = (bench.size, bench.other_size, (bench.size + bench.other_size) // 2)
    resolutions = tuple(Resolution(size, size) for size in sizes)
    engines = len(bench.store.list())
    module = bench.module(resolutions=resolutions, shapes=ShapeChoice.RANGE)
    fast = accelerate_model(bench.model, module)
    for size in (*sizes, *sizes):
        found = bench.picture(fast, size)
        bench.assert_equal(found, *(bench.picture(model, size) for model in (bench.model, bench.exact)), say)
    assert module.status.eager_calls == 0, module.status.to_json()["reasons"]
    assert module.status.engine_calls == 2 * len(sizes) * STEPS
    assert len(bench.store.list()) == engines + 1, "one engine for all sizes"
