"""The step skipping page, its chart and the figures that nodes show follow from the rows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.benchmarks.pages.page import DOCS
from slipstream.benchmarks.skipping.image_to_image import IMAGE_TO_IMAGE, OTHER, cases
from slipstream.benchmarks.skipping.page import HELP, NAME, page, write_page
from slipstream.benchmarks.skipping.samples import protocol
from slipstream.benchmarks.skipping.samples.fingerprint import fingerprint
from slipstream.benchmarks.skipping.samples.results import (
    EXEMPT,
    condition_of,
    disagreements,
    is_judged,
    read,
    read_values,
    values_key,
)
from slipstream.benchmarks.skipping.shown import measured, with_figures
from slipstream.benchmarks.subjects.rows import RESULTS
from slipstream.sampling.closeness import CFG, closeness
from slipstream.sampling.measured import MEASURED
from slipstream.sampling.presets import PRESETS, Use
from slipstream.sampling.samplers import SamplerKind

FIELDS = (
    "sampler", "scheduler", "cfg", "steps", "preset", "computed", "samples", "psnr_db", "best_plain", "gain_db",
    "ci_low", "ci_high", "seconds", "shipped", "commit",
)  # fmt: skip


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return read(RESULTS)


def test_page_and_chart_are_those_of_the_rows(rows: list[dict[str, Any]]) -> None:
    text, picture = page(rows)
    assert (DOCS / f"{NAME}.md").read_text(encoding="utf-8") == text
    assert (DOCS / f"{NAME}.svg").read_text(encoding="utf-8") == picture


def test_nodes_show_the_figures_of_the_rows(rows: list[dict[str, Any]]) -> None:
    assert MEASURED.read_text(encoding="utf-8") == measured(rows)
    pages = {file.stem: file.read_text(encoding="utf-8") for file in HELP.glob("*.md")}
    for language, text in pages.items():
        assert with_figures(text, language) == text
    told = closeness(PRESETS["balanced"], 20)
    assert told in pages["en"] and "–" not in told


def test_presets_are_shipped_where_the_rows_say_so(rows: list[dict[str, Any]]) -> None:
    assert len({condition_of(row) for row in rows if is_judged(row)}) == len(protocol.conditions()) == 72
    assert disagreements(rows) == []


@pytest.mark.parametrize("page", [HELP / "en.md", HELP / "zh.md"])
def test_the_help_says_where_presets_are_shipped(page: Path) -> None:
    told = set()
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        kind = next((kind for kind in SamplerKind if re.split("[（ ]*（", cells[0])[0] == kind.value), None)
        if kind and len(cells) == 3 and "_" not in cells[1] and "euler" not in cells[1] and "deis" not in cells[1]:
            told |= {(Use(kind, guided), name) for guided, cell in ((True, cells[1]), (False, cells[2]))
                     for name in re.findall("`(.+?)`", cell)}  # fmt: skip
    assert told == {(use, name) for name, preset in PRESETS.items() if name != EXEMPT for use in preset.uses}


def test_every_row_of_a_preset_has_what_the_table_needs(rows: list[dict[str, Any]]) -> None:
    judged = [row for row in rows if is_judged(row)]
    assert judged
    for row in judged:
        assert all(row.get(field) is not None for field in FIELDS), row
        assert row["samples"] >= 200 and row["preset"] in PRESETS
        assert row["ci_low"] <= row["gain_db"] <= row["ci_high"]
        assert row["gain_db"] == pytest.approx(row["psnr_db"] - row["best_plain_db"], abs=2e-3)


def test_rows_follow_from_the_values_of_each_sample(rows: list[dict[str, Any]]) -> None:
    values = read_values(RESULTS)
    found = {
        name.removesuffix("-preset"): values[name].mean(dtype=np.float64) for name in values if name.endswith("-preset")
    }
    means = sorted(round(float(mean), 1) for mean in found.values())
    told = sorted(round(row["psnr_db"], 1) for row in rows if is_judged(row))
    assert len(means) == len(told)
    assert max(abs(one - other) for one, other in zip(means, told, strict=True)) <= 0.11  # kept as float16


def test_nodes_show_the_figures_of_pictures(rows: list[dict[str, Any]]) -> None:
    """At the CFG that is nearest to KSampler's own of 8, and of pictures that reach the floor."""
    assert CFG == max(protocol.CFGS) == 7.5
    chosen = [row for row in rows if is_judged(row) and (row["preset"], row["cfg"]) == ("fast", CFG)]
    found = [row["decoded"]["preset"]["psnr_db"] for row in chosen if row["steps"] in (20, 21) and row["shipped"]]
    assert len(found) == 3 and min(found) < PRESETS["fast"].floor, (
        "Euler and DDIM, and Euler ancestral, which is refused"
    )
    reached = [each for each in found if each >= PRESETS["fast"].floor]
    assert closeness(PRESETS["fast"], 20) == f"{round(min(reached))} to {round(max(reached))}"
    assert closeness(PRESETS["extreme"], 20) == "–"
    assert "of the decoded picture" in (HELP / "en.md").read_text(encoding="utf-8")


