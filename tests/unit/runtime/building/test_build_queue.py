"""Builds run one at a time, in the right order, and nothing stops the queue."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

import pytest

from slipstream.core.errors import (
    BackendUnavailable,
    BuildCancelled,
    BuildDied,
    BuildFailed,
    BuildOutOfMemory,
    BuildPostponed,
    StoreError,
    UnsupportedModel,
)
from slipstream.core.progress import CancelToken, Progress, ProgressCallback
from slipstream.engine_cache import Entry
from slipstream.runtime.building import build_queue as queue_module
from slipstream.runtime.building.build_queue import BuildQueue, Ticket, TicketState
from slipstream.runtime.planning.plan import Plan
from slipstream.tests.fakes import Host, make_plan, wait_until

SECONDS = 30.0
FIRST, SECOND, THIRD = (make_plan(size) for size in (8, 16, 24))


class Builder:
    """A build function that waits to be let through.

    Attributes:
        built: plans in the order in which their builds began.
        raises: what the next builds raise, one each.
    """

    def __init__(self) -> None:
        self.built: list[Plan] = []
        self.raises: list[BaseException] = []
        self.gate = threading.Event()
        self.gate.set()
        self.began = threading.Event()
        self.may_run: Callable[[], bool] = lambda: True

    def __call__(
        self, plan: Plan, progress: ProgressCallback, cancel: CancelToken, may_run: Callable[[], bool]
    ) -> Entry:
        self.built.append(plan)
        self.may_run = may_run
        progress(Progress("compile", 0.43, "compiling 851 operations"))
        self.began.set()
        while not self.gate.wait(0.01):
            cancel.raise_if_cancelled("The build")
        if self.raises:
            raise self.raises.pop(0)
        return object()  # type: ignore[return-value]


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.fixture
def builder() -> Iterator[Builder]:
    made = Builder()
    yield made
    made.gate.set()


@pytest.fixture
def queue(builder: Builder, host: Host) -> Iterator[BuildQueue]:
    made = BuildQueue(builder, lambda: host.idle)
    yield made
    made.cancel_all("the test is over")


def start(queue: BuildQueue, builder: Builder, plan: Plan = FIRST, urgent: bool = False) -> Ticket:
    """A build that is under way until the gate opens."""
    builder.gate.clear()
    builder.began.clear()
    ticket = queue.submit(plan, urgent=urgent)
    assert builder.began.wait(SECONDS)
    return ticket


def fail(queue: BuildQueue, builder: Builder, error: BaseException, plan: Plan = FIRST) -> Ticket:
    builder.raises = [error]
    ticket = queue.submit(plan)
    assert ticket.wait(SECONDS)
    return ticket


def assert_alive(queue: BuildQueue) -> None:
    ticket = queue.submit(THIRD)
    assert ticket.wait(SECONDS) and ticket.state is TicketState.DONE


# ------------------------------------------------------------------------------------------------ order


def test_a_build_ends_with_its_engine(queue: BuildQueue) -> None:
    ticket = queue.submit(FIRST)
    assert ticket.wait(SECONDS)
    assert ticket.state is TicketState.DONE and ticket.error is None
    assert ticket.result() is ticket.entry
    assert queue.pending() == [] and queue.find(FIRST.key.digest) is None


def test_an_engine_asked_for_twice_is_built_once(queue: BuildQueue, builder: Builder) -> None:
    running = start(queue, builder)
    assert queue.submit(make_plan(8)) is running
    waiting = queue.submit(SECOND)
    assert queue.submit(SECOND, urgent=True) is waiting
    assert queue.pending() == [running, waiting]
    assert queue.find(SECOND.key.digest) is waiting
    builder.gate.set()
    assert running.wait(SECONDS) and waiting.wait(SECONDS)
    assert builder.built == [FIRST, SECOND]


def test_builds_run_in_the_order_in_which_they_were_asked_for(queue: BuildQueue, builder: Builder) -> None:
    tickets = [start(queue, builder), queue.submit(SECOND), queue.submit(THIRD)]
    builder.gate.set()
    assert all(ticket.wait(SECONDS) for ticket in tickets)
    assert builder.built == [FIRST, SECOND, THIRD]


@pytest.mark.parametrize("asked", ["at once", "later"])
def test_an_urgent_build_overtakes(queue: BuildQueue, builder: Builder, asked: str) -> None:
    tickets = [start(queue, builder), queue.submit(SECOND), queue.submit(THIRD, urgent=asked == "at once")]
    if asked == "later":
        queue.submit(THIRD, urgent=True)
    builder.gate.set()
    assert all(ticket.wait(SECONDS) for ticket in tickets)
    assert builder.built == [FIRST, THIRD, SECOND]


def test_a_ticket_tells_people_where_it_stands(queue: BuildQueue, builder: Builder) -> None:
    running, waiting = start(queue, builder), queue.submit(SECOND)
    assert running.describe() == "building 43%: compiling 851 operations"
    assert waiting.describe() == "queued: waits for its turn"


def test_no_thread_before_the_first_build(queue: BuildQueue) -> None:
    assert not queue._threads


def test_as_many_builds_at_once_as_the_queue_is_told() -> None:
    meeting = threading.Barrier(2, timeout=5)

    def build(plan: Plan, *_: object) -> Entry:
        meeting.wait()
        raise BuildFailed("both were there")

    queue = BuildQueue(build, at_once=lambda: 2)
    tickets = [queue.submit(plan, urgent=True) for plan in (FIRST, SECOND)]
    assert all(ticket.wait(5) for ticket in tickets)
    assert {str(ticket.error) for ticket in tickets} == {"both were there"}


def test_builds_that_somebody_waits_for_now_are_made_side_by_side() -> None:
    meeting, host = threading.Barrier(2, timeout=5), Host()
    host.idle = False

    def build(plan: Plan, *_: object) -> Entry:
        meeting.wait()
        raise BuildFailed("both were there")

    queue = BuildQueue(build, lambda: host.idle, at_once=lambda: 1 + any(each.urgent for each in queue.pending()))
    tickets = [queue.submit(plan) for plan in (FIRST, SECOND)]
    for ticket in tickets:
        queue.hurry(ticket)
    assert all(ticket.wait(5) for ticket in tickets)
    assert {str(ticket.error) for ticket in tickets} == {"both were there"}


# ------------------------------------------------------------------------------------------------ idle gate


def test_builds_wait_for_the_host_to_be_idle(queue: BuildQueue, builder: Builder, host: Host) -> None:
    host.idle = False
    ticket = queue.submit(FIRST)
    assert not ticket.wait(0.3) and builder.built == []
    host.idle = True
    assert ticket.wait(SECONDS)


def test_an_urgent_build_does_not_wait(queue: BuildQueue, host: Host) -> None:
    host.idle = False
    queue.submit(SECOND)
    assert queue.submit(FIRST, urgent=True).wait(SECONDS)


def test_a_waiting_build_that_becomes_urgent_begins(queue: BuildQueue, host: Host) -> None:
    host.idle = False
    ticket = queue.submit(FIRST)
    queue.submit(FIRST, urgent=True)
    assert ticket.wait(SECONDS)


def test_a_running_build_holds_still_while_the_host_is_busy(queue: BuildQueue, builder: Builder, host: Host) -> None:
    start(queue, builder)
    assert builder.may_run()
    host.idle = False
    assert not builder.may_run()
    host.idle = True
    assert builder.may_run()


def test_a_running_build_that_becomes_urgent_goes_on(queue: BuildQueue, builder: Builder, host: Host) -> None:
    start(queue, builder)
    host.idle = False
    queue.submit(FIRST, urgent=True)
    assert builder.may_run()


def test_a_build_that_others_wait_behind_goes_on(queue: BuildQueue, builder: Builder, host: Host) -> None:
    """The host is busy waiting for the second one: held still, the first would hold up both for ever."""
    start(queue, builder)
    host.idle = False
    queue.submit(SECOND)
    assert not builder.may_run()
    queue.submit(SECOND, urgent=True)
    assert builder.may_run()


def test_a_host_that_cannot_say_whether_it_is_idle(builder: Builder) -> None:
    def broken() -> bool:
        raise RuntimeError("the host is shutting down")

    queue = BuildQueue(builder, broken)
    background = queue.submit(FIRST)
    assert not background.wait(0.2)
    assert queue.submit(SECOND, urgent=True).wait(SECONDS)
    queue.cancel_all("the test is over")
    assert background.wait(SECONDS)


# ------------------------------------------------------------------------------------------------- room


class DeviceMemory:
    """What builds find; each asks for it before it begins."""

    free, wanted_back = True, False

    def has_room(self, plan: Plan) -> bool:
        return self.free

    def gives_way(self, plan: Plan) -> bool:
        return self.wanted_back


@pytest.fixture
def memory() -> DeviceMemory:
    return DeviceMemory()


@pytest.fixture
def tight(builder: Builder, host: Host, memory: DeviceMemory) -> Iterator[BuildQueue]:
    made = BuildQueue(builder, lambda: host.idle, has_room=memory.has_room, gives_way=memory.gives_way)
    yield made
    made.cancel_all("the test is over")


def test_a_build_waits_for_its_memory_unless_somebody_waits_for_it(
    tight: BuildQueue, builder: Builder, memory: DeviceMemory
) -> None:
    memory.free = False
    waiting = tight.submit(FIRST)
    wait_until(lambda: waiting.describe() == "queued: waits for free GPU memory")
    assert not tight.is_held(waiting), "the host is idle"
    assert tight.submit(SECOND, urgent=True).wait(SECONDS) and builder.built == [SECOND]
    memory.free = True
    assert waiting.wait(SECONDS) and waiting.state is TicketState.DONE


def test_a_build_begins_where_the_host_cannot_say_what_is_free(builder: Builder) -> None:
    def broken(plan: Plan) -> bool:
        raise RuntimeError("no such device")

    assert BuildQueue(builder, has_room=broken).submit(FIRST).wait(SECONDS)


def test_a_build_whose_memory_is_wanted_back_begins_anew(
    tight: BuildQueue, builder: Builder, host: Host, memory: DeviceMemory
) -> None:
    ticket = start(tight, builder)
    memory.wanted_back = True
    assert builder.may_run(), "nobody wants it while the host is idle"
    host.idle = False
    with pytest.raises(BuildPostponed) as postponed:
        builder.may_run()
    builder.raises = [postponed.value]
    builder.gate.set()
    wait_until(lambda: ticket.state is TicketState.QUEUED)
    assert tight.pending() == [ticket] and tight.failure(FIRST.key.digest) is None
    host.idle = True
    assert ticket.wait(SECONDS) and ticket.state is TicketState.DONE and builder.built == [FIRST, FIRST]


def test_a_build_is_held_after_it_gave_way_twice(
    tight: BuildQueue, builder: Builder, host: Host, memory: DeviceMemory
) -> None:
    """Else one that takes longer than the user's pauses would never end, nor let others begin."""
    ticket = start(tight, builder)
    for _ in range(2):
        assert builder.began.wait(SECONDS)
        memory.wanted_back, host.idle = True, False
        with pytest.raises(BuildPostponed) as postponed:
            builder.may_run()
        builder.raises = [postponed.value]
        builder.gate.set()
        wait_until(lambda: ticket.state is TicketState.QUEUED)
        builder.gate.clear()
        builder.began.clear()
        host.idle = True
    assert builder.began.wait(SECONDS)
    host.idle = False
    assert builder.may_run() is False
    builder.gate.set()
    assert ticket.wait(SECONDS) and ticket.state is TicketState.DONE


