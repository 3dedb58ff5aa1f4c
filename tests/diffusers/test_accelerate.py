"""An accelerated UNet gives what the plain one gives: by engine where it can, else by eager with a reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("diffusers", reason="no diffusers")

import torch
from diffusers import UNet2DConditionModel, UNet2DModel
from diffusers.models.attention_processor import AttnProcessor2_0

from slipstream.core.errors import UnsupportedModel
from slipstream.core.spec import Precision
from slipstream.demo import model as demo_model
from slipstream.engine_cache import BuildRecord, EngineStore, Entry
from slipstream.hosts.diffusers import AcceleratedUNet, accelerate_unet
from slipstream.hosts.diffusers.source import DiffusersUNetSource
from slipstream.hosts.diffusers.unet import DiffusersUNet, call
from slipstream.runtime import provider as provider_module
from slipstream.runtime.planning.plan import CallShape
from slipstream.runtime.provider import EngineProvider, HostHooks
from slipstream.runtime.settings.model_settings import BackendChoice, BuildPolicy, Settings, parse_resolutions
from slipstream.tests.diffusers.support import FIRST_USE, Built, make_inputs, make_unet
from slipstream.tests.fakes import build_only
from slipstream.tests.tensors import distance
from slipstream.tests.tiny_unet import CONFIG

pytestmark = pytest.mark.diffusers

TOLERANCE = 1e-4
SDXL: dict[str, Any] = {
    **CONFIG,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 24 + 6 * 8,
}
MANUAL = Settings(policy=BuildPolicy.MANUAL)


@pytest.fixture(scope="module", autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def never_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(plan: Any, *_: Any) -> Entry:
        raise AssertionError(f"{plan} was built although its engine is in the store")

    monkeypatch.setattr(provider_module, "build_engine", refuse)


@pytest.fixture
def copies(built: Built, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Building copies the finished engine instead of compiling; lists what was built."""
    done: list[str] = []

    def copy(plan: Any, store: EngineStore, *_: Any) -> Entry:
        assert plan.key.digest == built.entry.digest
        done.append(str(plan))
        return store.put(plan.key, built.entry.artifact, label=str(plan), build=BuildRecord(0.0))

    monkeypatch.setattr(provider_module, "build_engine", copy)
    return done


@pytest.fixture
def unet() -> UNet2DConditionModel:
    return make_unet()


@pytest.fixture
def accelerated(unet: UNet2DConditionModel, built: Built, never_builds: None) -> AcceleratedUNet:
    return accelerate_unet(unet, EngineProvider(built.store), FIRST_USE)


# ------------------------------------------------------------------------------------------------ engines


def test_a_built_engine_gives_the_plain_output(built: Built) -> None:
    assert (built.first.status.engine_calls, built.first.status.eager_calls) == (1, 0)
    for seed in range(3):
        inputs = make_inputs(seed)
        assert distance(built.first(**inputs).sample, built.first.unet(**inputs).sample) < TOLERANCE
    assert (built.first.status.engine_calls, built.first.status.eager_calls) == (4, 0)
    (checked,) = built.store.lookup(built.entry.digest).manifest.verifications.values()
    assert 0 < checked.relative_error < TOLERANCE


def test_another_provider_finds_the_engine(accelerated: AcceleratedUNet, unet: UNet2DConditionModel) -> None:
    inputs = make_inputs()
    with accelerated.run():
        found = [accelerated(**inputs).sample for _ in range(2)]
    assert distance(found[1], unet(**inputs).sample) < TOLERANCE
    assert (accelerated.status.engine_calls, accelerated.status.eager_calls) == (2, 0)


ANOTHER_PROCESS = """
import json, runpy, sys
root, store, module, config, inputs, output = sys.argv[1:]
runpy.run_path(root + "/__main__.py", run_name="slipstream_main")["register"]()
import torch
from diffusers import UNet2DConditionModel
from slipstream.compile_backend.cpp.toolchain import why_no_cpp_compiler
from slipstream.engine_cache import EngineStore
from slipstream.hosts.diffusers import accelerate_unet
from slipstream.runtime.provider import EngineProvider
from slipstream.runtime.settings.model_settings import BuildPolicy, Settings

unet = UNet2DConditionModel.from_config(json.loads(config)).eval()
unet.load_state_dict(torch.load(module))
accelerated = accelerate_unet(unet, EngineProvider(EngineStore(store)), Settings(policy=BuildPolicy.FIRST_USE))
with torch.no_grad(), accelerated.run():
    torch.save(accelerated(**torch.load(inputs)).sample, output)
print(json.dumps({**accelerated.status.to_json(), "no_compiler": why_no_cpp_compiler()}))
"""


