"""What a build by a click leaves alone or refuses in a running ComfyUI, and what its cache may not hide.

The builds are pretended, see `testing_pack/quick_builds.py`.
"""

from __future__ import annotations

import json
import urllib.error
from collections.abc import Iterator

import pytest

from slipstream.tests.comfyui.server.test_dry_run import API, QUICK, Page, picture
from slipstream.tests.comfyui.server.test_main_job import accelerate
from slipstream.tests.comfyui.support.graph import Graph, Node


@pytest.fixture(scope="module")
def server(server_of, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with server_of(home=tmp_path_factory.mktemp("limits"), environment=QUICK) as server, server.client() as client:
        yield Page(client, server.home)


@pytest.fixture
def page(server: Page) -> Page:
    """Of a server where nothing is built yet."""
    delete_all(server)
    return server


def delete_all(page: Page) -> None:
    page.client.post("/free", {"unload_models": True, "free_memory": False})
    page.delete_all()
    assert page.engines() == []


def ready_made(graph: Graph, model: Node, resolutions: str = "64x64") -> Node:
    """Build Engine behind a loader."""
    chosen = {"resolutions": resolutions, "batch": 2, "tokens": 77}
    return graph.add(
        "SlipstreamBuildEngine", model=model, backend="auto", precision="auto", optimize="fast build", **chosen
    )


def test_build_engine_builds_again_what_was_deleted_by_a_click_and_by_a_run(page: Page, model_files) -> None:
    graph = Graph()
    node = ready_made(graph, graph.add("CheckpointLoaderSimple", ckpt_name=model_files.checkpoint("sd15")))
    samples = graph.sample(accelerate(graph, node), size=64, steps=4, cfg=7.0, seed=12)
    graph.save(samples)
    assert page.client.run(graph).ok
    for build in (page.build, lambda graph, _: page.client.run(graph)):
        delete_all(page)
        assert build(graph, node).ok and page.engines() == ["SD15 64×64 batch 2"]
    assert page.client.run(graph).ok
    assert {node.id, samples.id} <= set(page.client.run(graph).cached), "sampled again for nothing"


def test_a_build_engine_on_the_way_fails_as_in_any_run(page: Page, model_files) -> None:
    graph = Graph()
    loader = graph.add("CheckpointLoaderSimple", ckpt_name=model_files.checkpoint("sd15"))
    model = accelerate(graph, ready_made(graph, loader, resolutions="auto"))
    graph.save(graph.sample(model, size=64, steps=4, cfg=7.0, seed=3))
    for run in (page.client.wait(page.click(graph, model)), page.client.run(graph)):
        assert not run.ok and "Name at least one resolution" in run.error["exception_message"]


def test_pictures_of_one_step_are_not_saved(page: Page, model_files) -> None:
    known = page.client.get("/object_info/SaveLatent")["SaveLatent"]
    if not known["output"]:
        pytest.skip("SaveLatent hands nothing on in this ComfyUI")
    graph, model, samples = picture(model_files, seed=4)
    saved = graph.add("SaveLatent", samples=samples, filename_prefix="first pass")
    graph.save(graph.sample(model, latent=saved, steps=4, denoise=0.5, seed=9))
    assert page.build(graph, model).latents() == [] and page.engines() == ["SD15 64×64 batch 2"]
    assert len(page.client.run(graph).latents()) == 3


def test_off_in_the_settings_builds_nothing_for_auto(page: Page, model_files) -> None:
    graph, model, _ = picture(model_files, seed=6)
    node = ready_made(graph, Node("1"))
    page.client.post(API + "/settings", {"backend": "off"})
    try:
        for each in (model, node):
            with pytest.raises(urllib.error.HTTPError) as refusal:
                page.dry_run(graph, each)
            told = json.loads(refusal.value.read())["error"]
            assert told["code"] == "bad_request" and "switched off in Slipstream's settings" in told["message"]
        run = page.client.run(graph)
        assert not run.ok and "switched off" in run.error["exception_message"] and page.engines() == []
        graph.prompt[model.id]["inputs"]["backend"] = "compiled"
        assert page.build(graph, model).ok and page.engines() == ["SD15 64×64 batch 2"]
    finally:
        page.client.post(API + "/settings", {"backend": "auto"})