def test_a_build_that_was_cancelled_does_not_begin_anew() -> None:
    def build(plan: Plan, progress: ProgressCallback, cancel: CancelToken, may_run: Callable[[], bool]) -> Entry:
        cancel.cancel()
        raise BuildPostponed("its memory is wanted back")

    queue = BuildQueue(build)
    ticket = queue.submit(FIRST)
    assert ticket.wait(SECONDS) and ticket.state is TicketState.CANCELLED and queue.pending() == []


# ------------------------------------------------------------------------------------------------ cancel


def test_cancelling_a_waiting_build_ends_it_at_once(queue: BuildQueue, builder: Builder) -> None:
    """A person who presses cancel must not wait for somebody else's build."""
    start(queue, builder)
    waiting = queue.submit(SECOND)
    waiting.cancel("the user pressed cancel")
    assert waiting.wait(5.0) and waiting.state is TicketState.CANCELLED
    with pytest.raises(BuildCancelled, match="the user pressed cancel"):
        waiting.result()
    builder.gate.set()
    assert_alive(queue)
    assert builder.built == [FIRST, THIRD]


def test_cancelling_a_build_that_waits_for_an_idle_host(queue: BuildQueue, builder: Builder, host: Host) -> None:
    host.idle = False
    ticket = queue.submit(FIRST)
    ticket.cancel()
    assert ticket.wait(SECONDS) and ticket.state is TicketState.CANCELLED
    assert builder.built == []


