"""A network's whole call over engines of its blocks by one graph: which calls have one, and that pictures stay right.

What stands for graphs here: see `host_graphs`. In a CUDA GPU's server: tests/comfyui/gpu.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import comfy.model_management
import pytest
import torch
from comfy.ldm.modules.attention import SpatialTransformer

from slipstream.compile_backend.blocks.attention_out import AttentionFailed
from slipstream.engine_cache import EngineStore
from slipstream.hosts.comfy.accelerate_controlnet import accelerate_controlnet
from slipstream.hosts.comfy.block_calls.block_calls import BlockCalls
from slipstream.hosts.comfy.blocks.channels_last import in_channels_last, transformed
from slipstream.hosts.comfy.process import dynamic_vram
from slipstream.runtime.capture.library import CaptureError
from slipstream.runtime.loaded import network_graphs
from slipstream.runtime.module import AcceleratedModule
from slipstream.runtime.provider import EngineProvider
from slipstream.runtime.settings.model_settings import BuildPolicy, Settings
from slipstream.tests.comfyui.blocks.host_graphs import HostGraphs, HostNetworks, host_graphs
from slipstream.tests.comfyui.blocks.quick_blocks import quick_block_provider
from slipstream.tests.comfyui.blocks.test_block_calls import BY_BLOCKS, PATCHES, accelerated, patched, share_of
from slipstream.tests.comfyui.models.test_controlnet import union
from slipstream.tests.comfyui.support import staging
from slipstream.tests.comfyui.support.models import tiny
from slipstream.tests.comfyui.support.quick import quick_provider
from slipstream.tests.tensors import distance

STEPS = 9
BEFORE = 4
"""Steps of a first picture before the capture: engines are asked for, then compared, then two by blocks."""


@pytest.fixture
def graphs(shared_provider: EngineProvider) -> Iterator[HostGraphs]:
    with host_graphs(shared_provider) as made:
        yield made


@pytest.fixture
def provider(shared_provider: EngineProvider, graphs: HostGraphs) -> EngineProvider:
    return shared_provider


@pytest.mark.parametrize("family", ["sd15", "sdxl"])
def test_steps_are_replayed_and_the_next_picture_from_its_first(
    family: str, provider: EngineProvider, graphs: HostGraphs
) -> None:
    model = tiny.model(family)
    fast, module = accelerated(provider, model)
    wanted = tiny.sample(model, family, steps=STEPS)
    assert distance(tiny.sample(fast, family, steps=STEPS), wanted) < 1e-5
    assert (graphs.captures, graphs.replays) == (1, STEPS - BEFORE), module.status.to_json()
    calls = provider.blocks.backend.calls
    other = tiny.sample(model, family, steps=STEPS, seed=8)
    assert distance(tiny.sample(fast, family, steps=STEPS, seed=8), other) < 1e-5 < 1e-3 < distance(other, wanted)
    assert (graphs.captures, graphs.replays) == (1, 2 * STEPS - BEFORE)
    assert provider.blocks.backend.calls > calls and module.status.block_calls >= 2 * STEPS - 2


@pytest.mark.parametrize("family", ["flux"])
def test_transformers_have_graphs_too(family: str, provider: EngineProvider, graphs: HostGraphs) -> None:
    model = tiny.transformer(family)
    fast, module = accelerated(provider, model)
    prompts = {name: tiny.conditioning(family, seed) for seed, name in ((1, "positive"), (2, "negative"))}
    options: dict[str, Any] = {"steps": STEPS, "cfg": 2.0, **prompts}
    found, wanted = tiny.sample(fast, family, **options), tiny.sample(model, family, **options)
    assert distance(found, wanted) < 1e-5
    assert graphs.captures == 1 and graphs.replays >= STEPS - BEFORE, module.status.to_json()


def test_other_sizes_have_graphs_of_their_own(provider: EngineProvider, graphs: HostGraphs) -> None:
    model = tiny.model()
    fast, _ = accelerated(provider, model)
    for size in (64, 96, 64):
        found, wanted = tiny.sample(fast, steps=STEPS, size=size), tiny.sample(model, steps=STEPS, size=size)
        assert distance(found, wanted) < 1e-5
    assert graphs.captures == 2


def test_a_lora_is_in_the_replayed_steps(provider: EngineProvider, graphs: HostGraphs) -> None:
    model = tiny.model()
    fast, _ = accelerated(provider, model)

    def with_lora(patcher: Any) -> Any:
        clone, state = patcher.clone(), patcher.model_state_dict()
        names = [name for name in state if name.endswith(("to_q.weight", "time_embed.0.weight"))]
        assert clone.add_patches({name: (torch.full_like(state[name], 0.05),) for name in names}, 1.0)
        return clone

    for change in (lambda patcher: patcher, with_lora, lambda patcher: patcher):
        before = graphs.replays
        found, wanted = tiny.sample(change(fast), steps=STEPS), tiny.sample(change(model), steps=STEPS)
        assert distance(found, wanted) < 1e-5 and graphs.replays > before
    assert distance(tiny.sample(with_lora(model), steps=STEPS), tiny.sample(model, steps=STEPS)) > 1e-3


def test_model_and_controlnet_are_a_graph_each_and_hints_and_residuals_their_inputs(
    provider: EngineProvider, graphs: HostGraphs
) -> None:
    model, control = tiny.model(), tiny.controlnet()
    fast, _ = accelerated(provider, model)
    of_ours = accelerate_controlnet(control, of_control := AcceleratedModule(provider, BY_BLOCKS))
    wanted = [_with_hints(model, control, seed=seed) for seed in (3, 4)]
    assert all(distance(_with_hints(fast, of_ours, seed=seed), wanted[seed - 3]) < 1e-5 for seed in (3, 4))
    assert distance(*wanted) > 1e-4
    assert graphs.captures == 2 and graphs.replays >= 2 * (2 * STEPS - BEFORE), of_control.status.to_json()


def _with_hints(patcher: Any, *networks: Any, seed: int = 3) -> torch.Tensor:
    """A picture with a chain of ControlNets.

    Args:
        seed: of the hint.
    """
    hint = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(seed))

    def chain() -> Any:
        before: Any = None
        for network in networks:
            before = network.copy().set_cond_hint(hint, 0.6).set_previous_controlnet(before)
        return before

    prompts = [tiny.conditioning(seed=each, control=chain(), control_apply_to_uncond=False) for each in (1, 2)]
    return tiny.sample(patcher, steps=STEPS, positive=prompts[0], negative=prompts[1])


def test_a_model_and_two_controlnets_keep_their_graphs(
    provider: EngineProvider, graphs: HostGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[HostGraphs] = []

    def own(*_: Any, are_many: bool = False) -> HostGraphs:
        made.extend([] if are_many else [HostGraphs()])
        return HostGraphs() if are_many else made[-1]

    monkeypatch.setattr(network_graphs, "CudaGraphs", own)
    model, controls = tiny.model(), [tiny.controlnet(seed=seed) for seed in (1, 2)]
    fast, _ = accelerated(provider, model)
    ours = [accelerate_controlnet(control, AcceleratedModule(provider, BY_BLOCKS)) for control in controls]
    wanted = _with_hints(model, *controls)
    assert distance(_with_hints(fast, *ours), wanted) < 1e-5 < 1e-3 < distance(_with_hints(model, controls[0]), wanted)
    assert [each.captures for each in made] == [1, 1, 1]
    for _ in range(2):
        before = sum(each.replays for each in made)
        assert distance(_with_hints(fast, *ours), wanted) < 1e-5
        assert [each.captures for each in made] == [1, 1, 1]
        assert sum(each.replays for each in made) == before + 2 * 3 * STEPS  # each prompt has a chain of its own


def test_a_controlnets_graphs_go_once_its_whole_engine_serves(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, provider: EngineProvider, graphs: HostGraphs
) -> None:
    control = tiny.controlnet()
    ours = accelerate_controlnet(control, module := AcceleratedModule(provider, BY_BLOCKS))
    model = tiny.model()
    _with_hints(model, ours)
    kept = provider.pool.networks._kept
    assert [each.network() for each in kept.values()] == [control.control_model] and graphs.captures == 1
    with quick_provider(EngineStore(tmp_path)) as whole:
        monkeypatch.setattr(provider, "backends", whole.backends)
        monkeypatch.setattr(Settings, "runs_by_blocks", lambda *_: True)  # as on a GPU
        then = accelerate_controlnet(control, AcceleratedModule(provider, Settings(policy=BuildPolicy.FIRST_USE)))
        _with_hints(model, then)
    assert then.acceleration.module.status.engine_calls and not kept, module.status.to_json()


@torch.inference_mode()
def test_all_types_of_a_union_share_one_graph(provider: EngineProvider, graphs: HostGraphs) -> None:
    network = union()
    fast = accelerate_controlnet(network, module := AcceleratedModule(provider, BY_BLOCKS))
    x, context, y = torch.randn(2, 4, 8, 8), torch.randn(2, 77, 64), torch.randn(2, 2816)
    hint = torch.rand(1, 3, 64, 64)
    calls = fast.acceleration.calls_of(fast)
    for step, types in enumerate([[0]] * BEFORE + [[0], [3], []]):
        given = {"x": x, "hint": hint, "timesteps": torch.full((2,), 900.0 - 50 * step), "context": context, "y": y}
        wanted, found = (each(**given, control_type=types) for each in (network.control_model, calls))
        assert found.keys() == wanted.keys()
        for kind, tensors in wanted.items():
            assert all(distance(one, other) < 1e-5 for one, other in zip(found[kind], tensors, strict=True))
    fast.acceleration.leave(fast)
    assert (graphs.captures, graphs.replays) == (1, 3), module.status.to_json()


@pytest.mark.parametrize("how", PATCHES)
def test_of_what_other_nodes_patch_blocks_alone_are_replayed(
    how: str, provider: EngineProvider, graphs: HostGraphs
) -> None:
    model = tiny.model()
    fast, module = accelerated(provider, model)
    tiny.sample(fast, steps=STEPS)
    before = graphs.replays
    wanted = tiny.sample(patched(model, how), steps=STEPS)
    assert distance(wanted, tiny.sample(model, steps=STEPS)) > 1e-3
    parts, inner, counts = graphs.parts, graphs.parts.inner, []
    for _ in range(3):
        assert distance(tiny.sample(patched(fast, how), steps=STEPS), wanted) < 1e-5
        counts.append((parts.captures + inner.captures, parts.replays + inner.replays))
    assert before and graphs.replays == before and module.status.block_calls
    *_, (captures, first), (later, second) = counts
    on_engines, _ = share_of(module)
    assert captures == later == on_engines and second - first == STEPS * on_engines
    assert inner.captures == (3 if how == "attention input" else 0)


def test_a_blocks_graph_that_is_wrong_is_not_used(
    provider: EngineProvider, graphs: HostGraphs, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny.model()
    fast, module = accelerated(provider, model)
    graphs.parts.factor = 1.1
    wanted = tiny.sample(patched(model, "skips"), steps=STEPS)
    for _ in range(2):
        assert distance(tiny.sample(patched(fast, "skips"), steps=STEPS), wanted) < 1e-5
    on_engines, total = share_of(module)
    groups = len(_groups(model))
    assert graphs.parts.captures == graphs.parts.replays == on_engines + groups and on_engines == total
    assert caplog.text.count("differs from its engine") == on_engines + groups


class Watching:
    """A patch behind each output block that changes skips, and notes what options tell it."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def __call__(self, h: torch.Tensor, skip: torch.Tensor, options: dict[str, Any]) -> Any:
        self.told.append({name: options.get(name) for name in ("block", "block_index", "activations_shape")})
        return 1.1 * h, 0.9 * skip