@pytest.mark.slow  # loading without a compiler: tests/unit/compile_backend/test_aot_inductor.py
def test_a_new_process_without_a_compiler_finds_the_engine(
    built: Built, unet: UNet2DConditionModel, root: Path, tmp_path: Path
) -> None:
    module, inputs, output = (tmp_path / name for name in ("unet.pt", "inputs.pt", "output.pt"))
    torch.save(unet.state_dict(), module)
    torch.save(make_inputs(), inputs)
    arguments = [str(root), str(built.store.root), str(module), json.dumps(CONFIG), str(inputs), str(output)]
    bare = {name: value for name, value in os.environ.items() if name not in ("CXX", "CC")} | {"PATH": str(tmp_path)}
    command = [sys.executable, "-c", ANOTHER_PROCESS, *arguments]
    ended = subprocess.run(command, env=bare, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout.splitlines()[-1])
    assert told["no_compiler"], "the process found a compiler, so it proves nothing"
    assert (told["engine_calls"], told["eager_calls"]) == (1, 0), told
    assert distance(torch.load(output), unet(**make_inputs()).sample) < TOLERANCE


def test_every_weight_reaches_the_engine(accelerated: AcceleratedUNet, unet: UNet2DConditionModel) -> None:
    """A constant that the compiler wrote into the code would stay behind."""
    inputs = make_inputs()
    before = unet(**inputs).sample
    torch.manual_seed(3)
    with accelerated.run():  # one run, so that no check of the new weights can help
        accelerated(**inputs)
        for name, parameter in unet.named_parameters():
            kept = parameter.clone()
            parameter.add_(torch.randn_like(parameter))
            wanted = unet(**inputs).sample
            assert distance(wanted, before) > 10 * TOLERANCE, f"changing {name} changes nothing: this proves nothing"
            assert distance(accelerated(**inputs).sample, wanted) < TOLERANCE, name
            parameter.copy_(kept)
    assert accelerated.status.eager_calls == 0


@pytest.mark.parametrize("how", ["in place", "past autograd", "assigned", "half and back"])
def test_new_weights_are_used(accelerated: AcceleratedUNet, unet: UNet2DConditionModel, how: str) -> None:
    inputs = make_inputs()
    before = accelerated(**inputs).sample
    other = make_unet(seed=2).state_dict()
    if how == "in place":
        unet.load_state_dict(other)
    elif how == "past autograd":
        for name, parameter in unet.named_parameters():
            parameter.data = other[name]
    elif how == "assigned":
        unet.load_state_dict(other, assign=True)
    else:
        unet.half().float()
    wanted = unet(**inputs).sample
    assert distance(wanted, before) > TOLERANCE
    assert distance(accelerated(**inputs).sample, wanted) < TOLERANCE
    assert accelerated.status.eager_calls == 0


def test_two_checkpoints_share_one_engine(built: Built, never_builds: None) -> None:
    provider = EngineProvider(built.store)
    inputs = make_inputs()
    outputs = []
    for seed in (1, 7):
        unet = make_unet(seed)
        accelerated = accelerate_unet(unet, provider, FIRST_USE)
        outputs.append(accelerated(**inputs).sample)
        assert distance(outputs[-1], unet(**inputs).sample) < TOLERANCE
        assert accelerated.status.engine_calls == 1
    assert distance(outputs[0], outputs[1]) > 0.1
    (entry,) = built.store.list()
    digests = {DiffusersUNetSource(make_unet(seed)).weights_digest() for seed in (1, 7)}
    assert digests <= set(entry.manifest.verifications)


@pytest.mark.parametrize("timestep", [500, 500.0, torch.tensor(500), torch.tensor([500]), torch.tensor([500.0, 20.0])])
def test_timesteps_come_in_every_form(accelerated: AcceleratedUNet, unet: UNet2DConditionModel, timestep: Any) -> None:
    inputs = {**make_inputs(), "timestep": timestep}
    assert distance(accelerated(**inputs).sample, unet(**inputs).sample) < TOLERANCE
    assert accelerated.status.eager_calls == 0