def test_cancelling_a_running_build(queue: BuildQueue, builder: Builder) -> None:
    ticket = start(queue, builder)
    ticket.cancel()
    assert ticket.wait(SECONDS) and ticket.state is TicketState.CANCELLED
    with pytest.raises(BuildCancelled, match="cancelled by the user"):
        ticket.result()


def test_what_goes_wrong_after_a_cancel_is_no_failure() -> None:
    """The next run may try again."""
    failed: list[Plan] = []

    def build(plan: Plan, progress: ProgressCallback, cancel: CancelToken, may_run: Callable[[], bool]) -> Entry:
        if failed:
            return object()  # type: ignore[return-value]
        cancel.wait(SECONDS)
        failed.append(plan)
        raise UnsupportedModel("the model is gone")

    queue = BuildQueue(build)
    ticket = queue.submit(FIRST)
    wait_until(lambda: ticket.state is TicketState.RUNNING)
    ticket.cancel()
    assert ticket.wait(SECONDS) and ticket.state is TicketState.CANCELLED
    again = queue.submit(FIRST)
    assert again.wait(SECONDS) and again.state is TicketState.DONE


def test_cancel_all(queue: BuildQueue, builder: Builder) -> None:
    tickets = [start(queue, builder), queue.submit(SECOND), queue.submit(THIRD, urgent=True)]
    queue.cancel_all("ComfyUI is closing")
    assert all(ticket.wait(SECONDS) and ticket.state is TicketState.CANCELLED for ticket in tickets)
    assert queue.pending() == [] and builder.built == [FIRST]


