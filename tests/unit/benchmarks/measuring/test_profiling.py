"""What a profile says, from pieces of work whose times are known."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.benchmarks.measuring.profiling import TOP, Profile, Work, busy_and_span, profile_case
from slipstream.benchmarks.subjects.cases import Case
from slipstream.benchmarks.subjects.setup import SetupContext
from slipstream.benchmarks.subjects.variants import Variant
from slipstream.engine_cache import EngineStore


def test_what_runs_at_the_same_time_is_busy_once() -> None:
    work = [Work("c", 70, 80), Work("a", 10, 30), Work("b", 20, 40), Work("inside b", 25, 35)]
    assert busy_and_span(work) == (40, 70)
    assert busy_and_span([]) == (0, 0)


def test_a_table_with_a_gpu() -> None:
    work = [Work("gemm", 0, 2000), Work("gemm", 3000, 5000), Work("Memcpy HtoD", 6000, 7000), Work("add", 9000, 9500)]
    text = "\n".join(Profile("a case, a variant", 12.5, 2, True, 3, work).lines())
    assert "wall time                    12.50 ms" in text
    assert "GPU busy                      5.50 ms" in text
    assert "4.00 ms, 2.000 ms a step, 42.1 % of the time" in text
    assert "kernels                          3\n" in text and "graph launches                   3\n" in text
    rows = text.splitlines()[-3:]
    assert [row.split()[-1] for row in rows] == ["gemm", "HtoD", "add"]
    assert rows[0].split()[:3] == ["4.000", "72.7", "2"]


def test_without_a_gpu_there_are_no_figures_of_one() -> None:
    text = "\n".join(Profile("title", 1.0, 1, False, 0, [Work("aten::mm", 0, 10)]).lines())
    assert "no GPU here" in text and "GPU busy" not in text and "graph launches" not in text and "aten::mm" in text


def test_changes_between_pictures_are_not_profiled(tmp_path: Path) -> None:
    told: list[str] = []
    case = Case("fake", "a fake", lambda: object(), needs_gpu=False)  # type: ignore[arg-type, return-value]
    setup_context = SetupContext(EngineStore(tmp_path), tmp_path, told.append)
    assert list(profile_case(case, [Variant.of("eager+switch-size")], setup_context)) == []
    assert told == ["eager+switch-size is left out: changes between pictures are timed, not profiled"]


@pytest.mark.parametrize("count", [3, TOP + 5])
def test_only_the_longest_are_listed(count: int) -> None:
    lines = Profile("title", 1.0, 1, False, 0, [Work(f"k{n}", 0, n + 1) for n in range(count)]).lines()
    listed = [line for line in lines if " k" in line]
    assert len(listed) == min(count, TOP) and listed[0].endswith(f"k{count - 1}")