@pytest.mark.slow
def test_sdxl_class(tmp_path: Path) -> None:
    unet = make_unet(config=SDXL)
    accelerated = accelerate_unet(unet, EngineProvider(EngineStore(tmp_path)), FIRST_USE)
    inputs = make_inputs()
    generator = torch.Generator().manual_seed(5)
    added = {
        "text_embeds": torch.randn(2, 24, generator=generator),
        "time_ids": torch.tensor([[1024, 768, 0, 0, 1021, 768]] * 2).half(),
    }
    wanted = unet(**inputs, added_cond_kwargs=added).sample
    for key in added:
        moved = {**added, key: added[key].flip(-1)}
        assert distance(unet(**inputs, added_cond_kwargs=moved).sample, wanted) > 10 * TOLERANCE, key
        found = accelerated(**inputs, added_cond_kwargs=moved).sample
        assert distance(found, unet(**inputs, added_cond_kwargs=moved).sample) < TOLERANCE
    assert (accelerated.status.engine_calls, accelerated.status.eager_calls) == (2, 0), accelerated.status.to_json()


@pytest.mark.slow
@pytest.mark.skipif(not list(demo_model.WEIGHTS.glob("unet.*")), reason="the demo model's weights are not there")
def test_the_demo_model_samples_the_plain_picture(tmp_path: Path) -> None:
    from slipstream.demo.pipeline import Pipeline

    pipeline = Pipeline.load(with_controlnet=False)
    options = {"height": 64, "width": 64, "steps": 4, "seed": 3}
    plain = pipeline("a red circle", **options)
    accelerated = accelerate_unet(pipeline.unet, EngineProvider(EngineStore(tmp_path)), FIRST_USE)
    pipeline.unet = accelerated
    with accelerated.run():
        found = pipeline("a red circle", **options)
    assert distance(found.latents, plain.latents) < TOLERANCE
    assert (accelerated.status.engine_calls, accelerated.status.eager_calls) == (4, 0)


# ------------------------------------------------------------------------------------------------ policies


def test_background_takes_over_at_the_next_run(tmp_path: Path, unet: UNet2DConditionModel, copies: list[str]) -> None:
    provider = EngineProvider(EngineStore(tmp_path))
    accelerated = accelerate_unet(unet, provider, Settings(policy=BuildPolicy.BACKGROUND))
    inputs = make_inputs()
    with accelerated.run():
        assert torch.equal(accelerated(**inputs).sample, unet(**inputs).sample)
        (reason,) = accelerated.status.to_json()["reasons"]
        assert "background" in reason
        time.sleep(1.0)
        assert not copies, "it was built while a run was active"
    _until(lambda: not provider.queue.pending())
    assert len(copies) == 1
    with accelerated.run():
        accelerated(**inputs)
    assert (accelerated.status.engine_calls, accelerated.status.eager_calls) == (1, 1)


def test_an_open_run_keeps_what_it_began_with(tmp_path: Path, unet: UNet2DConditionModel, copies: list[str]) -> None:
    accelerated = accelerate_unet(unet, EngineProvider(EngineStore(tmp_path)), MANUAL)
    with accelerated.run():
        accelerated(**make_inputs())
        _obtain(accelerated, unet)
        accelerated(**make_inputs())
        assert accelerated.status.engine_calls == 0
    accelerated(**make_inputs())
    assert (accelerated.status.engine_calls, accelerated.status.eager_calls) == (1, 2)


def test_manual_waits_to_be_asked(tmp_path: Path, unet: UNet2DConditionModel, copies: list[str]) -> None:
    accelerated = accelerate_unet(unet, EngineProvider(EngineStore(tmp_path)), MANUAL)
    accelerated(**make_inputs())
    (reason,) = accelerated.status.to_json()["reasons"]
    assert "no engine" in reason and not copies
    _obtain(accelerated, unet)
    accelerated(**make_inputs())
    assert len(copies) == 1
    assert (accelerated.status.engine_calls, accelerated.status.eager_calls) == (1, 1)