def watched(patcher: Any, watching: Watching) -> Any:
    clone = patcher.clone()
    clone.set_model_output_block_patch(watching)
    return clone


@pytest.mark.parametrize("family", ["sd15", "sdxl"])
def test_blocks_that_follow_one_another_are_one_graph_where_others_patch_elsewhere(
    family: str, provider: EngineProvider, graphs: HostGraphs
) -> None:
    model = tiny.model(family, depth=3)
    fast, module = accelerated(provider, model)
    here, there = Watching(), Watching()
    wanted = tiny.sample(watched(model, there), family, steps=STEPS)
    assert distance(wanted, tiny.sample(model, family, steps=STEPS)) > 1e-3
    assert distance(tiny.sample(watched(fast, here), family, steps=STEPS), wanted) < 1e-5
    captures, replays, first = graphs.parts.captures, graphs.parts.replays, module.status.block_calls
    assert distance(tiny.sample(watched(fast, here), family, steps=STEPS), wanted) < 1e-5
    on_engines, total = share_of(module)
    others = total - 3 * len(_groups(model))
    assert on_engines == total and module.status.block_calls == first + STEPS
    assert graphs.parts.captures == captures
    assert graphs.parts.replays - replays == STEPS * (others + len(_groups(model)))
    assert here.told == 2 * there.told


