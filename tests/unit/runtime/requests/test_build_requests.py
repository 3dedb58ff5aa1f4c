"""Requests: engines that a person asks for by a model's name."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from slipstream.core.errors import UnsupportedModel
from slipstream.core.spec import Role
from slipstream.runtime.building.build_queue import TicketState
from slipstream.runtime.planning.plan import CallShape
from slipstream.runtime.provider import EngineProvider, HostHooks
from slipstream.runtime.requests.build_requests import BuildRequest, BuildRequests, Wanted, describe_requests
from slipstream.runtime.requests.make_engines import make_engines
from slipstream.runtime.settings.model_settings import Settings
from slipstream.tests.fakes import CPU, FakeSource, FakeWorker, make_inputs, wait_until


class ModelBuilder:
    """Makes `TinyModel`'s engines; waits for `gate` after the model was loaded."""

    roles: tuple[Role, ...] = (Role.UNET,)

    def __init__(self, provider: EngineProvider) -> None:
        self.provider = provider
        self.gate = threading.Event()
        self.gate.set()
        self.error: BaseException | None = None
        self.rests = 0

    def device(self) -> torch.device:
        return CPU

    def models(self) -> list[str]:
        return ["tiny"]

    def parameter_count(self, model: str, role: Role) -> int | None:
        return 8

    def make(self, wanted: Wanted, hooks: HostHooks) -> Iterator[str]:
        while not self.gate.wait(0.01):
            hooks.check_interrupted()
        if self.error is not None:
            raise self.error
        calls = (CallShape.of(make_inputs(size.height // 8, wanted.batch)) for size in wanted.settings.resolutions)
        for made in make_engines(self.provider, FakeSource(), calls, wanted.settings, hooks):
            yield str(made)

    def rest(self) -> None:
        self.rests += 1


@pytest.fixture
def builder(provider: EngineProvider) -> ModelBuilder:
    return ModelBuilder(provider)


@pytest.fixture
def requests(builder: ModelBuilder) -> BuildRequests:
    return BuildRequests(builder)


def wanted(sizes: str = "64x64") -> Wanted:
    return Wanted("tiny", Role.UNET, Settings.of_text(build="first use", resolutions=sizes), 2, 77)


def test_engines_are_made_and_told_of(requests: BuildRequests, builder: ModelBuilder, worker: FakeWorker) -> None:
    request = requests.submit(wanted("64x64, 128x128"))
    assert requests.wait(30)
    assert request.state is TicketState.DONE and not request.reason
    assert [line.partition(":")[0] for line in request.report] == ["Tiny 64×64 batch 2", "Tiny 128×128 batch 2"]
    assert worker.builds == 2 and builder.rests == 1 and len(request.digests) == 2


def test_the_same_order_twice_is_one(requests: BuildRequests, builder: ModelBuilder) -> None:
    builder.gate.clear()
    first = requests.submit(wanted())
    assert requests.submit(wanted()) is first
    other = requests.submit(wanted("128x128"))
    assert other is not first and requests.pending() == [first, other]
    builder.gate.set()
    assert requests.wait(30) and [request.state for request in requests.all()] == [TicketState.DONE] * 2
    assert requests.submit(wanted()) is not first
    assert requests.wait(30)


def test_cancel_while_the_model_is_loaded(requests: BuildRequests, builder: ModelBuilder, worker: FakeWorker) -> None:
    builder.gate.clear()
    request = requests.submit(wanted())
    wait_until(lambda: request.state is TicketState.RUNNING)
    assert requests.cancel(request.id) and requests.wait(30)
    assert request.state is TicketState.CANCELLED and "Nothing was kept" in request.reason
    assert worker.builds == 0 and not requests.cancel(request.id)


def test_cancel_while_it_is_built(requests: BuildRequests, worker: FakeWorker, provider: EngineProvider) -> None:
    worker.gate.clear()
    request = requests.submit(wanted())
    assert worker.started.wait(30)
    (row,) = describe_requests(requests, provider.queue)
    assert row["state"] == "running" and row["label"] == "tiny 64×64 batch 2"
    requests.cancel(request.id)
    assert requests.wait(30) and request.state is TicketState.CANCELLED and not provider.store.list()


def test_a_cancel_in_the_queue_ends_the_order(
    requests: BuildRequests, worker: FakeWorker, provider: EngineProvider
) -> None:
    worker.gate.clear()
    request = requests.submit(wanted())
    assert worker.started.wait(30)
    provider.queue.cancel_all("enough")
    assert requests.wait(30) and request.state is TicketState.CANCELLED and "enough" in request.reason


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (UnsupportedModel("no engines for it"), "no engines for it"),
        (OSError("on fire"), "Slipstream broke (OSError"),
        (SystemExit(2), "Slipstream broke (SystemExit"),
    ],
)
def test_a_failure_is_told_and_the_next_order_goes_on(
    requests: BuildRequests, builder: ModelBuilder, error: BaseException, told: str
) -> None:
    builder.error = error
    request = requests.submit(wanted())
    assert requests.wait(30)
    assert request.state is TicketState.FAILED and request.reason.startswith(told)
    builder.error = None
    assert requests.submit(wanted()) is not request
    assert requests.wait(30) and requests.all()[-1].state is TicketState.DONE


def test_ends_are_told(builder: ModelBuilder) -> None:
    ended: list[BuildRequest] = []
    requests = BuildRequests(builder, ended.append)
    request = requests.submit(wanted())
    assert requests.wait(30) and ended == [request]


def test_builds_of_others_are_shown_too(requests: BuildRequests, worker: FakeWorker, provider: EngineProvider) -> None:
    worker.gate.clear()
    call = CallShape.of(make_inputs())
    (plan,) = provider.plans(FakeSource(), call, Settings())
    provider.queue.submit(plan, urgent=True)
    wait_until(lambda: any(row["state"] == "running" for row in describe_requests(requests, provider.queue)))
    (row,) = describe_requests(requests, provider.queue)
    assert row["id"] == plan.key.digest and row["report"] == [] and row["reason"] == ""
