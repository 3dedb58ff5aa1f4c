"""Cases that are set up side by side are timed one at a time, when all are set up."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from slipstream.benchmarks import turns
from slipstream.benchmarks.turns import Place

pytestmark = pytest.mark.skipif(turns.why_not() is not None, reason="this system has no lock held together")


def _case(file: Path, name: str, sets_up: float, said: list[str], entered: threading.Barrier) -> threading.Thread:
    def run() -> None:
        with Place(file) as place:
            entered.wait()
            time.sleep(sets_up)
            said.append(f"{name} is set up")
            with place.alone():
                said.append(f"{name} is timed")
                time.sleep(0.05)
                said.append(f"{name} was timed")

    return threading.Thread(target=run)


def test_nobody_is_timed_before_all_are_set_up_nor_beside_another(tmp_path: Path) -> None:
    said: list[str] = []
    entered = threading.Barrier(3)
    cases = [_case(tmp_path / "lock", name, wait, said, entered) for name, wait in (("a", 0), ("b", 0.2), ("c", 0.1))]
    for case in cases:
        case.start()
    for case in cases:
        case.join(timeout=20)

    assert sorted(said[:3]) == ["a is set up", "b is set up", "c is set up"]
    for begin, end in zip(said[3::2], said[4::2], strict=True):
        assert (begin.split()[1:], end.split()[1:]) == (["is", "timed"], ["was", "timed"])
        assert begin[0] == end[0]
    assert len(said) == 9


def test_a_case_that_ends_early_holds_nobody_up(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), Place(tmp_path / "lock") as gone:
        raise RuntimeError("no memory")
    with Place(tmp_path / "lock") as place, place.alone():
        assert place.is_shared
    assert gone.is_shared


def test_by_itself_nothing_is_locked() -> None:
    with Place(None) as place, place.alone():
        assert not place.is_shared
