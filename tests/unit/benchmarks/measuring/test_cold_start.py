"""Cold starts: which processes are started, what is timed in them, what becomes of their rows."""

from __future__ import annotations

import json
import os
import sys
import textwrap
import time
import types
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.benchmarks.measuring import job_variants
from slipstream.benchmarks.measuring.case_process import Outcome
from slipstream.benchmarks.measuring.cold_start import STARTS, measure_cold, together
from slipstream.benchmarks.measuring.command import main, make_parser, parts
from slipstream.benchmarks.measuring.first_picture import Marks, start
from slipstream.benchmarks.pages.cold_page import cold_starts, section
from slipstream.benchmarks.pages.page import newest, report
from slipstream.benchmarks.subjects.cases import CASES, Case
from slipstream.benchmarks.subjects.jobs import PICTURE, READY, Job
from slipstream.benchmarks.subjects.rows import FIELDS, OF_COLD, OF_JOBS, Row
from slipstream.benchmarks.subjects.setup import Ready, SetupContext, compiler_cache
from slipstream.benchmarks.subjects.variants import COLD_STARTED, SWITCHED, USUAL, Variant, describe
from slipstream.core.spec import Precision
from slipstream.engine_cache import EngineStore
from slipstream.tests.unit.benchmarks.support import row

TINY = "tiny-sd15-canny-64-3steps"
MARKS = {"imports": 2.0, "model": 3.0, "ready": 5.5, "picture": 6.0}


def cold(variant: str = "eager+cold", ms: float | None = 6000.0, **fields: Any) -> Row:
    of_job = {"steps": 20, "errors": {"latent": 1e-3, "picture": 2e-3}, "distances": {"seed": {"picture": 0.5}}}
    known = {"case": TINY, "steady_ms": 900.0, "marks": MARKS, "repeats": 1, "run": "cold", **of_job, **fields}
    return row(variant, ms, **{"samples": [] if ms is None else [ms], **known})


# Options and names


def test_pictures_that_need_a_gpu_are_measured_by_three_variants() -> None:
    found = parts(make_parser().parse_args(["--cold-start"]))
    assert [name for name, _ in found] == [name for name, case in CASES.items() if case.is_job and case.needs_gpu]
    names = ["eager+cold", "slipstream:compiled+cold", "torch.compile:reduce-overhead+cold"]
    assert all([each.name for each in variants] == names for _, variants in found)


def test_cold_variants_are_described_and_are_about_pictures() -> None:
    assert len({describe(name) for name in (*COLD_STARTED, *SWITCHED, *USUAL)}) == len(
        {*COLD_STARTED, *SWITCHED, *USUAL}
    )
    assert all(Variant.of(name).is_cold for name in COLD_STARTED) and not any(Variant.of(n).is_cold for n in USUAL)
    with pytest.raises(ValueError, match="choose one of cold and switch-size"):
        Variant.of("eager+switch-size+cold")


# Processes


Measured = Callable[..., tuple[Outcome, list[list[str]]]]


@pytest.fixture
def measured(tmp_path: Path) -> Measured:
    """What becomes of processes that run `steps`, and the words that each was given."""

    def measured(*steps: str, words: tuple[str, ...] = ()) -> tuple[Outcome, list[list[str]]]:
        lines = textwrap.dedent(
            f"""
            import json, os, sys, time
            def given(word): return sys.argv[sys.argv.index(word) + 1]
            variant, is_first, late = given("--variants"), "--fill" in sys.argv, time.perf_counter()
            with open({str(tmp_path / "log")!r}, "a") as stream:
                stream.write(json.dumps([os.getpid(), late, os.path.isdir(given("--caches")), sys.argv]) + "\\n")
            with open({str(tmp_path / "log")!r}) as stream:
                number = sum(variant in line for line in stream) - 1
            def put(**fields):
                with open(given("--part"), "a") as stream:
                    stream.write(json.dumps({{**{cold()!r}, "variant": variant, **fields}}) + "\\n")
            """
        )
        script = tmp_path / "child.py"
        script.write_text(lines + "\n".join(steps))
        options = make_parser().parse_args(["--cold-start", "--out", str(tmp_path), *words])
        variants = ["eager+cold", "slipstream:compiled+cold"]
        found = measure_cold(TINY, options, variants, words, (sys.executable, str(script)))
        return found, [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]

    return measured


