"""The example workflows and the nodes' help pages, as ComfyUI's page finds them."""

from __future__ import annotations

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

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "example_workflows").glob("*.json"))
DOCS = ROOT / "web" / "js" / "docs"
DEMOS = ("build_before", "first_engine")
SAMPLING = ("sampler_name", "scheduler")
"""Inputs whose options are ComfyUI's own and explained there."""

each_example = pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)


def workflow(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "example_workflows" / f"{name}.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def object_info(comfy_server) -> dict[str, Any]:
    """What the server says of all its nodes."""
    with comfy_server.client() as client:
        return client.get("/object_info")


@pytest.fixture(scope="module")
def built(comfy_server, object_info) -> Iterator[Run]:
    """A run of `build_before`: it builds the one engine of this file."""
    with comfy_server.client() as client:
        yield client.wait(queue(client, to_graph(workflow("build_before"), object_info)), timeout=400)


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
    assert {file.stem for file in EXAMPLES} == {*DEMOS, "step_skip", "stock_checkpoint_with_lora"}


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
def test_an_example_shows_engine_info_and_explains_itself(file: Path) -> None:
    saved = workflow(file.stem)
    notes = [node["widgets_values"][0] for node in saved["nodes"] if node["type"] == "Note"]
    assert len(notes) == 1 and "engine" in notes[0]
    kinds = [node["type"] for node in nodes_of(saved)]
    assert {"SlipstreamAccelerateModel", "SlipstreamEngineInfo", "PreviewAny"} <= set(kinds)


# ---- the runs


@pytest.mark.slow
def test_build_before_builds_and_then_samples_on_the_engine(built: Run) -> None:
    assert built.ok, built.error
    saved = workflow("build_before")
    (report,) = texts_of(built, saved, "SlipstreamBuildEngine")
    assert "256×256 batch 2" in report and "ready" in report
    (info,) = texts_of(built, saved, "SlipstreamEngineInfo")
    assert "engine calls: 20, eager calls: 0" in info
    assert texts_of(built, saved, "PreviewAny") == [report, info]
    (picture,) = built.images()
    assert picture.shape == (256, 256, 3) and is_picture(picture)
    assert np.abs(picture - thumbnail("build_before")).mean() < 0.03


@pytest.mark.slow
def test_first_engine_samples_on_an_engine_that_is_there(built: Run, client, object_info, comfy_server) -> None:
    before = engines(comfy_server)
    saved = workflow("first_engine")
    run = client.wait(queue(client, to_graph(saved, object_info)), timeout=120)
    assert run.ok, run.error
    (info,) = texts_of(run, saved, "SlipstreamEngineInfo")
    assert "engine calls: 20, eager calls: 0" in info, info
    assert texts_of(run, saved, "PreviewAny") == [info]
    (picture,) = run.images()
    assert picture.shape == (256, 256, 3) and is_picture(picture)
    assert np.abs(picture - thumbnail("first_engine")).mean() < 0.03
    assert engines(comfy_server) == before, "another engine was built"


@pytest.mark.slow
def test_step_skip_is_compared_with_all_steps(built: Run, client, object_info) -> None:
    saved = workflow("step_skip")
    graph = to_graph(saved, object_info)
    change(
        graph, "SlipstreamAccelerateModel", build="first use"
    )  # else ComfyUI takes first_engine's node, and its count
    run = client.wait(queue(client, graph), timeout=120)
    assert run.ok, run.error
    (info,) = texts_of(run, saved, "SlipstreamEngineInfo")
    assert "engine calls: 32, eager calls: 0" in info, info
    assert texts_of(run, saved, "PreviewAny") == [info]
    (report,) = texts_of(run, saved, "SlipstreamCompareImages")
    assert 20 < float(re.match(r"picture 1: PSNR ([\d.]+) dB", report)[1]) < 60
    picture = run.images()[-1]  # the comparison's own are there too
    assert picture.shape == (256, 768, 3) and is_picture(picture)
    assert np.abs(picture - thumbnail("step_skip")).mean() < 0.03


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
    assert "engine calls: 0" in info


def test_choices_that_saved_workflows_do_not_have_reach_the_model(client, object_info) -> None:
    saved = workflow("first_engine")
    graph = to_graph(saved, object_info)
    change(graph, "KSampler", steps=1)
    (node,) = [node for node in graph.prompt.values() if node["class_type"] == "SlipstreamAccelerateModel"]
    node["inputs"].update(engines="one for a range", max_batch=4, max_tokens=154, bake=False)  # and no list of sizes
    run = client.wait(queue(client, graph), timeout=120)
    assert run.ok, run.error
    (info,) = texts_of(run, saved, "SlipstreamEngineInfo")
    assert "eager calls: 1" in info and "'one for a range' needs a list of resolutions" in info


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
    assert node["widgets_values"][1] == "randomize"


# ---- help pages


def ours(object_info: dict[str, Any]) -> dict[str, Any]:
    """The nodes of this pack."""
    return {name: info for name, info in object_info.items() if info["python_module"] == "custom_nodes.slipstream"}


def test_every_node_has_a_help_page_that_is_served(client: ComfyClient, object_info) -> None:
    nodes = ours(object_info)
    assert len(nodes) >= 5
    assert {page.name for page in DOCS.iterdir()} == set(nodes)
    for name in nodes:
        assert client.fetch(f"/extensions/slipstream/docs/{name}/en.md") == (DOCS / name / "en.md").read_bytes()


def test_a_help_page_names_every_input_option_and_output(object_info) -> None:
    for node, info in ours(object_info).items():
        page = (DOCS / node / "en.md").read_text(encoding="utf-8")
        assert page.startswith(f"# {info['display_name']}\n")
        inputs = {name: spec for kind in ("required", "optional") for name, spec in info["input"].get(kind, {}).items()}
        explained = [spec for name, spec in inputs.items() if name not in SAMPLING]
        words = [*inputs, *itertools.chain(*map(_options, explained)), *info["output_name"]]
        assert [word for word in words if f"`{word}`" not in page] == [], node


def _options(spec: list[Any]) -> list[str]:
    """A combo's values, in either way of writing that ComfyUI has."""
    if isinstance(spec[0], list):
        return spec[0]
    return spec[1].get("options", []) if spec[0] == "COMBO" else []


def test_the_options_of_combos_are_seen(object_info) -> None:
    inputs = object_info["SlipstreamAccelerateModel"]["input"]["required"]
    assert _options(inputs["build"]) == ["background", "first use", "manual"]
