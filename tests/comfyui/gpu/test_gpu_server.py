"""A real ComfyUI server on a GPU, started as users start it and driven by its API: it never dies, pictures stay right.

    SLIPSTREAM_TEST_DEVICE=cuda pytest tests/comfyui/gpu/test_gpu_server.py

SLIPSTREAM_TEST_FLAGS holds further arguments of ComfyUI, such as `--disable-cuda-malloc`; SLIPSTREAM_TEST_REPORT names
a file to which outcomes are written, SLIPSTREAM_TEST_ENGINES a store whose engines serve instead of new ones. With
SLIPSTREAM_TEST_DEVICE=cpu the same runs without a GPU, where nothing is captured: to try the tests themselves.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.tests.comfyui.support.client import ComfyClient, Run
from slipstream.tests.comfyui.support.graph import Graph
from slipstream.tests.comfyui.support.models.model_files import ModelFiles
from slipstream.tests.comfyui.support.report import facts
from slipstream.tests.comfyui.support.server import ComfyServer, on_gpu

IS_WANTED = os.environ.get("SLIPSTREAM_TEST_DEVICE") in ("cuda", "cpu")
pytestmark = pytest.mark.skipif(not IS_WANTED, reason="no CUDA GPU: SLIPSTREAM_TEST_DEVICE is not set")

STEPS = 6
BUILDING = 600.0
"""Seconds that a picture may take that waits for engines."""
CLOSE = 3e-2
"""Relative difference of latents that are meant to be the same, in fp16 and over a few steps."""
MB = 1 << 20
NODE = "SlipstreamAccelerateModel"
CHOICES = {"backend": "compiled", "precision": "auto", "optimize": "fast build", "resolutions": "auto"}


@dataclass(frozen=True)
class Wish:
    """A picture.

    Attributes:
        checkpoint: seed of its weights.
        lora: strength; None for none.
        control: strength of a ControlNet; None for none.
        by_blocks: the fast one runs by engines of the model's blocks.
        build: when it builds engines.
    """

    seed: int = 7
    size: int = 64
    batch: int = 1
    steps: int = STEPS
    cfg: float = 3.0  # a higher one multiplies the rounding of random models
    sampler: str = "euler"
    checkpoint: int = 1
    lora: float | None = None
    control: float | None = None
    by_blocks: bool = False
    build: str = "first use"

    @property
    def choices(self) -> dict[str, str]:
        """Of our nodes."""
        return {**CHOICES, "optimize": "blocks"} if self.by_blocks else CHOICES


class Server:
    """The server, and what its pictures are without Slipstream."""

    def __init__(self, process: ComfyServer, client: ComfyClient, files: ModelFiles) -> None:
        self.process, self.client, self.files = process, client, files
        self._plain: dict[Wish, np.ndarray] = {}

    def graph(self, wish: Wish, fast: bool) -> Graph:
        graph = Graph()
        add = graph.add
        loader = add("CheckpointLoaderSimple", ckpt_name=self.files.checkpoint("sd15", wish.checkpoint))
        model = loader
        if wish.lora is not None:
            model = add("LoraLoaderModelOnly", model=model, lora_name=self.files.lora("sd15"), strength_model=wish.lora)
        if fast:
            model = add(NODE, model=model, build=wish.build, **wish.choices)
        positive, negative = graph.conditioning(1), graph.conditioning(2)
        prompts: dict[str, Any] = {"positive": positive, "negative": negative}
        if wish.control is not None:
            control = add("ControlNetLoader", control_net_name=self.files.controlnet("sd15"))
            if fast:
                control = add("SlipstreamAccelerateControlNet", control_net=control, build=wish.build, **wish.choices)
            image = add("EmptyImage", width=wish.size, height=wish.size, batch_size=1, color=0x404040)
            conditioned = add(
                "ControlNetApplyAdvanced", positive=positive, negative=negative, control_net=control, image=image,
                strength=wish.control, start_percent=0.0, end_percent=1.0,
            )  # fmt: skip
            prompts = {"positive": conditioned, "negative": conditioned.out(1)}
        latent = add("EmptyLatentImage", width=wish.size, height=wish.size, batch_size=wish.batch)
        samples = graph.sample(
            model, latent=latent, seed=wish.seed, steps=wish.steps, cfg=wish.cfg, sampler_name=wish.sampler, **prompts
        )
        graph.save(samples, vae=loader.out(2))
        return graph

    def plain(self, wish: Wish) -> np.ndarray:
        if (wish := replace(wish, by_blocks=False, build="")) not in self._plain:
            run = self.client.run(self.graph(wish, fast=False), timeout=BUILDING)
            assert run.ok, run.error
            (self._plain[wish],) = run.latents()
        return self._plain[wish]

    def fast(self, wish: Wish) -> Run:
        return self.client.run(self.graph(wish, fast=True), timeout=BUILDING)

    def is_alive(self) -> bool:
        return bool(self.client.get("/system_stats"))

    def memory_used(self) -> int:
        """Device memory in bytes that the server holds; where the driver does not tell, all that is in use."""
        query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
        if on_gpu():
            told = subprocess.run(query, capture_output=True, text=True, check=False).stdout
            used = {row[0]: row[1] for line in told.splitlines() if len(row := line.replace(" ", "").split(",")) == 2}
            if (found := used.get(str(self.process.pid), "")).isdecimal():
                return int(found) * MB
        (device,) = self.client.get("/system_stats")["devices"]
        return int(device["vram_total"] - device["vram_free"])


def counts(run: Run) -> tuple[int, int]:
    """Calls of the model that its engine, or those of its blocks, computed, and calls of the model itself."""
    runs = _runs_of(run)
    by_engines = sum(what["engine_calls"] + what.get("block_calls", 0) for what in runs)
    return by_engines, sum(what["eager_calls"] for what in runs)


def reasons(run: Run) -> str:
    return str([what["reasons"] for what in _runs_of(run)])


def _runs_of(run: Run) -> list[dict[str, Any]]:
    """What the picture says of each run of an accelerated model."""
    fields = json.loads(run.metadata()[0]["slipstream"])
    return [what for name, each in fields.items() if name != "run" for what in each]


def assert_right(server: Server, wish: Wish, run: Run) -> None:
    """Not constant, finite, and what the model itself makes."""
    assert run.ok, run.error
    (latent,) = run.latents()
    wanted = server.plain(wish)
    assert np.isfinite(latent).all() and latent.std() > 0
    difference = np.linalg.norm(latent - wanted) / np.linalg.norm(wanted)
    assert difference < CLOSE, (wish, difference)


def assert_by_engine(server: Server, wish: Wish, run: Run) -> None:
    assert_right(server, wish, run)
    engine, eager = counts(run)
    assert engine >= wish.steps and eager == 0, (engine, eager, reasons(run))


@pytest.fixture(scope="module")
def process(server_of: Any) -> Iterator[ComfyServer]:
    engines = os.environ.get("SLIPSTREAM_TEST_ENGINES")
    arguments = os.environ.get("SLIPSTREAM_TEST_FLAGS", "").split()
    with server_of(home=Path(engines) if engines else None, arguments=arguments) as running:
        yield running


@pytest.fixture(scope="module")
def server(process: ComfyServer, model_files: ModelFiles) -> Iterator[Server]:
    with process.client() as client:
        (device,) = client.get("/system_stats")["devices"]
        facts["server"] = str(device["name"])  # which names the allocator, too
        yield Server(process, client, model_files)


@pytest.fixture(autouse=True)
def _lives(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test does, the same process answers afterwards."""
    if "server" not in request.fixturenames:
        yield
        return
    server: Server = request.getfixturevalue("server")
    pid = server.process.pid
    server.client.fail(None)
    yield
    assert server.process.pid == pid and server.is_alive()


