"""Engines of blocks: what is looked up, what is built and when, and why there is none."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.compile_backend.blocks.backend import BlockBackend
from slipstream.core.errors import BackendUnavailable, BuildDied, BuildFailed, BuildOutOfMemory, UnsupportedModel
from slipstream.core.progress import CancelToken, Progress, ProgressCallback, ignore_progress
from slipstream.core.protocols import Artifact
from slipstream.core.spec import Optimize, Precision, Role
from slipstream.engine_cache import BuildHistory, BuildRecord, EngineStore, Entry, manifest
from slipstream.runtime.blocks import block_engines
from slipstream.runtime.blocks.block_engines import BlockEngines, BlockOffer
from slipstream.runtime.building.supply import Supply
from slipstream.runtime.building.worker_pool import WorkerPool
from slipstream.runtime.loaded.canary import Canary
from slipstream.runtime.planning.build_estimate import past_build
from slipstream.runtime.planning.plan import Plan
from slipstream.runtime.provider import EngineProvider
from slipstream.runtime.settings.model_settings import BuildPolicy
from slipstream.tests.fakes import CPU, FakeArchitecture, Host, NullBackend, wait_until


@dataclass(frozen=True)
class FakeBlock(FakeArchitecture):
    """A kind of block whose calls have one tensor."""

    role: Role = Role.BLOCK
    size: int = 8
    form: Any = (("x", "tensor"),)
    open_axes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def example(self) -> dict[str, tuple[int, ...]]:
        return {"x": (1, self.size)}

    @property
    def larger(self) -> list[FakeBlock]:
        return []


class FakeBlockBackend(BlockBackend):
    """Loads nothing, and takes calls of all sizes."""

    def why_cannot_build(self, device: torch.device) -> str | None:
        return None

    def load_block(self, artifact: Artifact, device: torch.device) -> Any:
        return FakeEngine()


class FakeEngine:
    def accepts(self, inputs: Any, ones_too: bool = False) -> bool:
        return True

    def takes_others_for_equal(self, inputs: Any) -> bool:
        return False


class Builder:
    """In the place of `EngineProvider._build`.

    Attributes:
        gate: builds wait until it is set; it is, unless cleared.
        error: raised instead of an engine.
        built: what was begun.
    """

    def __init__(self, store: EngineStore, folder: Path) -> None:
        self._store, self._folder = store, folder
        (folder / "engine.bin").write_bytes(b"engine")
        self.gate = threading.Event()
        self.gate.set()
        self.error: BaseException | None = None
        self.built: list[Plan] = []

    def __call__(
        self, plan: Plan, progress: ProgressCallback, cancel: CancelToken, may_run: Callable[[], bool]
    ) -> Entry:
        self.built.append(plan)
        progress(Progress("compile", 0.5, "compiling"))
        while not (self.gate.wait(0.01) and may_run()):
            cancel.raise_if_cancelled("The build")
        if self.error is not None:
            raise self.error
        artifact = Artifact(self._folder, ("engine.bin",), {})
        return self._store.put(plan.key, artifact, label=str(plan), build=BuildRecord(1.0, {}))


@pytest.fixture
def builder(store: EngineStore, tmp_path: Path) -> Builder:
    return Builder(store, tmp_path)


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.fixture
def engines(store: EngineStore, builder: Builder, host: Host) -> Iterator[BlockEngines]:
    made = BlockEngines(store, Canary(store.marks), builder, WorkerPool(), FakeBlockBackend(), lambda: host.idle)
    yield made
    made.queue.end_all("the test is over", 5)


def asked(engines: BlockEngines, architecture: FakeBlock, policy: BuildPolicy = BuildPolicy.FIRST_USE) -> BlockOffer:
    """The offer, before anything is known."""
    return engines.offer(architecture, (torch.float32,), Precision.FP32, CPU, Optimize.BALANCED, policy)


def found(engines: BlockEngines, architecture: FakeBlock, policy: BuildPolicy = BuildPolicy.FIRST_USE) -> BlockOffer:
    """The offer, once it is settled."""
    offer = asked(engines, architecture, policy)
    wait_until(lambda: not offer.is_coming)
    return offer


def test_what_is_built_is_found(engines: BlockEngines, builder: Builder) -> None:
    assert found(engines, FakeBlock()).engine is not None
    assert found(engines, FakeBlock(), policy=BuildPolicy.MANUAL).engine is not None
    assert len(builder.built) == 1


def test_a_build_is_explained_once_and_has_an_estimate_by_earlier_ones(
    engines: BlockEngines, builder: Builder, store: EngineStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "slipstream")
    found(engines, FakeBlock("1" * 64))
    BuildHistory(store.root).add(past_build(builder.built[0], 30, 16.0))
    builder.gate.clear()
    offers = [asked(engines, FakeBlock("2" * 64)) for _ in range(2)]
    wait_until(lambda: all(offer.build.ticket for offer in offers))
    assert engines.queue.pending()[0].estimate == 16
    builder.gate.set()
    wait_until(lambda: not any(offer.is_coming for offer in offers))
    told = [line for line in caplog.messages if "no engine for" in line]
    assert [line.partition("yet ")[2] for line in told] == [
        "(no engine has been built yet)",
        "(no engine has been built for this model yet)",
    ]


def test_what_is_asked_for_and_not_built_here_is_missing(store: EngineStore, builder: Builder) -> None:
    provider = EngineProvider(store, [NullBackend()])
    provider.blocks.backend, provider.blocks.queue._build = FakeBlockBackend(), builder
    found(provider.blocks, FakeBlock(), BuildPolicy.MANUAL)
    assert [*provider.missing().values()] == ["blocks Tiny for one size"]
    found(provider.blocks, FakeBlock())
    assert len(builder.built) == 1 and not provider.missing()
    builder.error = UnsupportedModel("it cannot be traced")
    assert found(provider.blocks, FakeBlock("b" * 64)).engine is None
    assert not provider.missing(), "its blocks run as they are"


def test_a_kind_of_block_may_be_asked_for_without_end(engines: BlockEngines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_engines, "_MOST_BUILDS", 2)
    assert all(found(engines, FakeBlock()).engine for _ in range(3))  # one engine


def test_a_kind_of_block_has_so_many_engines_built(
    engines: BlockEngines, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_engines, "_MOST_BUILDS", 2)
    offers = [found(engines, FakeBlock(size=size)) for size in (8, 16, 24)]
    assert [offer.engine is not None for offer in offers] == [True, True, False]
    assert "2 engines were built for other calls of it" in offers[2].reason
    assert len(builder.built) == 2
    assert found(engines, FakeBlock(size=8)).engine is not None
    assert found(engines, FakeBlock(digest="b" * 64)).engine is not None  # another kind


def refused(engines: BlockEngines, builder: Builder) -> BlockOffer:
    """An offer whose engine was found wrong."""
    offer = found(engines, FakeBlock())
    engines.refuse(offer, "it is wrong")
    assert offer.engine is None and not offer.is_final  # the next run asks again
    again = found(engines, FakeBlock())
    assert (again.engine, again.reason, again.is_final) == (None, "it is wrong", False)
    return offer


def test_an_engine_that_was_refused_is_tried_again_when_somebody_wants_that(
    engines: BlockEngines, builder: Builder
) -> None:
    other = found(engines, FakeBlock())
    offer = refused(engines, builder)
    engines.forget(offer.digest)
    assert found(engines, FakeBlock()).engine is not None and len(builder.built) == 1
    assert engines.is_refused(other)  # it holds the one that was wrong


def test_an_engine_that_takes_the_place_of_one_that_was_refused_is_tried(
    engines: BlockEngines, builder: Builder, store: EngineStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer = refused(engines, builder)
    store.delete(offer.digest)
    monkeypatch.setattr(manifest, "utc_now", lambda: "2030-01-01T00:00:00+00:00")
    assert found(engines, FakeBlock()).engine is not None and len(builder.built) == 2


class SpareEngine(FakeEngine):
    """One that needed no C++ compiler."""


NO_COMPILER = "no C++ compiler was found"


class FakeSpare(FakeBlockBackend):
    """Needs no C++ compiler."""

    name = "spare"

    def load_block(self, artifact: Artifact, device: torch.device) -> Any:
        return SpareEngine()

    def why_unavailable(self, device: torch.device) -> str | None:
        return None


@pytest.fixture
def with_spare(engines: BlockEngines, monkeypatch: pytest.MonkeyPatch) -> BlockEngines:
    """Where there is no C++ compiler."""
    monkeypatch.setattr(engines, "spare", FakeSpare())
    monkeypatch.setattr(engines.backend, "why_cannot_build", lambda device: NO_COMPILER)
    return engines


def backends_of(builder: Builder) -> list[str]:
    return [plan.backend.name for plan in builder.built]


def test_without_a_cpp_compiler_blocks_are_built_without_it(with_spare: BlockEngines, builder: Builder) -> None:
    offer = found(with_spare, FakeBlock())
    assert type(offer.engine) is SpareEngine and backends_of(builder) == ["spare"]
    assert found(with_spare, FakeBlock()).digest == offer.digest and len(builder.built) == 1


def test_an_engine_that_was_built_with_a_cpp_compiler_serves_without_one(
    engines: BlockEngines, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = found(engines, FakeBlock()).digest
    monkeypatch.setattr(engines, "spare", FakeSpare())
    monkeypatch.setattr(engines.backend, "why_cannot_build", lambda device: NO_COMPILER)
    offer = found(engines, FakeBlock())
    assert offer.digest == before and type(offer.engine) is FakeEngine and len(builder.built) == 1


def test_with_a_cpp_compiler_no_other_engine_is_built(
    with_spare: BlockEngines, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor used: what was built while there was no compiler gives way."""
    spare = found(with_spare, FakeBlock())
    monkeypatch.setattr(with_spare.backend, "why_cannot_build", lambda device: None)
    offer = found(with_spare, FakeBlock())
    assert offer.engine is not None and offer.digest != spare.digest
    builder.error = BuildFailed("g++ crashed")
    failed = found(with_spare, FakeBlock(size=16))
    assert failed.engine is None and failed.is_final and "g++ crashed" in failed.reason
    assert backends_of(builder) == ["spare", "aotinductor-blocks", "aotinductor-blocks"]


