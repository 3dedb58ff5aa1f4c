"""Engines of both backends: they compute what the model computes, with the weights they were given, or say why not."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from slipstream.compile_backend.layouts import LaidOutWeights
from slipstream.core.errors import IncompatibleEngine, ShapeOutsideProfile
from slipstream.core.protocols import Engine
from slipstream.tests.tensors import distance
from slipstream.tests.unit.compile_backend.support import (
    OUTPUTS,
    SHAPES,
    UNUSED,
    Built,
    assert_right,
    eager,
    make_inputs,
    make_weights,
    used_names,
)

INPUTS = make_inputs()


# -------------------------------------------------------------------------------------------------- right


@pytest.mark.parametrize("seed", range(3))
def test_it_computes_what_the_model_computes(engine: Engine, seed: int) -> None:
    weights, inputs = make_weights(seed), make_inputs(seed)
    engine.update_weights(weights)
    assert_right(engine(**inputs), weights, inputs)


@pytest.mark.parametrize("name", used_names())
def test_every_single_tensor_can_be_changed(engine: Engine, name: str) -> None:
    weights = make_weights()
    engine.update_weights(weights)
    before = engine(**INPUTS)
    weights[name] = make_weights(9)[name]
    engine.update_weights(weights)
    assert_right(engine(**INPUTS), weights, INPUTS)
    assert any(distance(engine(**INPUTS)[output], before[output]) > 1e-3 for output in OUTPUTS)


@pytest.mark.parametrize("name", SHAPES)
def test_every_input_reaches_it_whatever_their_order(engine: Engine, name: str) -> None:
    weights = make_weights()
    engine.update_weights(weights)
    inputs = {**INPUTS, name: INPUTS[name] * 0.5}
    assert_right(engine(**dict(reversed(inputs.items()))), weights, inputs)


def test_what_the_program_does_not_read_need_not_be_there(engine: Engine) -> None:
    weights = make_weights()
    del weights[UNUSED]
    engine.update_weights(weights)
    assert_right(engine(**INPUTS), weights, INPUTS)


def test_more_weights_than_it_needs_are_fine(engine: Engine) -> None:
    weights = make_weights()
    engine.update_weights({**weights, "lifted_tensor_0": torch.zeros(4), "other": torch.zeros(1)})
    assert_right(engine(**INPUTS), weights, INPUTS)


def test_weights_that_want_gradients(engine: Engine) -> None:
    weights = {name: torch.nn.Parameter(tensor) for name, tensor in make_weights().items()}
    engine.update_weights(weights)
    found = engine(**INPUTS)
    assert_right(found, weights, INPUTS)
    assert not any(tensor.requires_grad for tensor in found.values())


def test_two_engines_of_one_artifact_are_independent(built: Built, engine: Engine) -> None:
    other = built.load()
    weights, others = make_weights(1), make_weights(2)
    engine.update_weights(weights)
    other.update_weights(others)
    assert_right(engine(**INPUTS), weights, INPUTS)
    assert_right(other(**INPUTS), others, INPUTS)
    other.close()
    assert_right(engine(**INPUTS), weights, INPUTS)


def test_engines_run_on_several_threads(built: Built) -> None:
    problems: list[BaseException] = []

    def use(seed: int) -> None:
        try:
            own, weights = built.load(), make_weights(seed)
            own.update_weights(weights)
            for step in range(5):
                assert_right(own(**make_inputs(step)), weights, make_inputs(step))
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


def test_hosts_that_work_in_inference_mode(engine: Engine) -> None:
    with torch.inference_mode():
        weights, inputs = make_weights(4), make_inputs(4)
        engine.update_weights(weights)
        found = engine(**inputs)
    assert_right(found, weights, inputs)
    engine.update_weights(make_weights(5))
    assert_right(engine(**INPUTS), make_weights(5), INPUTS)


# ------------------------------------------------------------------------------------------------ strides


@pytest.mark.parametrize("name", ["conv.weight", "pointwise.weight", "out.weight"])
def test_channels_last_weights(engine: Engine, name: str) -> None:
    weights = make_weights()
    weights[name] = weights[name].to(memory_format=torch.channels_last)
    engine.update_weights(weights)
    assert_right(engine(**INPUTS), weights, INPUTS)


def test_transposed_and_sliced_weights(engine: Engine) -> None:
    weights = make_weights()
    weights["linear.weight"] = weights["linear.weight"].t().contiguous().t()
    weights["linear.bias"] = torch.stack([weights["linear.bias"]] * 3, 1)[:, 1]
    weights["table"] = torch.cat([torch.zeros(7), weights["table"]])[7:]
    engine.update_weights(weights)
    assert_right(engine(**INPUTS), weights, INPUTS)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "channels_last": lambda x: x.to(memory_format=torch.channels_last) if x.dim() == 4 else x,
    "every second": lambda x: torch.stack([x, x + 1], -1)[..., 0],
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "at an odd address": lambda x: torch.cat([torch.zeros(1), x.flatten()])[1:].view(x.shape),
    "part of a batch": lambda x: torch.cat([x + 1, x])[len(x) :],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_inputs_in_any_layout(engine: Engine, layout: str) -> None:
    weights = make_weights()
    engine.update_weights(weights)
    inputs = {name: LAYOUTS[layout](tensor) for name, tensor in INPUTS.items()}
    assert any(tensor.stride() != INPUTS[name].stride() or tensor.storage_offset() for name, tensor in inputs.items())
    assert_right(engine(**inputs), weights, inputs)


def test_expanded_inputs(engine: Engine) -> None:
    weights = make_weights()
    engine.update_weights(weights)
    inputs = {**INPUTS, "context": INPUTS["context"][:1].expand(2, -1, -1), "timesteps": torch.tensor(5.0).expand(2)}
    assert_right(engine(**inputs), weights, inputs)


# ------------------------------------------------------------------------------------------------ refused


def _inputs(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    return {**INPUTS, **changes}


WRONG_INPUTS = {
    "larger": (_inputs(x=torch.ones(2, 4, 24, 24)), "X is 2×4×24×24, the engine takes 2×4×16×16"),
    "smaller": (_inputs(x=torch.ones(2, 4, 8, 8)), "X is 2×4×8×8"),
    "one of a batch": (_inputs(timesteps=torch.ones(1)), "Timesteps is 1, the engine takes 2"),
    "fewer axes": (_inputs(x=torch.ones(4, 16, 16)), "X has 3 axes"),
    "transposed shape": (_inputs(x=torch.ones(2, 16, 4, 16)), "X is 2×16×4×16"),
    "half": (_inputs(x=INPUTS["x"].half()), "x is torch.float16 on cpu, the engine takes torch.float32"),
    "double": (_inputs(context=INPUTS["context"].double()), "context is torch.float64"),
    "whole numbers": (_inputs(timesteps=torch.ones(2, dtype=torch.int64)), "timesteps is torch.int64"),
    "meta": (_inputs(x=INPUTS["x"].to("meta")), "x is torch.float32 on meta"),
    "unknown": (_inputs(y=torch.ones(2)), "Inputs are "),
    "missing": ({name: tensor for name, tensor in INPUTS.items() if name != "hint"}, "Inputs are "),
    "none": ({}, "Inputs are "),
}


@pytest.mark.parametrize("case", WRONG_INPUTS)
def test_inputs_it_was_not_built_for(engine: Engine, case: str) -> None:
    inputs, words = WRONG_INPUTS[case]
    weights = make_weights()
    engine.update_weights(weights)
    with pytest.raises(ShapeOutsideProfile, match=words.replace(".", r"\.")):
        engine(**inputs)
    assert_right(engine(**INPUTS), weights, INPUTS)


WRONG_WEIGHTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "half": lambda tensor: tensor.half(),
    "double": lambda tensor: tensor.double(),
    "meta": lambda tensor: tensor.to("meta"),
    "flat": lambda tensor: tensor.flatten(),
    "longer": lambda tensor: torch.cat([tensor, tensor]),
    "scalar": lambda tensor: torch.tensor(1.0),
}


@pytest.mark.parametrize("case", WRONG_WEIGHTS)
def test_weights_it_was_not_built_for(engine: Engine, case: str) -> None:
    weights = make_weights()
    weights["out.weight"] = WRONG_WEIGHTS[case](weights["out.weight"])
    with pytest.raises(IncompatibleEngine, match=r"'out\.weight'"):
        engine.update_weights(weights)


@pytest.mark.parametrize("name", ["gain", "out.bias", "hidden"])
def test_a_missing_weight_is_named(engine: Engine, name: str) -> None:
    weights = make_weights()
    del weights[name]
    with pytest.raises(IncompatibleEngine, match=f"'{name}'"):
        engine.update_weights(weights)


def test_refused_weights_leave_none(engine: Engine) -> None:
    """Those of the model before must not serve for this one."""
    engine.update_weights(make_weights())
    with pytest.raises(IncompatibleEngine):
        engine.update_weights({})
    with pytest.raises(IncompatibleEngine, match="no weights"):
        engine(**INPUTS)


# ------------------------------------------------------------------------------------------------ life


def test_without_weights_it_does_not_compute(engine: Engine) -> None:
    with pytest.raises(IncompatibleEngine, match="no weights"):
        engine(**INPUTS)
    engine.update_weights(make_weights())
    engine(**INPUTS)
    engine.release_weights()
    engine.release_weights()
    with pytest.raises(IncompatibleEngine, match="no weights"):
        engine(**INPUTS)
    engine.update_weights(make_weights(1))
    assert_right(engine(**INPUTS), make_weights(1), INPUTS)


def test_closed_it_does_nothing(built: Built) -> None:
    engine = built.load()
    engine.update_weights(make_weights())
    engine.close()
    engine.close()
    engine.release_weights()
    with pytest.raises(IncompatibleEngine, match="was closed"):
        engine(**INPUTS)
    with pytest.raises(IncompatibleEngine, match="was closed"):
        engine.update_weights(make_weights())


def test_closing_one_that_never_had_weights(built: Built) -> None:
    built.load().close()


def test_outputs_are_fresh(engine: Engine) -> None:
    weights = make_weights()
    engine.update_weights(weights)
    first = engine(**INPUTS)
    kept = {name: tensor.clone() for name, tensor in first.items()}
    second = engine(**make_inputs(1))
    assert all(torch.equal(first[name], kept[name]) for name in OUTPUTS)
    for tensor in first.values():
        tensor.zero_()
    assert_right(second, weights, make_inputs(1))
    assert_right(engine(**INPUTS), weights, INPUTS)


def test_inputs_are_left_alone(engine: Engine) -> None:
    engine.update_weights(make_weights())
    inputs = make_inputs(2)
    engine(**inputs)
    assert all(torch.equal(tensor, make_inputs(2)[name]) for name, tensor in inputs.items())


def test_weights_are_kept_alive(engine: Engine) -> None:
    weights = make_weights(3)
    weights["conv.weight"] = weights["conv.weight"].to(memory_format=torch.channels_last)
    wanted = eager(weights, INPUTS)
    engine.update_weights(weights)
    del weights
    gc.collect()
    litter = [torch.full((n,), float("nan")) for n in (16, 64, 128, 256, 576, 4096)] * 50
    found = engine(**INPUTS)
    assert all(distance(found[name], wanted[name]) < 1e-5 for name in OUTPUTS)
    del litter


def test_released_weights_are_let_go(engine: Engine) -> None:
    """A host that unloads its model gets the memory back, though the engine stays loaded."""
    weights = make_weights(3)
    storages = [weakref.ref(tensor.untyped_storage()) for tensor in weights.values()]
    engine.update_weights(weights)
    engine(**INPUTS)
    del weights
    engine.release_weights()
    gc.collect()
    assert [storage() for storage in storages if storage() is not None] == []


def test_weights_of_a_hand_over_that_failed_are_let_go(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no")

    weights = make_weights(3)
    storages = [weakref.ref(tensor.untyped_storage()) for tensor in weights.values()]
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="no"):
        patched.setattr(LaidOutWeights, "write", fails)
        engine.update_weights(weights)
    engine.release_weights()
    with pytest.raises(IncompatibleEngine, match="no weights"):
        engine(**INPUTS)
    del weights
    gc.collect()
    assert [storage() for storage in storages if storage() is not None] == []
    engine.update_weights(make_weights(4))
    assert_right(engine(**INPUTS), make_weights(4), INPUTS)


def test_replaced_weights_are_let_go(engine: Engine) -> None:
    weights = make_weights(3)
    storage = weakref.ref(weights["out.weight"].untyped_storage())
    engine.update_weights(weights)
    del weights
    engine.update_weights(make_weights(4))
    gc.collect()
    assert storage() is None


def test_weights_are_not_copied_where_their_layout_is_right(engine: Engine) -> None:
    """So that gigabytes are not there twice; and what is written into them takes effect."""
    weights = make_weights()
    engine.update_weights(weights)
    assert engine.device_bytes < 100, "constants only"
    for tensor in weights.values():
        tensor.mul_(0.5)
    assert_right(engine(**INPUTS), weights, INPUTS)


def test_copies_are_counted(engine: Engine) -> None:
    engine.update_weights(make_weights())
    own = engine.device_bytes
    weights = make_weights()
    weights["conv.weight"] = weights["conv.weight"].to(memory_format=torch.channels_last)
    engine.update_weights(weights)
    assert engine.device_bytes == own + weights["conv.weight"].nbytes
    engine.release_weights()
    assert engine.device_bytes == own + weights["conv.weight"].nbytes, (
        "the copy is kept, where it lies, for the next run"
    )
    engine.update_weights(make_weights())
    assert engine.device_bytes == own


def test_weights_that_lie_where_they_lay_are_not_handed_over_again(packaged: Built) -> None:
    engine, weights = packaged.load(), make_weights()
    weights["conv.weight"] = weights["conv.weight"].to(memory_format=torch.channels_last)
    supply, supplied = engine._supply, []
    engine._supply = lambda given: supplied.append(1) or supply(given)
    for _ in range(3):
        engine.update_weights({name: tensor.detach() for name, tensor in weights.items()})
        assert_right(engine(**INPUTS), weights, INPUTS)
        engine.release_weights()
        for tensor in weights.values():
            tensor.mul_(0.7)
    assert supplied == [1]


def test_weights_that_became_others_behind_the_same_names(engine: Engine) -> None:
    """As hosts do it: a parameter's data is exchanged, or looked at in another way."""
    weights = {name: torch.nn.Parameter(tensor, requires_grad=False) for name, tensor in make_weights().items()}
    changes: list[Callable[[], None]] = [
        lambda: None,
        lambda: setattr(weights["linear.weight"], "data", weights["linear.weight"].data * 2),
        lambda: setattr(weights["conv.weight"], "data", weights["conv.weight"].data.clone() * 2),
        lambda: setattr(weights["pointwise.weight"], "data", weights["pointwise.weight"].data.transpose(0, 1)),
        lambda: setattr(weights["conv.weight"], "data", weights["conv.weight"].to(memory_format=torch.channels_last)),
        lambda: None,
    ]
    for change in changes:
        change()
        engine.update_weights(weights)
        assert_right(engine(**INPUTS), weights, INPUTS)
        engine.release_weights()


