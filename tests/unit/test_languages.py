"""The page's texts in its further languages: the same names and placeholders as in English."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FURTHER = ("ja", "ko", "fr", "de", "es", "ru")
TEXT = re.compile(r'^  "?([\w.-]+)"?: (".*"),$', re.MULTILINE)


def table(file: str, name: str) -> dict[str, str]:
    """A table of texts of the page's code."""
    text = (ROOT / "web" / "js" / "lib" / file).read_text(encoding="utf-8")
    body = re.search(rf"const {name} = \{{\n(.*?)^\}};", text, re.DOTALL | re.MULTILINE)
    assert body is not None
    return {key: json.loads(value) for key, value in TEXT.findall(body[1])}


def holes(text: str) -> list[str]:
    return sorted(re.findall(r"\{\w+\}", text))


@pytest.mark.parametrize("language", FURTHER)
def test_a_language_has_all_texts(language: str) -> None:
    """Those of English, and the phases of builds, which the server says in English."""
    english, chinese, found = table("words.js", "EN"), table("words.js", "ZH"), table("languages.js", language.upper())
    assert found.keys() == english.keys() | chinese.keys()
    wanted = {**chinese, **english}
    assert [key for key, text in found.items() if holes(text) != holes(wanted[key])] == []
    assert all(text.strip() for text in found.values())


def test_chinese_has_all_texts() -> None:
    english, chinese = table("words.js", "EN"), table("words.js", "ZH")
    assert {key for key in english if not key.endswith("_1")} <= chinese.keys()
    assert [key for key in english.keys() & chinese.keys() if holes(chinese[key]) != holes(english[key])] == []


@pytest.mark.parametrize("language", ("zh", *FURTHER))
@pytest.mark.parametrize("file", ["nodeDefs", "commands", "settings"])
def test_a_language_has_all_names_and_tooltips(language: str, file: str) -> None:
    """But the tooltip of presets, which is live: only Chinese has one of its own."""
    english, found = texts(file, "en"), texts(file, language)
    live = {path for path in found.keys() - english.keys() if path[-2:] == ("preset", "tooltip")}
    assert found.keys() - live == english.keys() and (not live or language == "zh")
    assert [path for path, text in found.items() if not text.strip() or re.search(r"[{}@|]", text)] == []
    long = {path: text for path, text in found.items() if len(english.get(path, "")) > 60}
    assert [path for path, text in long.items() if text == english[path]] == [], "left in English"


@pytest.mark.parametrize("language", FURTHER)
def test_menus_and_categories_are_those_that_chinese_has(language: str) -> None:
    assert texts("main", language).keys() == texts("main", "zh").keys()


def texts(file: str, language: str) -> dict[tuple[str, ...], str]:
    """All texts of a file of ComfyUI's own kind, by their path."""

    def leaves(content: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], str]:
        if not isinstance(content, dict):
            return {path: content}
        return {name: text for key, value in content.items() for name, text in leaves(value, (*path, key)).items()}

    return leaves(json.loads((ROOT / "locales" / language / f"{file}.json").read_text(encoding="utf-8")))
