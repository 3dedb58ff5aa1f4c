"""Graphs of networks come and go with what their owners, and other needs of memory, want."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.runtime.loaded import network_graphs
from slipstream.runtime.loaded.canary import CAPTURE, Canary, EngineCanary
from slipstream.runtime.loaded.engine_pool import EnginePool
from slipstream.runtime.loaded.network_graphs import NetworkGraphs
from slipstream.tests.unit.runtime.doomed import Doomed

CUDA = torch.device("cuda", 0)
SOME, OTHERS = frozenset({"a" * 64}), frozenset({"a" * 64, "b" * 64})


class Graphs:
    """In the place of `CudaGraphs`, which cannot hold anything without a GPU."""

    def __init__(self, device: torch.device, graphing: Any, are_many: bool = False) -> None:
        self.bytes, self._graphing = 1 if are_many else 100, graphing

    @property
    def are_possible(self) -> bool:
        return bool(self._graphing.canary.allows_graphs)

    def drop(self) -> None:
        self.bytes = 0


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_graphs, "CudaGraphs", Graphs)


def used(networks: NetworkGraphs, network: torch.nn.Module, digests: frozenset[str] = SOME) -> Any:
    with networks.using(network, CUDA, digests) as graphs:
        return graphs


def test_a_network_keeps_its_graphs_whatever_engines_take_part() -> None:
    networks, network = NetworkGraphs(Path("library")), torch.nn.Identity()
    assert networks.may_be_had(CUDA) and not networks.may_be_had(torch.device("cpu"))
    assert not NetworkGraphs().may_be_had(CUDA)
    first = used(networks, network)
    assert first is not None and used(networks, network, OTHERS) is first and first.bytes == 100
    with networks.using(network, CUDA, SOME, parts=True) as parts:
        assert parts is not None and parts is not first
    assert networks.device_bytes(CUDA) == 102
    networks.drop(network)
    assert networks.device_bytes(CUDA) == first.bytes == parts.bytes == 0


def test_those_in_use_stay_and_the_others_give_way_oldest_first() -> None:
    pool, networks_of = EnginePool(), [torch.nn.Identity() for _ in range(3)]
    networks = pool.networks
    told: list[torch.device] = []
    pool.on_change = told.append
    graphs = [used(networks, network) for network in networks_of]
    assert pool.device_bytes(CUDA) == 306
    pool.close_all_idle(CUDA)
    assert pool.device_bytes(CUDA) == 306, "a model may run by them where no engine is used"
    with networks.running(networks_of[0]):
        assert pool.free(CUDA, 50) == 102 and told == [CUDA]
        assert [each.bytes for each in graphs] == [100, 0, 100]
        assert pool.free(CUDA, 1000) == 102
    assert pool.device_bytes(CUDA) == 102
    pool.clear()
    assert pool.device_bytes(CUDA) == 0


def test_what_one_thread_uses_no_other_gets_or_drops() -> None:
    networks, network = NetworkGraphs(), torch.nn.Identity()
    with networks.using(network, CUDA, SOME) as graphs, ThreadPoolExecutor(1) as other:
        assert graphs is not None and other.submit(used, networks, network).result() is None
        other.submit(networks.drop, network).result()
        assert networks.free(CUDA, 1000) == 0 and graphs.bytes == 100
    assert networks.free(CUDA, 1000) == 102


def test_in_the_midst_of_a_call_others_are_used_and_none_dropped() -> None:
    networks, network = NetworkGraphs(), torch.nn.Identity()
    with networks.using(network, CUDA, SOME, parts=True) as outer:
        outer_canary = networks._kept[id(network)].graphing.canary
        assert used(networks, network) is None, "a whole call has no graph in the midst of another"
        with networks.using(network, CUDA, OTHERS, parts=True) as inner:
            assert inner is not None and inner is not outer
            with networks.using(network, CUDA, OTHERS, parts=True) as innermost:
                assert innermost is None
            networks.drop(network)
            assert networks.free(CUDA, 1000) == 0 and inner.bytes == 1
        assert networks._kept[id(network)].graphing.canary is outer_canary
    with networks.using(network, CUDA, SOME, parts=True) as again:
        assert again is outer


def test_few_are_kept_and_none_of_networks_that_are_gone() -> None:
    networks, kept = NetworkGraphs(), [torch.nn.Identity() for _ in range(7)]
    for network in kept:
        with networks.running(network):
            used(networks, network)
    assert networks.device_bytes(CUDA) == 5 * 102
    del network, kept[-1]
    with networks.running(kept[0]):
        pass
    assert networks.device_bytes(CUDA) == 4 * 102


def test_an_engine_that_ended_a_process_in_a_capture_is_in_no_other_until_somebody_wants_it(tmp_path: Path) -> None:
    canary, network, others = Canary(tmp_path, dict), torch.nn.Identity(), frozenset({"c" * 64})
    Doomed(tmp_path, max(OTHERS), CAPTURE, True, {}).end()
    networks = NetworkGraphs(canary=canary)
    assert used(networks, network, OTHERS) is None and used(networks, network, others) is not None
    assert used(networks, network, OTHERS) is None
    canary.forget(max(OTHERS))
    assert used(networks, network, OTHERS) is not None


def test_a_capture_is_marked_for_each_of_its_engines(tmp_path: Path) -> None:
    with EngineCanary(Canary(tmp_path, dict), *OTHERS).capturing():
        assert {mark.name[0] for mark in tmp_path.glob(f"*.{CAPTURE}.*.json")} == {"a", "b"}
    assert not [*tmp_path.iterdir()]