def test_others_at_the_same_address_leave_a_copy_alone_that_is_in_use(built: Built) -> None:
    one, other, weights = built.load(), built.load(), make_weights()
    weights["conv.weight"] = weights["conv.weight"].to(memory_format=torch.channels_last)
    memory = torch.empty(weights["conv.weight"].numel())
    strides = weights["conv.weight"].stride()

    def with_temporary(factor: float) -> dict[str, torch.Tensor]:
        """What a host cast for this run lies in the same place each time."""
        flat = torch.frombuffer(memory.numpy(), dtype=torch.float32)
        place = flat.as_strided(weights["conv.weight"].shape, strides)
        return {**weights, "conv.weight": place.copy_(weights["conv.weight"] * factor)}

    both = with_temporary(1.0)
    for engine in (one, other):
        engine.update_weights(both)
    del both
    other.release_weights()
    other.update_weights(with_temporary(3.0))
    assert_right(other(**INPUTS), with_temporary(3.0), INPUTS)
    assert_right(one(**INPUTS), weights, INPUTS)


def test_generation_tells_whether_weights_moved(engine: Engine) -> None:
    weights = make_weights()
    weights["conv.weight"] = weights["conv.weight"].to(memory_format=torch.channels_last)
    engine.update_weights(weights)
    generation = engine.generation
    engine.release_weights()
    weights["linear.weight"].mul_(2)  # in place, as some LoRA come in
    weights["conv.weight"].mul_(2)
    engine.update_weights(weights)
    assert engine.generation == generation
    assert_right(engine(**INPUTS), weights, INPUTS)
    engine.update_weights({**weights, "linear.weight": weights["linear.weight"].clone()})
    assert engine.generation > generation


def test_a_pointwise_convolution_in_channels_last_is_no_copy(engine: Engine) -> None:
    """Its numbers lie in the same order; only the strides of axes of size 1 differ."""
    weights = make_weights()
    engine.update_weights(weights)
    own = engine.device_bytes
    weights["pointwise.weight"] = weights["pointwise.weight"].to(memory_format=torch.channels_last)
    assert weights["pointwise.weight"].stride() != make_weights()["pointwise.weight"].stride()
    engine.update_weights(weights)
    assert engine.device_bytes == own
    assert_right(engine(**INPUTS), weights, INPUTS)


def test_its_profile_is_what_it_was_built_for(engine: Engine) -> None:
    assert engine.profile.opt == SHAPES and engine.profile.is_static


def test_the_artifact_holds_no_weights(built: Built) -> None:
    files = [Path(built.artifact.directory) / name for name in built.artifact.files]
    assert all(file.is_file() for file in files)
    assert built.artifact.details["nodes"] > 10
