"""What a soak draws, and what it makes of figures that it was given."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.benchmarks.soaking.account import Account, Report, slope
from slipstream.benchmarks.soaking.subjects import SUBJECTS, Subject
from slipstream.benchmarks.soaking.wishes import prompt_of, wish_of

DEFAULTS = {
    "SlipstreamAccelerateModel": {"optimize": "auto", "precision": "auto", "build": "off"},
    "SlipstreamAccelerateControlNet": {"optimize": "auto", "build": "off"},
    "SlipstreamAccelerateVAE": {"build": "off"},
}


@pytest.fixture
def account() -> Account:
    return Account(
        seed=1, commit="abc", device="cpu", subject="demo", comfyui="0.33.0", wanted=100, tolerance=0.01,
        rss_growth_limit_mb=5.0, handles_growth_limit=1.0,
    )  # fmt: skip


def report_of(account: Account, folder: Path, memory: list[float], handles: int = 20) -> Report:
    report = Report(account, folder / "soak.json", folder / "soak.jsonl")
    for rss in memory:
        account.prompts += 1
        account.engine_calls += 9
        account.eager_calls += 1
        report.add({"number": account.prompts, "rss_mb": rss, "handles": handles}, seconds=float(account.prompts))
    return report


def test_a_prompt_is_the_same_whichever_others_are_run() -> None:
    subject = SUBJECTS["demo"](None)
    assert [wish_of(7, number, subject) for number in range(50)][13] == wish_of(7, 13, subject)
    assert wish_of(7, 13, subject) != wish_of(8, 13, subject)
    events = {wish_of(7, number, subject).event for number in range(300)}
    assert events == {"", "cancel", "free", "delete", "second_server"}


@pytest.mark.parametrize("name", SUBJECTS)
def test_the_eager_twin_differs_by_the_accelerate_nodes_alone(name: str) -> None:
    subject: Subject = SUBJECTS[name]("fast build")
    wish = replace(wish_of(7, 0, subject), has_control=True, has_skip=True, lora_strength=0.5)
    fast, plain = (prompt_of(wish, subject, defaults) for defaults in (DEFAULTS, None))
    classes, plain_classes = ([node["class_type"] for node in prompt.values()] for prompt in (fast, plain))
    assert sorted(classes) == sorted([*plain_classes, *DEFAULTS])
    chosen = {node["class_type"]: node["inputs"] for node in fast.values()}
    assert chosen["SlipstreamAccelerateModel"]["optimize"] == "fast build"
    assert "optimize" not in chosen["SlipstreamAccelerateVAE"], "a node gets no input that it does not have"
    assert all(chosen[node]["build"] == "first use" for node in DEFAULTS)


def test_memory_that_grows_at_first_is_flat(account: Account, tmp_path: Path) -> None:
    report_of(account, tmp_path, [600.0 + 4 * min(n, 40) for n in range(100)])
    assert account.rss_growth_mb == 0.0 and account.handles_growth == 0.0 and account.failures() == []
    assert account.rss_first_mb == account.rss_last_mb == 760.0


def test_a_leak_fails_the_soak(account: Account, tmp_path: Path) -> None:
    report_of(account, tmp_path, [600.0 + 0.08 * n for n in range(100)])
    assert account.rss_growth_mb == pytest.approx(8.0) and len(account.failures()) == 1


def test_what_comfyui_grows_by_itself_is_not_ours(account: Account, tmp_path: Path) -> None:
    account.host_growth_mb = 4.0
    report_of(account, tmp_path, [600.0 + 0.08 * n for n in range(100)])
    assert account.failures() == [], "8 MB, of which 4 are ComfyUI's"
    account.host_growth_mb = 2.0
    assert len(account.failures()) == 1


def test_a_soak_without_slipstream_measures_comfyui_alone(account: Account, tmp_path: Path) -> None:
    account.is_plain = True
    report_of(account, tmp_path, [600.0 + 0.08 * n for n in range(100)])
    account.engine_calls = account.eager_calls = 0
    assert account.failures() == [] and account.rss_growth_mb == pytest.approx(8.0)


def test_what_was_found_so_far_is_in_the_files(account: Account, tmp_path: Path) -> None:
    report_of(account, tmp_path, [600.0] * 30)
    written = json.loads((tmp_path / "soak.json").read_text(encoding="utf-8"))
    rows = [json.loads(line) for line in (tmp_path / "soak.jsonl").read_text(encoding="utf-8").splitlines()]
    assert (written["prompts"], written["wanted"], len(rows)) == (30, 100, 30)
    assert written["rss_growth_mb"] is None, "before half of the prompts were run nothing is said of growth"


@pytest.mark.parametrize("name", ["wrong", "errors", "deaths", "stale_engines"])
def test_each_trouble_fails_the_soak(name: str, account: Account, tmp_path: Path) -> None:
    report_of(account, tmp_path, [600.0] * 100)
    assert account.failures() == []
    setattr(account, name, 1)
    assert len(account.failures()) == 1


def test_too_few_engine_calls_fail_the_soak(account: Account, tmp_path: Path) -> None:
    report_of(account, tmp_path, [600.0] * 100)
    account.eager_calls = account.engine_calls
    assert account.failures() == ["engines made 900 of 1800 calls only"]


def test_slope() -> None:
    assert slope((1, 2, 3), (5, 7, 9)) == pytest.approx(2.0)
