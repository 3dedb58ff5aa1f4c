"""Engines take over the host's weights: what changed, exactly, or an error."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slipstream.core.errors import IncompatibleEngine
from slipstream.tests.unit.trt_backend.support import Bench, error, make_inputs, make_weights
from slipstream.trt_backend.surgery.weight_map import WeightSource

NEW = ("10.0.1", "10.16.1", "11.4.0", "rtx-1.7.1")


def test_everything_once_and_then_nothing(release: str, tmp_path: Path) -> None:
    bench = Bench(release, tmp_path)
    engine, weights = bench.load(), make_weights()
    engine.update_weights(weights)
    assert sorted(bench.script.set_weights) == sorted(bench.graph.weights)
    before = engine.generation
    bench.script.set_weights.clear()
    engine.update_weights(weights)
    engine.release_weights()
    engine.update_weights({name: tensor.clone() for name, tensor in weights.items()})
    assert not bench.script.set_weights and bench.script.refits == 1
    assert engine.generation == before


@pytest.mark.parametrize("name", ["query.weight", "out.bias", "norm.weight"])
def test_a_lora_changes_one_weight_in_place_and_is_taken_back(release: str, tmp_path: Path, name: str) -> None:
    bench = Bench(release, tmp_path)
    engine, weights, inputs = bench.load(), make_weights(), make_inputs(bench.spec)
    engine.update_weights(weights)
    plain, saved = engine(**inputs)["out"], weights[name].clone()
    before = engine.generation
    for change in (lambda: weights[name].data.mul_(1.5), lambda: weights[name].data.copy_(saved)):
        bench.script.set_weights.clear()
        change()
        engine.update_weights(weights)
        entries = [entry for entry, source in bench.graph.weights.items() if source.name == name]
        assert bench.script.set_weights == entries
        found = engine(**inputs)
        assert error(found, weights, inputs) < 1e-5
    assert torch.equal(found["out"], plain)
    assert engine.generation == before + 2


def test_weights_that_tensorrt_merged_are_given_too(release: str, tmp_path: Path) -> None:
    """A convolution's bias goes with its kernel."""
    bench = Bench(release, tmp_path)
    engine, weights, inputs = bench.load(), make_weights(), make_inputs(bench.spec)
    engine.update_weights(weights)
    bench.script.set_weights.clear()
    weights["conv.weight"].mul_(0.5)
    engine.update_weights(weights)
    assert {bench.graph.weights[entry].name for entry in bench.script.set_weights} == {"conv.weight", "conv.bias"}
    assert error(engine(**inputs), weights, inputs) < 1e-5


def test_another_checkpoint(release: str, tmp_path: Path) -> None:
    bench = Bench(release, tmp_path)
    engine, inputs = bench.load(), make_inputs(bench.spec)
    for seed in (0, 1, 0):
        weights = make_weights(seed=seed)
        engine.update_weights(weights)
        assert error(engine(**inputs), weights, inputs) < 1e-5


def test_weights_that_lie_in_parts_of_larger_tensors(release: str, tmp_path: Path) -> None:
    bench = Bench(release, tmp_path)
    engine, weights, inputs = bench.load(), make_weights(), make_inputs(bench.spec)
    odd = {
        name: torch.cat([tensor.flatten()[:1], tensor.flatten()])[1:].view(tensor.shape)
        for name, tensor in weights.items()
    }
    odd["conv.weight"] = odd["conv.weight"].to(memory_format=torch.channels_last)
    engine.update_weights(odd)
    assert error(engine(**inputs), weights, inputs) < 1e-5


def test_layouts_that_the_graph_wants(tmp_path: Path) -> None:
    """Linear layers are products with the transposed weight, and of a length that 8 divides."""
    bench = Bench("11.4.0", tmp_path)
    assert any(source.permutation or source.padded for source in bench.graph.weights.values()), "the test tests nothing"
    read = bench.signature
    read.save(tmp_path)
    again = type(read).read(tmp_path)
    assert again == read and list(again.inputs) == list(read.inputs)
    engine, weights, inputs = bench.load(signature=again), make_weights(), make_inputs(bench.spec)
    engine.update_weights(weights)
    assert error(engine(**inputs), weights, inputs) < 1e-5


