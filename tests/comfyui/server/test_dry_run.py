"""Building by a click in a running ComfyUI: what is built, what the page hears, and how it is stopped.

Most of these builds are pretended, see `testing_pack/quick_builds.py`; the last tests compile.
"""

from __future__ import annotations

import json
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.engine_cache import EngineStore
from slipstream.tests.comfyui.server.test_main_job import accelerate, difference, info_of, wait_until, workers
from slipstream.tests.comfyui.server.test_whole_workflow import CASES, STEPS, Workflow, counted
from slipstream.tests.comfyui.support.client import ComfyClient, Run
from slipstream.tests.comfyui.support.graph import Graph, Node

API = "/slipstream/v1"
QUICK = {"SLIPSTREAM_TEST_BUILD_SECONDS": "1.5"}
SLOW = {"SLIPSTREAM_TEST_BUILD_SECONDS": "120"}


class Page:
    """What the page does: it asks for dry runs, queues them, and listens."""

    def __init__(self, client: ComfyClient, home: Path) -> None:
        self.client = client
        self._home = home

    def click(self, graph: Graph, node: Node) -> str:
        """Queue the builds of a node; the prompt's id."""
        return self.client.queue(self.dry_run(graph, node))

    def dry_run(self, graph: Graph, node: Node) -> Graph:
        made = Graph()
        made.prompt = self.client.post(API + "/dry-run", {"prompt": graph.prompt, "node": node.id})["prompt"]
        return made

    def build(self, graph: Graph, node: Node) -> Run:
        run = self.client.wait(self.click(graph, node))
        assert run.ok, run.error
        return run

    def builds(self) -> list[dict[str, Any]]:
        return list(self.client.get(API + "/builds")["builds"])

    def state(self, node: Node) -> dict[str, Any]:
        return next(state for state in self.client.get(API + "/nodes")["nodes"] if state["node"] == node.id)

    def heard(self, event: str) -> list[dict[str, Any]]:
        return [each["data"] for each in self.client.events if each["type"] == f"slipstream.{event}"]

    def results(self) -> list[str]:
        return [data["result"] for data in self.heard("result")]

    def engines(self) -> list[str]:
        return sorted(entry.manifest.label for entry in EngineStore(self._home).list())

    def delete_all(self) -> None:
        """Nothing is built yet, or no more."""
        for engine in self.client.get(API + "/engines")["engines"]:
            self.client.post(f"{API}/engines/{engine['digest']}/delete", {})

    def assert_nothing_is_left(self) -> None:
        assert self.builds() == [] and self.engines() == []
        assert not any(path.is_file() for path in (self._home / "tmp").rglob("*"))


