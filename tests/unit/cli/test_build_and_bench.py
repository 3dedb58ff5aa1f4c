"""build and bench on a model that needs no compiler."""

from __future__ import annotations

import functools

import pytest
import torch

from slipstream.cli import build
from slipstream.core.errors import ShapeOutsideProfile
from slipstream.runtime.provider import EngineProvider
from slipstream.tests.unit.cli.support import FakeBackend, fake_model

MODEL = ("--model", "x.safetensors", "--resolution", "512x512,768x512")


@pytest.fixture
def backend(request, monkeypatch) -> FakeBackend:
    """In place of all backends; built in this process; `request.param` alters its engines' results."""
    backend = FakeBackend(getattr(request, "param", lambda tensor: tensor))
    provider = functools.partial(EngineProvider, backends=[backend])
    monkeypatch.setattr("slipstream.runtime.building.build.run_build", backend.run_build)
    monkeypatch.setattr(build, "load_model", lambda *_: fake_model())
    monkeypatch.setattr("slipstream.runtime.provider.EngineProvider", provider)
    return backend


def test_builds_once_a_resolution(cli, backend, store) -> None:
    done = cli("build", *MODEL, "--json")
    assert done.status == 0, done.err
    assert done.json["host"] == "a host 1.0" and done.json["store"] == str(store.root)
    assert [row["built"] for row in done.json["engines"]] == [True, True]
    assert [row["label"] for row in done.json["engines"]] == ["Fake 512×512 batch 2", "Fake 768×512 batch 2"]
    assert [row["error"] for row in done.json["engines"]] == [0.0, 0.0]
    assert backend.builds == 2
    assert [row["estimate_s"] for row in done.json["engines"]] == [None, 0.3], "the second by the first"
    again = cli("build", *MODEL, "--json")
    assert [row["built"] for row in again.json["engines"]] == [False, False]
    assert [row["estimate_s"] for row in again.json["engines"]] == [None, None], "nothing was to be built"
    assert backend.builds == 2
    listed = cli("list", "--json").json["engines"]
    assert {row["digest"] for row in listed} == {row["digest"] for row in done.json["engines"]}


def test_tells_people_what_it_does(cli, backend) -> None:
    done = cli("build", *MODEL)
    assert done.status == 0, done.err
    for step in (
        "x.safetensors: load: loading the model",
        "Fake 512×512 batch 2: start: building the engine (",
        "Fake 768×512 batch 2: start: building the engine, about 1 s by earlier builds on this machine",
        "Fake 512×512 batch 2: compile: compiling 3 operations",
        "Fake 768×512 batch 2: verify: comparing the engine with the model",
    ):
        assert step in done.err
    assert done.out.count("built in") == 2 and "a library says hello" not in done.out
    assert cli("build", *MODEL).out.count("was there") == 2


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        (("--batch", "4"), {"batch": 4}),
        (("--precision", "bf16"), {"precision": "bf16"}),
        (("--precision", "fp8"), {"precision": "fp8"}),
        (("--precision", "int8"), {"precision": "int8"}),
        (("--optimize", "max"), {"optimize": "max"}),
    ],
)
def test_choices_reach_the_engine(cli, backend, words, changed) -> None:
    (row,) = cli("build", "--model", "x", "--resolution", "64x64", "--json", *words).json["engines"]
    shown = cli("show", row["digest"], "--json").json
    found = {**{name: row[name] for name in ("precision", "optimize")}, "batch": int(shown["shapes"]["x"][0])}
    assert found == {"precision": "fp32", "optimize": "balanced", "batch": 2, **changed}


def test_one_engine_for_all_resolutions(cli, backend) -> None:
    backend.why_unsupported = lambda spec: None
    words = ("build", *MODEL, "--engines", "one-for-a-range", "--max-batch", "4", "--max-tokens", "154", "--json")
    (row,) = cli(*words).json["engines"]
    assert row["label"] == "Fake 512×512…768×512 batch 1…4" and row["built"] and backend.builds == 1
    (again,) = cli(*words).json["engines"]
    assert again["digest"] == row["digest"] and not again["built"]


