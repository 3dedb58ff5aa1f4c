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
import torch

from slipstream.compile_backend.cpp import toolchain
from slipstream.core.eight_bits import CHOOSE_AUTO
from slipstream.core.environment import versions_now
from slipstream.engine_cache import Speed
from slipstream.hosts.comfy.block_calls.block_share import BlockShare
from slipstream.runtime.checking.step_times import say_retired
from slipstream.runtime.loaded.canary import Death
from slipstream.runtime.loaded.device_memory import Shortages
from slipstream.runtime.planning.build_estimate import say_estimate
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
        log.warning("Slipstream runs your model without an engine: %s", "the model is being trained")
        return texts(lines)[-1]

    assert told() == "Slipstream runs your model without an engine: the model is being trained"
    monkeypatch.setattr(log_language.locale, "getlocale", lambda: ("de_DE", "UTF-8"))
    assert told() == "Slipstream benutzt das Modell ohne Engine: das Modell wird trainiert"
    follow_page(lambda: "zh-TW")
    assert told() == "Slipstream 使用原模型：模型正在训练"
    monkeypatch.setenv(VARIABLE, "en")
    assert told().startswith("Slipstream runs your model without an engine")


def test_what_no_table_has_stays(kept: tuple[logging.Logger, RecentLog], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "zh")
    log, lines = kept
    log.warning("of the moon")
    log.warning("Slipstream runs your model without an engine: %s", "of the moon")
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
    "hosts/comfy/models", "hosts/comfy/blocks", "hosts/comfy/block_calls", "hosts/comfy/run", "hosts/comfy/skip",
    "hosts/comfy/step_graph", "hosts/live_model", "hosts/model_patches.py", "hosts/control_residuals.py",
    "runtime/provider.py", "runtime/settings", "runtime/planning", "runtime/blocks", "runtime/loaded",
    "runtime/capture", "core/eight_bits.py", "trt_backend/library.py",
)  # fmt: skip


