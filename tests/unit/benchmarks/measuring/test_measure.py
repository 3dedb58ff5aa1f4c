"""One case in this process, on a model that needs no compiler."""

from __future__ import annotations

import functools
import signal
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.benchmarks.measuring import measure as measuring
from slipstream.benchmarks.measuring import model_variants, ours, turns
from slipstream.benchmarks.measuring.measure import Schedule, measure
from slipstream.benchmarks.measuring.turns import GpuTurn
from slipstream.benchmarks.subjects.cases import Case
from slipstream.benchmarks.subjects.models import Model
from slipstream.benchmarks.subjects.rows import FIELDS, OF_SWITCHED, Row
from slipstream.benchmarks.subjects.setup import SetupContext
from slipstream.benchmarks.subjects.variants import Variant
from slipstream.benchmarks.subjects.weights import randomise
from slipstream.core.errors import ShapeOutsideProfile, UnsupportedModel
from slipstream.engine_cache import EngineStore
from slipstream.runtime.checking.trust import Trust
from slipstream.runtime.provider import EngineProvider
from slipstream.tests.fakes import FakeSource, FakeWorker, NullBackend

REPEATS, WARMUP = 4, 2
CALLS = 1 + WARMUP + Model.sets + 2 * REPEATS + Model.sets + Model.unseen
"""Of each variant: the first one, warm-up, check, alone, in turns, check with one more set of inputs."""

Measure = Callable[..., list[Row]]


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> NullBackend:
    backend = NullBackend("compiled")
    monkeypatch.setattr(ours, "EngineProvider", functools.partial(EngineProvider, backends=[backend]))
    monkeypatch.setattr("slipstream.runtime.building.build.run_build", FakeWorker([backend]))
    monkeypatch.setitem(sys.modules, "comfyui_version", types.SimpleNamespace(__version__="0.99"))
    return backend


@pytest.fixture
def source() -> FakeSource:
    return FakeSource()


@pytest.fixture
def run(backend: NullBackend, source: FakeSource, tmp_path: Path) -> Measure:
    """Measure variants; all rows in the order in which they were written."""

    def call(module: Any, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"out": module(**inputs)[0]}

    def run(*names: str, patcher: object = None, lock: Path | None = None, seconds: float | None = None) -> list[Row]:
        shapes = {"x": (2, 4, 8, 8), "timesteps": (2,), "context": (2, 3, 5)}
        subject = Model(source, source.model, call, shapes, patcher)
        case = Case("fake", "a fake", lambda: subject, needs_gpu=False, convolutional=False)
        rows: list[Row] = []
        until = None if seconds is None else time.monotonic() + seconds
        schedule = Schedule(REPEATS, WARMUP, {"commit": "abc", "run": "r"}, GpuTurn(lock), until)
        setup_context = SetupContext(EngineStore(tmp_path / "engines"), tmp_path, lambda text: None)
        measure(case, [Variant.of(name) for name in names], schedule, setup_context, rows.append)
        return rows

    return run


def test_every_variant_is_written_alone_and_again_after_the_turns(run: Measure) -> None:
    rows = run("eager", "slipstream:compiled")
    assert [row["variant"] for row in rows] == ["eager", "slipstream:compiled"] * 2
    for row in rows:
        assert tuple(row) == FIELDS, row.get("failed")
        assert len(row["samples"]) == row["repeats"] == REPEATS and row["warmup"] == WARMUP
        assert 0 < row["ms_min"] <= row["ms"] <= row["ms_max"]
        assert row["case"] == "fake" and row["commit"] == "abc" and row["run"] == "r" and row["gpu"] is None
        assert row["shapes"]["context"] == [2, 3, 5] and row["precision"] == "fp32" and row["error"] < 1e-6
        assert row["versions"]["comfyui"] == "0.99" and row["versions"]["torch"] == torch.__version__
    eager, ours = rows[2:]
    assert eager["engine_calls"] == 0 and eager["build_s"] is None and eager["load_s"] is None
    assert ours["engine_calls"] == CALLS
    assert ours["build_s"] == pytest.approx(6.0) and ours["load_s"] >= 0 and ours["size_mb"] >= 0


@pytest.mark.skipif(turns.why_not() is not None, reason="this system has no lock held together")
def test_beside_other_cases_only_turns_are_timed(run: Measure, tmp_path: Path) -> None:
    rows = run("eager", "slipstream:compiled", lock=tmp_path / "lock")
    assert [row["variant"] for row in rows] == ["eager", "slipstream:compiled"]
    assert all(len(row["samples"]) == REPEATS for row in rows)
    assert rows[1]["engine_calls"] == CALLS - REPEATS and "failed" not in rows[1]