def test_first_use_waits_and_shows_progress(tmp_path: Path, unet: UNet2DConditionModel, copies: list[str]) -> None:
    shown: list[str] = []
    hooks = HostHooks(progress=lambda update: shown.append(update.phase))
    accelerated = accelerate_unet(unet, EngineProvider(EngineStore(tmp_path)), FIRST_USE, hooks)
    accelerated(**make_inputs())
    assert len(copies) == 1 and shown[-1] == "load"
    assert (accelerated.status.engine_calls, accelerated.status.eager_calls) == (1, 0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (Settings(backend=BackendChoice.OFF), "switched off"),
        (Settings(resolutions=parse_resolutions("512x512")), "not in the node's list"),
        (Settings(backend=BackendChoice.TENSORRT), "tensorrt"),
    ],
)
def test_settings_that_leave_the_plain_model(
    built: Built, unet: UNet2DConditionModel, settings: Settings, words: str
) -> None:
    accelerated = accelerate_unet(unet, EngineProvider(built.store), settings)
    _assert_plain(accelerated, unet, make_inputs(), words)


def _obtain(accelerated: AcceleratedUNet, unet: UNet2DConditionModel) -> None:
    """Build an engine, and leave it to the run to load it."""
    inputs = make_inputs()
    call = CallShape.of(
        {"x": inputs["sample"], "timesteps": torch.zeros(2), "context": inputs["encoder_hidden_states"]}
    )
    module = accelerated._module
    build_only(module.provider, DiffusersUNetSource(unet), module.settings, call)


