"""Engines for many models, with the exit statuses that containers need."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from slipstream.cli.errors import CommandError
from slipstream.cli.fleet.matrix import read_matrix, run_command
from slipstream.cli.fleet.tasks import Task
from slipstream.engine_cache.travel.remote_store import RemoteStore
from slipstream.tests.unit.cli.fleet.conftest import builds

MATRIX = """
defaults: {batch: 2, optimize: fast-build}
models:
  - {model: one, resolutions: [512x512, 768x512]}
  - {model: two, resolutions: 512x512, gpu: [H100, L4], bake: true}
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A matrix of two sizes of one model."""
    file = tmp_path / "models.yaml"
    file.write_text("models: [{model: one, resolutions: [64x64, 128x64]}]")
    return file


def test_each_model_size_and_gpu_is_a_task(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    (tmp_path / "m.yaml").write_text(MATRIX)
    words = ("--optimize", "fast-build", "--batch", "2")
    assert read_matrix(tmp_path / "m.yaml") == [
        Task("one", "512x512", words),
        Task("one", "768x512", words),
        Task("two", "512x512", (*words, "--bake"), "H100"),
        Task("two", "512x512", (*words, "--bake"), "L4"),
    ]


def test_json_needs_no_package(tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text(json.dumps({"models": [{"model": "one", "resolutions": ["64x64"]}]}))
    assert read_matrix(tmp_path / "m.json") == [Task("one", "64x64")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "no YAML"),
        ("models: []", "lists no models"),
        ("3", "lists no models"),
        ("models: [x]", "model 1: write model:"),
        ("models: [{model: x}]", "resolutions:"),
        ("models: [{model: x, resolutions: 64x64, colour: red}]", "colour is not known"),
        ("models: [{model: !!python/object/apply:os.system [true], resolutions: 64x64}]", "no YAML"),
    ],
)
def test_a_matrix_that_cannot_be_read(text: str, message: str, tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    (tmp_path / "m.yaml").write_text(text)
    with pytest.raises(CommandError, match=message):
        read_matrix(tmp_path / "m.yaml")
    with pytest.raises(CommandError, match="cannot be read"):
        read_matrix(tmp_path / "nothing.yaml")


@pytest.mark.slow
def test_check_then_build_then_check(cli, small: Path, pretended: Path, store) -> None:
    checked = cli("build", "--matrix", small, "--check", "--json")
    assert checked.status == 3 and [row["status"] for row in checked.json["builds"]] == [3, 3]
    assert builds(pretended) == 0 and not store.root.joinpath("engines").exists()
    built = cli("build", "--matrix", small)
    assert built.status == 0 and "2 of 2 builds succeeded" in built.out and builds(pretended) == 2
    assert cli("build", "--matrix", small, "--check").status == 0


def test_a_process_that_dies_is_tried_again_and_a_failure_fails_all(cli, tmp_path: Path, pretended: Path) -> None:
    (tmp_path / "m.json").write_text(
        json.dumps({"models": [{"model": "one", "resolutions": ["64x64", "65x64"], "tokens": 77}]})
    )
    done = cli("build", "--matrix", tmp_path / "m.json", "--json")
    assert done.status == 1
    good, bad = done.json["builds"]
    assert good["status"] == 0 and good["attempts"] == 1
    assert bad["status"] == 2 and bad["attempts"] == 2 and "multiples of 8" in bad["error"]


def test_check_of_one_model(cli, tmp_path: Path, pretended: Path, small: Path) -> None:
    words = ["build", "--model", "one", "--resolution", "64x64,128x64", "--json", "--home", str(tmp_path / "x")]
    status, answer = run_command([*words, "--check"])
    assert status == 3 and [engine["ready"] for engine in answer["engines"]] == [False, False]
    assert run_command(words)[0] == 0
    assert run_command([*words, "--check"])[0] == 0


@pytest.mark.slow
def test_machines_that_share_a_store_build_each_engine_once(tmp_path: Path, pretended: Path) -> None:
    url, results = str(tmp_path / "remote"), list[tuple[int, dict]]()

    def machine(number: int) -> None:
        words = ["build", "--model", "one", "--resolution", "64x64", "--json", "--remote", url]
        results.append(run_command([*words, "--home", str(tmp_path / f"home-{number}")]))

    threads = [threading.Thread(target=machine, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [status for status, _ in results] == [0, 0, 0], results
    assert builds(pretended) == 1 and len(RemoteStore(url).digests()) == 1
    assert sorted(engine["built"] for _, answer in results for engine in answer["engines"]) == [False, False, True]
    checked = ["build", "--model", "one", "--resolution", "64x64", "--check", "--json", "--home", str(tmp_path / "new")]
    assert run_command([*checked, "--remote", url])[0] == 0 and run_command(checked)[0] == 3


@pytest.mark.parametrize("word", ["--check", "--remote"])
def test_blocks_are_refused_before_anything_is_done_where_they_are_not_known(word: str, cli, tmp_path: Path) -> None:
    models = [
        {"model": "one", "resolutions": ["64x64"]},
        {"model": "two", "resolutions": ["64x64"], "optimize": "blocks"},
    ]
    (tmp_path / "m.json").write_text(json.dumps({"models": models}))
    done = cli("build", "--matrix", tmp_path / "m.json", word, *([tmp_path] if word == "--remote" else []))
    assert done.status == 1 and "file of their own" in done.err and "one 64x64" not in done.err
