"""Engines that a person requests by a model's name: it is loaded, its engines are built, compared, and told of.

All of it happens on a thread here, so that the page that requested them may be closed, reloaded, or opened twice.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ...core.errors import BuildCancelled, SlipstreamError, first_line
from ...core.progress import CancelToken, Progress
from ...core.spec import Role
from ..building.build_queue import ENDED, BuildQueue, TicketState
from ..provider import HostHooks
from ..reporting.build_info import describe_build
from ..settings.model_settings import Settings

log = logging.getLogger(__name__)

_KEPT = 20
"""Requests that ended and are still told of."""


@dataclass(frozen=True)
class Wanted:
    """What a person asks for.

    Attributes:
        model: a name that the builder offers.
        role: the part of it that engines are for.
        settings: with a resolution at least.
        batch: samples in one call.
        tokens: length of the text.
    """

    model: str
    role: Role
    settings: Settings
    batch: int
    tokens: int

    def __str__(self) -> str:
        part = "" if self.role is Role.UNET else f" {self.role.value}"
        return f"{self.model}{part} {', '.join(map(str, self.settings.resolutions))} batch {self.batch}"


class ModelBuilder(Protocol):
    """What a host does for requests.

    Attributes:
        roles: parts of models that it has engines built for.
    """

    roles: tuple[Role, ...]

    def device(self) -> torch.device:
        """That engines are built for."""
        ...

    def models(self) -> list[str]:
        """Names of models that engines can be requested for."""
        ...

    def file_of(self, model: str) -> str:
        """Path of the file that a model is loaded from, resolved; empty where it has none, or that is not known."""
        ...

    def parameter_count(self, model: str, role: Role) -> int | None:
        """How many parameters that part of a model has; None where that is not known without loading it."""
        ...

    def make(self, wanted: Wanted, hooks: HostHooks) -> Iterable[str]:
        """Load the model, and give one line of report for each engine as it is there.

        Raises:
            SlipstreamError: an engine could not be had; those before it are kept.
            whatever `hooks.check_interrupted` raises.
        """
        ...

    def rest(self) -> None:
        """No request is left: memory may be given back."""
        ...


class BuildRequest:
    """One request and what came of it so far.

    Attributes:
        report: a line for each engine.
        reason: why there is no engine, or none of the rest; empty where all is well.
        digests: of engines that were built for it.
    """

    def __init__(self, wanted: Wanted) -> None:
        self.id = uuid.uuid4().hex
        self.wanted = wanted
        self.state = TicketState.QUEUED
        self.progress = Progress("queued", None, "waiting for its turn")
        self.report: list[str] = []
        self.reason = ""
        self.digests: list[str] = []
        self.token = CancelToken()

    @property
    def ended(self) -> bool:
        return self.state in ENDED


class BuildRequests:
    """Carries out requests one after another; the same one twice at a time is one.

    Args:
        on_end: told of each request that ended, in the thread that carried it out.
    """

    def __init__(self, builder: ModelBuilder, on_end: Callable[[BuildRequest], None] = lambda request: None) -> None:
        self._builder = builder
        self._on_end = on_end
        self._requests: list[BuildRequest] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def submit(self, wanted: Wanted) -> BuildRequest:
        """Have engines made, or find the request that does so already."""
        with self._lock:
            for request in self._requests:
                if request.wanted == wanted and not request.ended and not request.token.cancelled:
                    return request
            self._requests = [
                *[each for each in self._requests if each.ended][-_KEPT:],
                *self._waiting(),
                BuildRequest(wanted),
            ]
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, daemon=True, name="slipstream-requests")
                self._thread.start()
            return self._requests[-1]

    def all(self) -> list[BuildRequest]:
        """All requests in the order in which they came, the last 20 that ended included."""
        with self._lock:
            return list(self._requests)

    def pending(self) -> list[BuildRequest]:
        with self._lock:
            return self._waiting()

    def cancel(self, id: str) -> bool:
        """Stop a request; whether there was one to stop."""
        found = next((request for request in self.pending() if request.id == id), None)
        if found is not None:
            found.token.cancel()
        return found is not None

    def wait(self, seconds: float) -> bool:
        """Wait until no request is left; returns whether that is so."""
        thread = self._thread
        if thread is not None:
            thread.join(seconds)
        return not self.pending()

    def _waiting(self) -> list[BuildRequest]:
        return [request for request in self._requests if not request.ended]

    def _next(self) -> BuildRequest | None:
        with self._lock:
            return next(iter(self._waiting()), None)

    def _work(self) -> None:
        while True:
            while (request := self._next()) is not None:
                self._carry_out(request)
            self._rest()
            with self._lock:
                if not self._waiting():
                    self._thread = None
                    return

    def _rest(self) -> None:
        try:
            self._builder.rest()
        except Exception:  # the host's own code
            log.exception("Slipstream: the host could not release memory")

    def _carry_out(self, request: BuildRequest) -> None:
        request.state, state = TicketState.RUNNING, TicketState.FAILED
        try:
            self._check(request)
            for line in self._builder.make(request.wanted, self._hooks(request)):
                request.report.append(line)
                log.info("Slipstream: %s", line)
            state = TicketState.DONE
        except BuildCancelled as error:
            request.reason, state = str(error), TicketState.CANCELLED
        except SlipstreamError as error:
            request.reason = str(error)
        except BaseException as error:  # a host's loader may even exit: nothing may leave everybody waiting
            log.exception("Slipstream: building %s failed with an unexpected error", request.wanted)
            request.reason = f"Slipstream broke ({first_line(error)}); please report this with the log"
        if request.reason:
            log.warning("Slipstream: %s: %s", request.wanted, request.reason)
        request.state = state
        self._on_end(request)

    def _hooks(self, request: BuildRequest) -> HostHooks:
        def progress(update: Progress) -> None:
            request.progress = update

        def check() -> None:
            self._check(request)

        return HostHooks(
            progress, check, (BuildCancelled, KeyboardInterrupt), wants=request.digests.append, by_hand=True
        )

    def _check(self, request: BuildRequest) -> None:
        request.token.raise_if_cancelled(f"Making {request.wanted}")


def describe_requests(requests: BuildRequests, queue: BuildQueue) -> list[dict[str, Any]]:
    """What pages show: each request with the figures of its build, then builds that were not requested here."""
    of_requests = {digest for request in requests.all() for digest in request.digests}
    rows = [_describe(request, queue) for request in requests.all()]
    others = (ticket for ticket in queue.pending() if ticket.plan.key.digest not in of_requests)
    return rows + [{**describe_build(ticket, queue.is_held(ticket)), "report": [], "reason": ""} for ticket in others]


def _describe(request: BuildRequest, queue: BuildQueue) -> dict[str, Any]:
    ticket = queue.find(request.digests[-1]) if request.digests else None
    figures = describe_build(ticket, queue.is_held(ticket)) if ticket is not None else {}
    mine = {
        "id": request.id,
        "label": str(request.wanted),
        "role": request.wanted.role.value,
        "state": request.state.value,
        "phase": request.progress.phase,
        "fraction": request.progress.fraction,
        "message": request.progress.message,
        "report": list(request.report),
        "reason": request.reason,
    }
    return {"left_s": None, "estimate_s": None, "seconds": 0.0, "held": False, **figures, **mine}
