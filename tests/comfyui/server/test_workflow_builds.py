"""`slipstream build --workflow` and the route of health, on a real ComfyUI whose builds are pretended."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli.commands import run
from slipstream.cli.fleet.prompts import our_nodes, prompt_of
from slipstream.tests.comfyui.support.client import ComfyClient
from slipstream.tests.comfyui.support.server import ComfyServer
from slipstream.tests.comfyui.support.workflow import to_graph

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "example_workflows"
QUICK = {"SLIPSTREAM_TEST_BUILD_SECONDS": "0.2"}
HEALTH = "/slipstream/v1/health"

Command = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], logging_as_before: None) -> Command:
    """Run `slipstream build --json` in this process: its status and its answer."""

    def call(*words: object) -> tuple[int, dict[str, Any]]:
        capsys.readouterr()
        status = run(["build", "--json", *map(str, words)])
        return status, json.loads(capsys.readouterr().out)

    return call


@pytest.fixture(scope="module")
def object_info(comfy_server: ComfyServer) -> dict[str, Any]:
    with comfy_server.client() as client:
        return client.get("/object_info")


@pytest.mark.parametrize("name", sorted(file.stem for file in EXAMPLES.glob("*.json")))
def test_a_workflow_becomes_the_prompt_that_the_page_would_queue(name: str, object_info: dict[str, Any]) -> None:
    data = json.loads((EXAMPLES / f"{name}.json").read_text(encoding="utf-8"))
    prompt = prompt_of(data, object_info)
    if name != "stock_checkpoint_with_lora":  # whose checkpoint this server has not
        assert prompt == to_graph(data, object_info).prompt
    assert prompt_of(prompt, object_info) == prompt and our_nodes(prompt)


def by_blocks(file: Path, folder: Path) -> Path:
    """The same workflow, whose models are to run by blocks alone."""
    data = json.loads(file.read_text(encoding="utf-8"))
    for node in data["nodes"]:
        if node["type"] == "SlipstreamAccelerateModel":
            node["widgets_values"][2] = "blocks"
    (folder / "by_blocks.json").write_text(json.dumps(data), encoding="utf-8")
    return folder / "by_blocks.json"


def test_what_a_workflow_needs_is_checked_then_built(
    command: Command, start_comfy: Callable[..., ComfyServer], tmp_path: Path
) -> None:
    file = EXAMPLES / "hires_fix.json"
    worker = start_comfy(home=tmp_path / "engines", environment={**QUICK, "SLIPSTREAM_WORKER": "1"})
    status, checked = command("--workflow", file, "--check", "--server", worker.url)
    assert status == 3 and checked["ready"] == 0 and len(checked["missing"]) >= 1 and checked["never_builds"]
    status, checked = command("--workflow", by_blocks(file, tmp_path), "--check", "--server", worker.url)
    assert status == 3 and any(each["label"].startswith("blocks ") for each in checked["missing"]), checked
    worker.stop()
    builder = start_comfy(home=tmp_path / "engines", environment=QUICK)
    status, refused = command("--workflow", file, "--check", "--server", builder.url)
    assert status == 1 and "SLIPSTREAM_WORKER=1" in refused["error"]
    status, built = command("--workflow", file, "--server", builder.url)
    assert status == 0 and built["missing"] == [] and built["failures"] == {}
    assert built["ready"] >= 2 and built["text"] == f"{built['ready']} engines ready, 0 missing"
    builder.stop()
    worker = start_comfy(home=tmp_path / "engines", environment={**QUICK, "SLIPSTREAM_WORKER": "1"})
    status, checked = command("--workflow", file, "--check", "--server", worker.url)
    assert (status, checked["ready"], checked["missing"]) == (0, built["ready"], [])


def test_a_server_of_its_own(
    command: Command, server_of: Callable[..., ComfyServer], comfyui_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = server_of()
    for name, value in {**QUICK, "HF_HUB_OFFLINE": "1", "SLIPSTREAM_STEP_TIMES": "off"}.items():
        monkeypatch.setenv(name, value)
    arguments = ["--cpu", "--base-directory", str(layout.base), "--disable-api-nodes"]
    arguments += ["--database-url", "sqlite:///:memory:"]
    words = ["--comfyui", comfyui_dir, "--home", layout.home, "--comfyui-args", shlex.join(arguments)]
    assert command("--workflow", EXAMPLES / "first_engine.json", *words, "--check")[0] == 3
    status, built = command("--workflow", EXAMPLES / "first_engine.json", *words)
    assert status == 0 and built["missing"] == [], built
    assert command("--workflow", EXAMPLES / "first_engine.json", *words, "--check")[0] == 0


def test_files_that_are_no_workflow(command: Command, comfy_server: ComfyServer, tmp_path: Path) -> None:
    texts = {
        "[]": "no workflow",
        "{": "no workflow",
        '{"nodes": [{}], "links": []}': "cannot be read",
        "{}": "no workflow",
    }
    for text, message in texts.items():
        (tmp_path / "x.json").write_text(text)
        status, answer = command("--workflow", tmp_path / "x.json", "--server", comfy_server.url)
        assert status == 1 and message in answer["error"], answer
    (tmp_path / "x.json").write_text('{"1": {"class_type": "EmptyLatentImage", "inputs": {}}}')
    assert "no Accelerate node" in command("--workflow", tmp_path / "x.json", "--server", comfy_server.url)[1]["error"]
    assert "does not answer" in command("--workflow", tmp_path / "x.json", "--server", "http://127.0.0.1:9")[1]["error"]


def test_health(comfy_server: ComfyServer) -> None:
    with ComfyClient(comfy_server.url) as client:
        found = client.get(HEALTH)
    assert found["text"].endswith("missing") and found["never_builds"] is False and found["version"]