def test_medians_and_pooled_errors_follow_from_the_values_of_each_sample(rows: list[dict[str, Any]]) -> None:
    values = read_values(RESULTS)
    for row in (row for row in rows if is_judged(row)):
        for what, prefix in (("preset", ""), ("best_plain", "best_plain_")):
            found = values[f"{values_key(row)}-{what}"].astype(np.float64)
            assert row[f"{prefix}median_db"] == pytest.approx(np.median(found), abs=0.1)
            pooled = -10 * np.log10(np.mean(10 ** (-found / 10)))
            assert row[f"{prefix}pooled_db"] == pytest.approx(pooled, abs=0.1)
    text = page(rows)[0]
    assert "| 20 | 4 | `quality` | 15 | 61.6, 62.7, 52.8 | 54.1 | shortened-15 |" in text


def test_balanced_is_as_rows_of_image_to_image_say(rows: list[dict[str, Any]]) -> None:
    """With the power that it has it reaches its floor and leads everywhere; another power does not."""
    balanced, found = PRESETS["balanced"], [row for row in rows if row.get("case") == IMAGE_TO_IMAGE]
    assert [(row["condition"], row["denoise"], row["begins_with"]) for row in found] == [
        (str(case.condition), case.denoise, case.begins_with) for case in cases()
    ]
    own = f"{balanced.selection.power:g}"
    for row in found:
        assert row["fingerprint"] == fingerprint(balanced)
        assert row["decoded"][own]["psnr_db"] >= balanced.floor and row["ci_low"] > 0
        assert f"| {row['denoise']:g} | {row['begins_with']} |" in page(rows)[0]
    for other in found[0]["by_power"].keys() - {own}:
        assert min(row["decoded"][other]["psnr_db"] for row in found) < balanced.floor
    changed = [row["by_power"] for row in found if row["begins_with"] == OTHER and row["cfg"] == CFG]
    assert all(max(each, key=lambda power: each[power]["psnr_db"]) == own for each in changed)


def test_page_says_which_preset_misses_its_floor(rows: list[dict[str, Any]]) -> None:
    text = page(rows)[0]
    assert "| uni_pc, normal | `balanced` | 40 | 7.5 | 26.4 ✗ | 30.7 ✗ | 46.2 |" in text
    (line,) = [line for line in text.splitlines() if line.startswith("| dpmpp_2m, karras | `balanced` | 40 | 7.5 |")]
    assert "34.9 ✗, with 17 steps " in line


def test_page_says_what_rows_without_equal_time_are(rows: list[dict[str, Any]]) -> None:
    judged = [{**row, "seeds": {}, "worst_tenth_gain_db": -1.25} for row in rows if is_judged(row)][:3]
    mixed = [*judged, {key: value for key, value in judged[0].items() if key != "seeds"}]
    assert "first look" in page(mixed)[0] and "Equal time is measured" not in page(mixed)[0]
    assert "first look" not in page(judged)[0] and "Equal time is measured" in page(judged)[0]
    assert "| -1.2 |" in page(judged)[0]


def test_page_marks_full_runs_that_are_further_off_than_a_rival(rows: list[dict[str, Any]]) -> None:
    row = next(row for row in rows if is_judged(row) and "converged_db" in row)
    settled = {**row, "converged_db": {"full": 40.0, "preset": 39.0, "best_plain": 38.0}}
    assert "†" not in page([settled])[0]
    further = {**row, "converged_db": {"full": 24.0, "preset": 25.0, "best_plain": 26.0}}
    text = page([further])[0]
    assert "| 24.0, 25.0, 26.0 † |" in text and "† (1 rows)" in text


def test_page_says_where_no_cache_is_a_rival(rows: list[dict[str, Any]]) -> None:
    row = next(row for row in rows if is_judged(row))
    assert "‡" not in page([row])[0]
    assert "neither EasyCache nor LazyCache" in page([{**row, "no_cache_rival": True}])[0]


def test_page_can_be_written_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    helps = sorted(HELP.glob("*.md"))
    before = [file.read_bytes() for file in (MEASURED, *helps)]
    write_page(RESULTS, tmp_path / "pages")
    written = sorted(file.name for file in (tmp_path / "pages").iterdir())
    names = [file.name for file in helps]
    assert written == sorted(["measured.json", "step-skipping.md", "step-skipping.svg", *names])
    assert [file.read_bytes() for file in (MEASURED, *helps)] == before
    assert "en.md" in capsys.readouterr().out