@pytest.mark.skipif(turns.why_not() is not None, reason="limits are of cases side by side, which this system has not")
@pytest.mark.parametrize("late", ["slipstream:compiled", "slipstream:compiled+switch-size", "torch.compile"])
def test_what_is_not_ready_in_time_is_not_measured_and_the_rest_is(
    run: Measure, backend: NullBackend, monkeypatch, late: str
) -> None:
    """A build that takes long, or a compiler that takes every `Exception` for its own."""
    worker = FakeWorker([backend])
    worker.gate.clear()
    monkeypatch.setattr("slipstream.runtime.building.build.run_build", worker)
    monkeypatch.setattr(torch, "compile", lambda function, **_: lambda *_, **__: compile_for_ever())
    names = ("eager", late, "slipstream:compiled+max")
    begun = time.monotonic()
    rows = run(*names, seconds=3)
    assert time.monotonic() - begun < 20
    assert worker.builds == ("slipstream" in late), "the last one was not begun"
    measured = [] if "switch" in late else ["eager"] * 2
    assert [row["variant"] for row in rows] == measured and all("failed" not in row for row in rows)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0), "whatever comes next would be ended as well"


def compile_for_ever() -> None:
    while True:
        try:
            time.sleep(60)
        except Exception:  # noqa: S112
            continue


def test_changes_between_pictures_are_measured_before_the_turns(run: Measure) -> None:
    rows = run("eager", "slipstream:compiled+switch-batch", "eager+switch-size")
    assert [row["variant"] for row in rows] == [
        "slipstream:compiled+switch-batch",
        "eager+switch-size",
        "eager",
        "eager",
    ]
    ours, plain = rows[:2]
    for row in (ours, plain):
        assert tuple(row) == (*FIELDS, *OF_SWITCHED), row.get("failed")
        assert len(row["samples"]) == len(row["other"]["samples"]) == REPEATS and row["error"] < 1e-6
        assert row["steady_ms"] > 0 and row["again_ms"] > 0 and row["shapes"]["x"] == [2, 4, 8, 8]
    assert ours["other"]["shapes"]["x"] == [4, 4, 8, 8] and plain["other"]["shapes"]["x"] == [2, 4, 8, 12]
    pictures = 4 * (WARMUP + REPEATS)
    assert ours["engine_calls"] == pictures * Model.sets + 2 * (Model.sets + Model.unseen)
    assert ours["build_s"] == pytest.approx(12.0), "both engines"
    assert plain["engine_calls"] == 0 and plain["build_s"] is None


def test_a_change_that_an_engine_does_not_survive_fails_its_row(
    run: Measure, backend: NullBackend, monkeypatch
) -> None:
    begin = measuring.Switch.take_turns

    def break_and_begin(self: Any, turns: int) -> None:
        backend.call_error = ShapeOutsideProfile("x is too large")
        begin(self, turns)

    monkeypatch.setattr(measuring.Switch, "take_turns", break_and_begin)
    row, *others = run("slipstream:compiled+switch-size", "eager")
    assert "the engine served " in row["failed"] and "x is too large" in row["failed"]
    assert all("failed" not in each for each in others)


def test_a_change_that_cannot_be_measured_is_a_failed_row(run: Measure, backend: NullBackend) -> None:
    backend.cannot_build = "no C++ compiler"
    row, *others = run("slipstream:compiled+switch-size", "eager")
    assert "no C++ compiler" in row["failed"] and row["variant"] == "slipstream:compiled+switch-size"
    assert len(others) == 2


def test_an_engine_that_turns_wrong_fails_its_row(run: Measure, backend: NullBackend, monkeypatch) -> None:
    checked = EngineProvider.make

    def make_and_spoil(self: EngineProvider, *given: Any) -> Any:
        result = checked(self, *given)
        monkeypatch.setattr(Trust, "prove", lambda *_: None)
        backend.error = 1e-2
        return result

    monkeypatch.setattr(EngineProvider, "make", make_and_spoil)
    eager, ours = run("eager", "slipstream:compiled")[-2:]
    assert "failed" not in eager
    assert ours["failed"] == "differs from fp32 by 1.0e-02, allowed is 1.0e-04 in fp32"
    assert ours["engine_calls"] == CALLS


