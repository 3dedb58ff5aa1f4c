"""The page and the chart that are made of rows."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from slipstream.benchmarks.pages import ladder, page, scratch_page
from slipstream.benchmarks.pages.cold_page import cold_starts
from slipstream.benchmarks.pages.ladder import ladders
from slipstream.benchmarks.pages.page import DOCS, newest, read_all, report
from slipstream.benchmarks.pages.server_summary import read_rows
from slipstream.benchmarks.pages.switch_page import switches
from slipstream.benchmarks.subjects.cases import CASES
from slipstream.benchmarks.subjects.rows import RESULTS, append
from slipstream.benchmarks.subjects.variants import LADDER_CASE
from slipstream.tests.unit.benchmarks.support import row

ROWS = [
    row("eager", 20.0),
    row("torch.compile", 10.0),
    row("torch.compile:max-autotune", 8.0, build_s=61.4, vram_mb=2100.2),
    row("slipstream:compiled", 5.0, build_s=40.6, load_s=0.514, engine_calls=40),
]


def line_of(text: str, variant: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if f"| `{variant}` |" in line]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_page_is_what_the_rows_say() -> None:
    rows = read_all(RESULTS)
    climbed = ladders(rows)
    scratch = scratch_page.read_rows(RESULTS)
    text, picture = report(newest(rows), climbed, switches(rows), cold_starts(rows), read_rows(RESULTS), scratch)
    hint = "run `python benchmarks/report.py`"
    assert (DOCS / "benchmarks.md").read_text(encoding="utf-8") == text, hint
    assert (DOCS / "benchmarks.svg").read_text(encoding="utf-8") == picture, hint
    if climbed:
        title = CASES[LADDER_CASE].title
        assert (DOCS / "ladder.svg").read_text(encoding="utf-8") == ladder.picture(climbed, title), hint


def test_a_model_that_was_never_met() -> None:
    def made(at: float, step: float, engine: int = 0, blocks: int = 0) -> dict[str, float]:
        calls = {"engine_calls": engine, "of_blocks": blocks, "eager_calls": 5 - engine}
        return {"at_s": at, "client_s": 9.04, "step_ms": step, **calls}

    pictures = [made(0, 100), made(10, 90, 4, 4), made(20, 50, 5, 5), made(30, 30, 5, 5), made(40, 31, 5, 5)]
    builds = [{"what": "blocks X", "seconds": 7, "parts": "start 1, compile 6"}]
    ours = {
        "case": "a",
        "variant": "slipstream",
        "gpu": "G",
        "pictures": [*pictures, made(50, 20, 5)],
        "builds": builds,
    }
    rival = {
        **ours,
        "variant": "torch-compile",
        "builds": [],
        "pictures": [{"at_s": 0, "client_s": 61.0, "step_ms": 40}],
    }
    text = scratch_page.section([ours, rival])
    assert line_of(text, "slipstream") == ["a", "`slipstream`", "9.0", "100.0", "10", "31.0", "50", "20.0"]
    assert line_of(text, "torch-compile")[2:] == ["61.0", "40.0", "", "", "", ""]
    assert text.count("Builds of") == 1 and "blocks X 7 s (start 1, compile 6)" in text
    assert not scratch_page.section([])


def test_the_table() -> None:
    text, _ = report(newest(ROWS))
    assert line_of(text, "eager") == ["sd15-512-b2", "`eager`", "20.00", "1.00×", "0.40×", "1.0e-03", "", "", ""]
    assert line_of(text, "torch.compile:max-autotune")[2:] == ["8.00", "2.50×", "1.00×", "1.0e-03", "61", "", "2100"]
    assert line_of(text, "slipstream:compiled")[2:] == ["5.00", "4.00×", "1.60×", "1.0e-03", "41", "0.51", ""]
    assert "torch 2.11.0, CUDA 13.0, ComfyUI 0.33.0, driver 580.1; Slipstream 1.0, commit cccccccccccc" in text
    assert "median of 2 calls after 1" in text and "Not to be trusted" not in text


def test_a_failed_row_has_a_reason_and_no_time() -> None:
    wrong = row("torch.compile:max-autotune", 1.0, failed="differs from fp32 by 3.0e-01 | much")
    broken = row("TorchCompileModel", None, error=None, failed="RuntimeError: <no>")
    text, picture = report(newest([ROWS[0], ROWS[1], wrong, broken]))
    assert line_of(text, "torch.compile:max-autotune")[2:] == ["failed", *[""] * 6]
    assert line_of(text, "eager")[4] == "0.50×"  # the best mode that computes the right thing
    assert "- sd15-512-b2, `torch.compile:max-autotune`: differs from fp32 by 3.0e-01 \\| much" in text
    assert "`TorchCompileModel`: RuntimeError: &lt;no>" in text
    assert "max-autotune" not in picture and "TorchCompileModel" not in picture


def test_without_an_eager_row_there_is_nothing_to_compare_with() -> None:
    assert line_of(report(newest([ROWS[3]]))[0], "slipstream:compiled")[3:5] == ["", ""]


def test_the_newest_run_of_each_case_and_gpu_counts(tmp_path: Path) -> None:
    later = [row("eager", 3.0, run="second")]
    other = [row("eager", 4.0, case="sdxl-1024-b2", run="third"), row("eager", 9.0, gpu=None, run="fourth")]
    append(tmp_path / "nvidia-h200-2026-02-01.jsonl", later)
    append(tmp_path / "nvidia-h200-2026-01-31.jsonl", [*ROWS, *other])
    groups = newest(read_all(tmp_path))
    assert [(group.gpu, group.case, [found["ms"] for found in group.rows]) for group in groups] == [
        ("CPU", "sd15-512-b2", [9.0]),
        ("NVIDIA H200", "sd15-512-b2", [3.0]),
        ("NVIDIA H200", "sdxl-1024-b2", [4.0]),
    ]
    text, _ = report(groups)
    assert text.index("## CPU") < text.index("## NVIDIA H200")


def test_a_run_of_tensorrt_stands_beside_the_others() -> None:
    """It may need a Python of its own: its rows come from a run of their own."""
    ours = [row("slipstream:tensorrt+bake", 5.0, run="later")]
    groups = newest([*ROWS, *ours])
    assert [[found["run"] for found in group.rows[:1]] for group in groups if group.case == ours[0]["case"]] == [
        [ROWS[0]["run"]],
        ["later"],
    ]


def rung(variant: str, ms: float | None, **fields: object) -> dict[str, object]:
    return row(variant, ms, case=LADDER_CASE, **{"run": "climbed", **fields})


RUNGS = [
    rung("slipstream:compiled+fp8", 10.0, error=3e-2),
    rung("eager", 40.0),
    rung("eager+fp32", 200.0, vram_mb=12000.4),
    rung("slipstream:compiled", 20.0),
    rung("slipstream:compiled+int8", None, failed="too coarse"),
]


def test_the_ladder_goes_from_rung_to_rung() -> None:
    text, _ = report(newest(RUNGS), ladders(RUNGS))
    part = text.split("## Rung by rung")[1].split("## How")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if "× |" in line]
    assert lines == [
        ["`eager+fp32`", "200.00", "1.00×", "1.00×", "1.0e-03", "12000"],
        ["`eager`", "40.00", "5.00×", "5.00×", "1.0e-03", ""],
        ["`slipstream:compiled`", "20.00", "10.00×", "2.00×", "1.0e-03", ""],
        ["`slipstream:compiled+fp8`", "10.00", "20.00×", "2.00×", "3.0e-02", ""],
    ]
    assert "- `slipstream:compiled+fp8`: " in part and "int8" not in part and "(ladder.svg)" in part
    bars = [
        each for each in ElementTree.fromstring(ladder.picture(ladders(RUNGS), "SDXL")).iter() if each.get("rx") == "3"
    ]
    assert [bar.get("class") for bar in bars] == ["other", "other", "ours", "ours"]


def test_a_run_of_the_ladder_leaves_its_cases_table_alone() -> None:
    before = [row("eager", 41.0, case=LADDER_CASE), row("slipstream:compiled", 21.0, case=LADDER_CASE)]
    (group,) = newest([*before, *RUNGS])
    assert [found["ms"] for found in group.rows] == [41.0, 21.0]
    (found,) = ladders([*before, *RUNGS, *(({**each, "run": "later"}) for each in before)])
    assert found.rows[0]["ms"] == 200.0, "a run without rungs of its own is no ladder"
    both = [*RUNGS, rung("eager+graph", 30.0)]
    assert len(newest(both)) == len(ladders(both)) == 1


@pytest.mark.parametrize(("eager", "is_blind"), [(0.05, False), (0.1, True)])
def test_pictures_that_cannot_be_judged_are_named(eager: float, is_blind: bool) -> None:
    """0.3 is how far another picture is away, and three times the plain model's error would pass."""
    more = {"steps": 20, "distances": {"seed": {"latent": 1.0, "picture": 0.3}}}
    rows = [row("eager", 40.0, case="sd15-512-20steps", errors={"latent": 0.01, "picture": eager}, **more)]
    assert ("the times count, not the errors" in report(newest(rows))[0]) == is_blind