def value(words: list[str], name: str) -> str:
    return words[len(words) - 1 - words[::-1].index(name) + 1]


def test_each_start_is_a_process_of_its_own_and_the_first_is_not_timed(measured: Measured) -> None:
    before = time.perf_counter()
    outcome, started = measured("put(samples=[10000.0 if is_first else 1000.0 * number], engine_calls=7)")
    assert not outcome.trouble and STARTS == 3
    for found in outcome.rows:
        assert found["samples"] == [1000, 2000, 3000] and found["ms"] == 2000, "without the first, and in all turns"
        assert (found["repeats"], found["warmup"], found["engine_calls"]) == (3, 1, 21)
    variants = [value(words, "--variants") for *_, words in started]
    assert variants == ["eager+cold", "slipstream:compiled+cold"] * 4
    assert ["--fill" in words for *_, words in started] == [True] * 2 + [False] * 6
    assert len({pid for pid, *_ in started}) == 8 and os.getpid() not in {pid for pid, *_ in started}
    shared = {tuple(value(words, name) for name in ("--store", "--caches", "--run")) for *_, words in started}
    assert len(shared) == 1 and all(is_there for _, _, is_there, _ in started)
    for _, late, _, words in started:
        assert before < float(value(words, "--started")) < late, "the clock is one of all processes"
        before = late
    assert not os.path.exists(next(iter(shared))[1])


def test_a_store_and_a_number_that_are_named_are_used(measured: Measured, tmp_path: Path) -> None:
    outcome, started = measured("put()", words=("--store", str(tmp_path / "mine"), "--repeats", "1"))
    assert {value(words, "--store") for *_, words in started} == {str(tmp_path / "mine")} and len(started) == 4
    assert [found["repeats"] for found in outcome.rows] == [1, 1]


@pytest.mark.parametrize("number", [0, 2])
def test_a_start_that_may_not_be_trusted_fails_its_variant(measured: Measured, number: int) -> None:
    outcome, started = measured(
        f"put(**({{'failed': 'off'}} if number == {number} and variant != 'eager+cold' else {{}}))"
    )
    eager, ours = outcome.rows
    assert "failed" not in eager and eager["repeats"] == 3 and ours["failed"] == "off"
    assert outcome.trouble == (f"{TINY}, slipstream:compiled+cold: off",)
    assert len(started) == 4 + number + 1, "it is not started again"


def test_a_start_that_dies_or_says_nothing_is_told_on(measured: Measured) -> None:
    died = "sys.exit(7) if variant == 'eager+cold' and number == 3 else None"
    outcome, _ = measured(died, "put() if variant == 'eager+cold' else None")
    assert [(found["variant"], found["repeats"]) for found in outcome.rows] == [("eager+cold", 2)]
    assert outcome.trouble == (
        f"{TINY}, slipstream:compiled+cold: the process left its variant out",
        f"{TINY}, eager+cold: its process ended with status 7",
    )


def test_a_start_that_takes_too_long_is_ended(measured: Measured) -> None:
    outcome, _ = measured("put() if variant == 'eager+cold' else time.sleep(100)", words=("--limit", "2"))
    assert outcome.trouble == (f"{TINY}, slipstream:compiled+cold: was not done after 2 s, and ended",)


def test_a_variant_that_means_nothing_here_is_not_missed(measured: Measured) -> None:
    outcome, started = measured("put(**({'left_out': 'why'} if variant != 'eager+cold' else {}))")
    assert [found["variant"] for found in outcome.rows] == ["eager+cold"] and not outcome.trouble
    assert len(started) == 5


def test_of_several_starts_medians_count_and_the_largest_error() -> None:
    starts = [
        cold(
            ms=ms,
            steady_ms=ms / 10,
            marks={"imports": ms / 2000, "picture": ms / 1000},
            error=error,
            errors={"a": error},
        )
        for ms, error in ((3000.0, 1e-3), (1000.0, 3e-3), (1500.0, 2e-3))
    ]
    found = together(starts)
    assert (found["ms"], found["ms_min"], found["ms_max"]) == (1500, 1000, 3000)
    assert found["samples"] == [3000, 1000, 1500] and found["steady_ms"] == 150
    assert found["marks"] == {"imports": 0.75, "picture": 1.5}
    assert found["error"] == 3e-3 and found["errors"] == {"a": 3e-3} and list(found) == list(starts[0])


