"""A server on a small card: builds in the background get what ComfyUI's models hold, and pictures get it back."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from slipstream.engine_cache import EngineStore
from slipstream.tests.comfyui.support.client import ComfyClient
from slipstream.tests.comfyui.support.graph import Graph
from slipstream.tests.comfyui.support.server import ComfyServer

TIGHT = {"SLIPSTREAM_TEST_BUILD_SECONDS": "60", "SLIPSTREAM_TEST_TIGHT_MEMORY": "3"}
ASKED = "Slipstream: ComfyUI unloads models"
ENDED = "gives its memory back and begins anew later"


def picture(model_files: Any, seed: int, build: str | None = "background") -> Graph:
    graph = Graph()
    model = loader = graph.add("CheckpointLoaderSimple", ckpt_name=model_files.checkpoint("sd15"))
    if build is not None:
        options = {"precision": "auto", "optimize": "fast build", "build": build, "resolutions": "auto"}
        model = graph.add("SlipstreamAccelerateModel", model=loader, backend="auto", **options)
    samples = graph.sample(model, size=64, steps=3, cfg=7.0, seed=seed)
    graph.save(samples)
    if build is not None:
        graph.add("SlipstreamEngineInfo", model=model, after=samples)
    return graph


def builds(client: ComfyClient) -> list[tuple[str, str]]:
    found = client.get("/slipstream/v1/builds")["builds"]
    return [(build["state"], build["message"]) for build in found]


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.1)


def test_a_build_gets_memory_and_the_next_picture_gets_it_back(
    start_comfy: Callable[..., ComfyServer], model_files: Any
) -> None:
    """In a server of its own, since only ComfyUI's own prompt worker shows what its flag does."""
    server = start_comfy(environment=TIGHT)
    with server.client() as client:
        assert client.run(picture(model_files, seed=1)).ok
        until(lambda: builds(client) == [("queued", "waits for free GPU memory")], "the build to find no memory")
        assert ASKED not in server.log(), "a person may go on at once"
        until(lambda: builds(client) == [("running", "pretending")], "the build")
        assert server.log().count(ASKED) == 1

        run = client.run(again := picture(model_files, seed=2))
        kinds = {again.prompt[node]["class_type"] for node in run.cached}
        assert {"CheckpointLoaderSimple", "SlipstreamTestConditioning"} <= kinds, "what nodes made was lost"
        until(lambda: ENDED in server.log(), "the build to end")
        client.builds_take(0.5)
        until(lambda: EngineStore(server.home).list(), "the engine")
        assert server.log().count(ASKED) == 2 and "failed" not in server.log()

        run, plain = (client.run(picture(model_files, seed=3, build=build)) for build in ("background", None))
        assert "calls on engines: 3" in str(run.outputs), run.outputs
        assert np.allclose(run.latents()[0], plain.latents()[0], atol=1e-4)