def reasons_in(tree: ast.Module) -> Iterator[ast.expr]:
    """What functions return whose names ask why not, or that give a text in place of what they were asked for; what an
    engine is refused by."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            instead = node.returns is not None and ast.unparse(node.returns).endswith(" | str")
            if "why" in node.name or "overflowed" in node.name or instead:
                answers = (each.value for each in ast.walk(node) if isinstance(each, ast.Return) and each.value)
                for answer in answers:
                    yield from (answer.body, answer.orelse) if isinstance(answer, ast.IfExp) else (answer,)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "refuse":
            yield from node.args


def test_each_reason_for_the_users_own_model_is_in_chinese() -> None:
    found, reasons = [], 0
    for name, tree in trees(*GIVES_REASONS):
        for reason in reasons_in(tree):
            text = filled(reason)
            if text and len(text.strip("… ;:,")) > 8:
                reasons += 1
                known = said(text, "zh") or said(text.removesuffix("…"), "zh")  # what comes last may be nothing
                found += [] if known else [f"{name}:{reason.lineno}: {text}"]
    assert reasons > 70 and found == []


COMMANDS = re.compile(r"sudo apt install|pip install|xcode-select --install|slipstream build")
"""What every language writes as it is."""
PARTICLES = re.compile(r"(?<![\w'./-])(?:the|with|and|which|its|for|of)(?![\w'./-])")
"""English words that none of the languages has."""


def in_threes(text: str) -> set[tuple[str, ...]]:
    """All words of a text that follow one another, three by three, without names and holes."""
    runs = (run[0].split() for run in ENGLISH.finditer(COMMANDS.sub("", HOLE.sub("…", text))))
    return {tuple(run[place : place + 3]) for run in runs for place in range(len(run) - 2)}


def has_english(found: str, english: str) -> bool:
    """Whether a part of a sentence was left as it is in English."""
    return bool(in_threes(found) & in_threes(english)) or PARTICLES.search(HOLE.sub("…", found)) is not None


@pytest.mark.parametrize("language", LANGUAGES)
def test_what_nodes_show_has_no_english_left(language: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: None)
    missing = toolchain.why_no_cpp_compiler()
    gpu, short = torch.device("cuda"), Shortages(lambda device: None)
    reasons = [
        f"No engine can be built on this machine. aotinductor: {missing}; torch.compile: {missing}",
        "another node replaces parts of the model (attn2), as IP-Adapter and PAG do; none of its blocks runs on one: "
        "their engines are on their way, or are being compared",
        "512×512 is not in the node's list of resolutions (768×768)",
        f"fp8 needs an NVIDIA Ada, Hopper or Blackwell GPU (RTX 40 series or newer); {CHOOSE_AUTO}",
        *(PRESETS[name].why_not(task) for name in ("balanced", "extreme") for task in TASKS),
        *(f"Slipstream skips no steps: {PRESETS['balanced'].why_not(task)}" for task in TASKS),
        *(f"mine was calibrated {what}; sample so, or calibrate anew" for what in CALIBRATED),
        *(short.note("digest", gpu, needed) for needed in (0, 1 << 30, 0)),
        short.why_not("digest", gpu),
        f"It runs without CUDA graphs: {Death('capture', True, 1, 0.0)}",
        f"{BlockShare(engine=3, waiting=2)}; its engine was found wrong",
        "the engine takes 38.1 ms a step where engines of the model's blocks take 34.0 ms, so these are used instead; "
        "tried again once they take longer, at the next start, or when you press Build engine",
        *(f"the engine for SDXL is being built in the background{say_estimate(120, ran)}" for ran in (0, 80, 130)),
        "no engine for SDXL 512×512 batch 2 yet; build it with the Build Engine node or `slipstream build`",
    ]
    for reason in reasons:
        assert reason is not None
        found = said(reason, language)
        assert found is not None and not has_english(found, reason), found
        if language in ("zh", "ja", "ko", "ru"):
            assert re.search(r"[^\W\da-zA-Z_]", found) and not ENGLISH.search(COMMANDS.sub("", found)), found


CALIBRATED = (
    "with a mask for inpainting, and this is without", "without a mask for inpainting, and this is with one",
    "at CFG 1, and this is above", "with euler, and this is dpmpp_2m", "on latents of one part, and this has several",
)  # fmt: skip
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


def sentences(language: str) -> list[tuple[str, str]]:
    """A table in its order: the first template that fits says a sentence."""
    pairs: list[tuple[str, str]] = json.loads(
        (FOLDER / f"{language}.json").read_text(encoding="utf-8"), object_pairs_hook=list
    )
    return pairs


ALIKE = {"ancestral"}
"""Words that are the same in German and Spanish."""


@pytest.mark.parametrize("language", LANGUAGES)
def test_tables_have_the_same_sentences(language: str) -> None:
    """In the same order, each once, with all that they put in, and none left in English, not by half either."""
    table, chinese = sentences(language), sentences("zh")
    assert [english for english, _ in table] == [english for english, _ in chinese]
    assert len({english for english, _ in table}) == len(table)
    holes = re.compile(r"\{\w+\}")
    assert [each for each, other in table if set(holes.findall(each)) != set(holes.findall(other))] == []
    named = re.compile(r"\{\w+\}|torch\.compile|Slipstream")
    has_words = (pair for pair in table if re.search("[a-z]", named.sub("", pair[0])) and pair[0] not in ALIKE)
    assert [english for english, other in has_words if english == other or not other.strip()] == []
    assert [other for english, other in table if has_english(other, english)] == []


def test_a_system_language_that_python_does_not_know_costs_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> tuple[str, str]:
        raise ValueError("unknown locale: en-US")

    monkeypatch.delenv(log_language.VARIABLE, raising=False)
    monkeypatch.setattr(log_language, "_page", [])
    monkeypatch.setattr(log_language.locale, "getlocale", unknown)
    assert log_language.log_language() == "en"