def test_the_command_adds_the_row_of_all_starts(tmp_path: Path, monkeypatch) -> None:
    seen: list[Any] = []

    def measure(name: str, options: Any, variants: list[str], words: tuple[str, ...]) -> Outcome:
        seen.append((name, variants, options.repeats))
        return Outcome((cold(),), ())

    monkeypatch.setattr("slipstream.benchmarks.measuring.command.measure_cold", measure)
    words = ["--cold-start", "--cases", TINY, "--optimize", "max", "--out", str(tmp_path)]
    assert main(words) == 0
    assert seen == [(TINY, ["eager+cold", "slipstream:compiled+cold+max", COLD_STARTED[2]], None)]
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text()) == cold()


# In the process


class Painter(Job):
    """Pictures of which each is written down."""

    def __init__(self, log: list[str], offset: float = 0.0) -> None:
        self.device, self.steps, self.log, self.offset = torch.device("cpu"), 3, log, offset
        self.parts = None  # type: ignore[assignment]
        self.shapes = {"latent": (1, 4, 2, 2)}
        self.tell = lambda what: None

    precision = Precision.FP32
    engine_calls = 7

    def inputs(self, seed: int) -> Any:
        return seed

    def apply(self, parts: Any, wish: Any) -> Any:
        return wish

    def paint(self, parts: Any, applied: Any) -> Any:
        self.log.append("paint")
        self.tell(READY)
        self.tell(READY)
        time.sleep(0.02)
        found = {"latent": torch.ones(2) + applied + self.offset}
        self.tell(PICTURE)
        return found

    def references(self, inputs: Any) -> Any:
        self.log.append("fp32")
        return [{"latent": torch.ones(2) + each} for each in inputs]

    def judge(self, examples: Any) -> Any:
        return types.SimpleNamespace(errors=_errors, limit=lambda *_: 1e-3, facts=lambda errors: {"errors": errors})


def _errors(given: Any, reference: Any) -> dict[str, float]:
    return {name: float((given[name] - wanted).abs().max()) for name, wanted in reference.items()}


@pytest.fixture
def started(tmp_path: Path, monkeypatch) -> Callable[..., Row]:
    """The row of a start in this process, which began 100 s ago."""
    monkeypatch.setitem(sys.modules, "comfyui_version", types.SimpleNamespace(__version__="0.99"))
    kept: dict[str, Any] = {}
    monkeypatch.setattr(torch, "save", lambda found, file: kept.update(found=found) or file.touch())
    monkeypatch.setattr(torch, "load", lambda file, weights_only: kept["found"])

    def started(job: Job, name: str = "eager+cold") -> Row:
        setup_context = SetupContext(EngineStore(tmp_path / "engines"), tmp_path, lambda text: None)
        marks = Marks(time.perf_counter() - 100)
        marks("imports")
        case = Case("fake", "a fake", lambda: job, needs_gpu=False, is_job=True)
        return start(case, Variant.of(name), setup_context, marks, tmp_path / "kept")

    return started


def test_the_first_picture_is_timed_and_fp32_comes_afterwards(started: Callable[..., Row]) -> None:
    log: list[str] = []
    found = started(Painter(log))
    assert log == ["paint"] * 3 + ["fp32"] + ["paint"] * 2, "one, two later ones, and then what is compared"
    assert tuple(found) == (*FIELDS, "steps", "errors", *OF_COLD) and "failed" not in found
    assert found["samples"] == [pytest.approx(1000 * found["marks"]["picture"], abs=0.1)]
    assert 100 <= found["marks"]["imports"] <= found["marks"]["model"] <= found["marks"]["ready"]
    assert found["marks"]["ready"] + 0.02 <= found["marks"]["picture"] < 160 and 20 <= found["steady_ms"] < 10_000
    assert list(found["marks"]) == ["imports", "model", "ready", "picture"] and found["error"] == 0
    again: list[str] = []
    started(Painter(again))
    assert again == ["paint"] * 5, "fp32 paints once for all processes of a case"


def test_a_wrong_picture_fails_the_start(started: Callable[..., Row]) -> None:
    assert "differs from fp32 by 5.0e-01" in started(Painter([], 0.5))["failed"]


