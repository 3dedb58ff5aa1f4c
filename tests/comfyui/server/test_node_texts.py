"""What ComfyUI's page tells of each node: tooltips, names in other languages, help pages."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from slipstream.tests.comfyui.support.client import ComfyClient

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "web" / "js" / "docs"
LANGUAGES = ("en", "zh")
SAMPLING = ("sampler_name", "scheduler")
"""Inputs whose options are ComfyUI's own and explained there."""
SAME_IN_CHINESE = {"vae", "cfg", "ControlNet", "Sigmas"}
"""Names that ComfyUI's own Chinese leaves as they are."""
EXAMPLE = "a large yellow star left of a black ring"
CHINESE = re.compile(r"[\u4e00-\u9fff]")
ENGLISH = re.compile(r"[a-z]+(?: [a-z]+){2,}")

Json = dict[str, Any]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    """tools/locales.py."""
    spec = importlib.util.spec_from_file_location("slipstream_tools_locales", ROOT / "tools" / "locales.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def object_info(comfy_server) -> Json:
    """What the server says of all its nodes."""
    with comfy_server.client() as client:
        return client.get("/object_info")


@pytest.fixture(scope="module")
def nodes(tool, object_info) -> Json:
    """The nodes of this pack."""
    found = tool.own_nodes(object_info)
    assert len(found) >= 14
    return found


def node_defs(language: str) -> Json:
    return json.loads((ROOT / "locales" / language / "nodeDefs.json").read_text(encoding="utf-8"))


def leaves(content: Json, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    for key, value in content.items():
        if isinstance(value, dict):
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


def options_of(nodes: Json) -> set[str]:
    """All values that combos of this pack offer and that no ComfyUI explains."""
    specs = [spec for info in nodes.values() for spec in _specs(info).items()]
    return set(itertools.chain(*(_options(spec) for name, spec in specs if name not in SAMPLING)))


def _specs(info: Json) -> Json:
    return {name: spec for kind in ("required", "optional") for name, spec in info["input"].get(kind, {}).items()}


def _options(spec: list[Any]) -> list[str]:
    """A combo's values, in either way of writing that ComfyUI has."""
    if isinstance(spec[0], list):
        return spec[0]
    return spec[1].get("options", []) if spec[0] == "COMBO" else []


# ---- tooltips


def test_every_input_and_output_has_a_tooltip(tool, nodes) -> None:
    missing = [
        f"{node}.{name}"
        for node, info in nodes.items()
        for name, settings in tool.inputs_of(info).items()
        if not (settings.get("tooltip") or "").strip()
    ]
    for node, info in nodes.items():
        tooltips = info.get("output_tooltips") or [None] * len(info["output"])
        missing += [f"{node} output {index}" for index, tooltip in enumerate(tooltips) if not (tooltip or "").strip()]
    assert missing == []


def test_every_node_describes_itself(nodes) -> None:
    assert [name for name, info in nodes.items() if len(info["description"]) < 40] == []


def test_the_options_of_combos_are_seen(nodes) -> None:
    inputs = nodes["SlipstreamAccelerateModel"]["input"]["required"]
    assert _options(inputs["build"]) == ["background", "first use", "manual"]


# ---- names and tooltips by language


def test_the_english_file_says_what_the_nodes_say(tool, object_info) -> None:
    there = (ROOT / "locales" / "en" / "nodeDefs.json").read_text(encoding="utf-8")
    assert there == tool.as_text(tool.node_defs(object_info)), "run tools/locales.py"


def test_chinese_has_the_same_keys(tool) -> None:
    live = {
        (node, "inputs", name, "tooltip")
        for node, texts in node_defs("en").items()
        for name in texts["inputs"]
        if name in tool.LIVE
    }
    assert {path for path, _ in leaves(node_defs("zh"))} == {path for path, _ in leaves(node_defs("en"))} | live


def test_nothing_is_left_in_english(nodes) -> None:
    known = sorted({*options_of(nodes), EXAMPLE}, key=len, reverse=True)
    for path, text in leaves(node_defs("zh")):
        assert text in SAME_IN_CHINESE or CHINESE.search(text), path
        for words in known:
            text = text.replace(words, "")
        assert not ENGLISH.search(text), path


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_page_takes_no_text_for_a_pattern(language: str) -> None:
    """vue-i18n gives a meaning to these signs; a text that holds one is cut or not shown."""
    assert [path for path, text in leaves(node_defs(language)) if re.search(r"[{}@|]", text)] == []


def test_the_chinese_table_of_presets_has_the_nodes_figures(nodes) -> None:
    tooltip = nodes["SlipstreamStepSkip"]["input"]["required"]["preset"][1]["tooltip"]
    counts = re.findall(r"^(\w+): (\d+, \d+, \d+)", tooltip, re.MULTILINE)
    assert len(counts) >= 5
    for node in ("SlipstreamStepSkip", "SlipstreamKSamplerStepSkip", "SlipstreamSkipSigmas"):
        chinese = node_defs("zh")[node]["inputs"]["preset"]["tooltip"]
        assert [name for name, numbers in counts if f"{name}：{numbers}" not in chinese] == []


def test_the_server_hands_them_to_the_page(client: ComfyClient) -> None:
    served = client.get("/i18n")
    for language in LANGUAGES:
        assert served[language]["nodeDefs"].items() >= node_defs(language).items()


# ---- help pages


def page(node: str, language: str) -> str:
    return (DOCS / node / f"{language}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_node_has_a_help_page_that_is_served(client: ComfyClient, nodes, language: str) -> None:
    assert {folder.name for folder in DOCS.iterdir()} == set(nodes)
    for name in nodes:
        file = DOCS / name / f"{language}.md"
        assert client.fetch(f"/extensions/slipstream/docs/{name}/{language}.md") == file.read_bytes()


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_help_page_names_every_input_option_and_output(nodes, language: str) -> None:
    for node, info in nodes.items():
        text = page(node, language)
        assert text.startswith(f"# {node_defs(language)[node]['display_name']}\n")
        explained = [spec for name, spec in _specs(info).items() if name not in SAMPLING]
        words = [*_specs(info), *itertools.chain(*map(_options, explained)), *info["output_name"]]
        assert [word for word in words if f"`{word}`" not in text] == [], node


def test_help_pages_are_built_alike(nodes) -> None:
    for node in nodes:
        english, chinese = page(node, "en"), page(node, "zh")
        assert _headings(english) == _headings(chinese), node
        assert len(_rows(english)) == len(_rows(chinese)), node
        for ours, theirs in zip(_rows(english), _rows(chinese), strict=True):
            assert _quoted(ours) == _quoted(theirs)[: len(_quoted(ours))], (node, ours)
            assert theirs.startswith(ours) or _quoted(ours), (node, ours)


def test_measured_figures_are_the_same_in_every_language() -> None:
    english, chinese = (page("SlipstreamStepSkip", language) for language in LANGUAGES)
    assert _figures(english) == _figures(chinese) != []


def _figures(text: str) -> list[str]:
    return re.findall(r"\d+", text.partition("<!-- figures -->")[2].partition("<!-- end of figures -->")[0])


def _headings(text: str) -> list[int]:
    """How deep each heading is."""
    return [len(marks) for marks in re.findall(r"^(#+) ", text, re.MULTILINE)]


def _rows(text: str) -> list[str]:
    """The first cell of each row of a table, less the rows that head it."""
    lines = text.split("\n")
    below = [*lines[1:], ""]
    rows = [line for line, next_line in zip(lines, below, strict=True) if not next_line.startswith("|---")]
    return [line.split(" | ")[0].removeprefix("| ") for line in rows if line.startswith("| ")]


def _quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)