def test_changes_between_pictures_leave_their_cases_table_alone() -> None:
    other = {"shapes": {"x": [2, 4, 64, 96]}, "ms": 9.0, "again_ms": 8.5, "steady_ms": 8.25}
    change = row("slipstream:compiled+switch-size", 6.5, run="later", again_ms=6.25, steady_ms=6.0, other=other)
    rows = [*ROWS, change]
    (group,) = newest(rows)
    assert [found["variant"] for found in group.rows] == [found["variant"] for found in ROWS]
    text, picture = report([group], switched=switches(rows))
    assert "## Changing between pictures" in text and "768×512 → 512×512" in text and "switch" not in picture
    assert "Changing between pictures" not in report([group])[0]


def test_what_others_published_stands_beside_our_rows_in_fp16() -> None:
    text, _ = report(newest([*ROWS, row("eager+graph", 12.0)]))
    part = text.split("## What other projects published")[1].split("\n## ")[0]
    assert (
        "none of it was measured by us" in part
        and "| AITemplate | not named | +140 % over PyTorch in fp16 | 2.40× |" in part
    )
    assert "| sd15-512-b2 | NVIDIA H200 | 4.00× | 2.40× |" in part
    others = [{**found, "precision": "bf16"} for found in ROWS]
    for rows in (others, ROWS[:3], [*ROWS[:3], row("slipstream:compiled", 5.0, failed="wrong")]):
        assert "What other projects published" not in report(newest(rows))[0]