class Inside:
    """Functions in the midst of all blocks: they note what they are told, and add noise, so that calls count.

    Attributes:
        is_on: asked at each call of the network; where it says no, nothing of it is there.
        kept: what the functions were given, beside copies of it.
    """

    NAMES = ("block", "block_index", "activations_shape", "n_heads", "dim_head", "cond_or_uncond", "sigmas")

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.calls = 0
        self.is_on: Callable[[int], bool] = lambda call: True
        self.error: tuple[int, BaseException] | None = None
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._noise = torch.Generator().manual_seed(7)

    def replace(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        self._note("attn2", options)
        self.kept.append((q, q.clone()))
        v.zero_()  # they are its own
        return q + 0.1 * torch.randn(q.shape, generator=self._noise)

    def behind(self, n: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        self._note("attn1", options)
        return n.mul_(0.5)

    def _note(self, what: str, options: dict[str, Any]) -> None:
        values = {name: options.get(name) for name in self.NAMES}
        values["sigmas"] = values["sigmas"].tolist()  # a tensor's text would void what another thread traces
        self.told.append((what, {name: str(value) for name, value in values.items()}))
        if self.error is not None and len(self.told) == self.error[0]:
            raise self.error[1]

    def put_into(self, patcher: Any) -> Any:
        clone = patcher.clone()
        for side, number in (("input", 1), ("input", 2), ("middle", 0), ("output", 3), ("output", 4), ("output", 5)):
            clone.set_model_attn2_replace(self.replace, side, number)
        clone.set_model_attn1_output_patch(self.behind)
        clone.set_model_unet_function_wrapper(self._switched)
        return clone

    def _switched(self, apply: Callable[..., torch.Tensor], given: dict[str, Any]) -> torch.Tensor:
        options = dict(given["c"]["transformer_options"])
        if not self.is_on(self.calls):
            options.pop("patches_replace"), options.pop("patches")
        self.calls += 1
        return apply(given["input"], given["timestep"], **{**given["c"], "transformer_options": options})


class Tiles(Inside):
    """Functions around all first attention layers, which divide tokens into ever other numbers of tiles, and before
    those over the text, which change it; one block's attention is replaced besides."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[int] = []

    def divide(self, n: torch.Tensor, context: torch.Tensor, value: torch.Tensor, options: dict[str, Any]) -> Any:
        assert context is n and value is n
        self._note("attn1 in", options)
        self.numbers.append(2 + 2 * (len(self.told) // 5 % 2))
        return (*[n.unflatten(1, (self.numbers[-1], -1)).flatten(0, 1)] * 3,)

    def join(self, n: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        self._note("attn1 out", options)
        return n.unflatten(0, (-1, self.numbers.pop())).flatten(1, 2)

    def change(self, n: torch.Tensor, context: torch.Tensor, value: torch.Tensor, options: dict[str, Any]) -> Any:
        self._note("attn2 in", options)
        return n.mul_(0.9), 1.1 * context, value[:, : context.shape[1]]

    def put_into(self, patcher: Any) -> Any:
        clone = patcher.clone()
        clone.set_model_attn1_patch(self.divide)
        clone.set_model_attn1_output_patch(self.join)
        clone.set_model_attn2_patch(self.change)
        clone.set_model_attn1_replace(lambda q, k, v, options: v, "middle", 0, 1)
        return clone


@pytest.mark.parametrize("family", ["sd15", "sdxl"])
@pytest.mark.parametrize(("kind", "depth"), [(Inside, 3), (Tiles, 2)])
def test_a_group_in_whose_midst_others_compute_is_one_row_of_graphs(
    kind: type[Inside], depth: int, family: str, provider: EngineProvider, graphs: HostGraphs
) -> None:
    model = tiny.model(family, depth=depth)
    fast, module = accelerated(provider, model)
    there = kind()
    wanted = tiny.sample(there.put_into(model), family, steps=STEPS)
    assert distance(wanted, tiny.sample(model, family, steps=STEPS)) > 1e-3
    parts, inner = graphs.parts, graphs.parts.inner
    for _ in range(3):
        here, replays = kind(), parts.replays + inner.replays
        assert distance(tiny.sample(here.put_into(fast), family, steps=STEPS), wanted) < 1e-5
        assert here.told == there.told
        assert all(torch.equal(kept, copy) for kept, copy in here.kept), "what they keep stays as it is"
    groups = len(_groups(model))
    # Attentions that are called out of blocks have engines, and graphs, of their own.
    on_engines, total = share_of(module)
    assert on_engines == total
    assert parts.replays + inner.replays - replays == STEPS * (total - depth * groups + groups)
    assert bool(inner.replays) == (kind is Tiles)


def test_steps_with_and_without_others_in_the_midst_take_turns(provider: EngineProvider, graphs: HostGraphs) -> None:
    model = tiny.model(depth=2)
    fast, _ = accelerated(provider, model)

    def inside() -> Inside:
        made = Inside()
        made.is_on = lambda call: call % 3 == 0
        return made

    for size in (64, 64, 96, 64, 96):
        there, here = inside(), inside()
        wanted = tiny.sample(there.put_into(model), steps=2 * STEPS, size=size)
        assert distance(tiny.sample(here.put_into(fast), steps=2 * STEPS, size=size), wanted) < 1e-5
        assert here.told == there.told
    assert distance(wanted, tiny.sample(model, steps=2 * STEPS, size=96)) > 1e-3


def test_other_functions_at_the_same_places_are_the_ones_that_are_called(
    provider: EngineProvider, graphs: HostGraphs
) -> None:
    model = tiny.model(depth=2)
    fast, _ = accelerated(provider, model)

    def scaled(patcher: Any, factor: float, block: int | None = None) -> Any:
        clone = patcher.clone()
        clone.set_model_attn2_replace(lambda q, k, v, options: factor * q, "middle", 0, block)
        return watched(clone, Watching())

    for factor, block in ((0.5, None), (0.5, None), (2.0, None), (2.0, 1), (2.0, 1), (3.0, 0), (0.5, None)):
        wanted = tiny.sample(scaled(model, factor, block), steps=STEPS)
        assert distance(tiny.sample(scaled(fast, factor, block), steps=STEPS), wanted) < 1e-5
    assert graphs.parts.replays


@pytest.mark.parametrize("error", [ValueError("mine"), torch.OutOfMemoryError("full")])
def test_what_a_function_raises_between_graphs_ends_what_it_would_end(
    error: BaseException, provider: EngineProvider, graphs: HostGraphs
) -> None:
    model = tiny.model(depth=2)
    fast, _ = accelerated(provider, model)
    for _ in range(2):
        tiny.sample(Inside().put_into(fast), steps=STEPS)
    here, replays = Inside(), graphs.parts.replays
    here.error = (40, error)
    with pytest.raises(type(error), match=str(error)):
        tiny.sample(here.put_into(fast), steps=STEPS)
        assert isinstance(error, torch.OutOfMemoryError), "of which the picture goes on without a graph"
        raise error
    assert graphs.parts.replays > replays
    there, here = Inside(), Inside()
    wanted = tiny.sample(there.put_into(model), steps=STEPS)
    assert distance(tiny.sample(here.put_into(fast), steps=STEPS), wanted) < 1e-5 and here.told == there.told


def test_a_group_in_which_others_do_more_is_left_to_its_blocks(provider: EngineProvider, graphs: HostGraphs) -> None:
    model = tiny.model(depth=2)
    fast, module = accelerated(provider, model)

    def more(patcher: Any) -> Any:
        clone = Inside().put_into(patcher)
        clone.set_model_attn1_patch(lambda q, k, v, options: (0.5 * q, k, v))
        patches = clone.model_options["transformer_options"]["patches"]
        patches["attn1_patch"] = (*patches["attn1_patch"],)  # no list, which blocks take as well
        return clone

    def less(patcher: Any) -> Any:
        return Inside().put_into(patcher)

    for change in (less, less, more, more, less, more):
        wanted = tiny.sample(change(model), steps=STEPS)
        assert distance(tiny.sample(change(fast), steps=STEPS), wanted) < 1e-5
    on_engines, total = share_of(module)
    assert 0 < on_engines < total


def test_an_override_of_attention_is_not_passed_over_by_a_groups_graph(
    provider: EngineProvider, graphs: HostGraphs
) -> None:
    model = tiny.model(depth=2)
    fast, _ = accelerated(provider, model)
    for _ in range(2):
        tiny.sample(patched(fast, "skips"), steps=STEPS)
    assert graphs.parts.replays
    wanted = tiny.sample(patched(patched(model, "skips"), "attention function"), steps=STEPS)
    found = tiny.sample(patched(patched(fast, "skips"), "attention function"), steps=STEPS)
    assert distance(found, wanted) < 1e-5 < 1e-3 < distance(wanted, tiny.sample(patched(model, "skips"), steps=STEPS))


@pytest.mark.parametrize("what", ["a hook", "its own norm"])
def test_a_group_that_others_changed_is_left_to_its_blocks(
    what: str, provider: EngineProvider, graphs: HostGraphs
) -> None:
    model = tiny.model(depth=2)
    fast, module = accelerated(provider, model)
    for _ in range(2):
        tiny.sample(patched(fast, "skips"), steps=STEPS)
    group = _groups(model)[0]
    usual = tiny.sample(patched(model, "skips"), steps=STEPS)
    if what == "a hook":
        handle = group.proj_in.register_forward_hook(lambda layer, args, out: 0.5 * out)
    else:
        group.norm.forward = lambda x: 0.5 * type(group.norm).forward(group.norm, x)
    found, wanted = tiny.sample(patched(fast, "skips"), steps=STEPS), tiny.sample(patched(model, "skips"), steps=STEPS)
    if what == "a hook":
        handle.remove()
    else:
        del group.norm.forward
    assert distance(found, wanted) < 1e-5 < 1e-4 < distance(wanted, usual)
    on_engines, total = share_of(module)
    assert on_engines == total
    assert distance(tiny.sample(patched(fast, "skips"), steps=STEPS), usual) < 1e-5


def by_single_blocks(model: Any) -> None:
    """Change each layer around blocks, so that no graph holds several."""
    for group in _groups(model):
        group.proj_in.register_forward_hook(lambda layer, args, out: 0.5 * out)


def behind_attention(patcher: Any, calls: list[int]) -> Any:
    """A clone with a function in the midst of all transformer blocks, which does else in each of its calls."""
    clone = patcher.clone()

    def behind(n: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        calls.append(1)
        return n * (0.5 + 0.001 * len(calls))

    clone.set_model_attn1_output_patch(behind)
    return clone


@pytest.mark.parametrize("failing", ["replayed", "run"])
def test_a_blocks_graph_that_fails_behind_a_function_calls_it_no_second_time(
    failing: str, provider: EngineProvider, graphs: HostGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.model()
    by_single_blocks(model)
    fast, _ = accelerated(provider, model)
    theirs: list[int] = []
    wanted = tiny.sample(behind_attention(model, theirs), steps=STEPS)
    original, failed = getattr(HostGraphs, failing), []

    def fail(self: HostGraphs, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        if self is graphs.parts and found is not None and (kwargs.get("outside") or args[-1]) and not failed:
            failed.append(1)
            raise CaptureError("launching a graph")
        return found

    monkeypatch.setattr(HostGraphs, failing, fail)
    for _ in range(3):
        calls: list[int] = []
        assert distance(tiny.sample(behind_attention(fast, calls), steps=STEPS), wanted) < 1e-5
        assert calls == theirs
    assert failed and graphs.parts.replays


def test_memory_that_runs_out_while_a_blocks_graph_is_compared_puts_it_off(
    provider: EngineProvider, graphs: HostGraphs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "slipstream")
    model = tiny.model()
    by_single_blocks(model)
    fast, _ = accelerated(provider, model)
    original, failed = HostGraphs.run, []

    def run(self: HostGraphs, *args: Any, **kwargs: Any) -> Any:
        def full(*_: Any) -> torch.Tensor:
            failed.append(1)
            raise AttentionFailed(torch.OutOfMemoryError("CUDA out of memory"))

        if kwargs.get("outside") and not failed:
            kwargs["outside"] = full
        return original(self, *args, **kwargs)

    monkeypatch.setattr(HostGraphs, "run", run)
    for _ in range(3):
        wanted = tiny.sample(behind_attention(model, []), steps=STEPS)
        assert distance(tiny.sample(behind_attention(fast, []), steps=STEPS), wanted) < 1e-5
    assert failed and graphs.parts.replays and "not replayed" not in caplog.text


def test_a_blocks_graph_is_compared_in_two_calls(provider: EngineProvider, graphs: HostGraphs) -> None:
    model = tiny.model()
    by_single_blocks(model)
    fast, module = accelerated(provider, model)
    wanted = tiny.sample(behind_attention(model, []), steps=STEPS)
    graphs.parts.factor, graphs.parts.right = (
        1.1,
        1,
    )  # of its first replays: as where a graph holds nothing, and what it gives lies there already
    assert distance(tiny.sample(behind_attention(fast, []), steps=STEPS), wanted) < 1e-5
    on_engines, total = share_of(module)
    assert on_engines == total and graphs.parts.replays == 2 * total


def test_what_a_groups_graph_gives_lies_as_the_group_gives_it(provider: EngineProvider, graphs: HostGraphs) -> None:
    """Other nodes' functions may look at it in another shape."""
    model = tiny.model(depth=2)
    fast, _ = accelerated(provider, model)

    def flat(patcher: Any) -> Any:
        clone = patcher.clone()
        clone.set_model_input_block_patch(lambda h, options: (1.1 * h.view(h.shape[0], -1)).view(h.shape))
        return clone

    wanted = tiny.sample(flat(model), steps=STEPS)
    for _ in range(2):
        assert distance(tiny.sample(flat(fast), steps=STEPS), wanted) < 1e-5
    assert graphs.parts.replays


def test_a_comparison_that_fails_counts_no_block_twice(
    provider: EngineProvider, graphs: HostGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slipstream.hosts.comfy.block_calls import graphed_network

    def fail(*_: Any) -> float:
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(graphed_network, "relative_error", fail)
    fast, module = accelerated(provider, tiny.model(depth=2))
    before = module.status.to_json()
    tiny.sample(watched(fast, Watching()), steps=STEPS)
    counted = module.status.since(before)
    assert graphs.parts.captures and counted["blocks"] == STEPS * share_of(module)[1]


def _groups(model: Any) -> list[Any]:
    return [layer for layer in model.model.diffusion_model.modules() if isinstance(layer, SpatialTransformer)]


def test_weights_that_moved_in_the_midst_of_a_picture_may_go(provider: EngineProvider, graphs: HostGraphs) -> None:
    model = tiny.model()
    fast, _ = accelerated(provider, model)
    moved: list[Any] = []

    def exchange(step: int, *_: Any) -> None:
        if step == 6:
            moved.extend(weakref.ref(each.weight) for each in _attentions(model))
            for each in _attentions(model):
                each.weight = torch.nn.Parameter(each.weight.detach().clone(), requires_grad=False)
        elif step == 8:
            gc.collect()
            moved.append(sum(known() is not None for known in moved))

    found = tiny.sample(patched(fast, "skips"), steps=STEPS + 1, callback=exchange)
    assert distance(found, tiny.sample(patched(model, "skips"), steps=STEPS + 1)) < 1e-5
    assert graphs.parts.replays and len(moved) > 2 and moved[-1] == 0


def _attentions(model: Any) -> list[Any]:
    return [layer for name, layer in model.model.diffusion_model.named_modules() if name.endswith("attn1.to_q")]


@pytest.mark.parametrize("error", [CaptureError("no"), torch.OutOfMemoryError("no"), RuntimeError("no")], ids=repr)
def test_a_blocks_capture_that_fails_leaves_it_to_its_engine(
    error: Exception, provider: EngineProvider, graphs: HostGraphs
) -> None:
    model = tiny.model()
    fast, module = accelerated(provider, model)
    graphs.parts.error = error
    wanted = tiny.sample(patched(model, "skips"), steps=STEPS)
    for _ in range(2):
        assert distance(tiny.sample(patched(fast, "skips"), steps=STEPS), wanted) < 1e-5
        on_engines, total = share_of(module)
        assert on_engines == total and not graphs.parts.replays


def test_a_model_that_was_changed_is_not_answered_by_its_graph(
    provider: EngineProvider, graphs: HostGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.model()
    fast, _ = accelerated(provider, model)
    usual = tiny.sample(fast, steps=STEPS)
    captures, replays = graphs.captures, graphs.replays
    with monkeypatch.context() as changed:
        norm = model.model.diffusion_model.out[0]
        forward = norm.forward
        changed.setattr(norm, "forward", lambda *args, **kwargs: 0.5 * forward(*args, **kwargs))
        found, wanted = tiny.sample(fast, steps=STEPS), tiny.sample(model, steps=STEPS)
    assert distance(found, wanted) < 1e-5 < 1e-3 < distance(wanted, usual)
    assert captures and graphs.replays == replays
    assert distance(tiny.sample(fast, steps=STEPS), usual) < 1e-5
    assert graphs.captures == captures and graphs.replays == replays + STEPS


def test_a_wrapper_inside_of_the_network_is_not_passed_over(provider: EngineProvider, graphs: HostGraphs) -> None:
    from comfy.patcher_extension import WrappersMP

    model = tiny.model()
    fast, _ = accelerated(provider, model)
    tiny.sample(fast, steps=STEPS)
    before = graphs.replays

    def wrapped(patcher: Any) -> Any:
        clone = patcher.clone()
        clone.add_wrapper_with_key(
            WrappersMP.DIFFUSION_MODEL, "other", lambda executor, *args, **kwargs: 0.5 * executor(*args, **kwargs)
        )
        return clone

    found, wanted = tiny.sample(wrapped(fast), steps=STEPS), tiny.sample(wrapped(model), steps=STEPS)
    assert distance(found, wanted) < 1e-5 < 1e-3 < distance(wanted, tiny.sample(model, steps=STEPS))
    assert before


def test_weights_exchanged_in_the_midst_of_a_picture_reach_it(provider: EngineProvider, graphs: HostGraphs) -> None:
    model = tiny.model()
    fast, _ = accelerated(provider, model)
    tiny.sample(fast, steps=STEPS)
    layer = model.model.diffusion_model.time_embed[0]
    own = layer.weight

    def sampled(patcher: Any) -> torch.Tensor:
        def exchange(step: int, *_: Any) -> None:
            if step == 5:
                layer.weight = torch.nn.Parameter(5 * own, requires_grad=False)

        try:
            return tiny.sample(patcher, steps=STEPS, callback=exchange)
        finally:
            layer.weight = own

    before = graphs.replays
    found, wanted = sampled(fast), sampled(model)
    assert distance(found, wanted) < 1e-5 < 1e-3 < distance(wanted, tiny.sample(model, steps=STEPS))
    assert 0 < graphs.replays - before < STEPS


def test_a_graph_that_is_wrong_is_not_used(
    provider: EngineProvider, graphs: HostGraphs, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny.model()
    fast, module = accelerated(provider, model)
    graphs.factor = 1.1
    wanted = tiny.sample(model, steps=STEPS)
    for _ in range(2):
        assert distance(tiny.sample(fast, steps=STEPS), wanted) < 1e-5
    assert (graphs.captures, graphs.replays) == (1, 1) and "differs from the blocks" in caplog.text
    assert module.status.block_calls >= 2 * STEPS - 2


@pytest.mark.parametrize("error", [CaptureError("no"), torch.OutOfMemoryError("no"), RuntimeError("no")], ids=repr)
def test_a_capture_that_fails_leaves_the_picture_to_blocks(
    error: Exception, provider: EngineProvider, graphs: HostGraphs
) -> None:
    model = tiny.model()
    fast, module = accelerated(provider, model)
    graphs.error = error
    wanted = tiny.sample(model, steps=STEPS)
    for _ in range(2):
        assert distance(tiny.sample(fast, steps=STEPS), wanted) < 1e-5
        graphs.error = AssertionError("captured once more")
    assert module.status.block_calls >= 2 * STEPS - 2 and not graphs.replays


def test_an_interruption_in_a_capture_ends_the_picture(provider: EngineProvider, graphs: HostGraphs) -> None:
    model = tiny.model()
    fast, _ = accelerated(provider, model)
    graphs.error = comfy.model_management.InterruptProcessingException()
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        tiny.sample(fast, steps=STEPS)
    graphs.error = None
    assert distance(tiny.sample(fast, steps=STEPS), tiny.sample(model, steps=STEPS)) < 1e-5


def test_no_graph_is_made_where_memory_is_short(
    provider: EngineProvider, graphs: HostGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.model()
    fast, module = accelerated(provider, model)
    from slipstream.hosts.comfy.block_calls import graphed_network

    monkeypatch.setattr(graphed_network, "leaves_memory", lambda device: False)
    assert distance(tiny.sample(fast, steps=STEPS), tiny.sample(model, steps=STEPS)) < 1e-5
    assert module.status.block_calls and not graphs.captures


def test_memory_that_runs_out_beside_a_graph_ends_the_graph_alone(
    provider: EngineProvider, graphs: HostGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.model()
    fast, module = accelerated(provider, model)
    tiny.sample(fast, steps=3)
    wanted = tiny.sample(model, steps=STEPS)
    with monkeypatch.context() as patch:
        patch.setattr(BlockCalls, "once", _failing_once(graphs))
        assert distance(tiny.sample(fast, steps=STEPS), wanted) < 1e-5
    assert (graphs.captures, graphs.replays) == (1, 1) and module.status.eager_calls <= 2


def _failing_once(graphs: HostGraphs) -> Any:
    computing, failed = BlockCalls.once, []

    def failing(self: Any, *args: Any) -> Any:
        if graphs.captures and not failed:
            failed.append(True)
            raise torch.OutOfMemoryError("no")
        return computing(self, *args)

    return failing


def test_calls_that_alternate_keep_their_graphs(provider: EngineProvider, graphs: HostGraphs) -> None:
    """Prompts of unequal lengths are computed one after the other, by engines for one sample each."""
    model = tiny.model()
    fast, module = accelerated(provider, model)
    prompts = {"positive": tiny.conditioning(tokens=77), "negative": tiny.conditioning(seed=2, tokens=385)}
    wanted = tiny.sample(model, steps=STEPS, **prompts)
    for _ in range(2):
        assert distance(tiny.sample(fast, steps=STEPS, **prompts), wanted) < 1e-5
    assert graphs.captures == 2 and graphs.replays > 2 * STEPS, module.status.to_json()


def test_another_thread_gets_no_graph(provider: EngineProvider, graphs: HostGraphs) -> None:
    model = tiny.model()
    fast, module = accelerated(provider, model)
    wanted = tiny.sample(model, steps=STEPS)
    tiny.sample(fast, steps=STEPS)
    before = graphs.replays
    (kept,) = provider.pool.networks._kept.values()
    with ThreadPoolExecutor(1) as other:  # which replays
        other.submit(kept.lock.acquire).result()
        assert distance(tiny.sample(fast, steps=STEPS), wanted) < 1e-5
        provider.pool.networks.drop(model.model.diffusion_model)
        other.submit(kept.lock.release).result()
    assert graphs.replays == before and module.status.block_calls > STEPS
    assert distance(tiny.sample(fast, steps=STEPS), wanted) < 1e-5 and graphs.replays == before + STEPS


def test_graphs_give_way_while_their_model_is_loaded(provider: EngineProvider, graphs: HostGraphs) -> None:
    model = tiny.model()
    fast, _ = accelerated(provider, model)
    tiny.sample(fast, steps=STEPS)
    networks, found = provider.pool.networks, []
    load = comfy.model_management.load_models_gpu

    def loading(*args: Any, **kwargs: Any) -> Any:
        found.append(bool(networks._running))
        return load(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comfy.model_management, "load_models_gpu", loading)
        tiny.sample(fast, steps=STEPS, callback=lambda *_: found.append(bool(networks._running)))
    assert found[0] is False and found[-1] is True and not networks._running


def test_captures_that_do_not_repay_are_made_ever_more_seldom(provider: EngineProvider, graphs: HostGraphs) -> None:
    """Weights that move with each picture void its graph."""
    model = tiny.model()
    fast, _ = accelerated(provider, model)
    captures = []
    for _ in range(6):
        for layer in model.model.diffusion_model.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.weight = torch.nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
        before = graphs.captures
        assert distance(tiny.sample(fast, steps=STEPS), tiny.sample(model, steps=STEPS)) < 1e-5
        captures.append(graphs.captures - before)
    assert captures == [1, 1, 1, 1, 0, 1] and graphs.replays


def test_weights_that_comfyui_stages_are_used_where_they_lie(
    tmp_path: Any, graphs: HostGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dynamic VRAM; where pages cannot be held there is no graph."""
    kind = staging.switch_on(monkeypatch)
    model = tiny.model()
    comfy.model_management.archive_model_dtypes(model.model)
    patcher = kind(model.model, staging.DEVICE, torch.device("cpu"))
    with quick_block_provider(EngineStore(tmp_path)) as provider:
        provider.pool.networks = HostNetworks()
        fast, module = accelerated(provider, patcher)
        wanted = tiny.sample(patcher, steps=STEPS)
        for _ in range(2):
            assert distance(tiny.sample(fast, steps=STEPS), wanted) < 1e-5
        assert graphs.captures == 1 and graphs.replays >= STEPS, module.status.to_json()
        before = graphs.replays
        with monkeypatch.context() as short_of_memory:
            short_of_memory.setattr(dynamic_vram, "hold", lambda patcher: None)
            assert distance(tiny.sample(fast, steps=STEPS), wanted) < 1e-5
        assert graphs.replays == before
        patcher.model.dynamic_vbars[patcher.load_device].take_away()
        assert distance(tiny.sample(fast, steps=STEPS), wanted) < 1e-5
        assert graphs.replays > before


# ------------------------------------------------------------------------------------- features in channels last


@pytest.mark.parametrize("size", [(8, 8), (5, 7)], ids=str)
@pytest.mark.parametrize("by_linear", [True, False])
def test_transformers_of_the_copy_compute_in_channels_last(by_linear: bool, size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    layer = SpatialTransformer(64, 4, 16, 2, context_dim=32, use_linear=by_linear, operations=torch.nn)
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    text, features = torch.randn(2, 9, 32), torch.randn(2, 64, *size) * 3 + 5
    with torch.no_grad():
        wanted = layer(features, text, {})
        for given in (features, features.contiguous(memory_format=torch.channels_last)):
            found = in_channels_last(layer)(given, text, {})
            assert found.is_contiguous(memory_format=torch.channels_last)
            assert distance(found, wanted) < 1e-5 and distance(found, given) > 0.1
        several = transformed(layer, features, [text, text.flip(1) * 2], {})
        assert torch.allclose(several, layer(features, [text, text.flip(1) * 2], {}), rtol=1e-4, atol=1e-4)