def test_where_nothing_can_be_built_the_cpp_compiler_is_what_is_missing(
    with_spare: BlockEngines, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(with_spare.spare, "why_unavailable", lambda device: "no triton")
    offer = found(with_spare, FakeBlock())
    assert offer.engine is None and offer.is_final and offer.reason == NO_COMPILER and not builder.built


def test_what_a_spare_engine_lacks_is_said(with_spare: BlockEngines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(with_spare.spare, "why_cannot_build", lambda device: "no C compiler was found")
    assert found(with_spare, FakeBlock()).reason == "no C compiler was found"


def unsign(store: EngineStore, **changes: Any) -> None:
    (entry,) = store.list()
    path = entry.directory / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "seal": None, "signature": None, **changes}))


def test_an_engine_that_nobody_signed_is_built_anew(
    engines: BlockEngines, builder: Builder, store: EngineStore
) -> None:
    found(engines, FakeBlock())
    unsign(store)
    by_hand = found(engines, FakeBlock(), policy=BuildPolicy.MANUAL)
    assert by_hand.engine is None and "nobody signed it" in by_hand.reason and not by_hand.is_final
    assert found(engines, FakeBlock()).engine is not None and len(builder.built) == 2


def test_an_engine_of_somebody_unknown_is_neither_loaded_nor_replaced(
    engines: BlockEngines, builder: Builder, store: EngineStore
) -> None:
    found(engines, FakeBlock())
    unsign(store, signature="ab:cd")
    offer = found(engines, FakeBlock())
    assert offer.engine is None and "is not loaded" in offer.reason and not offer.is_final and len(builder.built) == 1


