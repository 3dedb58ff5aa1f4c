"""Cases that are set up side by side are timed one at a time, when all are set up."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from slipstream.benchmarks.measuring import turns
from slipstream.benchmarks.measuring.building import Builders, Task
from slipstream.benchmarks.measuring.measure import Schedule
from slipstream.benchmarks.measuring.turns import GpuTurn, Unwanted

pytestmark = pytest.mark.skipif(turns.why_not() is not None, reason="this system has no lock held together")


def _case(file: Path, name: str, sets_up: float, said: list[str], entered: threading.Barrier) -> threading.Thread:
    def run() -> None:
        with GpuTurn(file) as place:
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
    with pytest.raises(RuntimeError), GpuTurn(tmp_path / "lock") as gone:
        raise RuntimeError("no memory")
    with GpuTurn(tmp_path / "lock") as place, place.alone():
        assert place.is_shared
    assert gone.is_shared


def test_by_itself_nothing_is_locked() -> None:
    with GpuTurn(None) as place, place.alone():
        assert not place.is_shared


def test_a_place_that_nobody_wants_any_more_is_not_waited_for(tmp_path: Path) -> None:
    asked: list[float] = []

    def is_unwanted() -> bool:
        asked.append(time.monotonic())
        return len(asked) > 3

    with GpuTurn(tmp_path / "lock") as other, other.alone():
        with pytest.raises(Unwanted), GpuTurn(tmp_path / "lock", is_unwanted):
            pytest.fail("another is alone")
    assert len(asked) == 4
    with GpuTurn(tmp_path / "lock", lambda: False) as place:
        assert place.waited < 1


def test_builders_end_with_their_command_while_another_times(tmp_path: Path) -> None:
    """They wait for the other's lock in threads, which nothing but they themselves can end."""
    begun: list[Task] = []
    builders = Builders(tmp_path / "lock", 600, lambda task, limit: begun.append(task), str)
    waiting = threading.Thread(target=builders, args=(Task("one", "slipstream:compiled", "model"),))
    with GpuTurn(tmp_path / "lock") as other, other.alone():
        waiting.start()
        time.sleep(0.5)
        assert waiting.is_alive()
        builders.stop()
        waiting.join(timeout=5)
        assert not waiting.is_alive() and not begun


def test_waiting_for_others_is_no_setting_up(tmp_path: Path) -> None:
    holds, lets_go = threading.Event(), threading.Event()

    def times() -> None:
        with GpuTurn(tmp_path / "lock") as place, place.alone():
            holds.set()
            lets_go.wait(20)

    other = threading.Thread(target=times)
    other.start()
    assert holds.wait(20)
    threading.Timer(1.0, lets_go.set).start()
    until = time.monotonic() + 10
    with GpuTurn(tmp_path / "lock") as place:
        left = Schedule(1, 1, {}, place, until).seconds_left
    other.join()
    assert 0.9 < place.waited < 9 and 9 < left <= 10
