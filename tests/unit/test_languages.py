"""The page's texts in its further languages: the same names and placeholders as in English."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FURTHER = ("ja", "ko", "fr", "de", "es", "ru")
TEXT = re.compile(r'^  "?([\w.]+)"?: (".*"),$', re.MULTILINE)


def table(file: str, name: str) -> dict[str, str]:
    """A table of texts of the page's code."""
    text = (ROOT / "web" / "js" / "lib" / file).read_text(encoding="utf-8")
    body = re.search(rf"const {name} = \{{\n(.*?)^\}};", text, re.DOTALL | re.MULTILINE)
    assert body is not None
    return {key: json.loads(value) for key, value in TEXT.findall(body[1])}


def holes(text: str) -> list[str]:
    return sorted(re.findall(r"\{\w+\}", text))


@pytest.mark.parametrize("language", FURTHER)
def test_texts_of_a_language_fit_the_english_ones(language: str) -> None:
    english, found = table("words.js", "EN"), table("languages.js", language.upper())
    assert len(found) > 80 and found.keys() <= english.keys()
    assert found.keys() == table("languages.js", "JA").keys()
    assert [key for key, text in found.items() if holes(text) != holes(english[key])] == []
    assert all(text.strip() for text in found.values())


def test_chinese_has_all_texts() -> None:
    english, chinese = table("words.js", "EN"), table("words.js", "ZH")
    assert {key for key in english if not key.endswith("_1")} <= chinese.keys()
    assert [key for key in english.keys() & chinese.keys() if holes(chinese[key]) != holes(english[key])] == []


@pytest.mark.parametrize("language", FURTHER)
@pytest.mark.parametrize("file", ["nodeDefs", "commands", "settings"])
def test_names_of_a_language_are_of_nodes_that_exist(language: str, file: str) -> None:
    def names(content: Any, path: str = "") -> set[str]:
        if not isinstance(content, dict):
            return {path}
        return {name for key, value in content.items() for name in names(value, f"{path}/{key}")}

    there, english = (
        json.loads((ROOT / "locales" / each / f"{file}.json").read_text(encoding="utf-8")) for each in (language, "en")
    )
    assert there and names(there) <= names(english)
