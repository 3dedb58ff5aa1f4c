"""The page and the chart that are made of rows."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from slipstream.benchmarks import page
from slipstream.benchmarks.page import DOCS, newest, read_all, report
from slipstream.benchmarks.rows import RESULTS, append
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
    text, picture = report(newest(read_all(RESULTS)))
    hint = "run `python benchmarks/report.py`"
    assert (DOCS / "benchmarks.md").read_text(encoding="utf-8") == text, hint
    assert (DOCS / "benchmarks.svg").read_text(encoding="utf-8") == picture, hint


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


@pytest.mark.parametrize("script", ["run.py", "report.py"])
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
