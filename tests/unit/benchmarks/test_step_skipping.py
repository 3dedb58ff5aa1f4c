"""The step skipping page, its chart and the figures that nodes show follow from the rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.benchmarks.page import DOCS
from slipstream.benchmarks.rows import RESULTS
from slipstream.benchmarks.skipping.page import HELP, NAME, measured, page, with_figures
from slipstream.benchmarks.skipping.results import is_judged, keep, read
from slipstream.sampling.measured import MEASURED, closeness
from slipstream.sampling.presets import PRESETS

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
    help_page = HELP.read_text(encoding="utf-8")
    assert with_figures(help_page) == help_page
    assert closeness("balanced", 20) in help_page and "–" not in closeness("balanced", 20)


def test_every_row_of_a_preset_has_what_the_table_needs(rows: list[dict[str, Any]]) -> None:
    judged = [row for row in rows if is_judged(row)]
    assert judged
    for row in judged:
        assert all(row.get(field) is not None for field in FIELDS), row
        assert row["samples"] >= 200 and row["preset"] in PRESETS
        assert row["ci_low"] <= row["gain_db"] <= row["ci_high"]
        assert row["gain_db"] == pytest.approx(row["psnr_db"] - row["best_plain_db"], abs=2e-3)


def test_rows_follow_from_the_values_of_each_sample(rows: list[dict[str, Any]]) -> None:
    values = np.load(RESULTS / f"{NAME}.npz")
    found = {
        name.removesuffix("-preset"): values[name].mean(dtype=np.float64) for name in values if name.endswith("-preset")
    }
    means = sorted(round(float(mean), 1) for mean in found.values())
    told = sorted(round(row["psnr_db"], 1) for row in rows if is_judged(row))
    assert len(means) == len(told)
    assert max(abs(one - other) for one, other in zip(means, told, strict=True)) <= 0.11  # kept as float16


def test_newer_rows_take_the_place_of_older_ones(tmp_path: Path) -> None:
    row = {
        "sampler": "euler",
        "scheduler": "normal",
        "cfg": 4.0,
        "steps": 20,
        "preset": "fast",
        "gain_db": 1.0,
        "ci_low": 0.5,
    }
    other = {"case": "overhead", "rules": {}}
    keep(tmp_path, [row, other], {"a": np.ones(3, np.float32)})
    keep(tmp_path, [{**row, "ci_low": -0.5}, {**row, "cfg": 7.5}], {"b": np.zeros(3, np.float32)})
    kept = read(tmp_path)
    assert [(each.get("cfg"), each.get("ci_low"), each.get("shipped")) for each in kept] == [
        (4.0, -0.5, False),
        (7.5, 0.5, False),  # of the same kind: one that is worse is enough
        (None, None, None),
    ]
    assert set(np.load(tmp_path / f"{NAME}.npz")) == {"a", "b"}
    judged = (tmp_path / f"{NAME}.jsonl").read_text(encoding="utf-8").splitlines()
    assert all(is_judged(json.loads(line)) for line in judged) and len(judged) == 2
