"""Calls of single blocks as one CUDA graph each, where the network's own call is none. Reduces launch overhead.

Where others compute in the midst of a network, their code may not be captured, and the host launches a block's kernels
one by one. Kernels of an engine alone may be: each block's are recorded once, and replayed from then on, those
before what is called out of it and those behind as a graph each. What the first two replays give is compared with what
the engine gives, before any picture is made of them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from ....compile_backend.blocks.attention_out import AttentionFailed, attended, attention_by, handed_out_to
from ....core.formatting import say_share
from ....core.protocols import HandOut, Tensors
from ....runtime.blocks.block_engines import BlockOffer
from ....runtime.checking.rounding_switches import rounding_switches
from ....runtime.checking.verify import ROUNDING
from ....runtime.loaded.cuda_graphs import CudaGraphs
from ....runtime.loaded.device_memory import MemoryWatch
from ....runtime.module import AcceleratedModule
from ..blocks.computed_outside import Outside, StandIns
from ..blocks.led_network import LedBlock, keep
from ..process.dynamic_vram import leaves_memory
from .graphed_network import COMPARED, Captured
from .trials import Trial, compared, read

log = logging.getLogger(__name__)

_NAMES = tuple(f"{place:02}" for place in range(100))
"""Of a call's tensors."""

_FORMS_KEPT = 1024
"""Of one network's calls of blocks."""