def test_cancelling_what_has_ended_changes_nothing(queue: BuildQueue) -> None:
    ticket = queue.submit(FIRST)
    assert ticket.wait(SECONDS)
    ticket.cancel()
    assert ticket.state is TicketState.DONE and ticket.result() is ticket.entry


def test_asking_again_while_a_cancelled_build_still_ends(queue: BuildQueue, builder: Builder) -> None:
    """Cancel, then queue the prompt again: the second must not inherit the first one's end."""
    gate = threading.Event()

    def build(plan: Plan, progress: ProgressCallback, cancel: CancelToken, may_run: Callable[[], bool]) -> Entry:
        cancel.wait(SECONDS if not gate.is_set() else 0.01)
        gate.wait(SECONDS)  # as an export that cannot be interrupted
        cancel.raise_if_cancelled("The build")
        return object()  # type: ignore[return-value]

    queue = BuildQueue(build)
    first = queue.submit(FIRST)
    wait_until(lambda: first.state is TicketState.RUNNING)
    first.cancel()
    second = queue.submit(FIRST)
    assert second is not first
    gate.set()
    assert first.wait(SECONDS) and first.state is TicketState.CANCELLED
    assert second.wait(SECONDS) and second.state is TicketState.DONE
    assert queue.pending() == []


def test_a_cancelled_build_is_no_failure(queue: BuildQueue, builder: Builder) -> None:
    for _ in range(5):
        ticket = start(queue, builder)
        ticket.cancel()
        assert ticket.wait(SECONDS)
    builder.gate.set()
    assert queue.submit(FIRST).wait(SECONDS)
    assert len(builder.built) == 6