def test_first_picture_second_and_third(server: Server) -> None:
    for seed in (1, 2, 3):
        assert_by_engine(server, Wish(seed=seed), server.fast(Wish(seed=seed)))


def test_loras_come_and_go(server: Server) -> None:
    strong, weak = Wish(lora=1.0), Wish(lora=-0.5)
    assert np.abs(server.plain(strong) - server.plain(Wish())).max() > 0.01, "the LoRA shows"
    for wish in (Wish(), strong, Wish(), weak, strong, Wish()):
        assert_by_engine(server, wish, server.fast(replace(wish, seed=7)))


def test_another_size_and_back(server: Server) -> None:
    for wish in (Wish(size=96), Wish(), Wish(size=96, seed=8), Wish(seed=9)):
        assert_by_engine(server, wish, server.fast(wish))


def test_another_checkpoint_needs_no_build(server: Server) -> None:
    server.fast(Wish())
    engines = len(server.client.get("/slipstream/v1/engines")["engines"])
    for wish in (Wish(checkpoint=2), Wish(), Wish(checkpoint=2, seed=8)):
        assert_by_engine(server, wish, server.fast(wish))
    assert len(server.client.get("/slipstream/v1/engines")["engines"]) == engines


@pytest.mark.parametrize("sampler", ["euler_ancestral", "dpmpp_2m", "heun"])
def test_samplers(sampler: str, server: Server) -> None:
    wish = Wish(sampler=sampler)
    assert_by_engine(server, wish, server.fast(wish))