def test_a_failed_refit_leaves_an_engine_that_waits_for_all_weights(release: str, tmp_path: Path) -> None:
    bench = Bench(release, tmp_path)
    engine, weights, inputs = bench.load(), make_weights(), make_inputs(bench.spec)
    engine.update_weights(weights)
    weights["time.bias"].add_(1)
    bench.script.refusals["refit"] = "cudaError 700: an illegal memory access"
    with pytest.raises(IncompatibleEngine, match="could not put the weights into its engine: cudaError 700"):
        engine.update_weights(weights)
    with pytest.raises(IncompatibleEngine, match="no weights"):
        engine(**inputs)
    bench.script.refusals.clear()
    bench.script.set_weights.clear()
    engine.update_weights(weights)
    assert sorted(bench.script.set_weights) == sorted(bench.graph.weights)
    assert error(engine(**inputs), weights, inputs) < 1e-5


def test_an_error_of_an_earlier_refit_is_not_told_again(release: str, tmp_path: Path) -> None:
    bench = Bench(release, tmp_path)
    engine, weights = bench.load(), make_weights()
    for refused in ("the first reason", "the second reason"):
        bench.script.refusals["refit"] = refused
        with pytest.raises(IncompatibleEngine, match=f"into its engine: {refused}$"):
            engine.update_weights(weights)


def test_a_weight_that_is_asked_for_again_and_again(
    release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(release, tmp_path)
    engine, weights, entry = bench.load(), make_weights(), next(iter(bench.graph.weights))
    with monkeypatch.context() as patch:
        patch.setattr(bench.trt.Refitter, "get_missing_weights", lambda refitter: [entry])
        with pytest.raises(IncompatibleEngine, match=f"asks for weight '{entry}', which it was given already; switch"):
            engine.update_weights(weights)
    assert not bench.script.refits
    engine.update_weights(weights)
    assert bench.script.refits == 1


def test_a_weight_that_tensorrt_refuses(release: str, tmp_path: Path) -> None:
    bench = Bench(release, tmp_path)
    bench.script.refusals["set_named_weights"] = "these numbers are cursed"
    with pytest.raises(IncompatibleEngine, match=r"does not take weight .* of this model: these numbers are cursed"):
        bench.load().update_weights(make_weights())


def test_a_weight_of_another_size(release: str, tmp_path: Path) -> None:
    bench = Bench(release, tmp_path)
    weights = make_weights()
    weights["norm.bias"] = torch.ones(17)
    with pytest.raises(
        IncompatibleEngine, match=r"does not take weight 'norm.bias' \[17\].*has 16 numbers, 17 were given"
    ):
        bench.load().update_weights(weights)


@pytest.mark.parametrize("release", NEW)
def test_a_weight_of_another_dtype(release: str, tmp_path: Path) -> None:
    """Its bytes would be taken for numbers of the engine's dtype."""
    bench = Bench(release, tmp_path)
    weights = make_weights()
    weights["norm.bias"] = weights["norm.bias"].half()
    with pytest.raises(IncompatibleEngine, match="does not take weight 'norm.bias'.*torch.float16 was given"):
        bench.load().update_weights(weights)


def test_a_missing_weight(release: str, tmp_path: Path) -> None:
    bench = Bench(release, tmp_path)
    weights = make_weights()
    del weights["time.weight"]
    engine = bench.load()
    with pytest.raises(IncompatibleEngine, match="no weight 'time.weight' that the engine needs; build it again"):
        engine.update_weights(weights)
    with pytest.raises(IncompatibleEngine, match="no weights"):
        engine(**make_inputs(bench.spec))


def test_an_engine_in_which_a_weight_cannot_be_replaced(release: str, tmp_path: Path) -> None:
    bench = Bench(release, tmp_path)
    signature = replace(bench.signature, weights={**bench.signature.weights, "ghost": WeightSource("norm.bias")})
    with pytest.raises(IncompatibleEngine, match="1 of .* weights cannot be replaced, such as ghost; switch bake on"):
        bench.load(signature=signature)


def test_a_merged_weight_that_the_model_does_not_have(release: str, tmp_path: Path) -> None:
    bench = Bench(release, tmp_path)
    (bias,) = [entry for entry, source in bench.graph.weights.items() if source.name == "conv.bias"]
    weights = {entry: source for entry, source in bench.signature.weights.items() if entry != bias}
    engine = bench.load(signature=replace(bench.signature, weights=weights))
    with pytest.raises(IncompatibleEngine, match=f"asks for weight '{bias}', which the model does not have"):
        engine.update_weights(make_weights())
