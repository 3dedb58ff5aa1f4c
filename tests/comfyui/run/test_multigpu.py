"""ComfyUI's MultiGPU CFG Split: each GPU computes a part of the calls, by a model and in a thread of its own."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from slipstream.engine_cache import EngineStore
from slipstream.runtime.provider import EngineProvider
from slipstream.tests.comfyui.blocks.quick_blocks import quick_block_provider
from slipstream.tests.comfyui.blocks.test_block_calls import accelerated
from slipstream.tests.comfyui.support.models import tiny
from slipstream.tests.tensors import distance

pytest.importorskip("comfy.multigpu")

STEPS = 6
OTHER = torch.device("cpu", 0)
"""The CPU by another name stands for a second GPU."""


@pytest.fixture(scope="module")
def provider(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProvider]:
    with quick_block_provider(EngineStore(tmp_path_factory.mktemp("blocks"))) as made:
        yield made


def on_two(patcher: Any, calls: Counter[str]) -> Any:
    """The model on two devices; `calls` counts those of each device's network, by the thread's device."""
    clone, other = patcher.clone(), tiny.model()
    other.load_device = OTHER
    other.is_multigpu_base_clone = True
    clone.set_additional_models("multigpu", [other])
    names = {id(clone.model): "first", id(other.model): "second"}

    def counted(executor: Any, *args: Any, **kwargs: Any) -> Any:
        assert threading.current_thread() is not threading.main_thread()
        calls[names[id(executor.class_obj)]] += 1
        return executor(*args, **kwargs)

    from comfy.patcher_extension import WrappersMP

    clone.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "counted", counted)
    return clone


def test_both_parts_are_right_and_the_first_goes_by_engines(provider: EngineProvider) -> None:
    model = tiny.model()
    fast, module = accelerated(provider, model)
    plainly, ours = Counter[str](), Counter[str]()
    wanted = tiny.sample(on_two(model, plainly), steps=STEPS)
    assert distance(wanted, tiny.sample(model, steps=STEPS)) < 1e-5
    for _ in range(2):
        assert distance(tiny.sample(on_two(fast, ours), steps=STEPS), wanted) < 1e-5
    assert plainly == {"first": STEPS, "second": STEPS} and ours == {"first": 2 * STEPS, "second": 2 * STEPS}
    assert module.status.block_calls >= STEPS, module.status.to_json()


def test_a_model_that_is_put_on_another_gpu_goes_by_engines_there(provider: EngineProvider) -> None:
    """As Select Model Device does it behind Accelerate Model: by a clone with a network of its own."""
    model = tiny.model()
    model.cached_patcher_init = (tiny.model, ())
    wanted = tiny.sample(model, steps=STEPS)
    fast, module = accelerated(provider, model)
    assert distance(tiny.sample(fast, steps=STEPS), wanted) < 1e-5
    elsewhere = fast.deepclone_multigpu(new_load_device=OTHER)
    assert elsewhere.model is not fast.model and elsewhere.load_device == OTHER
    for each in (elsewhere, fast):
        tiny.sample(each, steps=STEPS)  # compares
        before = module.status.block_calls
        assert distance(tiny.sample(each, steps=STEPS), wanted) < 1e-5
        assert module.status.block_calls - before >= STEPS - 1, module.status.to_json()
