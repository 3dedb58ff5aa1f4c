"""The main job in a running ComfyUI: build once, hit in every later start, and say what runs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from slipstream.engine_cache import EngineStore
from slipstream.tests.comfyui.support.client import ComfyClient, Run
from slipstream.tests.comfyui.support.graph import Graph, Node

BUILD_SECONDS = 300


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The engine store of this file's servers; the first test fills it."""
    return tmp_path_factory.mktemp("home")


def accelerate(graph: Graph, model: Node, **options: str) -> Node:
    chosen = {"backend": "auto", "precision": "auto", "optimize": "fast build", "build": "first use", **options}
    return graph.add("SlipstreamAccelerateModel", model=model, resolutions=chosen.pop("resolutions", "auto"), **chosen)


def main_job(model_files, *, seed: int, checkpoint_seed: int = 1, **options: str | None) -> Graph:
    """Stock loader → LoRA → Accelerate Model → KSampler → VAEDecode → SaveImage, with Engine Info behind."""
    plain = options.pop("plain", None)
    graph = Graph()
    loader = graph.add("CheckpointLoaderSimple", ckpt_name=model_files.checkpoint("sd15", checkpoint_seed))
    model = graph.add("LoraLoaderModelOnly", model=loader, lora_name=model_files.lora(), strength_model=1.0)
    if not plain:
        model = accelerate(graph, model, **options)
    samples = graph.sample(model, size=64, steps=3, cfg=7.0, seed=seed)
    graph.save(samples, vae=loader.out(2))
    if not plain:
        graph.add("SlipstreamEngineInfo", model=model, after=samples)
    return graph


def info_of(run: Run) -> str:
    """The text that Engine Info shows."""
    return "\n".join(text for output in run.outputs.values() for text in output.get("text", ()))


def difference(one: Run, other: Run) -> float:
    (a,), (b,) = one.latents(), other.latents()
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def wait_for_engines(home: Path, count: int) -> None:
    deadline = time.monotonic() + BUILD_SECONDS
    while len(EngineStore(home).list()) < count:
        assert time.monotonic() < deadline, "the background build did not end"
        time.sleep(0.5)


@pytest.fixture(scope="module")
def built(server_of, home: Path, model_files) -> Iterator[tuple[ComfyClient, Run]]:
    """A server whose first prompt was queued with `background`; gives that prompt's run."""
    with server_of(home=home) as server, server.client() as client:
        first = client.run(main_job(model_files, seed=1, build="background"), timeout=120)
        wait_for_engines(home, 1)
        yield client, first


def test_pictures_come_from_the_plain_model_while_the_engine_is_built(built, model_files) -> None:
    client, first = built
    assert first.ok, first.error
    assert first.seconds < 20, "the picture waited for the build"
    assert "calls on engines: 0, on your model: 3" in info_of(first) and "in the background" in info_of(first)
    plain = client.run(main_job(model_files, seed=1, plain="yes"))
    assert difference(first, plain) == 0.0


def test_the_engine_takes_over_at_the_next_run(built, model_files) -> None:
    client, _ = built
    before = len(client.previews)
    run = client.run(main_job(model_files, seed=2, build="background"))
    previews = len(client.previews) - before
    plain = client.run(main_job(model_files, seed=2, plain="yes"))
    assert run.ok, run.error
    assert "calls on engines: 3" in info_of(run), info_of(run)
    assert 0.0 < difference(run, plain) < 1e-4
    assert previews == 3, "a preview for every step"
    (picture,), (wanted,) = run.images(), plain.images()
    assert picture.std() > 0.05 and np.abs(picture - wanted).max() <= 1 / 255 + 1e-6


def test_the_picture_says_which_engine_made_it(built, model_files, home: Path) -> None:
    client, _ = built
    run = client.run(main_job(model_files, seed=3))
    (engine,) = EngineStore(home).list()
    (metadata,) = run.metadata()
    record = json.loads(metadata["slipstream"])
    ((made,),) = [runs for name, runs in record.items() if name != "run"]
    assert made["engine_calls"] == 3 and made["engines"][0]["digest"] == engine.digest


