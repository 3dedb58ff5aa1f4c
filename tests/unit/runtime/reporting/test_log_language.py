"""Lines of the log in the user's language."""

from __future__ import annotations

import ast
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.core.environment import versions_now
from slipstream.engine_cache import Speed
from slipstream.runtime.checking.step_times import say_retired
from slipstream.runtime.reporting import log_language
from slipstream.runtime.reporting.log_language import VARIABLE, InLanguage, follow_page
from slipstream.runtime.reporting.recent_log import RecentLog
from slipstream.runtime.reporting.sentences import FOLDER, said

ROOT = Path(__file__).resolve().parents[4]
LANGUAGES = ("zh", "ja", "ko", "fr", "de", "es", "ru")
HOLE = re.compile(r"\{\w*\}|%[-.\d]*[sdfeg]")


@pytest.fixture(autouse=True)
def neither_page_nor_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_language, "_page", [])
    monkeypatch.setattr(log_language.locale, "getlocale", lambda: (None, None))
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.fixture
def kept() -> Iterator[tuple[logging.Logger, RecentLog]]:
    log, lines = logging.Logger("slipstream-test"), RecentLog()
    for handler in (InLanguage(), lines):
        log.addHandler(handler)
    yield log, lines


def texts(lines: RecentLog) -> list[str]:
    return [line["text"] for line in lines.after(0)["lines"]]


def test_lines_follow_environment_then_page_then_system(
    kept: tuple[logging.Logger, RecentLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    log, lines = kept

    def told() -> str:
        log.warning("Slipstream uses the plain model: %s", "the model is being trained")
        return texts(lines)[-1]

    assert told() == "Slipstream uses the plain model: the model is being trained"
    monkeypatch.setattr(log_language.locale, "getlocale", lambda: ("de_DE", "UTF-8"))
    assert told() == "Slipstream benutzt das Modell ohne Engine: das Modell wird trainiert"
    follow_page(lambda: "zh-TW")
    assert told() == "Slipstream 使用原模型：模型正在训练"
    monkeypatch.setenv(VARIABLE, "en")
    assert told().startswith("Slipstream uses the plain model")


def test_what_no_table_has_stays(kept: tuple[logging.Logger, RecentLog], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "zh")
    log, lines = kept
    log.warning("of the moon")
    log.warning("Slipstream uses the plain model: %s", "of the moon")
    log.warning("%d", "no number")
    assert texts(lines)[:2] == ["of the moon", "Slipstream 使用原模型：of the moon"]
    assert said("not run yet", "xx") is None and said("not run yet", "zh") == "尚未运行"


@pytest.mark.parametrize("language", LANGUAGES)
def test_sentences_within_sentences(language: str) -> None:
    retired = say_retired(Speed(104.3, 98.0, retired=versions_now()), "step")
    found = said(f"Slipstream: {retired}", language) or said(retired, language)
    assert found is not None and "104.3" in found and "98.0" in found and "step" not in found


def plain(text: str) -> str:
    return HOLE.sub("{}", text)


def written() -> set[str]:
    """All texts in the code, with {} for what is put in."""
    found = set()
    for folder in ("core", "engine_cache", "runtime", "hosts", "nodes", "compile_backend", "trt_backend", "sampling"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.add(plain(node.value))
                if isinstance(node, ast.JoinedStr):
                    parts = [str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values]
                    found.add("".join(parts))
    return found


def test_sentences_are_still_those_of_the_code() -> None:
    """Each run of words between holes stands in some text of the code."""
    code = "\n".join(written())
    for english in json.loads((FOLDER / "zh.json").read_text(encoding="utf-8")):
        words = [part.strip(" :().") for part in re.split(r"\{\}|, |; |: ", plain(english))]
        assert [part for part in words if part not in code] == [], english


@pytest.mark.parametrize("language", LANGUAGES)
def test_tables_have_the_same_holes(language: str) -> None:
    table, chinese = (json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8")) for name in (language, "zh"))
    assert len(table) > 25 and table.keys() <= chinese.keys()
    holes = re.compile(r"\{\w+\}")
    assert [each for each, other in table.items() if set(holes.findall(each)) != set(holes.findall(other))] == []


def test_a_system_language_that_python_does_not_know_costs_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> tuple[str, str]:
        raise ValueError("unknown locale: en-US")

    monkeypatch.delenv(log_language.VARIABLE, raising=False)
    monkeypatch.setattr(log_language, "_page", [])
    monkeypatch.setattr(log_language.locale, "getlocale", unknown)
    assert log_language.log_language() == "en"