# ------------------------------------------------------------------------------------------------ failures


@pytest.mark.parametrize(
    "error",
    [
        BuildFailed("g++ crashed"),
        StoreError("the disk is full"),
        RuntimeError("a bug"),
        AssertionError(),
        MemoryError(),
        RecursionError("too deep"),
        KeyboardInterrupt(),
        SystemExit(3),
        GeneratorExit(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_no_error_ends_the_queue(queue: BuildQueue, builder: Builder, error: BaseException) -> None:
    ticket = fail(queue, builder, error)
    assert ticket.state is TicketState.FAILED
    assert ticket.error is not None
    assert type(ticket.error) is type(error) or type(error).__name__ in str(ticket.error)
    assert_alive(queue)


def test_a_failure_is_logged(queue: BuildQueue, builder: Builder, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        fail(queue, builder, BuildFailed("g++ crashed"))
    assert "g++ crashed" in caplog.text


PASSING = [BuildDied("killed"), BuildOutOfMemory("CUDA out of memory"), StoreError("the disk is full")]
FINAL = [
    UnsupportedModel("custom op"),
    BackendUnavailable("no compiler"),
    BuildFailed("g++ crashed"),
    ValueError("a bug"),
]


def _kind(error: Exception) -> str:
    return type(error).__name__


@pytest.mark.parametrize("error", PASSING, ids=_kind)
def test_what_may_pass_is_tried_a_second_time(queue: BuildQueue, builder: Builder, error: Exception) -> None:
    fail(queue, builder, error)
    ticket = queue.submit(FIRST)
    assert ticket.wait(SECONDS) and ticket.state is TicketState.DONE


@pytest.mark.parametrize("error", PASSING, ids=_kind)
def test_but_not_a_third_time(queue: BuildQueue, builder: Builder, error: Exception) -> None:
    for _ in range(2):
        assert fail(queue, builder, error).state is TicketState.FAILED
    given_up = queue.submit(FIRST)
    assert given_up.wait(0) and given_up.state is TicketState.FAILED
    with pytest.raises(type(error), match=str(error)):
        given_up.result()
    assert len(builder.built) == 2 and queue.pending() == []


@pytest.mark.parametrize("error", FINAL, ids=_kind)
def test_what_cannot_work_is_not_tried_again(queue: BuildQueue, builder: Builder, error: Exception) -> None:
    fail(queue, builder, error)
    given_up = queue.submit(FIRST)
    assert given_up.state is TicketState.FAILED and str(error) in str(given_up.error)
    assert len(builder.built) == 1


def test_failures_of_one_engine_are_not_anothers(queue: BuildQueue, builder: Builder) -> None:
    fail(queue, builder, UnsupportedModel("custom op"))
    assert_alive(queue)


def test_whoever_asks_by_hand_gets_another_try(queue: BuildQueue, builder: Builder) -> None:
    fail(queue, builder, BuildFailed("g++ crashed"))
    queue.forget(FIRST)
    ticket = queue.submit(FIRST)
    assert ticket.wait(SECONDS) and ticket.state is TicketState.DONE
    queue.forget(SECOND)  # which never failed


def test_success_forgets_earlier_failures(queue: BuildQueue, builder: Builder) -> None:
    fail(queue, builder, BuildDied("killed"))
    assert queue.submit(FIRST).wait(SECONDS)
    fail(queue, builder, BuildDied("killed"))
    ticket = queue.submit(FIRST)
    assert ticket.wait(SECONDS) and ticket.state is TicketState.DONE


def test_pauses_do_not_count_as_building(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(queue_module.time, "monotonic", lambda: clock[-1])
    ticket = Ticket(FIRST, urgent=False)
    for now, running in ((100, True), (103, True), (104, False), (200, False), (201, True), (206, True)):
        clock.append(float(now))
        ticket.tick(running)
    assert ticket.seconds == 3 + 5


# ------------------------------------------------------------------------------------------------ listening


def test_listeners_are_told_of_all_that_happens_outside_of_the_lock(queue: BuildQueue, builder: Builder) -> None:
    heard: list[tuple[str, float | None]] = []

    def listen(ticket: Ticket) -> None:
        other = threading.Thread(target=queue.pending)  # would wait for ever if the lock were held here
        other.start()
        other.join(SECONDS)
        assert not other.is_alive()
        heard.append((ticket.state.value, ticket.progress.fraction))

    queue.listen(listen)
    ticket = start(queue, builder)
    builder.gate.set()
    assert ticket.wait(SECONDS)
    wait_until(lambda: heard and heard[-1][0] == "done")
    assert ("running", 0.0) in heard and ("running", 0.43) in heard
    assert [state for state, _ in heard][-1] == "done"


def test_a_waiting_build_that_is_cancelled_is_told(queue: BuildQueue, builder: Builder) -> None:
    heard: list[tuple[Plan, str]] = []
    start(queue, builder)
    queue.listen(lambda ticket: heard.append((ticket.plan, ticket.state.value)))
    queue.submit(SECOND).cancel()
    assert heard == [(SECOND, "queued"), (SECOND, "cancelled")]


def test_a_listener_that_breaks_ends_no_build(queue: BuildQueue, caplog: pytest.LogCaptureFixture) -> None:
    def listen(ticket: Ticket) -> None:
        raise RuntimeError("the page is gone")

    queue.listen(listen)
    ticket = queue.submit(FIRST)
    assert ticket.wait(SECONDS) and ticket.state is TicketState.DONE
    assert_alive(queue)
    assert "the page is gone" in caplog.text


def test_builds_are_held_while_the_host_is_busy(queue: BuildQueue, builder: Builder, host: Host) -> None:
    host.idle = False
    ticket = queue.submit(FIRST)
    assert queue.is_held(ticket)
    queue.submit(FIRST, urgent=True)
    assert not queue.is_held(ticket), "somebody waits for it"
    assert ticket.wait(SECONDS) and not queue.is_held(ticket)


def test_a_running_build_is_held_when_the_host_gets_busy(queue: BuildQueue, builder: Builder, host: Host) -> None:
    ticket = start(queue, builder)
    assert not queue.is_held(ticket)
    host.idle = False
    assert queue.is_held(ticket) and not builder.may_run()
    queue.submit(SECOND, urgent=True)
    assert not queue.is_held(ticket), "it may not hold up the urgent one"


def test_builds_run_beside_prompts_where_the_host_says_so(queue: BuildQueue, builder: Builder, host: Host) -> None:
    """Nothing but `is_idle` decides: a host that always says yes builds while it works."""
    host.idle = True
    ticket = start(queue, builder)
    assert builder.may_run() and not queue.is_held(ticket)
    builder.gate.set()
    assert ticket.wait(SECONDS)


def test_the_last_failure_is_told_until_somebody_asks_by_hand(queue: BuildQueue, builder: Builder) -> None:
    assert queue.failure(FIRST.key.digest) is None
    fail(queue, builder, BuildFailed("no compiler"))
    assert "no compiler" in str(queue.failure(FIRST.key.digest))
    queue.forget(FIRST)
    assert queue.failure(FIRST.key.digest) is None