def test_background_builds_wait_until_the_host_is_idle(engines: BlockEngines, builder: Builder, host: Host) -> None:
    host.idle = False
    offer = asked(engines, FakeBlock(), BuildPolicy.BACKGROUND)
    wait_until(engines.queue.pending)
    assert not engines.queue.is_building() and not builder.built
    host.idle = True
    wait_until(lambda: not offer.is_coming)
    assert offer.engine is not None


def test_builds_that_a_run_waits_for_begin_at_once(engines: BlockEngines, host: Host) -> None:
    host.idle = False
    assert found(engines, FakeBlock(), BuildPolicy.FIRST_USE).engine is not None
    later = asked(engines, FakeBlock(size=16), BuildPolicy.BACKGROUND)  # asked for by an earlier run
    engines.wait_for([later], ignore_progress, lambda: None)
    assert later.engine is not None


def test_who_asks_anew_after_cancelling_is_not_cancelled(engines: BlockEngines, builder: Builder) -> None:
    builder.gate.clear()
    first = asked(engines, FakeBlock())
    wait_until(lambda: builder.built)
    (ticket,) = engines.queue.pending()
    ticket.token.cancel("the user cancels")
    second = asked(engines, FakeBlock())
    wait_until(lambda: not first.is_coming)
    builder.gate.set()
    wait_until(lambda: not second.is_coming)
    assert first.engine is None and second.engine is not None


