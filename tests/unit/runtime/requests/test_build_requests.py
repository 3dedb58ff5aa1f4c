"""Orders: engines that a person asks for by a model's name."""

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
from slipstream.runtime.requests.build_requests import Order, Orders, Wanted, describe_orders
from slipstream.runtime.requests.make_engines import make_engines
from slipstream.runtime.settings.model_settings import Settings
from slipstream.tests.fakes import CPU, FakeSource, FakeWorker, make_inputs, wait_until


class Workshop:
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

    def numbers_in(self, model: str, role: Role) -> int | None:
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
def workshop(provider: EngineProvider) -> Workshop:
    return Workshop(provider)


@pytest.fixture
def orders(workshop: Workshop) -> Orders:
    return Orders(workshop)


def wanted(sizes: str = "64x64") -> Wanted:
    return Wanted("tiny", Role.UNET, Settings.of_text(build="first use", resolutions=sizes), 2, 77)


def test_engines_are_made_and_told_of(orders: Orders, workshop: Workshop, worker: FakeWorker) -> None:
    order = orders.submit(wanted("64x64, 128x128"))
    assert orders.wait(30)
    assert order.state is TicketState.DONE and not order.reason
    assert [line.partition(":")[0] for line in order.report] == ["Tiny 64×64 batch 2", "Tiny 128×128 batch 2"]
    assert worker.builds == 2 and workshop.rests == 1 and len(order.digests) == 2


def test_the_same_order_twice_is_one(orders: Orders, workshop: Workshop) -> None:
    workshop.gate.clear()
    first = orders.submit(wanted())
    assert orders.submit(wanted()) is first
    other = orders.submit(wanted("128x128"))
    assert other is not first and orders.pending() == [first, other]
    workshop.gate.set()
    assert orders.wait(30) and [order.state for order in orders.all()] == [TicketState.DONE] * 2
    assert orders.submit(wanted()) is not first
    assert orders.wait(30)


def test_cancel_while_the_model_is_loaded(orders: Orders, workshop: Workshop, worker: FakeWorker) -> None:
    workshop.gate.clear()
    order = orders.submit(wanted())
    wait_until(lambda: order.state is TicketState.RUNNING)
    assert orders.cancel(order.id) and orders.wait(30)
    assert order.state is TicketState.CANCELLED and "Nothing was kept" in order.reason
    assert worker.builds == 0 and not orders.cancel(order.id)


def test_cancel_while_it_is_built(orders: Orders, worker: FakeWorker, provider: EngineProvider) -> None:
    worker.gate.clear()
    order = orders.submit(wanted())
    assert worker.started.wait(30)
    (row,) = describe_orders(orders, provider.queue)
    assert row["state"] == "running" and row["label"] == "tiny 64×64 batch 2"
    orders.cancel(order.id)
    assert orders.wait(30) and order.state is TicketState.CANCELLED and not provider.store.list()


def test_a_cancel_in_the_queue_ends_the_order(orders: Orders, worker: FakeWorker, provider: EngineProvider) -> None:
    worker.gate.clear()
    order = orders.submit(wanted())
    assert worker.started.wait(30)
    provider.queue.cancel_all("enough")
    assert orders.wait(30) and order.state is TicketState.CANCELLED and "enough" in order.reason


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (UnsupportedModel("no engines for it"), "no engines for it"),
        (OSError("on fire"), "Slipstream broke (OSError"),
        (SystemExit(2), "Slipstream broke (SystemExit"),
    ],
)
def test_a_failure_is_told_and_the_next_order_goes_on(
    orders: Orders, workshop: Workshop, error: BaseException, told: str
) -> None:
    workshop.error = error
    order = orders.submit(wanted())
    assert orders.wait(30)
    assert order.state is TicketState.FAILED and order.reason.startswith(told)
    workshop.error = None
    assert orders.submit(wanted()) is not order
    assert orders.wait(30) and orders.all()[-1].state is TicketState.DONE


def test_ends_are_told(workshop: Workshop) -> None:
    ended: list[Order] = []
    orders = Orders(workshop, ended.append)
    order = orders.submit(wanted())
    assert orders.wait(30) and ended == [order]


def test_builds_of_others_are_shown_too(orders: Orders, worker: FakeWorker, provider: EngineProvider) -> None:
    worker.gate.clear()
    call = CallShape.of(make_inputs())
    (plan,) = provider.plans(FakeSource(), call, Settings())
    provider.queue.submit(plan, urgent=True)
    wait_until(lambda: any(row["state"] == "running" for row in describe_orders(orders, provider.queue)))
    (row,) = describe_orders(orders, provider.queue)
    assert row["id"] == plan.key.digest and row["report"] == [] and row["reason"] == ""
