"""Counts and reasons."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

from slipstream.runtime.reporting.status import EngineUse, LastRun, Standing, Status


def make_use(digest: str = "a" * 64, error: float | None = 1e-6) -> EngineUse:
    return EngineUse(digest, f"Tiny {digest[0]}", "null", "fp32", error)


def test_nothing_has_run() -> None:
    status = Status()
    assert (status.engine_calls, status.eager_calls, status.last_engine) == (0, 0, None)
    assert status.to_json()["now"] == "nothing has run yet"


def test_it_is_plain_data() -> None:
    status = Status()
    status.use_engine(make_use())
    status.count_engine("a" * 64)
    status.count_eager("a mask")
    found = json.loads(json.dumps(status.to_json()))
    assert (found["engine_calls"], found["eager_calls"]) == (1, 1)
    assert found["now"] == "eager: a mask"
    assert found["engines"][0]["label"] == "Tiny a" and found["engines"][0]["calls"] == 1
    assert found["reasons"] == {"a mask": 1}


def test_a_reason_is_new_once() -> None:
    status = Status()
    assert [status.count_eager(reason) for reason in ("mask", "mask", "hook", "mask")] == [True, False, True, False]


def test_using_an_engine_again_keeps_its_count() -> None:
    status = Status()
    status.use_engine(first := make_use())
    status.count_engine(first.digest)
    status.use_engine(make_use())
    status.count_engine(first.digest)
    assert status.engine_calls == 2
    assert status.last_engine is not None and status.last_engine.since == first.since


def test_the_last_engine_is_the_one_that_came_into_use_last() -> None:
    status = Status()
    for digest in ("a" * 64, "b" * 64, "a" * 64):
        status.use_engine(make_use(digest))
    assert status.last_engine is not None and status.last_engine.digest == "a" * 64


def test_the_error_shown_is_that_of_the_weights_in_use() -> None:
    status = Status()
    status.use_engine(make_use(error=1e-6))
    status.use_engine(make_use(error=2e-3))
    assert status.last_engine is not None and status.last_engine.relative_error == 2e-3


def test_no_call_is_lost_between_threads() -> None:
    status = Status()
    status.use_engine(make_use())
    times = 2000

    def engine() -> None:
        status.count_engine("a" * 64)

    def eager() -> None:
        status.count_eager("why")

    _run_together([engine, eager, engine, eager, lambda: json.dumps(status.to_json())], times)
    assert (status.engine_calls, status.eager_calls) == (2 * times, 2 * times)


def test_threads_agree_on_who_saw_a_reason_first() -> None:
    status = Status()
    firsts: list[bool] = []
    _run_together([lambda: firsts.append(status.count_eager("why"))] * 4, 500)
    assert firsts.count(True) == 1


def _run_together(jobs: list[Callable[[], object]], times: int) -> None:
    def repeat(job: Callable[[], object]) -> None:
        for _ in range(times):
            job()

    threads = [threading.Thread(target=repeat, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_it_knows_what_happened_last() -> None:
    status = Status()
    assert status.standing == Standing()
    status.note("no engines for this one")
    assert status.standing == Standing(note="no engines for this one")
    status.use_engine(use := make_use())
    assert status.standing == Standing(engine=use)
    status.miss("being built", "b" * 64)
    status.count_eager("being built")
    assert status.standing == Standing(reason="being built", wanted="b" * 64)
    status.count_eager("a mask")
    assert status.standing == Standing(reason="a mask")
    status.count_engine(use.digest)
    assert status.standing == Standing(engine=use)


def test_wanted_engines_are_listed_the_last_one_first() -> None:
    status, changes = Status(), []
    status.on_change = lambda: changes.append(1)
    for digest in "abca":
        status.want(digest * 64)
    assert status.wanted == ["a" * 64, "c" * 64, "b" * 64] and len(changes) == 4
    for number in range(40):
        status.want(f"{number:064d}")
    assert len(status.wanted) == 16


def test_the_calls_of_the_last_run_are_counted_apart() -> None:
    status, began = Status(), []
    status.on_run = lambda: began.append(1)
    status.use_engine(use := make_use())
    status.count_engine(use.digest)
    status.count_eager("an earlier reason")
    assert status.last_run.engine_calls == 1 and began == []
    status.begin_run()
    assert status.last_run == LastRun() and began == [1]
    status.miss("being built", "b" * 64)
    status.count_engine(use.digest)
    for reason in ("being built", "being built", "a mask"):
        status.count_eager(reason)
    run = status.last_run
    assert (run.engine, run.engine_calls) == (use, 1)
    assert run.reasons == {"being built": 2, "a mask": 1} and run.wanted == {"being built": "b" * 64}
    assert (status.engine_calls, status.eager_calls) == (2, 4), "all runs together"


def test_who_asked_for_engines_and_got_none_hears_why() -> None:
    status, changes = Status(), []
    status.on_change = lambda: changes.append(1)
    status.fail("out of memory")
    assert status.standing == Standing(reason="out of memory", failed=True) and changes == [1]
    status.use_engine(use := make_use())
    assert status.standing == Standing(engine=use)