def test_the_next_start_finds_the_engine_and_cannot_build(built, start_comfy, home: Path, model_files) -> None:
    server = start_comfy(home=home, environment={"PATH": str(home / "nowhere")})
    before = {entry.digest: entry.manifest.created for entry in EngineStore(home).list()}
    with server.client() as client:
        run = client.run(main_job(model_files, seed=4))
        plain = client.run(main_job(model_files, seed=4, plain="yes"))
        other = client.run(main_job(model_files, seed=4, checkpoint_seed=2))
        other_plain = client.run(main_job(model_files, seed=4, checkpoint_seed=2, plain="yes"))
    assert "calls on engines: 3, on your model: 0" in info_of(run), info_of(run)
    assert difference(run, plain) < 1e-4
    assert "cache hit" in server.log() and "Slipstream: built" not in server.log()
    # Another checkpoint of the same architecture runs on the same engine.
    assert "calls on engines: 3, on your model: 0" in info_of(other), info_of(other)
    assert difference(other, other_plain) < 1e-4 < difference(other, run)
    assert {entry.digest: entry.manifest.created for entry in EngineStore(home).list()} == before


def build_engine(model_files, resolutions: str, optimize: str) -> Graph:
    graph = Graph()
    loader = graph.add("CheckpointLoaderSimple", ckpt_name=model_files.checkpoint("sd15"))
    chosen = {"backend": "auto", "precision": "auto", "optimize": optimize}
    graph.add("SlipstreamBuildEngine", model=loader, resolutions=resolutions, batch=2, tokens=77, **chosen)
    return graph


def test_cancel_during_a_build_is_quick_and_leaves_nothing(built, model_files, home: Path) -> None:
    client, _ = built
    queued = client.queue(build_engine(model_files, "128x128", "balanced"))
    wait_until(lambda: workers(home), "the build did not start")
    started = time.monotonic()
    client.interrupt()
    run = client.wait(queued, timeout=30)
    assert run.interrupted and time.monotonic() - started < 5
    wait_until(lambda: not workers(home), "the worker outlived the cancel", seconds=5)
    assert len(EngineStore(home).list()) == 1
    assert not any(path.is_file() for path in (home / "tmp").rglob("*"))


def test_build_engine_finds_what_is_there(built, model_files) -> None:
    client, _ = built
    run = client.run(build_engine(model_files, "64x64", "fast build"))
    assert run.ok, run.error
    assert "SD15 64×64 batch 2" in info_of(run) and "ready" in info_of(run)


def test_bad_input_is_refused_in_words(built, model_files) -> None:
    client, _ = built
    graph = Graph()
    loader = graph.add("CheckpointLoaderSimple", ckpt_name=model_files.checkpoint("sd15"))
    model = accelerate(graph, loader, resolutions="512*5x12")
    graph.save(graph.sample(model))
    run = client.run(graph)
    assert not run.ok and "is no resolution" in run.error["exception_message"]


@pytest.mark.slow
def test_two_servers_that_want_the_same_engine_build_it_once(server_of, tmp_path: Path, model_files) -> None:
    shared = tmp_path / "shared"
    graph = main_job(model_files, seed=5)
    with server_of(home=shared) as one, server_of(home=shared) as other:
        with one.client() as first, other.client() as second:
            prompts = first.queue(graph), second.queue(graph)
            runs = first.wait(prompts[0], BUILD_SECONDS), second.wait(prompts[1], BUILD_SECONDS)
            assert difference(*runs) == 0.0
        logs = one.log() + other.log()
    for run in runs:
        assert "calls on engines: 3, on your model: 0" in info_of(run), info_of(run)
    assert logs.count("Slipstream: built") == 1
    assert len(EngineStore(shared).list()) == 1


def wait_until(condition, complaint: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, complaint
        time.sleep(0.1)


def workers(home: Path) -> list[int]:
    """Build processes that work inside a store."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if "worker" in command and any(str(home) in word for word in command):
            found.append(int(folder.name))
    return found


def test_prompts_run_as_ever_while_a_model_is_traced_and_compiled(start_comfy, model_files) -> None:
    """Tracing hooks into every module of a process: a plain prompt that ran in the same one would fail."""
    server = start_comfy()
    at_start = len(server.log())  # a ComfyUI tells there what nodes of its own lack a package
    with server.client() as client:
        for attempt in range(2):
            size = 64 + 8 * attempt
            graph = Graph()
            loader = graph.add("CheckpointLoaderSimple", ckpt_name=model_files.checkpoint("sd15"))
            graph.save(graph.sample(accelerate(graph, loader, build="background"), size=size, steps=1))
            assert client.run(graph).ok
            for seed in range(12):  # about as long as the worker takes to start and trace
                plain = Graph()
                loader = plain.add("CheckpointLoaderSimple", ckpt_name=model_files.checkpoint("sd15"))
                plain.save(plain.sample(loader, size=64, steps=1, seed=100 * attempt + seed))
                time.sleep(0.15)
                run = client.run(plain)
                assert run.ok, run.error
    said = server.log()[at_start:]
    assert "cannot trace" not in said and "Traceback" not in said
