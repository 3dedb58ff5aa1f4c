"""Builds on threads of their own: one at a time, or as many at once as a queue is told."""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable
from enum import Enum

from ...core.errors import (
    BuildCancelled,
    BuildDied,
    BuildFailed,
    BuildOutOfMemory,
    BuildPostponed,
    SlipstreamError,
    StoreError,
)
from ...core.progress import CancelToken, Progress, ProgressCallback
from ...engine_cache import Entry
from ..planning.plan import Plan

log = logging.getLogger(__name__)

BuildFunction = Callable[[Plan, ProgressCallback, CancelToken, Callable[[], bool]], Entry]

_IDLE_POLL_SECONDS = 0.5
_PASSING = (BuildDied, BuildOutOfMemory, StoreError)
"""Failures that the next try may be spared: a build was killed, or found memory or disk full. Others are final."""
_ATTEMPTS = 2
"""Such failures of one engine before this process stops trying by itself."""
_POSTPONED = 2
"""Times that a build is ended for its memory; then it is held like others, else it would never end."""
_TURN = Progress("queued", 0.0, "waits for its turn")
_ROOM = Progress("queued", 0.0, "waits for free GPU memory")


class TicketState(str, Enum):
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


ENDED = (TicketState.DONE, TicketState.FAILED, TicketState.CANCELLED)


class Ticket:
    """One build that was asked for.

    Attributes:
        urgent: somebody waits for it: it goes ahead of others and does not wait for the host to be idle.
        estimate: seconds that it is thought to run, by earlier builds; None where nothing is known.
        postponed: how often it was ended to begin anew.
    """

    def __init__(self, plan: Plan, urgent: bool, on_cancel: Callable[[Ticket], None] = lambda _: None) -> None:
        self.plan = plan
        self._on_cancel = on_cancel
        self.urgent = urgent
        self.postponed = 0
        self.state = TicketState.QUEUED
        self.progress = _TURN
        self.entry: Entry | None = None
        self.error: SlipstreamError | None = None
        self.estimate: float | None = None
        self.seconds = 0.0
        self._seen: float | None = None
        self.token = CancelToken()
        self._ended = threading.Event()

    @property
    def waits_for_another(self) -> bool:
        """Whether another process builds the same engine, which this one waits for."""
        return self.state is TicketState.RUNNING and self.progress.phase == "waiting"

    def tick(self, running: bool) -> None:
        """Called again and again while it is built; `seconds` counts the time between two calls that say running."""
        now = time.monotonic()
        if running and self._seen is not None:
            self.seconds += now - self._seen
        self._seen = now if running else None

    def wait(self, seconds: float | None = None) -> bool:
        """True once the build has ended, whatever the outcome."""
        return self._ended.wait(seconds)

    def cancel(self, reason: str = "cancelled by the user") -> None:
        self.token.cancel(reason)
        self._on_cancel(self)

    def result(self) -> Entry:
        """The engine.

        Raises:
            SlipstreamError: why there is none.
        """
        if self.error is not None:
            raise copy.copy(self.error)  # an error that is kept must not keep the caller's frames, and their model
        assert self.entry is not None, "result() before the build ended"
        return self.entry

    def describe(self) -> str:
        """E.g. "building 43 %: compiling 851 operations"."""
        percent = f" {self.progress.fraction:.0%}" if self.progress.fraction else ""
        is_building = self.state is TicketState.RUNNING and not self.waits_for_another
        word = "building" if is_building else TicketState.QUEUED.value if self.waits_for_another else self.state.value
        return f"{word}{percent}: {self.progress.message}"

    def end(self, state: TicketState) -> None:
        self.state = state
        self._ended.set()


Listener = Callable[[Ticket], None]
"""Told of a ticket that was queued, began, progressed or ended, in the thread where that happened."""


