"""The page's tables of pictures from a ComfyUI server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slipstream.benchmarks.pages import page as whole_page
from slipstream.benchmarks.pages import patches_page
from slipstream.benchmarks.pages.server_page import section
from slipstream.benchmarks.pages.server_summary import by_machine, read_rows
from slipstream.benchmarks.subjects.rows import Row, append
from slipstream.tests.unit.benchmarks.support import row as row_of_a_call
from slipstream.tests.unit.benchmarks.support import server_row

SD15 = "sd15-512-20"
FASTER = {"client_s": [1.5, 1.5], "sampler_s": [0.5, 0.75], "decoder_s": [0.25, 0.25], "step_ms": [20.0, 20.0]}
ROWS = [
    server_row("plain"),
    server_row("torch-compile", samples={**FASTER, "sampler_s": [0.75, 1.25]}),
    server_row("slipstream", samples=FASTER),
    server_row("slipstream", samples={**FASTER, "sampler_s": [0.75, 1.0]}, turn=2),
    server_row("fast", flags=["--fast"], samples={**FASTER, "sampler_s": [1.0, 1.5]}),
]


def patched(variant: str, patch: str, seconds: float, **fields: Any) -> Row:
    samples = {"client_s": [9.0, 9.0], "sampler_s": [seconds, seconds]}
    return server_row(variant, patch=patch, sampler_s=seconds, samples=samples, **fields)


BASE = [patched("plain", "", 3.0), patched("slipstream+blocks", "", 1.0, blocks=100, blocks_on_engines=100)]


def lines_of(text: str, first: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith(f"| {first} |")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_tables_say_what_the_rows_say() -> None:
    text = section(ROWS)
    assert "### NVIDIA H200, ComfyUI 0.33.0" in text
    headline, plain, compiled, ours, fast = lines_of(text, SD15)
    assert headline == [SD15, "2.25 (2.50)", "1.25 (1.50)", "1.00 (1.50)", "2.25× (1.67×)", "1.25× (1.00×)"]
    assert plain[1:] == ["`plain`", "50.0", "51.00", "10.0", "500.0", "9.0", "5000", "7000", "1.0e-02", ""]
    assert compiled[1] == "`torch-compile`" and ours[1:4] == ["`slipstream`", "", "20.00"] and ours[-1] == "98 %"
    assert fast[1:] == ["`--fast`", "`fast`", "1.500", "1.500", "1.50×", "1.0e-02", ""]
    assert "commit cccccccccccc; timed pictures a turn: 2, after 2 others." in text and "What went wrong" not in text


def test_a_text_has_its_encoders_seconds() -> None:
    samples = {"client_s": [0.5, 0.5], "encoder_s": [0.25, 0.25], "warmup_s": [9.0]}
    plain, ours = (server_row(name, case="t5-xxl-encode", samples=samples) for name in ("plain", "slipstream"))
    headline, line, _ = lines_of(section([plain, ours]), "t5-xxl-encode")
    assert headline[1:] == ["0.25 (0.50)", "", "0.25 (0.50)", "1.00× (1.00×)", ""]
    assert line[2:6] == ["", "", "", "250.0"]


def test_what_does_not_count_has_no_speed_but_a_reason() -> None:
    ended = {"died": True, "failed": "the server ended | <b>", "pictures": 0, "error": None}
    dead = server_row("slipstream", samples={"warmup_s": []}, **ended)
    headline, *_ = lines_of(section([ROWS[0], dead]), SD15)
    assert headline == [SD15, "2.25 (2.50)", "", "", "", ""]
    assert "turn 1: the server died: the server ended \\| &lt;b>" in section([ROWS[0], dead])
    eager = server_row("slipstream", engine_calls=10, eager_calls=30, reasons={"a rare shape": 30})
    assert lines_of(section([ROWS[0], eager]), SD15)[0][3] == ""
    assert "engines computed 25 % of the calls: a rare shape" in section([eager])


def test_the_last_whole_run_of_a_case_is_shown() -> None:
    later = [{**found, "run": "second", "samples": FASTER} for found in ROWS[:3]]
    lone = server_row("slipstream+fp8", run="third", samples=FASTER)
    ((case,),) = by_machine([*ROWS, *later, lone]).values()
    assert {turns.run for turns in case.shown} == {"second"}
    assert [turns.variant for turns in case.others] == ["fast", "slipstream+fp8"]
    fast, eight_bits = lines_of(section([*ROWS, *later, lone]), SD15)[-2:]
    assert (fast[1], fast[5]) == ("`--fast`", "1.50×"), "compared with its own run's plain workflow"
    assert (eight_bits[2], eight_bits[5]) == ("`slipstream+fp8`", ""), "whose run has none"
    without_rival = [later[0], later[2]]
    ((case,),) = by_machine([*ROWS, *without_rival, lone]).values()
    assert {turns.run for turns in case.shown} == {ROWS[0]["run"]}


def test_what_patches_leave_of_the_speed_has_a_table_of_its_own() -> None:
    pair = [
        patched("plain", "seg", 4.0, effect=0.25),
        patched("slipstream+blocks", "seg", 2.0, blocks=200, blocks_on_engines=150, error=0.02, eager_calls=30),
    ]
    lone = patched("plain", "pag", 4.0)
    died = patched("slipstream+blocks", "pag", 4.0, failed="no | room", died=True)
    text = patches_page.section([*ROWS, *BASE, *pair, lone, died])
    (base,), (seg,) = lines_of(text, "none"), lines_of(text, "Smoothed Energy Guidance")
    assert base[1:] == ["", "", "3.00", "1.00", "3.00×", "100 %", "100 %", "100 %", "1.0e-02"]
    assert seg[1:] == ["sd-perturbed-attention", "25 %", "4.00", "2.00", "2.00×", "67 %", "50 %", "75 %", "2.0e-02"]
    assert not lines_of(text, "PerturbedAttentionGuidance") and "with pag: no \\| room" in text
    assert section([*ROWS, *BASE, *pair, lone, died]) == section(ROWS) and not section(BASE)
    assert not patches_page.section(ROWS)


def test_a_patch_is_compared_with_the_base_of_its_own_run() -> None:
    later = [
        patched("plain", "", 3.0, run="second"),
        patched("slipstream+blocks", "", 1.5, run="second", blocks=100, blocks_on_engines=100),
        patched("plain", "freeu-v2", 3.0, run="second"),
        patched("slipstream+blocks", "freeu-v2", 3.0, run="second"),
    ]
    first = [patched("plain", "easycache", 3.0), patched("slipstream+blocks", "easycache", 1.0)]
    text = patches_page.section([*BASE, *first, *later])
    assert [lines_of(text, title)[0][6] for title in ("none", "EasyCache", "FreeU_V2")] == ["100 %", "100 %", "50 %"]
    assert lines_of(text, "FreeU_V2")[0][8] == "none is called through Slipstream"


def test_patches_in_servers_of_other_flags_have_a_table_of_their_own() -> None:
    names = "plain", "slipstream+blocks"
    other = [patched(name, patch, 9.0, flags=["--fast"], run="second") for patch in ("", "pag") for name in names]
    alone = [patched(name, "", 8.0, flags=["--lowvram"], run="third") for name in names]
    text = patches_page.section([*BASE, *(patched(name, "pag", 4.0) for name in names), *other, *alone])
    assert [line[3] for line in lines_of(text, "none")] == ["3.00", "9.00"]
    assert [line[3] for line in lines_of(text, "PerturbedAttentionGuidance")] == ["4.00", "9.00"]
    assert text.count("The server's flags are `--fast`.") == 1 and "--lowvram" not in text


@pytest.mark.parametrize(
    ("alone", "with_it", "cells"),
    [
        (1.5, 2.0, ["75 %", "50 %"]),
        (2.0, 3.0, ["67 %", "0 %"]),
        (2.0, 6.0, ["33 %", "-100 %"]),
        (2.9, 3.0, ["97 %", "0 %"]),
        (2.95, 3.0, ["98 %", ""]),
    ],
)
def test_how_much_of_the_gain_a_patch_leaves(alone: float, with_it: float, cells: list[str]) -> None:
    """Plain takes 3 s in each; where little is gained without a patch, much is kept even where nothing is gained."""
    rows = [patched("plain", patch, 3.0) for patch in ("", "easycache")]
    rows += [patched("slipstream+blocks", "", alone), patched("slipstream+blocks", "easycache", with_it)]
    assert lines_of(patches_page.section(rows), "EasyCache")[0][6:8] == cells


def test_the_page_begins_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "results"
    append(folder / "server-nvidia-h200-2026-01-31.jsonl", ROWS)
    calls = [row_of_a_call("eager", in_a_row_ms=8.0), row_of_a_call("slipstream:compiled", 5.0)]
    append(folder / "nvidia-h200-2026-01-31.jsonl", calls)
    monkeypatch.setattr(whole_page, "RESULTS", folder)
    monkeypatch.setattr(whole_page, "DOCS", tmp_path / "docs")
    assert len(read_rows(folder)) == 5 and whole_page.main() == 0
    text = (tmp_path / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert text.index("## Pictures from a ComfyUI server") < text.index("Single calls, each from an idle GPU")
    eager, ours, *_ = lines_of(text, "sd15-512-b2")
    assert eager[2:5] == ["10.00", "8.00", "1.00×"] and ours[2:5] == ["5.00", "", "2.00×"]