def test_controlnet(server: Server) -> None:
    for seed, strength in ((1, 0.8), (2, 0.8), (3, 0.4)):
        wish = Wish(seed=seed, control=strength)
        assert_by_engine(server, wish, server.fast(wish))


def test_cancel_in_a_step(server: Server) -> None:
    long = server.client.queue(server.graph(Wish(steps=3000, seed=11), fast=True))
    server.client.wait_for_event("progress", prompt_id=long)
    time.sleep(0.3)
    server.client.interrupt()
    assert server.client.wait(long).interrupted
    assert_by_engine(server, Wish(seed=12), server.fast(Wish(seed=12)))


@pytest.mark.skipif(not on_gpu(), reason="without a GPU memory is that of the whole machine")
def test_free_gives_memory_back(server: Server) -> None:
    server.plain(Wish(seed=19))  # CUDA's libraries and their workspaces stay in memory once something was computed
    server.client.free()
    time.sleep(2)
    before = server.memory_used()
    for seed in range(20, 23):
        assert_by_engine(server, Wish(seed=seed), server.fast(Wish(seed=seed)))
        server.client.free()
        time.sleep(2)
    assert server.memory_used() - before < 128 * MB


IN_CAPTURE = ["wait", "synchronize", "statistics", "empty cache", "memory", "keep", "raise"]
ELSEWHERE = [
    ("call", "raise"), ("call", "out of memory"), ("bind", "raise"), ("load", "raise"), ("launch", "raise"),
    ("step", "raise"),
]  # fmt: skip
ON_A_GPU = ("launch", "step", "load")
"""What happens there alone; without memory of its own no engine is closed and loaded again."""


@pytest.mark.skipif(not on_gpu(), reason="nothing is captured without a GPU")
@pytest.mark.parametrize("how", IN_CAPTURE)
def test_a_capture_that_fails(how: str, server: Server) -> None:
    _assert_survives(server, "capture", how)


@pytest.mark.parametrize(("where", "how"), ELSEWHERE)
def test_a_failure_elsewhere(where: str, how: str, server: Server) -> None:
    _assert_survives(server, where, how)


def _assert_survives(server: Server, where: str, how: str) -> None:
    """The picture in which it fails is right, and so are those after it, by the engine again."""
    wish = Wish(seed=30)
    server.client.free()  # engines are loaded, bound, and captured anew
    time.sleep(1)
    before = len(server.client.fail(where, how))
    assert_right(server, wish, server.fast(replace(wish)))
    failed = server.client.fail(None)[before:]
    for seed in (31, 32):
        assert_right(server, Wish(seed=seed), server.fast(Wish(seed=seed)))
    server.client.free()
    time.sleep(1)
    assert_by_engine(server, Wish(seed=33), server.fast(Wish(seed=33)))
    if on_gpu() or where not in ON_A_GPU:
        assert failed, "nothing failed"


BLOCKS = Wish(steps=12, by_blocks=True)
"""Enough steps for its engines to be asked for, compared and captured."""
IN_ONE_GRAPH = "are one CUDA graph from here on"


def _until_blocks_serve(server: Server) -> None:
    """The first pictures ask for engines, wait for them, and compare them."""
    for seed in (60, 61):
        assert_right(server, replace(BLOCKS, seed=seed), server.fast(replace(BLOCKS, seed=seed)))


def test_blocks_serve_every_step(server: Server) -> None:
    _until_blocks_serve(server)
    for wish in (BLOCKS, replace(BLOCKS, seed=62, lora=0.5), replace(BLOCKS, seed=63)):
        assert_by_engine(server, wish, server.fast(wish))
    others = ({"checkpoint": 2}, {"size": 96}, {"batch": 2}, {"control": 0.7})
    for wish in (replace(BLOCKS, **other) for other in others):  # which are compared first
        assert_right(server, wish, server.fast(wish))
        again = replace(wish, seed=64)
        assert_by_engine(server, again, server.fast(again))


@pytest.mark.skipif(not on_gpu(), reason="blocks run on engines by themselves on a GPU alone")
def test_blocks_serve_in_the_background_until_the_whole_does(server: Server) -> None:
    """Pictures are right at any time, and go from the model to its blocks and on to the whole, never back."""
    wish, tiers, deadline = Wish(steps=12, size=160, build="background"), [], time.monotonic() + BUILDING
    while tiers[-1:] != ["whole"]:
        assert time.monotonic() < deadline, tiers
        wanted = replace(wish, seed=70 + len(tiers))
        run = server.fast(wanted)
        assert_right(server, wanted, run)
        (calls,) = _runs_of(run)
        by_blocks, by_whole = calls.get("block_calls", 0) >= wish.steps - 1, calls["engine_calls"] >= wish.steps
        tiers.append("whole" if by_whole else "blocks" if by_blocks else "model")
        time.sleep(3)
    assert tiers == sorted(tiers, key=["model", "blocks", "whole"].index) and "blocks" in tiers, tiers