def test_versions_of_packages_that_only_some_variants_need_are_named() -> None:
    rival = row("diffusers", 18.0, versions={**ROWS[0]["versions"], "diffusers": "0.42.1"})
    text, _ = report(newest([*ROWS, rival]))
    assert "ComfyUI 0.33.0, diffusers 0.42.1, driver 580.1" in text
    assert line_of(text, "diffusers")[3:5] == ["1.11×", "0.44×"], "it is none of torch's own modes around our model"


def test_no_ladder_no_section() -> None:
    failed = [rung("eager+fp32", None, failed="no"), rung("slipstream:compiled", None, failed="no")]
    assert ladders([*ROWS, *failed]) == [] and "## Rung by rung" not in report(newest(ROWS), ladders(ROWS))[0]


def test_the_command_writes_the_ladders_chart(tmp_path: Path, monkeypatch) -> None:
    append(tmp_path / "results" / "a-2026-01-31.jsonl", [*ROWS, *RUNGS])
    monkeypatch.setattr(page, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(page, "DOCS", tmp_path / "docs")
    assert page.main() == 0
    text = (tmp_path / "docs" / "ladder.svg").read_text(encoding="utf-8")
    assert "200.0 ms  eager+fp32" in text
    assert "eager+fp32" not in (tmp_path / "docs" / "benchmarks.svg").read_text(encoding="utf-8")


def test_variants_of_other_times_do_not_stop_the_page() -> None:
    text, _ = report(newest([row("slipstream:magic", case="sd9-1-b1")]))
    assert "`slipstream:magic`: no longer offered" in text and "| sd9-1-b1 | `slipstream:magic` |" in text


def test_the_chart_is_a_picture_for_dark_and_light_pages() -> None:
    _, picture = report(newest(ROWS))
    root = ElementTree.fromstring(picture)
    bars = [element for element in root.iter() if element.get("class") in ("ours", "other")]
    assert [bar.get("class") for bar in bars] == ["other", "other", "other", "ours"]
    widths = [float(bar.get("width", 0)) for bar in bars]
    assert widths[0] == pytest.approx(4 * widths[3], rel=0.01)
    assert "prefers-color-scheme: dark" in picture and 'class="card"' in picture
    assert "5.0 ms  slipstream:compiled" in picture


def test_nothing_measured_is_said() -> None:
    text, picture = report([])
    assert "Nothing has been measured yet" in text and "benchmarks.svg" not in text
    ElementTree.fromstring(picture)


def test_the_command_writes_the_same_bytes_each_time(tmp_path: Path, monkeypatch) -> None:
    append(tmp_path / "results" / "a-2026-01-31.jsonl", ROWS)
    monkeypatch.setattr(page, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(page, "DOCS", tmp_path / "docs")
    written = []
    for _ in range(2):
        assert page.main() == 0
        written.append([(file.name, file.read_bytes()) for file in sorted((tmp_path / "docs").iterdir())])
    assert written[0] == written[1] and [name for name, _ in written[0]] == ["benchmarks.md", "benchmarks.svg"]


def test_a_broken_row_is_named(tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "a-2026-01-31.jsonl").write_text(json.dumps(ROWS[0]) + "\nnonsense\n")
    monkeypatch.setattr(page, "RESULTS", tmp_path)
    assert page.main() == 1 and "line 2 is no row" in capsys.readouterr().err


@pytest.mark.parametrize("script", ["run.py", "report.py", "server.py"])
def test_the_scripts_start_from_any_folder(root: Path, tmp_path: Path, script: str) -> None:
    """Through a link of another name, too: the folder may be called anything."""
    link = tmp_path / "some-pack"
    try:
        link.symlink_to(root, target_is_directory=True)
    except OSError:
        pytest.skip("links are not allowed here")
    code = f"import runpy, sys; sys.argv = ['x', '--help']; runpy.run_path({str(link / 'benchmarks' / script)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