def test_what_ends_as_the_process_does_is_no_error(
    engines: BlockEngines, builder: Builder, caplog: pytest.LogCaptureFixture
) -> None:
    builder.gate.clear()
    asked(engines, FakeBlock())
    wait_until(lambda: builder.built)
    engines._loader.shutdown()
    engines.queue.end_all("the process ends", 5)
    assert "a listener" not in caplog.text
    assert found(engines, FakeBlock()).reason == "this process is ending"


REMOTE = "memory://engines"


def engines_of(engines: BlockEngines, supply: Supply) -> BlockEngines:
    """Like `engines`, with engines from elsewhere."""
    return replace(engines, supply=supply)


@pytest.mark.parametrize(
    ("supply", "policy"),
    [(Supply([REMOTE]), BuildPolicy.MANUAL), (Supply([REMOTE], never_builds=True), BuildPolicy.FIRST_USE)],
    ids=["by hand", "never builds"],
)
def test_what_is_not_built_is_pulled(
    supply: Supply, policy: BuildPolicy, engines: BlockEngines, builder: Builder, host: Host
) -> None:
    host.idle = False
    pulling = engines_of(engines, supply)
    builder.error = BackendUnavailable("it is not there yet")
    offer = found(pulling, FakeBlock(), policy)
    assert offer.engine is None and not offer.is_final and "not there yet" in offer.reason
    assert pulling.supply.only_pulled == {plan.key.digest for plan in builder.built}
    builder.error = None  # it was pushed meanwhile
    assert found(pulling, FakeBlock(), policy).engine is not None
    assert found(pulling, FakeBlock(size=16)).engine is not None


@pytest.mark.parametrize(
    ("supply", "policy", "reason"),
    [
        (Supply(), BuildPolicy.MANUAL, "builds are asked for by hand"),
        (Supply(never_builds=True), BuildPolicy.FIRST_USE, "this process never builds"),
    ],
    ids=["by hand", "never builds"],
)
def test_where_nothing_can_be_pulled_nothing_is_asked_for(
    supply: Supply, policy: BuildPolicy, reason: str, engines: BlockEngines, builder: Builder
) -> None:
    offer = found(engines_of(engines, supply), FakeBlock(), policy)
    assert reason in offer.reason and not offer.is_final and not builder.built