@pytest.mark.skipif(not on_gpu(), reason="nothing is captured without a GPU")
def test_blocks_are_one_graph_which_free_drops(server: Server) -> None:
    wish = replace(BLOCKS, size=512, steps=30)  # a size that no other test captures
    before = server.process.log().count(IN_ONE_GRAPH)
    for seed in (60, 61):
        assert_right(server, replace(wish, seed=seed), server.fast(replace(wish, seed=seed)))
    assert server.process.log().count(IN_ONE_GRAPH) > before
    held = server.memory_used()
    server.client.free()
    time.sleep(2)
    assert server.memory_used() < held
    wanted = replace(wish, seed=64)
    assert_right(server, wanted, server.fast(wanted))  # of a model that was loaded anew: its blocks are compared
    for seed in (65, 66):
        assert_by_engine(server, replace(wish, seed=seed), server.fast(replace(wish, seed=seed)))


@pytest.mark.skipif(not on_gpu(), reason="nothing is captured without a GPU")
@pytest.mark.parametrize("how", IN_CAPTURE)
def test_a_capture_of_blocks_that_fails(how: str, server: Server) -> None:
    """The picture is right, its blocks stay on engines, and so they do afterwards."""
    wish = replace(BLOCKS, size=128 + 32 * IN_CAPTURE.index(how), steps=30)  # a size that has no graph yet
    _until_blocks_serve(server)
    before = len(server.client.fail("capture", how))
    assert_right(server, wish, server.fast(wish))
    assert server.client.fail(None)[before:], "nothing failed"
    for seed in (67, 68):
        assert_by_engine(server, replace(wish, seed=seed), server.fast(replace(wish, seed=seed)))


def test_two_hundred_mixed_prompts(server: Server) -> None:
    draw = random.Random(20)
    kinds = [
        Wish(seed=seed, size=size, checkpoint=checkpoint, lora=lora)
        for seed in (41, 42)
        for size in (64, 96)
        for checkpoint in (1, 2)
        for lora in (None, 0.5)
    ] + [Wish(seed=43, control=0.7), Wish(seed=44, steps=4)]
    wrong, engine_calls, eager_calls = [], 0, 0
    for number in range(200):
        wish = draw.choice(kinds)
        event = draw.random()
        if event < 0.04:
            server.client.free()
        elif event < 0.08:
            long = server.client.queue(server.graph(Wish(steps=500, seed=100 + number), fast=True))
            time.sleep(draw.random() * 0.3)
            server.client.interrupt()
            server.client.wait(long)
        run = server.fast(wish)
        assert run.ok, (number, wish, run.error)
        if not run.metadata():
            continue  # all of it was cached
        engine, eager = counts(run)
        engine_calls, eager_calls = engine_calls + engine, eager_calls + eager
        try:
            assert_right(server, wish, run)
        except AssertionError as error:
            wrong.append((number, str(error)))
    assert not wrong
    assert engine_calls > 0.95 * (engine_calls + eager_calls), (engine_calls, eager_calls)


@pytest.mark.skipif(not on_gpu(), reason="nothing is captured without a GPU")
def test_a_process_that_died_in_a_capture_is_the_last_one(
    server_of: Any, process: ComfyServer, model_files: Any
) -> None:
    """`kill -9` in a capture: the next process runs without CUDA graphs, says so, and *Try again* ends that."""
    with server_of(home=process.home, arguments=process.arguments) as other:
        with other.client() as client:
            server = Server(other, client, model_files)
            server.client.fail("capture", "kill")
            with pytest.raises(Exception):  # noqa: B017  whatever a connection that breaks raises
                server.fast(Wish(seed=50))
        deadline = time.monotonic() + 30
        while other.is_running and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not other.is_running
        other.restart()
        with other.client() as client:
            server = Server(other, client, model_files)
            for seed in (51, 52):
                assert_by_engine(server, Wish(seed=seed), server.fast(Wish(seed=seed)))
            digest = _careful(client)
            client.post(f"/slipstream/v1/engines/{digest}/try_again", {})
            assert_by_engine(server, Wish(seed=53), server.fast(Wish(seed=53)))
            assert_by_engine(server, Wish(seed=54), server.fast(Wish(seed=54)))
            with pytest.raises(StopIteration):
                _careful(client)


def _careful(client: ComfyClient) -> str:
    """The engine of which the page says that it runs without CUDA graphs."""
    engines = client.get("/slipstream/v1/engines")["engines"]
    return next(str(engine["digest"]) for engine in engines if engine["caution"])
