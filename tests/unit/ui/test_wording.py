"""The page's facts in words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.sampling.saved_preset import SavedPreset
from slipstream.ui import charts, wording

ENGINE: dict[str, Any] = {
    "digest": "ab" * 32,
    "label": "SD15 512×512 batch 2 with control",
    "role": "unet",
    "backend": "tensorrt",
    "precision": "fp16",
    "bytes": 3 * 2**20,
    "error": 4e-4,
    "speedup": 2.5,
    "engine_ms": 2.0,
    "eager_ms": 5.0,
    "timed_by": "step",
    "last_used": "2026-01-02T03:04:05+00:00",
    "state": "stale",
    "reasons": ["torch: 1 → 2"],
    "gpu": None,
    "resolution": "512×512",
    "batch": "2",
}
BUILD: dict[str, Any] = {
    "id": "x", "label": "<b>demo</b>", "state": "running", "fraction": 0.25, "message": "compiling", "left_s": 40.0,
    "held": False, "report": [], "reason": "",
}  # fmt: skip


def test_a_row() -> None:
    (row,) = wording.table([ENGINE])["data"]
    told = dict(zip(wording.COLUMNS, row, strict=True))
    assert (told["id"], told["model"], told["profile"]) == ("abababababab", "SD15", "512×512 batch 2 with control")
    assert (told["GPU"], told["MiB"], told["error"], told["speed-up"]) == ("CPU", "3.0", "0.04 %", "2.5x")
    assert told["state"] == "stale: torch: 1 → 2"


@pytest.mark.parametrize(
    ("label", "sizes"),
    [("blocks SDXL ResBlock 640", "any size"), ("blocks SDXL ResBlock 640 for one size", "one size")],
)
def test_a_row_of_an_engine_of_blocks(label: str, sizes: str) -> None:
    block = {"label": label, "role": "block", "resolution": sizes, "batch": "", "error": None}
    (row,) = wording.table([{**ENGINE, **block, "backend": "triton-blocks"}])["data"]
    told = dict(zip(wording.COLUMNS, row, strict=True))
    assert (told["model"], told["profile"]) == ("blocks SDXL ResBlock 640", sizes)
    assert (told["error"], told["backend"]) == ("-", "compiled, without C++")


def test_headers_are_there_without_rows() -> None:
    assert wording.table([]) == {"headers": list(wording.COLUMNS), "data": []}


def test_each_column_has_a_width() -> None:
    assert len(wording.WIDTHS) == len(wording.COLUMNS)
    assert sum(wording.WIDTHS) == pytest.approx(100)


def test_choices_lead_back_to_ids() -> None:
    assert wording.ids(wording.choices([ENGINE])) == ["abababababab"]
    assert wording.ids("abababababab | x") == ["abababababab"]
    for nothing in ([], None, ""):
        with pytest.raises(ValueError, match="Choose engines"):
            wording.ids(nothing)


def test_bars_show_what_goes_on_first_and_escape() -> None:
    done = {**BUILD, "label": "other", "state": "failed", "reason": "no <disk>", "fraction": None}
    html = wording.bars([done, BUILD])
    assert html.index("&lt;b&gt;demo") < html.index("other")
    assert "running 25%, compiling, 40 s left" in html and "width:25.0%" in html
    assert "no &lt;disk&gt;" in html and "<b>demo" not in html.replace("<b>&lt;", "")
    assert "Nothing is being built" in wording.bars([])
    assert "waits until the host is idle" in wording.bars([{**BUILD, "held": True}])


def test_the_grid() -> None:
    cell = {"state": "stale", "why": "torch: 1 → 2"}
    found = {"sizes": ["512x512", "768x512"], "models": [{"model": "a/b.safetensors", "cells": [cell, cell]}]}
    found["models"][0]["cells"] = [cell, {"state": "ready", "why": ""}]
    assert wording.grid(found) == {
        "headers": ["model", "512×512", "768×512"],
        "data": [["a/b.safetensors", "to be built again: torch: 1 → 2", "✔ ready"]],
    }


def test_what_markdown_would_read_is_shown_as_it_is() -> None:
    assert wording.code("a`b") == "`a b`"


def test_charts(tmp_path: Path) -> None:
    slower = {**ENGINE, "label": "SDXL", "speedup": 1.25}
    html = charts.speedups([slower, ENGINE, {**ENGINE, "speedup": None}])
    assert html.index("SD15") < html.index("SDXL") and html.count("slipstream-speed") == 2
    assert "SD15 512×512 batch 2 with control, fp16 TensorRT: 5.0 → 2.0 ms a step (2.5x)" in html
    assert "width:50.0%" in html and html.count("left:calc(40.0% - 1px)") == 2, "the line at 1×"
    slow = charts.speedups([{**ENGINE, "speedup": 0.5}])
    assert "width:50.0%" in slow and "left:calc(100.0% - 1px)" in slow
    assert "No engine" in charts.speedups([])
    (tmp_path / "step-skipping.svg").write_text("<svg/>")
    assert charts.measured(tmp_path).count("<img") == 1 and not charts.measured(tmp_path / "none")


def test_what_was_calibrated_here() -> None:
    near = SavedPreset("Mine <1>", 20, (0, 1, 2, 5, 19), "SD15", "euler", "normal", 4.0, 33.3, "2025-11-30")
    html = charts.calibrated([near, replace(near, name="closer", computed=tuple(range(20)), held_out_db=60.0)])
    assert html.index("closer") < html.index("Mine &lt;1&gt;: calibrated 2025-11-30: 5 of 20 steps, SD15")
    assert "width:25.0%" in html and "width:100.0%" in html
    assert "Nothing was calibrated here yet" in charts.calibrated([])


def test_the_charts_of_the_checkout_are_there() -> None:
    assert all((charts.DOCS / name).is_file() for name in charts.MEASURED)