def test_what_was_only_pulled_is_built_where_it_may_be(engines: BlockEngines, builder: Builder) -> None:
    pulling = engines_of(engines, Supply([REMOTE]))
    builder.error = BackendUnavailable("it is not there")
    found(pulling, FakeBlock(), BuildPolicy.MANUAL)
    builder.error = None
    assert found(pulling, FakeBlock(), BuildPolicy.FIRST_USE).engine is not None and not pulling.supply.only_pulled


def test_a_build_that_was_killed_is_asked_for_again_by_the_next_run(engines: BlockEngines, builder: Builder) -> None:
    builder.error = BuildDied("killed")
    for _ in range(3):
        offer = found(engines, FakeBlock())
        assert offer.reason == "killed" and not offer.is_final


def test_fewer_builds_at_once_where_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)), raising=False)
    for memory, hurried, unhurried in ([20, 64], 17, 5), ([16, 64], 16, 4), ([64, 64], 17, 8), ([0], 1, 1):
        monkeypatch.setattr(block_engines, "_by_memory", lambda *_, memory=memory: memory)
        assert block_engines.builds_at_once() == hurried
        assert block_engines.builds_at_once(is_hurried=False) == unhurried


def test_memory_for_builds_is_that_of_their_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (torch.device("cuda", number) for number in range(2))
    free = {first: 0, second: 3 * block_engines.BUILD_DEVICE_BYTES}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[device], 1 << 40))
    for devices in [first], [second], [first, second]:
        _, *by_device = block_engines._by_memory(devices)
        assert by_device == [free[device] // block_engines.BUILD_DEVICE_BYTES for device in devices]


@pytest.mark.parametrize("takes", [1, 0])
def test_what_running_builds_take_is_not_missing_for_others(
    takes: int, engines: BlockEngines, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is what those that have just begun will take counted as free."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)), raising=False)
    asked_of: set[torch.device] = set()

    def by_memory(devices: set[torch.device]) -> list[int]:
        asked_of.update(devices)
        return [3 - takes * len(builder.built)]

    monkeypatch.setattr(block_engines, "_by_memory", by_memory)
    builder.gate.clear()
    offers = [asked(engines, FakeBlock(digest=letter * 64)) for letter in "abcdef"]
    wait_until(lambda: len(builder.built) == 3)
    time.sleep(0.3)
    assert len(builder.built) == 3 and asked_of == {CPU}
    builder.gate.set()
    wait_until(lambda: not any(offer.is_coming for offer in offers))
    assert all(offer.engine is not None for offer in offers)


def test_builds_at_once_where_the_system_tells_neither_cores_nor_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As Windows and macOS do not."""
    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    monkeypatch.setattr(block_engines, "Path", lambda _: tmp_path / "no such file")
    for cores, hurried in ((16, 4), (2, 3)):
        monkeypatch.setattr("os.cpu_count", lambda cores=cores: cores)
        assert (block_engines.builds_at_once(), block_engines.builds_at_once(is_hurried=False)) == (hurried, 1)


class ChoosyEngine(FakeEngine):
    """As the first one of its kind it takes no call.

    Attributes:
        number: how many of its kind were loaded before it.
    """

    number = 0
    are_others_equal = False

    def accepts(self, inputs: Any, ones_too: bool = False) -> bool:
        return self.number > 0

    def takes_others_for_equal(self, inputs: Any) -> bool:
        return self.are_others_equal


@dataclass(frozen=True)
class WideBlock(FakeBlock):
    """One of whose calls two sizes are open."""

    open_axes: dict[str, tuple[int, ...]] = field(default_factory=lambda: {"x": (0, 1)})

    @property
    def example(self) -> dict[str, tuple[int, ...]]:
        return {"x": (2, self.size)}


@pytest.mark.parametrize("are_others_equal", [True, False])
def test_an_engine_for_such_sizes_is_built_where_the_first_one_takes_others_for_equal(
    are_others_equal: bool, engines: BlockEngines, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[ChoosyEngine] = []

    def load_block(artifact: Artifact, device: torch.device) -> Any:
        loaded.append(ChoosyEngine())
        loaded[-1].number, loaded[-1].are_others_equal = len(loaded) - 1, are_others_equal
        return loaded[-1]

    monkeypatch.setattr(engines.backend, "load_block", load_block)
    assert found(engines, WideBlock()).engine is loaded[1]
    assert [str(plan).partition(" for ")[2] for plan in builder.built] == [
        "", "some sizes" if are_others_equal else "one size"
    ]  # fmt: skip


def test_what_cannot_be_had_for_all_sizes_is_had_for_one(engines: BlockEngines, builder: Builder) -> None:
    builder.error = UnsupportedModel("its sizes do not let themselves be left open")
    assert found(engines, WideBlock()).engine is None
    assert [str(plan).partition(" for ")[2] for plan in builder.built] == ["", "one size"]


@dataclass(frozen=True)
class SingleBlock(FakeBlock):
    """`WideBlock` called with one of what that has two of."""

    open_axes: dict[str, tuple[int, ...]] = field(default_factory=lambda: {"x": (1,)})

    @property
    def larger(self) -> list[FakeBlock]:
        return [WideBlock(self.digest, size=self.size)]


def test_an_engine_for_several_is_lent_to_calls_of_one(engines: BlockEngines, builder: Builder) -> None:
    several, one = found(engines, WideBlock()), found(engines, SingleBlock())
    assert one.engine is several.engine is not None and one.is_lent and not several.is_lent
    assert len(builder.built) == 1
    assert not found(engines, SingleBlock(digest="b" * 64)).is_lent and len(builder.built) == 2  # another kind


def test_the_next_process_lends_what_is_in_the_store(
    engines: BlockEngines, store: EngineStore, builder: Builder
) -> None:
    several = found(engines, WideBlock())
    later = BlockEngines(store, Canary(store.marks), builder, WorkerPool(), FakeBlockBackend(), lambda: True)
    one = found(later, SingleBlock(), BuildPolicy.MANUAL)
    assert one.is_lent and one.digest == several.digest


def test_an_engine_of_its_own_that_is_there_comes_before_one_that_is_lent(
    engines: BlockEngines, builder: Builder
) -> None:
    own = found(engines, SingleBlock())
    builder.gate.clear()
    several = asked(engines, WideBlock())
    wait_until(lambda: several.build.ticket is not None)
    assert found(engines, SingleBlock()).digest == own.digest
    builder.gate.set()
    wait_until(lambda: not several.is_coming)
    assert found(engines, SingleBlock()).digest == own.digest != several.digest and not own.is_lent


def test_who_builds_by_hand_builds_an_engine_for_each_call(engines: BlockEngines, builder: Builder) -> None:
    found(engines, WideBlock())
    offer = engines.offer(
        SingleBlock(), (torch.float32,), Precision.FP32, CPU, Optimize.BALANCED, BuildPolicy.FIRST_USE, by_hand=True
    )
    wait_until(lambda: not offer.is_coming)
    assert not offer.is_lent and len(builder.built) == 2


def test_a_spare_engine_is_lent_only_where_it_is_needed(
    with_spare: BlockEngines, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    several = found(with_spare, WideBlock())
    assert several.engine is not None and found(with_spare, SingleBlock()).digest == several.digest
    monkeypatch.setattr(with_spare.backend, "why_cannot_build", lambda device: None)
    own = found(with_spare, SingleBlock())
    assert not own.is_lent and own.digest != several.digest and len(builder.built) == 2


def test_an_engine_that_does_not_take_calls_of_one_is_not_lent(
    engines: BlockEngines, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeEngine, "accepts", lambda self, inputs, ones_too=False: not ones_too)
    assert not found(engines, WideBlock()).is_lent and not found(engines, SingleBlock()).is_lent
    assert len(builder.built) == 2


def both_asked(engines: BlockEngines, builder: Builder) -> list[BlockOffer]:
    """Offers for calls of several and of one, which wait for builds that do not end yet."""
    builder.gate.clear()
    offers = [asked(engines, WideBlock()), asked(engines, SingleBlock())]
    wait_until(lambda: all(offer.build.ticket for offer in offers))
    return offers


def test_calls_of_one_wait_for_an_engine_for_several_that_is_being_built(
    engines: BlockEngines, builder: Builder
) -> None:
    offers = both_asked(engines, builder)
    assert offers[0].build.ticket is offers[1].build.ticket
    builder.gate.set()
    wait_until(lambda: not any(offer.is_coming for offer in offers))
    assert offers[1].is_lent and offers[1].engine is offers[0].engine and len(builder.built) == 1


def test_an_engine_that_does_not_fit_calls_of_one_serves_those_of_several(
    engines: BlockEngines, builder: Builder
) -> None:
    several, one, other = (found(engines, each) for each in (WideBlock(), SingleBlock(), SingleBlock(size=16)))
    assert other.is_lent and not engines.is_refused(other)
    engines.refuse(one, "it differs")
    assert one.engine is None and not one.is_final and not engines.is_refused(several) and engines.is_refused(other)
    own = found(engines, SingleBlock())
    assert own.engine is not None and not own.is_lent and own.digest != several.digest and len(builder.built) == 2
    assert found(engines, WideBlock()).digest == several.digest
    wider = SingleBlock(size=16)
    assert not found(engines, wider).is_lent, "nor does it fit other calls of one"
    engines.forget(several.digest)  # as who presses Try again wants
    assert engines.store.delete(own.digest, force=True) and found(engines, SingleBlock(size=24)).is_lent


def test_calls_of_one_have_an_engine_of_their_own_where_that_for_several_cannot_be_built(
    engines: BlockEngines, builder: Builder
) -> None:
    def build(plan: Plan, *rest: Any) -> Entry:
        if plan.spec.profile.opt["x"][0] > 1:
            wait_until(builder.gate.is_set)
            raise UnsupportedModel("it cannot be traced")
        return builder(plan, *rest)

    engines.queue._build = build
    offers = both_asked(engines, builder)
    assert offers[0].build.ticket is offers[1].build.ticket
    builder.gate.set()
    wait_until(lambda: not any(offer.is_coming for offer in offers))
    assert offers[0].engine is None and offers[1].engine is not None and not offers[1].is_lent


def test_who_cancels_the_build_for_several_gets_none_for_one(engines: BlockEngines, builder: Builder) -> None:
    offers = both_asked(engines, builder)
    offers[0].build.ticket.cancel("it was cancelled")
    wait_until(lambda: not any(offer.is_coming for offer in offers))
    assert [offer.engine for offer in offers] == [None, None] and len(builder.built) == 1


def test_builds_that_run_out_of_memory_side_by_side_are_made_one_by_one(
    engines: BlockEngines, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two at once have no room for each other."""
    monkeypatch.setattr(block_engines, "builds_at_once", lambda **_: 2)
    alone, entry_of = threading.Lock(), builder.__call__

    def build(plan: Plan, *rest: Any) -> Entry:
        if not alone.acquire(blocking=False):
            builder.built.append(plan)
            raise BuildOutOfMemory("no room")
        try:
            time.sleep(0.2)
            return entry_of(plan, *rest)
        finally:
            alone.release()

    engines.queue._build = build
    offers = [asked(engines, FakeBlock(digest=letter * 64)) for letter in "abcd"]
    wait_until(lambda: not any(offer.is_coming for offer in offers))
    assert all(offer.engine is not None for offer in offers) and len(builder.built) > 4


def test_a_build_for_which_memory_does_not_suffice_ends(engines: BlockEngines, builder: Builder) -> None:
    builder.error = BuildOutOfMemory("no room")
    for picture in range(5):
        offer = found(engines, FakeBlock())
        assert (offer.reason, offer.is_final) == ("no room", False)
        assert len(builder.built) == min(2 + picture, 3), "one retry beside the queue's own"