def test_where_no_backend_makes_one_for_all_each_resolution_has_its_own(cli, backend) -> None:
    rows = cli("build", *MODEL, "--engines", "one for a range", "--json").json["engines"]
    assert [row["label"] for row in rows] == ["Fake 512×512 batch 2", "Fake 768×512 batch 2"]


def test_a_backend_that_is_not_here(cli, backend) -> None:
    done = cli("build", *MODEL, "--backend", "tensorrt")
    assert done.status == 1 and "tensorrt" in done.err and not done.out and backend.builds == 0


@pytest.mark.parametrize("backend", [lambda tensor: tensor * 1.01], indirect=True)
def test_a_wrong_engine_is_reported(cli, backend) -> None:
    done = cli("build", *MODEL, "--json")
    assert done.status == 1 and "differs from the model by 1 %" in done.json["error"]


def test_a_failed_build_is_reported(cli, backend, monkeypatch, store) -> None:
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("slipstream.runtime.building.build.run_build", fail)
    done = cli("build", *MODEL)
    assert done.status == 1 and "No space left" in done.err and "Traceback" not in done.out
    assert cli("list", "--json").json["engines"] == []
    assert not list((store.root / "tmp").iterdir())


def test_bench_times_the_way_that_pictures_take(cli, backend) -> None:
    done = cli("bench", *MODEL, "--repeats", "4", "--warmup", "2", "--json")
    assert done.status == 0, done.err
    rows = done.json["rows"]
    assert [(row["case"], row["variant"]) for row in rows] == [
        ("fake-512-b2", "eager"),
        ("fake-512-b2", "slipstream:compiled"),
        ("fake-768x512-b2", "eager"),
        ("fake-768x512-b2", "slipstream:compiled"),
    ]
    for row in rows:
        assert row["repeats"] == len(row["samples"]) == 4 and row["warmup"] == 2
        assert 0 < row["ms_min"] <= row["ms"] <= row["ms_max"]
        assert row["shapes"]["timesteps"] == [2] and row["precision"] == "fp32"
        assert row["versions"]["torch"] == torch.__version__ and row["vram_mb"] is None
    assert [row["engine_calls"] for row in rows] == [0, 6, 0, 6]
    assert len({row["run"] for row in rows}) == 1
    assert {"build_s", "load_s", "size_mb"} <= set(rows[1])


@pytest.mark.parametrize("backend", [lambda tensor: tensor * (1 + 1e-5)], indirect=True)
def test_bench_measures_the_error(cli, backend) -> None:
    eager, fast = cli("bench", "--model", "x", "--resolution", "64x64", "--json").json["rows"]
    assert eager["error"] == 0 and 0.9e-5 < fast["error"] < 1.1e-5


def test_bench_for_people(cli, backend) -> None:
    done = cli("bench", "--model", "x", "--resolution", "64x64", "--repeats", "1")
    head, eager, fast = done.out.splitlines()
    assert head.split() == ["case", "variant", "ms", "min", "max", "speed", "error", "engine", "calls"]
    assert eager.startswith("fake-64-b2  eager") and "1.00×" in eager and fast.endswith("  4")


def fails_after_its_check(tensor: torch.Tensor, calls: list[int] = []) -> torch.Tensor:  # noqa: B006
    calls.append(1)
    if len(calls) > 2:
        raise ShapeOutsideProfile("x is too large")
    return tensor


@pytest.mark.parametrize("backend", [fails_after_its_check], indirect=True)
def test_bench_never_passes_the_plain_model_off_as_an_engine(cli, backend) -> None:
    done = cli("bench", "--model", "x", "--resolution", "64x64", "--json")
    assert done.status == 1 and list(done.json) == ["error"]
    assert "The model ran without its engine (Fake 64×64 batch 2" in done.err and "x is too large" in done.err
