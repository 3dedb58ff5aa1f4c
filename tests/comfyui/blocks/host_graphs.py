"""Graphs that a CPU "replays" by computing what was captured again, with the addresses of its capture.

Which calls are captured, and of what, is real; only that a replay launches kernels is not.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from slipstream.core.protocols import HandOut, Tensors
from slipstream.runtime.loaded import network_graphs
from slipstream.runtime.loaded.cuda_graphs import _call_of
from slipstream.runtime.loaded.network_graphs import NetworkGraphs
from slipstream.runtime.provider import EngineProvider


class HostGraphs:
    """In the place of `CudaGraphs`, on a CPU.

    Attributes:
        parts: in the place of those of blocks; `parts.inner` of those in the midst of such a call.
        captures, replays: how often.
        factor: by which replays are wrong.
        right: so many of the first replays of each call are right.
        error: that captures raise.
    """

    are_possible = True
    bytes = 0

    def __init__(self, parts: HostGraphs | None = None, inner: HostGraphs | None = None) -> None:
        self.parts, self.inner = parts or self, inner or self
        self._is_replayed = False
        self.captures = self.replays = 0
        self.factor = 1.0
        self.right = 0
        self._replays_of = Counter[Hashable]()
        self.error: Exception | None = None
        self._made: dict[tuple[Hashable, Hashable], tuple[Hashable, Callable[..., Tensors], Tensors]] = {}

    def holds(self, generation: Hashable, tensors: Tensors, what: Hashable) -> bool:
        call = _call_of(tensors, what)
        return call in self._made and self._made[call][0] == generation

    def replayed(
        self, generation: Hashable, tensors: Tensors, what: Hashable, outside: HandOut | None = None
    ) -> Tensors | None:
        if not self.holds(generation, tensors, what):
            return None
        return self.run(self._made[_call_of(tensors, what)][1], generation, tensors, what, True, outside)

    def run(
        self,
        compute: Callable[..., Tensors],
        generation: Hashable,
        tensors: Tensors,
        what: Hashable,
        or_raise: bool,
        outside: HandOut | None = None,
    ) -> Tensors:
        call = _call_of(tensors, what)
        if not self.holds(generation, tensors, what):
            if self.error is not None:
                raise self.error
            self.captures += 1
            places = {name: tensor.clone() for name, tensor in tensors.items()}
            compute(*([] if outside is None else [_nothing]), **places)
            self._made[call] = generation, compute, places
        assert not self._is_replayed, "another call computes in the memory of one that is not over"
        _, captured, places = self._made[call]
        for name, tensor in tensors.items():
            places[name].copy_(tensor)
        self.replays += 1
        self._replays_of[call] += 1
        factor = self.factor if self._replays_of[call] > self.right else 1.0
        out = [] if outside is None else [_from_buffers(outside)]
        self._is_replayed = True
        try:
            return {name: tensor * factor for name, tensor in captured(*out, **places).items()}
        finally:
            self._is_replayed = False

    def forget(self, what: Hashable, for_good: bool = False) -> None:
        self._made = {call: made for call, made in self._made.items() if call[0] != what}

    def drop(self) -> None:
        self._made.clear()


def _nothing(given: Sequence[torch.Tensor], shape: torch.Size, what: str) -> torch.Tensor:
    """In a capture, in which nothing is computed."""
    return torch.full(shape, torch.nan, dtype=given[0].dtype)


def _from_buffers(outside: HandOut) -> HandOut:
    """Hands tensors out that are overwritten afterwards."""

    def hand_out(given: Sequence[torch.Tensor], shape: torch.Size, what: str) -> torch.Tensor:
        buffers = [tensor.clone() for tensor in given]
        result = outside(buffers, shape, what).clone()
        for buffer in buffers:
            buffer.fill_(torch.nan)
        return result

    return hand_out


class HostNetworks(NetworkGraphs):
    """Whose graphs may be had without a GPU."""

    def may_be_had(self, device: torch.device) -> bool:
        return True


@contextmanager
def host_graphs(provider: EngineProvider) -> Iterator[HostGraphs]:
    """Meanwhile networks whose blocks a provider's engines compute have such graphs."""
    made = HostGraphs(HostGraphs(inner=HostGraphs()))
    of_blocks = itertools.cycle((made.parts, made.parts.inner))

    def graphs_of(device: torch.device, graphing: Any, are_many: bool = False) -> HostGraphs:
        return next(of_blocks) if are_many else made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network_graphs, "CudaGraphs", graphs_of)
        patch.setattr(provider.pool, "networks", HostNetworks())
        yield made