@pytest.fixture(scope="module")
def quick(server_of, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with server_of(home=tmp_path_factory.mktemp("quick"), environment=QUICK) as server, server.client() as client:
        yield Page(client, server.home)
        assert "Traceback" not in server.log(), server.log()


@pytest.fixture(scope="module")
def slow(server_of, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with server_of(home=tmp_path_factory.mktemp("slow"), environment=SLOW) as server, server.client() as client:
        yield Page(client, server.home)


@pytest.fixture
def page(quick: Page) -> Page:
    """Of a server whose builds take a moment; nothing is built yet."""
    quick.delete_all()
    time.sleep(0.8)  # until the last test's events have come
    quick.client.events.clear()
    return quick


def picture(model_files, size: int = 64, seed: int = 3, **options: str) -> tuple[Graph, Node, Node]:
    """Loader → Accelerate Model → KSampler → SaveLatent, with Engine Info; the graph, the node and the latent."""
    graph = Graph()
    loader = graph.add("CheckpointLoaderSimple", ckpt_name=model_files.checkpoint("sd15"))
    model = accelerate(graph, loader, **options)
    samples = graph.sample(model, size=size, steps=4, cfg=7.0, seed=seed)
    graph.save(samples)
    graph.add("SlipstreamEngineInfo", model=model, after=samples)
    return graph, model, samples


# ------------------------------------------------------------------------------------------- what is built


def test_one_click_builds_for_a_whole_workflow_and_the_real_run_is_as_ever(page: Page, model_files) -> None:
    lora = model_files.demo_lora()
    case = CASES["two ControlNets with overlapping ranges"]
    plain, fast = Workflow(case, lora, fast=False), Workflow(case, lora, fast=True)
    wanted = page.client.run(plain.graph)
    page.build(fast.graph, fast.vae)
    assert page.engines() == [
        "ControlNet 128×128 batch 2",
        "SD15 128×128 batch 2 with control",
        "VAE decoder 128×128 batch 1",
    ]
    assert {page.state(node)["kind"] for node in (fast.model, fast.control, fast.vae)} == {"ready"}
    run = page.client.run(fast.graph)
    assert run.ok, run.error
    assert counted(run)[0] == (STEPS, 0), "the dry run's one step was taken for the real run's"
    assert np.abs(run.latents()[0] - wanted.latents()[0]).max() < 1e-4
    assert np.abs(run.images()[0] - wanted.images()[0]).max() <= 2 / 255
    assert page.results() == ["built"] * 3


def test_a_second_pass_gets_its_own_size_by_the_same_click(page: Page, model_files) -> None:
    graph, model, samples = picture(model_files, build="first use")
    larger = graph.add(
        "LatentUpscale", samples=samples, upscale_method="bilinear", width=96, height=64, crop="disabled"
    )
    graph.save(graph.sample(model, latent=larger, steps=4, denoise=0.5, seed=9))
    page.build(graph, model)
    assert page.engines() == ["SD15 64×64 batch 2", "SD15 96×64 batch 2"]
    run = page.client.run(graph)
    assert "calls on engines: 4, on your model: 0" in info_of(run), info_of(run)


def test_guiders_and_custom_sampling(page: Page, model_files) -> None:
    graph = Graph()
    loader = graph.add("CheckpointLoaderSimple", ckpt_name=model_files.checkpoint("sd15"))
    model = accelerate(graph, loader)
    guider = graph.add(
        "CFGGuider", model=model, positive=graph.conditioning(1), negative=graph.conditioning(2), cfg=7.0
    )
    sampler = graph.add("KSamplerSelect", sampler_name="dpmpp_2m")
    sampler = graph.add("SlipstreamStepSkipSampler", sampler=sampler, preset="balanced")
    samples = graph.add(
        "SamplerCustomAdvanced",
        noise=graph.add("RandomNoise", noise_seed=1),
        guider=guider,
        sampler=sampler,
        sigmas=graph.add("BasicScheduler", model=model, scheduler="normal", steps=20, denoise=1.0),
        latent_image=graph.add("EmptyLatentImage", width=64, height=64, batch_size=1),
    )
    graph.save(samples)
    page.build(graph, model)
    assert page.engines() == ["SD15 64×64 batch 2"]
    assert page.state(model)["engine_calls"] == 1


def test_listed_sizes_are_built_although_no_sampler_has_them(page: Page, model_files) -> None:
    graph, model, _ = picture(model_files, resolutions="64x64, 128x64")
    page.build(graph, model)
    assert page.engines() == ["SD15 128×64 batch 2", "SD15 64×64 batch 2"]


def test_build_engine_by_a_click(page: Page, model_files) -> None:
    graph, _, _ = picture(model_files)
    chosen = {"resolutions": "64x64", "batch": 2, "tokens": 77}
    chosen |= {"backend": "auto", "precision": "auto", "optimize": "fast build"}
    node = graph.add("SlipstreamBuildEngine", model=Node("1"), **chosen)
    run = page.build(graph, node)
    assert page.engines() == ["SD15 64×64 batch 2"] and "ready" in info_of(run)
    assert page.state(node)["kind"] == "ready"


def test_two_clicks_at_once_build_once_and_a_third_after_deleting_builds_again(page: Page, model_files) -> None:
    graph, model, _ = picture(model_files)
    for prompt in [page.click(graph, model), page.click(graph, model)]:
        assert page.client.wait(prompt).ok
    wait_until(lambda: page.results() == ["built"], "the end was not told", 15)
    (entry,) = EngineStore(page._home).list()
    page.client.post("/free", {"unload_models": True, "free_memory": False})
    page.client.post(f"{API}/engines/{entry.digest}/delete", {})
    assert page.engines() == []
    page.build(graph, model)
    assert page.engines() == ["SD15 64×64 batch 2"]


def test_what_cannot_be_built_is_said_in_words(page: Page, model_files) -> None:
    graph = Graph()
    loader = graph.add("CheckpointLoaderSimple", ckpt_name=model_files.checkpoint("sd15"))
    model = accelerate(graph, loader)
    with pytest.raises(urllib.error.HTTPError) as refusal:
        page.dry_run(graph, model)
    told = json.loads(refusal.value.read())["error"]
    assert refusal.value.code == 400 and told["code"] == "bad_request" and "KSampler" in told["message"]


# ------------------------------------------------------------------------------------- what the page hears


def test_the_page_hears_how_far_it_is_and_how_it_ended(page: Page, model_files) -> None:
    graph, model, _ = picture(model_files, size=72)
    page.build(graph, model)
    wait_until(lambda: page.results() == ["built"], "the end was not told", 15)
    fractions = [build["fraction"] for data in page.heard("builds") for build in data["builds"] if build["fraction"]]
    assert len(fractions) >= 3 and fractions == sorted(fractions) and fractions[-1] > fractions[0]
    assert page.heard("builds")[-1] == {"builds": [], "policy": "idle"}
    build = next(data["builds"][0] for data in page.heard("builds") if data["builds"])
    assert build["nodes"] == [{"node": model.id, "workflow": None}] and build["label"] == "SD15 72×72 batch 2"
    texts = [state["text"] for data in page.heard("nodes") for state in data["nodes"] if state["node"] == model.id]
    assert any(text.startswith("building ") for text in texts) and texts[-1].endswith("ready")
    assert texts[-1].startswith("compiled fp32 · 72×72")
    (result,) = page.heard("result")
    assert result["nodes"] == build["nodes"] and result["id"] == build["id"] and "Built SD15" in result["message"]


def test_a_build_in_the_background_is_queued_then_building_then_ready(page: Page, model_files) -> None:
    graph, model, _ = picture(model_files, size=80, build="background")
    prompts = [page.client.queue(graph)]
    busy = Graph()
    busy.add("SlipstreamTestSleep", seconds=2.0)
    prompts.append(page.client.queue(busy))
    assert "on your model: 4" in info_of(page.client.wait(prompts[0]))
    state, (build,) = page.state(model), page.builds()
    assert (state["kind"], state["text"]) == ("queued", "queued: waits until ComfyUI is idle")
    assert build["state"] == "queued" and build["held"] and build["nodes"] == [{"node": model.id, "workflow": None}]

    def kinds() -> list[str]:
        return [state["kind"] for data in page.heard("nodes") for state in data["nodes"] if state["node"] == model.id]

    wait_until(lambda: kinds()[-1] == "ready", "the build did not end")
    order = [kind for kind, before in zip(kinds(), ["", *kinds()], strict=False) if kind != before]
    assert order[-3:] == ["queued", "building", "ready"], kinds()
    assert page.state(model)["kind"] == "ready", "its prompt is not the last one that ran"


def test_the_workflow_of_a_node_is_told_where_the_page_sends_it(page: Page, model_files) -> None:
    graph, model, _ = picture(model_files, seed=77)
    body = {"prompt": graph.prompt, "extra_data": {"extra_pnginfo": {"workflow": {"id": "w-1", "nodes": []}}}}
    assert page.client.wait(page.client.post("/prompt", body)["prompt_id"]).ok
    states = [state for state in page.client.get(API + "/nodes")["nodes"] if state["workflow"] == "w-1"]
    assert [state["node"] for state in states] == [model.id]


def with_workflow(graph: Graph, workflow: str) -> dict[str, Any]:
    info = {"workflow": {"id": workflow, "nodes": []}}
    return {"prompt": graph.prompt, "extra_data": {"extra_pnginfo": info}}


def test_a_node_that_comfyui_has_in_its_cache_shows_its_own_last_run(server_of, tmp_path: Path, model_files) -> None:
    with (
        server_of(home=tmp_path, environment=QUICK, arguments=["--cache-lru", "20"]) as server,
        server.client() as client,
    ):
        page = Page(client, server.home)

        def run(graph: Graph, workflow: str) -> None:
            assert client.wait(client.post("/prompt", with_workflow(graph, workflow))["prompt_id"]).ok

        def calls() -> dict[str | None, tuple[int, int]]:
            states = client.get(API + "/nodes")["nodes"]
            mine = [state for state in states if state["node"] == model.id]
            return {state["workflow"]: (state["engine_calls"], state["eager_calls"]) for state in mine}

        graph, model, samples = picture(model_files, seed=1, build="manual")
        run(graph, "w-1")
        assert calls() == {"w-1": (0, 4)}
        run(page.dry_run(graph, model), "w-1")
        assert calls() == {"w-1": (1, 0)}
        graph.prompt[samples.id]["inputs"]["seed"] = 2
        run(graph, "w-1")
        assert calls() == {"w-1": (4, 4)}, "the dry run's module stayed"
        graph.prompt[samples.id]["inputs"]["seed"] = 3
        run(graph, "w-2")
        assert calls()["w-2"] == (8, 4)


def test_build_engine_that_is_refused_has_failed(slow: Page, model_files) -> None:
    graph, _, _ = picture(model_files)
    chosen = {"resolutions": "64x64", "batch": 2, "tokens": 77}
    chosen |= {"backend": "tensorrt", "precision": "auto", "optimize": "fast build"}
    node = graph.add("SlipstreamBuildEngine", model=Node("1"), **chosen)
    assert not slow.client.wait(slow.click(graph, node)).ok
    state = slow.state(node)
    assert state["kind"] == "failed" and "tensorrt" in state["tip"].lower(), state


# ---------------------------------------------------------------------------------------------- stopping it


@pytest.mark.parametrize("how", ["route", "interrupt"])
def test_a_stopped_dry_run_ends_soon_and_leaves_nothing(slow: Page, model_files, how: str) -> None:
    graph, model, _ = picture(model_files)
    slow.client.events.clear()
    queued = slow.click(graph, model)
    wait_until(lambda: any(build["state"] == "running" for build in slow.builds()), "the build did not begin")
    (build,) = slow.builds()
    started = time.monotonic()
    if how == "route":
        assert slow.client.post(f"{API}/builds/{build['id']}/cancel", {}) == {"cancelled": build["id"]}
    else:
        slow.client.interrupt()
    run = slow.client.wait(queued)
    assert run.interrupted and time.monotonic() - started < 4, run.messages
    slow.assert_nothing_is_left()
    wait_until(lambda: slow.heard("result"), "the end was not told", 10)
    (result,) = slow.heard("result")
    assert result["result"] == "cancelled" and "was stopped" in result["message"]
    assert slow.state(model)["engine_calls"] == slow.state(model)["eager_calls"] == 0, "it sampled on"


def test_a_waiting_build_is_cancelled_by_the_route(slow: Page, model_files) -> None:
    graph, model, _ = picture(model_files, seed=5, build="background")
    busy = Graph()
    busy.add("SlipstreamTestSleep", seconds=20.0)
    first, second = slow.client.queue(graph), slow.client.queue(busy)
    assert slow.client.wait(first).ok
    (build,) = slow.builds()
    slow.client.post(f"{API}/builds/{build['id']}/cancel", {})
    assert slow.builds() == [] and slow.state(model)["kind"] == "idle"
    slow.client.interrupt()
    slow.client.wait(second)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        slow.client.post(f"{API}/builds/{build['id']}/cancel", {})


# ------------------------------------------------------------------------------------------- builds that compile


@pytest.fixture(scope="module")
def real(server_of, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with server_of(home=tmp_path_factory.mktemp("real")) as server, server.client() as client:
        yield Page(client, server.home)


def test_the_process_of_a_stopped_build_ends_too(real: Page, model_files) -> None:
    graph, model, _ = picture(model_files)
    queued = real.click(graph, model)
    wait_until(lambda: workers(real._home), "the build did not begin")
    (build,) = real.builds()
    real.client.post(f"{API}/builds/{build['id']}/cancel", {})
    assert real.client.wait(queued, 30).interrupted
    wait_until(lambda: not workers(real._home), "the worker outlived the cancel", seconds=5)
    real.assert_nothing_is_left()


@pytest.mark.slow  # test_page.py does it in a browser
def test_a_click_compiles_and_the_next_picture_is_made_by_the_engine(real: Page, model_files) -> None:
    graph, model, _ = picture(model_files)
    plain = Graph()
    loader = plain.add("CheckpointLoaderSimple", ckpt_name=model_files.checkpoint("sd15"))
    plain.save(plain.sample(loader, size=64, steps=4, cfg=7.0, seed=3))
    run = real.client.wait(real.click(graph, model), 600)
    assert run.ok, run.error
    made = real.client.run(graph)
    assert "calls on engines: 4, on your model: 0" in info_of(made), info_of(made)
    assert difference(made, real.client.run(plain)) < 1e-4
    assert real.state(model)["text"] == "compiled fp32 · 64×64 · ready"


@pytest.mark.slow
def test_a_click_builds_what_a_text_encoder_needs_and_the_next_text_is_encoded_by_it(real: Page, model_files) -> None:
    def text(words: str) -> tuple[Graph, Node]:
        graph = Graph()
        clip = graph.add("CLIPLoader", clip_name=model_files.text_encoder(), type="stable_diffusion")
        clip = graph.add("SlipstreamAccelerateTextEncoder", clip=clip, backend="auto", build="background")
        conditioning = graph.add("CLIPTextEncode", clip=clip, text=words)
        graph.add("SlipstreamEngineInfo", clip=clip, after=conditioning)
        return graph, clip

    graph, clip = text("a red circle")
    run = real.client.wait(real.click(graph, clip), 600)
    assert run.ok, run.error
    info = info_of(real.client.run(text("a large yellow star left of a black ring")[0]))
    assert "12 of 12 calls of blocks on engines" in info, info
    assert real.state(clip)["text"] == "blocks"
    assert [label for label in real.engines() if "CLIP CLIPLayer 768" in label]