def test_a_stale_result_is_found(run: Measure, monkeypatch) -> None:
    """An engine that answers with what it computed first is right on that input alone."""
    plain = model_variants._ours
    first: list[Any] = []

    def stale(variant: Variant, model: Model, *given: Any) -> Any:
        ready = plain(variant, model, *given)
        compute = ready.compute

        def again(inputs: Any) -> Any:
            first[:] = first or [compute(inputs)]
            return first[0]

        ready.compute = again
        return ready

    monkeypatch.setattr(model_variants, "_ours", stale)
    monkeypatch.setattr(measuring.Contender, "calls", property(lambda self: 1, lambda self, value: None), raising=False)
    row = run("slipstream:compiled")[-1]
    assert "differs from fp32" in row.get("failed", ""), row


def test_calls_that_went_elsewhere_fail_the_row(run: Measure, backend: NullBackend, monkeypatch) -> None:
    plain = model_variants._ours

    def breaks_later(*given: Any) -> Any:
        ready = plain(*given)
        compute = ready.compute

        def once(inputs: Any) -> Any:
            result = compute(inputs)
            backend.call_error = ShapeOutsideProfile("x is too large")
            return result

        ready.compute = once
        return ready

    monkeypatch.setattr(model_variants, "_ours", breaks_later)
    row = run("slipstream:compiled")[-1]
    assert row["engine_calls"] == 1 and row["error"] < 1e-6
    assert row["failed"].startswith(f"the engine served 1 of {CALLS} calls: the engine failed")
    assert "x is too large" in row["failed"]


def test_8_bits_are_left_out_where_a_model_has_nothing_to_gain_by_them(run: Measure, monkeypatch) -> None:
    def refuse(*_: Any) -> Any:
        raise UnsupportedModel("no layer is large enough")

    monkeypatch.setattr(model_variants, "_ours", refuse)
    eight, plain = run("slipstream:compiled+fp8", "slipstream:compiled", patcher="a patcher")
    assert eight == {"case": "fake", "variant": "slipstream:compiled+fp8", "left_out": "no layer is large enough"}
    assert plain["failed"] == "UnsupportedModel: no layer is large enough"


def test_a_variant_that_cannot_be_set_up_leaves_the_others_alone(run: Measure, monkeypatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no compiler here\nand a long trace")

    monkeypatch.setattr(torch, "compile", broken)
    failed, *others = run("torch.compile", "eager")
    assert failed["failed"] == "RuntimeError: no compiler here" and failed["ms"] is None and failed["samples"] == []
    assert [row["variant"] for row in others] == ["eager", "eager"] and all("failed" not in row for row in others)


def test_an_engine_that_cannot_be_built_is_a_failed_row(run: Measure, backend: NullBackend) -> None:
    backend.cannot_build = "no C++ compiler"
    (row,) = run("slipstream:compiled")
    assert "no C++ compiler" in row["failed"] and row["engine_calls"] is None


def test_what_means_nothing_here_is_left_out_with_a_reason(run: Measure) -> None:
    rows = run("eager+graph", "torch.compile:max-autotune", "TorchCompileModel", "torch.compile+channels_last")
    assert {row["variant"]: row["left_out"] for row in rows} == {
        "eager+graph": "CUDA graphs need a CUDA GPU",
        "torch.compile:max-autotune": "CUDA graphs need a CUDA GPU",
        "TorchCompileModel": "ComfyUI's node compiles diffusion models only",
        "torch.compile+channels_last": "the memory format of pictures means nothing to a transformer",
    }


def test_a_model_that_computes_nothing_is_no_measure(run: Measure, source: FakeSource) -> None:
    source.model.shift.fill_(float("nan"))
    with pytest.raises(ValueError, match="nothing can be judged"):
        run("eager")


def test_random_weights_set_every_number() -> None:
    layers = torch.nn.Sequential(torch.nn.Conv2d(64, 64, 3), torch.nn.GroupNorm(8, 64), torch.nn.Linear(400, 8))
    layers.register_buffer("table", torch.empty(1, 50, 64))
    layers.register_buffer("steps", torch.arange(4))
    for tensor in [*layers.parameters(), layers.table]:
        tensor.data.fill_(float("nan"))
    randomise(layers, seed=1)
    assert all(tensor.isfinite().all() for tensor in layers.state_dict().values())
    assert layers[0].weight.std().item() == pytest.approx(0.8 / (64 * 9) ** 0.5, rel=0.05)
    assert layers[1].weight.mean().item() == pytest.approx(1, abs=0.1) and layers[1].bias.abs().max() < 0.2
    assert layers.table.std().item() == pytest.approx(0.5, rel=0.1) and layers.steps.tolist() == [0, 1, 2, 3]
