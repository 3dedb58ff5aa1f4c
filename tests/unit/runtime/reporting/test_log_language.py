"""Lines of the log in the user's language."""

from __future__ import annotations

import ast
import functools
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.compile_backend.cpp import toolchain
from slipstream.core.eight_bits import CHOOSE_AUTO
from slipstream.core.environment import versions_now
from slipstream.engine_cache import Speed
from slipstream.runtime.checking.step_times import say_retired
from slipstream.runtime.reporting import log_language
from slipstream.runtime.reporting.log_language import VARIABLE, InLanguage, follow_page
from slipstream.runtime.reporting.recent_log import RecentLog
from slipstream.runtime.reporting.sentences import FOLDER, said
from slipstream.sampling.presets import PRESETS
from slipstream.sampling.task import Task

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


@functools.cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def plain(text: str) -> str:
    return HOLE.sub("{}", text)


def written() -> set[str]:
    """All texts in the code, with {} for what is put in."""
    found = set()
    for folder in ("core", "engine_cache", "runtime", "hosts", "nodes", "compile_backend", "trt_backend", "sampling"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(tree_of(file)):
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


FOLDERS = ("core", "engine_cache", "runtime", "hosts", "nodes", "compile_backend", "trt_backend", "sampling", "ui")
ENGLISH = re.compile(r"(?<![\w'./-])[a-z]+(?: [a-z]+){2,}")
LOGGED = {"log.info": 0, "log.warning": 0, "log.exception": 0, "log.error": 0, "warn_once": 1, "_warn_once": 0}
"""What writes a line of the log, and which of its arguments is the line."""


def filled(node: ast.expr) -> str | None:
    """A text of the code with "…" for all that is put in; None where it is no text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return HOLE.sub("…", node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    return None


def trees(*paths: str) -> Iterator[tuple[str, ast.Module]]:
    files = (
        file for path in paths for file in ([ROOT / path] if path.endswith(".py") else (ROOT / path).rglob("*.py"))
    )
    return ((file.relative_to(ROOT).as_posix(), tree_of(file)) for file in files)


def is_in_chinese(text: str) -> bool:
    found = said(text, "zh")
    return found is not None and not ENGLISH.search(found)


def test_each_line_of_the_log_is_in_chinese() -> None:
    found, lines = [], 0
    for name, tree in trees(*FOLDERS):
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            place = LOGGED.get(ast.unparse(call.func))
            text = filled(call.args[place]) if place is not None else None
            if text is not None and text.strip("… :"):
                lines += 1
                found += [] if is_in_chinese(text) else [f"{name}:{call.lineno}: {text}"]
    assert lines > 60 and found == []


GIVES_REASONS = (
    "hosts/comfy/models", "hosts/comfy/blocks/block_patches.py", "hosts/comfy/blocks/block_calls.py",
    "hosts/comfy/run", "hosts/live_model", "hosts/model_patches.py", "runtime/settings", "runtime/planning",
    "runtime/blocks", "core/eight_bits.py", "trt_backend/library.py",
)  # fmt: skip


def test_each_reason_for_the_users_own_model_is_in_chinese() -> None:
    """What functions return whose names ask why not."""
    found, reasons = [], 0
    for name, tree in trees(*GIVES_REASONS):
        asking = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and "why" in node.name)
        for answer in (node for function in asking for node in ast.walk(function) if isinstance(node, ast.Return)):
            text = None if answer.value is None else filled(answer.value)
            if text and len(text.strip("… ;:,")) > 8:
                reasons += 1
                found += [] if said(text, "zh") else [f"{name}:{answer.lineno}: {text}"]
    assert reasons > 40 and found == []


def test_what_nodes_show_has_no_english_left_in_chinese(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: None)
    missing = toolchain.why_no_cpp_compiler()
    reasons = [
        f"No engine can be built on this machine. aotinductor: {missing}; torch.compile: {missing}",
        "another node replaces parts of the model (attn2), as IP-Adapter and PAG do; none of its blocks runs on one: "
        "their engines are on their way, or are being compared",
        "512×512 is not in the node's list of resolutions (768×768)",
        f"fp8 needs an NVIDIA Ada, Hopper or Blackwell GPU (RTX 40 series or newer); {CHOOSE_AUTO}",
        *(PRESETS[name].why_not(task) for name in ("balanced", "extreme") for task in TASKS),
    ]
    for reason in reasons:
        assert reason is not None
        found = said(reason, "zh")
        assert found is not None and re.search("[\u4e00-\u9fff]", found), reason
        assert not ENGLISH.search(found.replace("sudo apt install g++", "")), found


TASKS = (
    Task("heun", 20),
    Task("euler", 20, is_distilled=True, distilled_by="sdxl_turbo.safetensors"),
    Task("lcm", 20),
    Task("euler", 20, has_parts=True),
    Task("euler", 20, has_mask=True),
    Task("euler_cfg_pp", 20),
    Task("euler", 8),
    Task("deis", 20, cfg=4.0),
    Task("dpmpp_2m_sde", 20, cfg=4.0),
    Task("uni_pc", 20, cfg=7.5),
)


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