class BuildQueue:
    """Runs builds one after another, or several at once; the same engine asked for twice is built once.

    Args:
        build: makes one engine.
        is_idle: whether the host has nothing else to do; builds that nobody waits for begin, and go on, only then.
        at_once: how many builds may run at the same time; asked whenever one is to begin.
        has_room: whether a build that nobody waits for finds the device memory that it needs; until then none begins.
        gives_way: whether a build that holds still has to be ended, and to begin anew later, for what it holds.
    """

    def __init__(
        self,
        build: BuildFunction,
        is_idle: Callable[[], bool] = lambda: True,
        at_once: Callable[[], int] = lambda: 1,
        has_room: Callable[[Plan], bool] = lambda plan: True,
        gives_way: Callable[[Plan], bool] = lambda plan: False,
    ) -> None:
        self._build = build
        self._is_idle = is_idle
        self._at_once = at_once
        self._has_room = has_room
        self._gives_way = gives_way
        self._tickets: dict[str, Ticket] = {}
        self._failures: dict[str, list[SlipstreamError]] = {}
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._listeners: list[Listener] = []

    def listen(self, callback: Listener) -> None:
        """`callback` should be quick; what it raises is logged and forgotten."""
        self._listeners.append(callback)

    def submit(self, plan: Plan, *, urgent: bool = False) -> Ticket:
        """Ask for a build; one that was given up ends at once with its old error (see `forget`).

        Args:
            urgent: do not wait for the host to be idle.
        """
        digest = plan.key.digest
        with self._changed:
            if failed := self._given_up(plan):
                return failed
            ticket = self._tickets.get(digest)
            if ticket is None or ticket.token.cancelled:  # a cancelled one may take a moment to end
                ticket = self._tickets[digest] = Ticket(plan, urgent, self._drop)
            ticket.urgent |= urgent
            self._ensure_threads()
            self._changed.notify_all()
        self._tell(ticket)
        return ticket

    def hurry(self, ticket: Ticket) -> None:
        """Somebody waits for a build that was asked for before."""
        with self._changed:
            ticket.urgent = True
            self._ensure_threads()
            self._changed.notify_all()

    def forget(self, plan: Plan) -> None:
        """Earlier failures of this engine count no more: somebody asks for it by hand."""
        with self._changed:
            self._failures.pop(plan.key.digest, None)

    def failure(self, digest: str) -> SlipstreamError | None:
        """Why the last build of an engine failed, as long as that counts."""
        with self._changed:
            failures = self._failures.get(digest)
            return failures[-1] if failures else None

    def is_held(self, ticket: Ticket) -> bool:
        """Whether it waits, or holds still, since the host is busy."""
        return ticket.state not in ENDED and not ticket.urgent and not self._may_run()

    def is_building(self) -> bool:
        """Whether a build runs at this moment, not held still."""
        running = [ticket for ticket in self.pending() if ticket.state is TicketState.RUNNING]
        return bool(running) and self._may_run()

    def pending(self) -> list[Ticket]:
        """Builds that wait or run, in the order in which they were asked for."""
        with self._changed:
            return list(self._tickets.values())

    def find(self, digest: str) -> Ticket | None:
        """The waiting or running build of an engine."""
        with self._changed:
            return self._tickets.get(digest)

    def cancel_all(self, reason: str) -> None:
        for ticket in self.pending():
            ticket.cancel(reason)

    def end_all(self, reason: str, seconds: float) -> None:
        """Cancel all builds, and wait for each no longer than that until nothing of it is left."""
        tickets = self.pending()
        self.cancel_all(reason)
        for ticket in tickets:
            ticket.wait(seconds)

    def _drop(self, ticket: Ticket) -> None:
        """End a cancelled build that has not begun; a running one sees it by its token."""
        with self._changed:
            if ticket.state is not TicketState.QUEUED:
                return
            self._end(ticket, TicketState.CANCELLED, _cancelled(ticket))
        self._tell(ticket)

    def _end(self, ticket: Ticket, state: TicketState, error: SlipstreamError | None) -> None:
        digest = ticket.plan.key.digest
        with self._changed:
            if self._tickets.get(digest) is ticket:
                del self._tickets[digest]
            if state is TicketState.DONE:
                self._failures.pop(digest, None)
            elif state is TicketState.FAILED and error is not None:
                log.warning("Slipstream: %s", error)
                self._failures.setdefault(digest, []).append(error)
            ticket.error = error
            ticket.end(state)

    def _tell(self, ticket: Ticket) -> None:
        for listener in self._listeners:
            try:
                listener(ticket)
            except Exception:  # whoever listens must not end the builds
                log.exception("Slipstream: a listener to the build of %s failed", ticket.plan)

    def _given_up(self, plan: Plan) -> Ticket | None:
        failures = self._failures.get(plan.key.digest, [])
        hopeless = failures and not isinstance(failures[-1], _PASSING)
        if not hopeless and len(failures) < _ATTEMPTS:
            return None
        ticket = Ticket(plan, urgent=False)
        ticket.error = failures[-1]
        ticket.end(TicketState.FAILED)
        return ticket

    def _ensure_threads(self) -> None:
        """One for each build that may run now; those that a larger number once needed are left waiting."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        for _ in range(min(self._at_once(), len(self._tickets)) - len(self._threads)):
            thread = threading.Thread(target=self._work, daemon=True, name="slipstream-build")
            self._threads.append(thread)
            thread.start()

    def _work(self) -> None:
        while True:
            with self._changed:
                ticket = self._next()
                while ticket is None:
                    self._changed.wait(_IDLE_POLL_SECONDS)
                    ticket = self._next()
                ticket.state = TicketState.RUNNING
            self._tell(ticket)
            self._run(ticket)
            self._tell(ticket)

    def _next(self) -> Ticket | None:
        waiting = [ticket for ticket in self._tickets.values() if ticket.state is TicketState.QUEUED]
        first = next((ticket for ticket in waiting if ticket.urgent), None)
        if first is None and waiting and self._idle():
            first = waiting[0]
        if first is None or len(self._tickets) - len(waiting) >= self._at_once():
            return None
        return first if first.urgent or self._finds_room(first) else None

    def _finds_room(self, ticket: Ticket) -> bool:
        try:
            found = self._has_room(ticket.plan)
        except Exception:  # the host's own code: the build itself shows whether there is room
            log.debug("Slipstream: the host cannot say whether a build has room", exc_info=True)
            found = True
        ticket.progress = _TURN if found else _ROOM
        return found

    def _idle(self) -> bool:
        try:
            return self._is_idle()
        except Exception:  # the host's own code, e.g. while it shuts down
            log.debug("Slipstream: the host cannot say whether it is idle", exc_info=True)
            return False

    def _may_run(self) -> bool:
        # A build that holds still would also hold up the urgent one behind it, for which the host waits.
        return any(ticket.urgent for ticket in self.pending()) or self._idle()

    def _run(self, ticket: Ticket) -> None:
        def progress(update: Progress) -> None:
            ticket.progress = update
            self._tell(ticket)

        def may_run() -> bool:
            ticket.tick(running := self._may_run())
            if not running and ticket.postponed < _POSTPONED and self._gives_way(ticket.plan):
                ticket.postponed += 1
                raise BuildPostponed(f"The build of {ticket.plan} gives its memory back and begins anew later")
            return running

        state: TicketState = TicketState.FAILED
        problem: SlipstreamError | None = None
        try:
            ticket.token.raise_if_cancelled(f"The build of {ticket.plan}")
            ticket.entry = self._build(ticket.plan, progress, ticket.token, may_run)
            state = TicketState.DONE
        except BuildCancelled as error:
            state, problem = TicketState.CANCELLED, error
        except BuildPostponed as error:
            log.info("Slipstream: %s", error)
            return self._postpone(ticket)
        except SlipstreamError as error:
            problem = _cancelled(ticket) or error
            state = TicketState.CANCELLED if ticket.token.cancelled else TicketState.FAILED
        except BaseException as error:  # nothing may end the thread and leave everybody waiting
            log.exception("Slipstream: building %s failed with an unexpected error", ticket.plan)
            problem = BuildFailed(f"Building {ticket.plan} broke: {type(error).__name__}: {error}")
        self._end(ticket, state, copy.copy(problem))  # the copy has no frames

    def _postpone(self, ticket: Ticket) -> None:
        """Put a build that was ended back into the queue; one that was cancelled meanwhile ends."""
        with self._changed:
            ticket.state, ticket.progress, ticket.seconds = TicketState.QUEUED, _TURN, 0.0
        if ticket.token.cancelled:
            self._drop(ticket)


def _cancelled(ticket: Ticket) -> SlipstreamError | None:
    try:
        ticket.token.raise_if_cancelled(f"The build of {ticket.plan}")
    except BuildCancelled as error:
        return copy.copy(error)
    return None
