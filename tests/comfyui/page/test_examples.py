"""The example workflows, as ComfyUI's page finds and queues them, and the pictures that they make.

All draw 256x256 with CFG, so that one engine of the model serves them; `hires_fix` and ControlNet need one more each.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from slipstream.engine_cache import EngineStore
from slipstream.tests.comfyui.support.client import ComfyClient, Run
from slipstream.tests.comfyui.support.graph import Graph
from slipstream.tests.comfyui.support.workflow import BadWorkflow, nodes_of, to_graph, widget_values

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = sorted((ROOT / "example_workflows").glob("*.json"))
EXAMPLES_WANTED = {
    "build_before", "comparing", "controlnet_and_vae", "first_engine", "hires_fix", "lora", "step_skipping",
    "stock_checkpoint_with_lora", "text_to_image",
}  # fmt: skip
NOTE_LINES = 6
SOONEST = "fast build"
ACCELERATE = ("SlipstreamAccelerateModel", "SlipstreamAccelerateControlNet", "SlipstreamAccelerateVAE")

each_example = pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)


def workflow(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "example_workflows" / f"{name}.json").read_text(encoding="utf-8"))


@pytest.fixture
def client(comfy_server) -> Iterator[ComfyClient]:
    """Of the server whose builds are real; other tests of this folder pretend them."""
    with comfy_server.client() as client:
        yield client


@pytest.fixture(scope="module")
def object_info(comfy_server) -> dict[str, Any]:
    """What the server says of all its nodes."""
    with comfy_server.client() as client:
        return client.get("/object_info")


@pytest.fixture(scope="module")
def built(comfy_server, object_info) -> Iterator[Run]:
    """A run of `build_before`: it builds the engine that most tests of this file sample on."""
    graph = to_graph(workflow("build_before"), object_info)
    for kind in ("SlipstreamBuildEngine", "SlipstreamAccelerateModel"):
        change(graph, kind, optimize=SOONEST)
    with comfy_server.client() as client:
        yield client.wait(queue(client, graph), timeout=500)


def queue(client: ComfyClient, graph: Graph) -> str:
    """Queue a prompt of which the server refuses no part."""
    answer = client.post("/prompt", {"prompt": graph.prompt, "client_id": client.id})
    assert answer["node_errors"] == {}
    return answer["prompt_id"]


def change(graph: Graph, class_type: str, **inputs: Any) -> None:
    """Set inputs of every node of a class."""
    nodes = [node for node in graph.prompt.values() if node["class_type"] == class_type]
    assert nodes, f"no {class_type}"
    for node in nodes:
        assert inputs.keys() <= node["inputs"].keys()
        node["inputs"].update(inputs)


def texts_of(run: Run, graph: dict[str, Any], class_type: str) -> list[str]:
    """What the nodes of a class show, each in one text."""
    shown = [run.outputs[str(node["id"])] for node in graph["nodes"] if node["type"] == class_type]
    return ["\n".join(output["text"]) for output in shown]


def is_picture(image: np.ndarray) -> bool:
    return bool(np.isfinite(image).all()) and 0.05 < image.mean() < 0.95 and image.std() > 0.05


def thumbnail(name: str) -> np.ndarray:
    content = (ROOT / "example_workflows" / f"{name}.jpg").read_bytes()
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"), dtype=np.float32) / 255


def engines(comfy_server) -> set[str]:
    return {entry.digest for entry in EngineStore(comfy_server.home).list()}


# ---- the files


def test_there_are_examples() -> None:
    assert {file.stem for file in EXAMPLES} == EXAMPLES_WANTED


@each_example
def test_an_example_has_a_small_thumbnail(file: Path) -> None:
    picture = file.with_suffix(".jpg")
    assert picture.stat().st_size <= 60_000
    assert Image.open(picture).format == "JPEG"
    assert is_picture(thumbnail(file.stem))


@each_example
def test_the_template_browser_finds_an_example(client: ComfyClient, file: Path) -> None:
    assert file.stem in client.get("/workflow_templates")["slipstream"]
    for found in (file, file.with_suffix(".jpg")):
        assert client.fetch(f"/api/workflow_templates/slipstream/{found.name}") == found.read_bytes()


@each_example
def test_links_join_slots_that_exist(object_info, file: Path) -> None:
    saved = workflow(file.stem)
    nodes = {node["id"]: node for node in saved["nodes"]}
    for link, source, output, target, slot, kind in saved["links"]:
        outputs, taken = object_info[nodes[source]["type"]], nodes[target]["inputs"][slot]
        assert (outputs["output"][output], nodes[source]["outputs"][output]["type"]) == (kind, kind)
        assert link in nodes[source]["outputs"][output]["links"] and taken["link"] == link
        assert _type_of(object_info[nodes[target]["type"]], taken["name"]) in (kind, "*")
    ends = [link for node in nodes.values() for slot in node["outputs"] for link in slot["links"]]
    starts = [slot["link"] for node in nodes.values() for slot in node["inputs"] if slot["link"] is not None]
    assert sorted(ends) == sorted(starts) == [link[0] for link in saved["links"]]
    assert saved["last_link_id"] == max(starts) and saved["last_node_id"] == max(nodes)


def _type_of(info: dict[str, Any], name: str) -> str:
    (spec,) = [inputs[name] for inputs in info["input"].values() if name in inputs]
    return spec[0]


@each_example
def test_the_layout_is_neat(file: Path) -> None:
    saved = workflow(file.stem)
    boxes = [_box(node) for node in saved["nodes"]]
    for one, other in itertools.combinations(boxes, 2):
        assert one[0] >= other[2] or other[0] >= one[2] or one[1] >= other[3] or other[1] >= one[3]
    groups = [(x, y, x + width, y + height) for x, y, width, height in (group["bounding"] for group in saved["groups"])]
    for box in boxes:
        inside = [group for group in groups if _holds(group, box)]
        assert len(inside) == 1, f"{box} lies in {len(inside)} groups"


def _box(node: dict[str, Any]) -> tuple[float, float, float, float]:
    (x, y), (width, height) = node["pos"], node["size"]
    return x, y - 30, x + width, y + height  # its title stands above


def _holds(outer: tuple[float, ...], inner: tuple[float, ...]) -> bool:
    return outer[0] <= inner[0] and outer[1] <= inner[1] and outer[2] >= inner[2] and outer[3] >= inner[3]


@each_example
def test_an_example_is_readable_and_in_sight_at_first(file: Path) -> None:
    """On a page of 1400 by 900, between its bars."""
    saved = workflow(file.stem)
    view = saved["extra"]["ds"]
    assert view["scale"] >= 0.7
    for group in saved["groups"]:
        x, y, width, height = group["bounding"]
        left, top = ((at + shift) * view["scale"] for at, shift in zip((x, y), view["offset"], strict=True))
        assert left >= 60 and top >= 95
        assert left + width * view["scale"] <= 1400 and top + height * view["scale"] <= 900


@each_example
def test_the_same_picture_comes_again(file: Path) -> None:
    samplers = [node for node in workflow(file.stem)["nodes"] if node["type"] == "KSampler"]
    assert {node["widgets_values"][1] for node in samplers} == {"fixed"}


@each_example
def test_links_lead_from_left_to_right_or_down(file: Path) -> None:
    saved = workflow(file.stem)
    places = {node["id"]: node["pos"] for node in saved["nodes"]}
    for _, source, _, target, _, _ in saved["links"]:
        assert places[source][0] < places[target][0] or places[source][1] < places[target][1]
        assert places[source][0] <= places[target][0]


@each_example
def test_an_example_shows_engine_info_and_explains_itself(file: Path) -> None:
    saved = workflow(file.stem)
    notes = [node["widgets_values"][0] for node in saved["nodes"] if node["type"] == "Note"]
    assert len(notes) == 1 and "engine" in notes[0]
    assert len(notes[0].split("\n")) <= NOTE_LINES and len(notes[0]) < 360, "more is for help pages"
    kinds = [node["type"] for node in nodes_of(saved)]
    assert {"SlipstreamAccelerateModel", "SlipstreamEngineInfo"} <= set(kinds)
    assert "Run" in notes[0] and ("Build engine" in notes[0] or "Build Engine" in notes[0])


# ---- the runs


def test_build_before_builds_and_then_samples_on_the_engine(built: Run) -> None:
    assert built.ok, built.error
    saved = workflow("build_before")
    (report,) = texts_of(built, saved, "SlipstreamBuildEngine")
    assert "256×256 batch 2" in report and "ready" in report
    (info,) = texts_of(built, saved, "SlipstreamEngineInfo")
    assert "calls on engines: 20, on your model: 0" in info
    (picture,) = built.images()
    assert picture.shape == (256, 256, 3) and is_picture(picture)
    assert np.abs(picture - thumbnail("build_before")).mean() < 0.03


def test_first_engine_samples_on_an_engine_that_is_there(built: Run, client, object_info, comfy_server) -> None:
    before = engines(comfy_server)
    saved = workflow("first_engine")
    graph = to_graph(saved, object_info)
    change(graph, "SlipstreamAccelerateModel", optimize=SOONEST)
    run = client.wait(queue(client, graph), timeout=120)
    assert run.ok, run.error
    (info,) = texts_of(run, saved, "SlipstreamEngineInfo")
    assert "calls on engines: 20, on your model: 0" in info, info
    (picture,) = run.images()
    assert picture.shape == (256, 256, 3) and is_picture(picture)
    assert np.abs(picture - thumbnail("first_engine")).mean() < 0.03
    assert engines(comfy_server) == before, "another engine was built"


def run_on_engines(client: ComfyClient, object_info: dict[str, Any], name: str) -> Run:
    """Run an example that waits for its engines; nothing is taken over from the prompt before, counts neither."""
    client.free()
    assert client.run(_of_no_interest()).ok
    graph = to_graph(workflow(name), object_info)
    for node in graph.prompt.values():
        if node["class_type"] in ACCELERATE:
            node["inputs"].update(build="first use", optimize=SOONEST)
    run = client.wait(queue(client, graph), timeout=500)
    assert run.ok, run.error
    return run


def _of_no_interest() -> Graph:
    """ComfyUI forgets what it was asked to forget at the end of a prompt."""
    graph = Graph()
    graph.add("PreviewAny", source="anything")
    return graph


def result(run: Run, name: str) -> np.ndarray:
    """The picture that is saved, which looks like the thumbnail."""
    (node,) = [node["id"] for node in workflow(name)["nodes"] if node["type"] == "SaveImage"]
    (picture,) = dataclasses.replace(run, outputs={str(node): run.outputs[str(node)]}).images()
    assert is_picture(picture)
    shown = picture[:, :512] if name == "comparing" else picture  # whose map of differences is black
    assert shown.shape == thumbnail(name).shape and np.abs(shown - thumbnail(name)).mean() < 0.03
    return picture


def calls(run: Run, name: str) -> list[tuple[int, int]]:
    """Calls of engine and plain model that Engine Info counts: of model, VAE, ControlNet, as far as connected."""
    (info,) = texts_of(run, workflow(name), "SlipstreamEngineInfo")
    return [(int(one), int(other)) for one, other in re.findall(r"calls on engines: (\d+), on your model: (\d+)", info)]


def psnr(run: Run, name: str) -> float:
    (report,) = texts_of(run, workflow(name), "SlipstreamCompareImages")
    return float(re.match(r"picture 1: PSNR ([\d.]+) dB", report)[1])


@pytest.mark.slow
def test_step_skipping_calls_the_engine_in_some_steps(built: Run, client, object_info) -> None:
    run = run_on_engines(client, object_info, "step_skipping")
    assert calls(run, "step_skipping") == [(20 + 14, 0)]
    assert 20 < psnr(run, "step_skipping") < 60
    assert result(run, "step_skipping").shape == (256, 768, 3)


@pytest.mark.slow
def test_comparing_shows_that_an_engine_changes_nothing(built: Run, client, object_info, comfy_server) -> None:
    before = engines(comfy_server)
    run = run_on_engines(client, object_info, "comparing")
    assert calls(run, "comparing") == [(20, 0)]
    assert psnr(run, "comparing") > 45
    assert result(run, "comparing")[:, 512:].max() < 0.5, "the map of differences is dark"
    assert engines(comfy_server) == before, "another engine was built"


@pytest.mark.slow
def test_the_lora_makes_night_without_a_build(built: Run, client, object_info, comfy_server) -> None:
    before = engines(comfy_server)
    run = run_on_engines(client, object_info, "lora")
    assert calls(run, "lora") == [(40, 0)]
    day, night = np.split(result(run, "lora"), 2, axis=1)
    assert np.abs(day - night).mean() > 0.08
    assert _corners(night) < 0.7 * _corners(day), "the backdrop is darker"
    assert engines(comfy_server) == before, "another engine was built"


def _corners(picture: np.ndarray) -> float:
    """Brightness far from the shapes."""
    return float(np.mean([picture[rows, columns] for rows in _ENDS for columns in _ENDS]))


_ENDS = (slice(0, 32), slice(-32, None))


@pytest.mark.slow
def test_controlnet_and_vae_run_on_engines_too(built: Run, client, object_info) -> None:
    run = run_on_engines(client, object_info, "controlnet_and_vae")
    model, vae, controlnet = calls(run, "controlnet_and_vae")
    assert (model, vae, controlnet) == ((40, 0), (2, 0), (20, 0))
    first, edges, second = np.split(result(run, "controlnet_and_vae"), 3, axis=1)
    assert np.abs(first - second).mean() > 0.1, "other colours"
    assert _sharpness_at(edges, second) > 1.4 * _sharpness_at(edges[::-1, ::-1], second), "the same outlines"


def _sharpness_at(edges: np.ndarray, picture: np.ndarray) -> float:
    """How much a picture changes from pixel to pixel where there are edges."""
    change = np.abs(np.diff(picture, axis=0))[:, 1:] + np.abs(np.diff(picture, axis=1))[1:]
    return float(change.mean(-1)[edges[1:, 1:].mean(-1) > 0.5].mean())


@pytest.mark.slow
def test_hires_fix_adds_a_second_pass(built: Run, client, object_info) -> None:
    run = run_on_engines(client, object_info, "hires_fix")
    assert calls(run, "hires_fix") == [(40, 0)]
    assert result(run, "hires_fix").shape == (384, 384, 3)


@pytest.mark.slow
def test_text_to_image_has_model_and_vae_on_engines(built: Run, client, object_info) -> None:
    run = run_on_engines(client, object_info, "text_to_image")
    assert calls(run, "text_to_image") == [(20, 0), (1, 0)]
    assert result(run, "text_to_image").shape == (256, 256, 3)


def test_a_beginner_gets_a_picture_at_the_first_click(start_comfy) -> None:
    """In an empty ComfyUI: the list of templates, the first of them as the server hands it out, and its picture."""
    with start_comfy().client() as client:
        assert set(client.get("/workflow_templates")["slipstream"]) == EXAMPLES_WANTED
        saved = client.get("/api/workflow_templates/slipstream/first_engine.json")
        run = client.wait(queue(client, to_graph(saved, client.get("/object_info"))), timeout=120)
        assert run.ok, run.error
        assert calls(run, "first_engine") == [(0, 20)]
        (info,) = texts_of(run, saved, "SlipstreamEngineInfo")
        assert "being built in the background" in info
        assert result(run, "first_engine").shape == (256, 256, 3)


def stock_graph(client: ComfyClient, model_files) -> Graph:
    """The stock example with files that exist here."""
    files = {"CheckpointLoaderSimple": model_files.checkpoint("sd15"), "LoraLoader": model_files.lora("sd15")}
    saved = workflow("stock_checkpoint_with_lora")
    for node in saved["nodes"]:
        if node["type"] in files:
            node["widgets_values"][0] = files[node["type"]]
    return to_graph(saved, client.get("/object_info"))  # asked anew: it lists the files


def test_the_stock_example_is_accepted_and_runs_up_to_the_text_encoder(client, model_files) -> None:
    run = client.wait(queue(client, stock_graph(client, model_files)))
    assert run.error["node_type"] == "CLIPTextEncode", "only the text encoder is missing in these files"


def test_the_stock_example_makes_a_picture(client, model_files) -> None:
    graph = stock_graph(client, model_files)
    for seed, node in enumerate(node for node in graph.prompt.values() if node["class_type"] == "CLIPTextEncode"):
        prompt = {"seed": seed, "tokens": 77, "dim": 768, "pooled": 0}
        node.update(class_type="SlipstreamTestConditioning", inputs=prompt)
    change(graph, "SlipstreamAccelerateModel", backend="off")  # else it would cost a second build
    change(graph, "KSampler", steps=2)
    run = client.wait(queue(client, graph))
    assert run.ok, run.error
    (picture,) = run.images()
    assert picture.shape == (512, 512, 3) and is_picture(picture)
    (info,) = texts_of(run, workflow("stock_checkpoint_with_lora"), "SlipstreamEngineInfo")
    assert "calls on engines: 0" in info


def test_choices_that_saved_workflows_do_not_have_reach_the_model(client, object_info) -> None:
    saved = workflow("first_engine")
    graph = to_graph(saved, object_info)
    change(graph, "KSampler", steps=1)
    (node,) = [node for node in graph.prompt.values() if node["class_type"] == "SlipstreamAccelerateModel"]
    node["inputs"].update(engines="one for a range", max_batch=4, max_tokens=154, bake=False)  # and no list of sizes
    run = client.wait(queue(client, graph), timeout=120)
    assert run.ok, run.error
    (info,) = texts_of(run, saved, "SlipstreamEngineInfo")
    assert "on your model: 1" in info and "'one for a range' needs a list of resolutions" in info


@pytest.mark.parametrize("name", ["SlipstreamAccelerateModel", "SlipstreamBuildEngine"])
def test_what_an_engine_is_for_may_be_left_out_and_is_folded_away(object_info, name: str) -> None:
    inputs = object_info[name]["input"]["optional"]
    assert list(inputs) == ["engines", "max_batch", "max_tokens", "bake"]
    assert all(settings["advanced"] for _, settings in inputs.values())


# ---- what the tests above rely on


def broken(kind: str, **changes: Any) -> dict[str, Any]:
    """`first_engine` with one node changed."""
    saved = workflow("first_engine")
    (node,) = [node for node in saved["nodes"] if node["type"] == kind]
    node.update(changes)
    return saved


@pytest.mark.parametrize(
    "kind, changes, complaint",
    [
        ("KSampler", {"type": "KSampleur"}, "is no node"),
        ("KSampler", {"mode": 4}, "bypassed"),
        ("KSampler", {"widgets_values": [7, 20, 5.0, "euler", "normal", 1.0]}, "has 6 values"),
        ("KSampler", {"widgets_values": [7, "sometimes", 20, 5.0, "euler", "normal", 1.0]}, "'sometimes'"),
        ("KSampler", {"widgets_values": [7, "fixed", 20, -5.0, "euler", "normal", 1.0]}, "cfg cannot be -5.0"),
        ("EmptyLatentImage", {"widgets_values": [256, "256", 1]}, "height cannot be '256'"),
        ("SaveImage", {"widgets_values": [1]}, "filename_prefix cannot be 1"),
        ("SlipstreamAccelerateModel", {"widgets_values": ["auto", "auto", "balanced", "manual"]}, "has 4 values"),
        (
            "SlipstreamAccelerateModel",
            {"widgets_values": ["warp", "auto", "balanced", "manual", "auto"]},
            "backend cannot be 'warp'",
        ),
    ],
)
def test_a_workflow_that_does_not_fit_its_nodes_is_noticed(object_info, kind, changes, complaint) -> None:
    with pytest.raises(BadWorkflow, match=complaint):
        to_graph(broken(kind, **changes), object_info)


def test_widgets_get_their_names(object_info) -> None:
    (node,) = [node for node in workflow("first_engine")["nodes"] if node["type"] == "KSampler"]
    assert widget_values(node, object_info["KSampler"]) == {
        "seed": 7, "steps": 20, "cfg": 5.0, "sampler_name": "euler", "scheduler": "normal", "denoise": 1.0,
    }  # fmt: skip
    assert node["widgets_values"][1] == "fixed"