@pytest.mark.parametrize(
    ("calls", "reasons", "failed"),
    [(7, "", None), (6, "", "the engine served 24 of 28 calls"), (7, "no engine yet", "28 of 28 calls: no engine yet")],
)
def test_a_picture_that_setting_up_paints_is_the_first(
    started: Callable[..., Row], monkeypatch, calls: int, reasons: str, failed: str | None
) -> None:
    log: list[str] = []
    job, served = Painter(log), []

    def ours(variant: Variant, job: Painter, setup_context: SetupContext, ending: ExitStack) -> Ready:
        def compute(applied: Any) -> Any:
            served.append(calls)
            return job.paint(None, applied)

        job.paint(None, job.inputs(0))
        return Ready(compute, Precision.FP32, engine_calls=lambda: sum(served), reasons=lambda: reasons)

    monkeypatch.setattr(job_variants, "_ours", ours)
    found = started(job, "slipstream:compiled+cold")
    assert log == ["paint"] * 3 + ["fp32"] + ["paint"] * 2 and found["engine_calls"] == 4 * calls
    assert "failed" not in found if failed is None else failed in found["failed"]


def test_what_breaks_is_a_row_with_a_reason(started: Callable[..., Row], monkeypatch) -> None:
    job = Painter([])
    monkeypatch.setattr(job, "paint", lambda parts, applied: 1 / 0)
    found = started(job)
    assert found["failed"] == "ZeroDivisionError: division by zero" and found["samples"] == [] and found["ms"] is None


def test_what_means_nothing_is_left_out(started: Callable[..., Row]) -> None:
    found = started(Painter([]), "torch.compile:reduce-overhead+cold")
    assert found == {"case": "fake", "variant": "torch.compile:reduce-overhead+cold", "left_out": GRAPHS}


GRAPHS = "CUDA graphs need a CUDA GPU"


@pytest.mark.parametrize("named", [True, False])
def test_torch_finds_what_it_compiled_where_a_folder_is_named(tmp_path: Path, monkeypatch, named: bool) -> None:
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "")
    folder = tmp_path / "compiled" if named else None
    setup_context = SetupContext(EngineStore(tmp_path), tmp_path, lambda text: None, compiled=folder)
    used = []
    for _ in range(2):
        with compiler_cache(setup_context):
            used.append(os.environ["TORCHINDUCTOR_CACHE_DIR"])
            assert os.environ["TRITON_CACHE_DIR"].startswith(used[-1])
    assert used == [str(folder)] * 2 if named else len(set(used)) == 2


# The page


def test_a_start_has_a_line_of_what_it_spent() -> None:
    text = section(cold_starts([cold(), cold("slipstream:compiled+cold", 4000.0), row("eager")]), ["torch."] * 2)
    assert f"| {TINY} | `eager+cold` | 6.00 | 2.00 | 1.00 | 2.50 | 0.50 | 900.00 |" in text
    assert f"| {TINY} | `slipstream:compiled+cold` | 4.00 |" in text and "- `slipstream:compiled+cold`: " in text
    assert text.count("torch.\n") == 1 and "### NVIDIA H200: cold starts" in text
    head, rule = [line for line in text.splitlines() if line.startswith(("| case", "| ---"))]
    assert head.count("|") == rule.count("|") == 9


def test_the_last_row_of_a_variant_counts_and_a_failed_one_has_a_reason() -> None:
    failed = cold("slipstream:compiled+cold", None, failed="<no> memory")
    found = cold_starts([cold(ms=7000.0), cold(ms=5000.0), failed])
    assert [each["ms"] for each in found] == [5000.0, None]
    text = section(found, ["a", "a"])
    assert "slipstream:compiled+cold`: &lt;no> memory" in text and "| `slipstream:compiled+cold` |" not in text
    assert section(cold_starts([row("eager")]), []) == ""


def test_cold_starts_leave_their_cases_table_alone() -> None:
    plain = cold("eager", 900.0, run="before")
    rows = [{name: plain[name] for name in (*FIELDS, *OF_JOBS)}, cold()]
    (group,) = newest(rows)
    assert [found["variant"] for found in group.rows] == ["eager"]
    text, picture = report([], cold=cold_starts(rows))
    assert "## From a cold start" in text and "median of 1 starts after 1" in text and "cold" not in picture
    assert "From a cold start" not in report(newest([row("eager")]), cold=cold_starts([row("eager")]))[0]