def _until(ready: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


# --------------------------------------------------------------------------------------------- fallbacks


def _residuals(unet: UNet2DConditionModel) -> dict[str, Any]:
    shapes = [(2, 32, 16, 16), (2, 32, 16, 16), (2, 32, 8, 8), (2, 64, 8, 8)]
    return {
        "down_block_additional_residuals": tuple(0.1 * torch.ones(shape) for shape in shapes),
        "mid_block_additional_residual": torch.ones(2, 64, 8, 8),
    }


CALLS: dict[str, tuple[Callable[[UNet2DConditionModel], dict[str, Any]], str]] = {
    "ControlNet": (_residuals, "ControlNet"),
    "cross_attention_kwargs": (lambda _: {"cross_attention_kwargs": {"scale": 1.0}}, "cross_attention_kwargs"),
    "a text mask": (lambda _: {"encoder_attention_mask": torch.ones(2, 77).tril()}, "encoder_attention_mask"),
    "IP-Adapter": (lambda _: {"added_cond_kwargs": {"image_embeds": torch.ones(2, 8)}}, "image_embeds"),
    "another size": (lambda _: {"sample": torch.ones(2, 4, 8, 8)}, "no engine"),
    "another batch": (lambda _: make_inputs(batch=1), "no engine"),
    "a gradient": (lambda _: {"sample": torch.ones(2, 4, 16, 16, requires_grad=True)}, "gradients"),
}


@pytest.mark.parametrize("case", CALLS)
def test_calls_that_no_engine_takes(built: Built, unet: UNet2DConditionModel, case: str) -> None:
    extra, words = CALLS[case]
    accelerated = accelerate_unet(unet, EngineProvider(built.store), MANUAL)
    with torch.enable_grad() if case == "a gradient" else nullcontext():
        _assert_plain(accelerated, unet, {**make_inputs(), **extra(unet)}, words)
    accelerated(**make_inputs())
    assert accelerated.status.engine_calls == 1, "the next plain call has to go to the engine"


def _lora(unet: UNet2DConditionModel) -> None:
    """What peft makes of a layer."""
    attention = unet.mid_block.attentions[0].transformer_blocks[0].attn1
    wrapper = torch.nn.Sequential(attention.to_q)
    wrapper.base_layer = attention.to_q
    attention.to_q = wrapper


def _other_attention(unet: UNet2DConditionModel) -> None:
    class Sharpened(AttnProcessor2_0):
        pass

    unet.mid_block.attentions[0].transformer_blocks[0].attn1.set_processor(Sharpened())


def _replaced_forward(unet: UNet2DConditionModel) -> None:
    layer = unet.mid_block.resnets[0]
    plain = layer.forward
    layer.forward = lambda *args, **kwargs: 2 * plain(*args, **kwargs)


def _no_bias(unet: UNet2DConditionModel) -> None:
    unet.conv_out.bias = None


def _more_channels(unet: UNet2DConditionModel) -> None:
    unet.conv_out = torch.nn.Conv2d(32, 8, 3, padding=1)


def _doubling_hook(unet: UNet2DConditionModel) -> None:
    unet.conv_in.register_forward_hook(lambda layer, args, out: 2 * out)


MODELS: dict[str, tuple[Callable[[UNet2DConditionModel], Any], str]] = {
    "LoRA layers": (_lora, "fuse_lora"),
    "attention processor": (_other_attention, "Sharpened"),
    "replaced forward": (_replaced_forward, "mid_block.resnets.0"),
    "hook": (_doubling_hook, "conv_in"),
    "FreeU": (lambda unet: unet.enable_freeu(0.9, 0.2, 1.1, 1.2), "FreeU"),
    "training": (lambda unet: unet.train(), "training"),
    "deleted weight": (_no_bias, "conv_out.bias"),
    "reshaped weight": (_more_channels, "conv_out"),
    "fused projections": (lambda unet: unet.fuse_qkv_projections(), "Fused"),
    "other activation": (lambda unet: setattr(unet, "conv_act", torch.nn.ReLU()), "conv_act"),
    "fp64": (lambda unet: unet.double(), "float64"),
}


@pytest.mark.parametrize("during", ["before", "while accelerated"])
@pytest.mark.parametrize("case", MODELS)
def test_models_that_no_engine_stands_for(
    built: Built, unet: UNet2DConditionModel, never_builds: None, case: str, during: str
) -> None:
    change, words = MODELS[case]
    accelerated = accelerate_unet(unet, EngineProvider(built.store), FIRST_USE)
    if during == "while accelerated":
        accelerated(**make_inputs())
    change(unet)
    inputs = make_inputs()
    if case == "fp64":
        inputs = {name: value.double() if name != "timestep" else value for name, value in inputs.items()}
    _assert_plain(accelerated, unet, inputs, words)


def test_a_model_that_came_back_is_accelerated_again(accelerated: AcceleratedUNet, unet: UNet2DConditionModel) -> None:
    unet.enable_freeu(0.9, 0.2, 1.1, 1.2)
    accelerated(**make_inputs())
    unet.disable_freeu()
    accelerated(**make_inputs())
    assert (accelerated.status.engine_calls, accelerated.status.eager_calls) == (1, 1)


def test_a_lora_written_into_the_weights_takes_effect(accelerated: AcceleratedUNet, unet: UNet2DConditionModel) -> None:
    """As `fuse_lora` does it, past torch's version counters."""
    inputs = make_inputs()
    with accelerated.run():
        before = accelerated(**inputs).sample
    weight = unet.mid_block.attentions[0].transformer_blocks[0].attn2.to_v.weight
    weight.data += torch.outer(torch.randn(weight.shape[0]), torch.randn(weight.shape[1]))
    wanted = unet(**inputs).sample
    with accelerated.run():
        found = accelerated(**inputs).sample
    assert distance(wanted, before) > 10 * TOLERANCE
    assert distance(found, wanted) < TOLERANCE
    assert accelerated.status.eager_calls == 0


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        (torch.ones(2, 4, 16, 16, dtype=torch.float16), "float16"),
        (torch.ones(2, 4, 16, 16, device="meta"), "meta"),
    ],
    ids=["another dtype", "another device"],
)
def test_inputs_that_the_plain_model_refuses_too(
    accelerated: AcceleratedUNet, unet: UNet2DConditionModel, sample: torch.Tensor, words: str
) -> None:
    inputs = {**make_inputs(), "sample": sample}
    with pytest.raises(Exception) as plain:
        unet(**inputs)
    with pytest.raises(plain.type):
        accelerated(**inputs)
    (reason,) = accelerated.status.to_json()["reasons"]
    assert words in reason and accelerated.status.engine_calls == 0


def test_autocast(accelerated: AcceleratedUNet, unet: UNet2DConditionModel) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _assert_plain(accelerated, unet, make_inputs(), "autocast")