class GraphedBlocks:
    """The calls of one network's blocks in one sampling run.

    Args:
        known: of earlier runs, which stays as long as the network has these blocks.
        attend: calls what is called out of a block, which it is given with its arguments.
    """

    def __init__(
        self,
        network: torch.nn.Module,
        device: torch.device,
        module: AcceleratedModule,
        known: dict[Any, Captured],
        attend: Callable[..., Any],
    ) -> None:
        self._network, self._device, self._pool = network, device, module.provider.pool
        self._known, self._attend = known, attend
        self._addresses: dict[int, tuple[list[torch.Tensor], tuple[int, ...]]] = {}
        """Of lists of weights that this run hands to engines, by the list's id."""
        self._trials: list[tuple[Captured, BlockOffer, Trial]] = []
        self._is_full = False
        self.begin()

    def begin(self) -> None:
        """A call of the network begins."""
        self._switches = rounding_switches()

    def __call__(
        self,
        block: LedBlock,
        offer: BlockOffer,
        tensors: Sequence[torch.Tensor],
        weights: list[torch.Tensor],
        outside: Outside | None,
    ) -> Any:
        """What the engine of an offer gives, by a graph; None where there is none, nor one to be made now. Where it
        failed, and others were called already: why, in words.

        Args:
            weights: as the engine takes them, which lie there for the rest of the run; the same list at each call.
            outside: what the engine calls out. Stand-ins are called where graph and engine are compared.

        Raises:
            AttentionFailed: see `attention_by`.
        """
        if len(tensors) > len(_NAMES):
            return None
        is_within = self._pool.networks.are_used(self._network)  # by graphs in whose memory it has none
        what = block.path, offer.digest, self._switches, is_within
        call = what, offer.inputs
        captured = self._known.get(call)
        if captured is None:
            captured = Captured()
            keep(self._known, call, captured, _FORMS_KEPT)
        if captured.is_refused:
            return None
        with self._pool.networks.using(self._network, self._device, frozenset((offer.digest,)), parts=True) as graphs:
            if graphs is None:
                return None
            return self._by_graph(captured, graphs, what, offer, tensors, weights, outside)

    def forget_weights(self) -> None:
        """Others changed them in the midst of the run: those of before may go."""
        self._addresses.clear()

    def settle(self) -> None:
        """Read what this call's comparisons gave: one wait for all of them."""
        trials, self._trials = self._trials, []
        for (captured, offer, _), (error, is_finite) in zip(trials, read([each for *_, each in trials]), strict=True):
            limit = ROUNDING[offer.precision]
            if error <= limit:
                captured.compared += 1
            elif not is_finite:  # nothing can be compared with that
                captured.put_off()
            else:
                captured.is_refused = True
                log.warning(
                    "Slipstream: the CUDA graph of %s differs from its engine by %s (allowed: %s) and is not used",
                    offer.architecture.fingerprint.architecture_name, say_share(error), say_share(limit),
                )  # fmt: skip

    def _by_graph(
        self,
        captured: Captured,
        graphs: CudaGraphs,
        what: Hashable,
        offer: BlockOffer,
        tensors: Sequence[torch.Tensor],
        weights: list[torch.Tensor],
        outside: Outside | None,
    ) -> Any:
        engine = offer.engine
        assert engine is not None
        generation, named = (engine, self._addresses_of(weights)), dict(zip(_NAMES, tensors, strict=False))
        try:
            others = None if outside is None else self._others(outside)
            if captured.compared >= COMPARED:
                if (found := graphs.replayed(generation, named, what, others)) is not None:
                    captured.replays += 1
                    return engine.returned([*found.values()], tensors)
        except AttentionFailed:
            raise
        except Exception as error:
            self._refuse(captured, graphs, what, error)
            return None if outside is None else f"its engine failed ({type(error).__name__}: {error})"
        is_held = captured.compared and graphs.holds(generation, named, what)
        if not (is_held or captured.is_due) or self._is_full or any(captured is each for each, *_ in self._trials):
            captured.directly += 1
            return None
        if not leaves_memory(self._device):
            self._is_full = True
            return None
        if not is_held:
            captured.begin()
        watch = MemoryWatch(self._device)
        try:
            compute = functools.partial(_computed if outside is None else _computed_around, engine, weights)
            stand_in = None if outside is None else StandIns(outside).in_the_engine
            others = None if stand_in is None else functools.partial(attended, stand_in)
            found = graphs.run(compute, generation, named, what, or_raise=True, outside=others)
            with nullcontext() if stand_in is None else attention_by(stand_in):
                wanted = engine.compute(tensors, weights)
            self._trials.append((captured, offer, compared([*found.values()], wanted)))
            return engine.returned(wanted, tensors) if stand_in is None else None
        except Exception as error:  # whatever compiled code raises: the engine goes on without a graph
            if watch.ran_out(error.error if isinstance(error, AttentionFailed) else error):
                self._is_full = True
                captured.put_off()
                graphs.drop()
            else:
                self._refuse(captured, graphs, what, error)
            return None
        finally:
            self._pool.on_change(self._device)

    def _others(self, outside: Outside) -> HandOut:
        return functools.partial(attended, functools.partial(self._attend, outside.called(are_lent=True)))

    @staticmethod
    def _refuse(captured: Captured, graphs: CudaGraphs, what: Hashable, error: Exception) -> None:
        log.info("Slipstream: calls of a block are not replayed as a CUDA graph: %s", error)
        captured.is_refused = True
        graphs.forget(what)

    def _addresses_of(self, weights: list[torch.Tensor]) -> tuple[int, ...]:
        """Where weights lie; looked up once a run."""
        if (known := self._addresses.get(id(weights))) is None:
            known = self._addresses[id(weights)] = weights, tuple([tensor.data_ptr() for tensor in weights])
        return known[1]


def _computed(engine: Any, weights: list[torch.Tensor], **tensors: torch.Tensor) -> Tensors:
    """What an engine gives, by the places of its results."""
    results = engine.compute([*tensors.values()], weights)
    return dict(zip(_NAMES, results, strict=False))


def _computed_around(engine: Any, weights: list[torch.Tensor], outside: HandOut, **tensors: torch.Tensor) -> Tensors:
    """The same, where `outside` computes what the engine calls out."""
    with handed_out_to(outside):
        return _computed(engine, weights, **tensors)