def test_other_kinds_of_unet(built: Built) -> None:
    plain = UNet2DModel(
        sample_size=16,
        block_out_channels=(32, 32),
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )
    with pytest.raises(UnsupportedModel, match="UNet2DModel"):
        DiffusersUNet.of(plain)
    classes = make_unet(config={**CONFIG, "num_class_embeds": 3})
    accelerated = accelerate_unet(classes, EngineProvider(built.store), FIRST_USE)
    inputs = {**make_inputs(), "class_labels": torch.tensor([0, 2])}
    _assert_plain(accelerated, classes, inputs, "num_class_embeds")


def _assert_plain(accelerated: AcceleratedUNet, unet: Any, inputs: dict[str, Any], words: str) -> None:
    engine_calls = accelerated.status.engine_calls
    assert torch.equal(accelerated(**inputs).sample, unet(**inputs).sample)
    assert accelerated.status.engine_calls == engine_calls
    assert words in list(accelerated.status.to_json()["reasons"])[-1]


# ------------------------------------------------------------------------------------------------ drop-in


def test_it_looks_like_the_unet(accelerated: AcceleratedUNet, unet: UNet2DConditionModel) -> None:
    assert accelerated.config is unet.config
    assert (accelerated.dtype, accelerated.device) == (unet.dtype, unet.device)
    assert accelerated.down_blocks is unet.down_blocks
    assert isinstance(accelerated, torch.nn.Module)
    with pytest.raises(AttributeError, match="no_such_thing"):
        accelerated.no_such_thing  # noqa: B018
    inputs = list(make_inputs().values())
    (as_tuple,) = accelerated(*inputs, return_dict=False)
    assert torch.equal(as_tuple, accelerated(*inputs).sample)
    assert accelerated.to(torch.float64).dtype is torch.float64


def test_accelerating_twice_is_accelerating_once(accelerated: AcceleratedUNet, built: Built) -> None:
    again = accelerate_unet(accelerated, EngineProvider(built.store), FIRST_USE)
    again(**make_inputs())
    assert again.unet is accelerated.unet
    assert (again.status.engine_calls, accelerated.status.engine_calls) == (1, 0)


def test_runs_nest_and_end_with_an_error(accelerated: AcceleratedUNet) -> None:
    with pytest.raises(ZeroDivisionError):
        with accelerated.run(), accelerated.run():
            accelerated(**make_inputs())
            raise ZeroDivisionError
    assert accelerated._module.provider._active_runs == 0
    accelerated(**make_inputs())
    assert accelerated.status.engine_calls == 2


# ------------------------------------------------------------------------------------------ architecture


def test_the_fingerprint_is_that_of_the_computation() -> None:
    def digest(**changes: Any) -> str:
        unet = UNet2DConditionModel(**{**CONFIG, **changes})
        return DiffusersUNet.of(unet).fingerprint.architecture

    assert digest() == digest() == digest(sample_size=64)
    others = [digest(**change) for change in ({"norm_eps": 1e-6}, {"act_fn": "gelu"}, {"center_input_sample": True})]
    assert len({digest(), *others}) == 4


def test_the_reference_is_fp32_and_leaves_the_model_alone() -> None:
    unet = make_unet().half()
    inputs = {"x": make_inputs()["sample"].half(), "timesteps": torch.tensor([3.0, 900.0])}
    inputs["context"] = make_inputs()["encoder_hidden_states"].half()
    before = {name: tensor.clone() for name, tensor in unet.state_dict().items()}
    found = DiffusersUNetSource(unet).reference(inputs)["out"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in unet.state_dict().items())
    wide = {name: tensor.float() for name, tensor in inputs.items()}
    assert found.dtype is torch.float32
    assert distance(found, call(unet.float(), wide)["out"]) < 1e-6


def test_weights_are_handed_out_not_copied(unet: UNet2DConditionModel) -> None:
    weights = DiffusersUNetSource(unet).bind(Precision.FP32).tensors
    assert weights["model.conv_in.weight"].data_ptr() == unet.conv_in.weight.data_ptr()
    placeholder = DiffusersUNet.of(unet).placeholder(Precision.FP32, torch.device("cpu"))
    assert set(weights) == set(placeholder.state_dict())
    attention = placeholder.model.mid_block.attentions[0].transformer_blocks[0].attn1
    assert type(attention.processor) is AttnProcessor2_0
