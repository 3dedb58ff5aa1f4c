"""A network's whole call over engines of its blocks as one CUDA graph. Attacks launch overhead.

A call whose blocks all ran on engines is computed once more by a copy of the network, and that is what is captured: the
host's code with layers of its own, which hold no weights but compute with the live model's where they lie, and engines
in the place of blocks. So neither other nodes' code nor ComfyUI's staging of weights can be part of a capture. What
the graph gives is compared with what the blocks give, twice, before a picture is made of it.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ....compile_backend.blocks.call_form import taken_apart
from ....core.dtypes import dtype_of
from ....core.errors import SlipstreamError
from ....core.protocols import Tensors
from ....runtime.blocks.block_engines import BlockEngines, BlockOffer
from ....runtime.checking.verify import ROUNDING, relative_error
from ....runtime.loaded.cuda_graphs import CudaGraphs
from ....runtime.loaded.device_clock import disturb
from ....runtime.loaded.device_memory import MemoryWatch
from ....runtime.module import AcceleratedModule
from ....runtime.planning.plan import CallShape
from ....runtime.settings.model_settings import Settings
from ...architecture import Remembered
from ...live_model.layer_walk import layers_of, tensors_of
from ..models.diffusion_model import split_inputs
from ..process.build_waiting import waiting_hooks
from ..process.current_weights import places_of
from ..process.dynamic_vram import leaves_memory
from .led_network import LedBlock, LedNetwork, weights_of

log = logging.getLogger(__name__)

_CALLS_BEFORE = 2
"""Calls by blocks before the first capture, which takes about as long as five of them."""

_REPAID = 16
"""Replays after which a capture has repaid what it took. Where they were fewer, the next one waits twice as long."""

_MOST_CALLS_BEFORE = 256

_FORMS_KEPT = 64
"""Of one network's calls."""

_COMPARED = 2
"""Replays that are held against blocks: the second one shows whether the first left anything behind."""


class _NotByEngines(SlipstreamError):
    """A block of the copy has no engine that has proved itself."""


@dataclass
class WholeCall:
    """Calls of a network in one form, of which engines computed all blocks.

    Attributes:
        offers: of these engines, each once.
        blocks: calls of blocks in one call of the network.
        by_blocks: calls since the last capture that were made without a graph.
        wait: so many of them come before the next one.
        replays: of the last capture.
        compared: replays that gave what the blocks gave.
        is_refused: there will be no graph in this process.
    """

    offers: tuple[BlockOffer, ...]
    blocks: int
    by_blocks: int = 0
    wait: int = _CALLS_BEFORE
    replays: int = 0
    compared: int = 0
    is_refused: bool = False

    def has_engines(self, engines: BlockEngines) -> bool:
        """Whether there may be a graph, as each engine is there and proved itself."""
        if self.is_refused or any(map(engines.is_refused, self.offers)):
            return False
        return all(offer.engine is not None and offer.is_trusted for offer in self.offers)

    def begin_capture(self) -> None:
        """Note that a graph is made, in the place of one that may have had to go too early."""
        if self.replays:
            self.wait = _CALLS_BEFORE if self.replays >= _REPAID else min(2 * self.wait, _MOST_CALLS_BEFORE)
        self.by_blocks = self.replays = self.compared = 0


class GraphedNetwork:
    """The whole calls of one network in one sampling run.

    Args:
        led: the network's blocks, which stay while it has these.
        weights: gives those weights of the network that lie on its device, where it computes in a dtype, by name, for
            as long as it gives the same ones.
    """

    def __init__(
        self,
        network: torch.nn.Module,
        led: LedNetwork,
        device: torch.device,
        module: AcceleratedModule,
        settings: Settings,
        weights: Callable[[torch.dtype], Mapping[str, torch.Tensor]],
    ) -> None:
        self._network, self._led, self._device = network, led, device
        self._known = _known.get(network, led, lambda: _Known(NetworkCopy(led.owner.fresh)))
        self._pool, self._engines = module.provider.pool, module.provider.blocks
        self._effort, self._weights, self._places = settings.effort, weights, places_of(device)
        self._found: tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor] | None] = {}, None

    def forget(self) -> None:
        """Try again what was refused: somebody asks for it."""
        self._known.wholes.clear()
        self._pool.networks.drop(self._network)

    def note(self, call: Tensors, offers: Mapping[int, BlockOffer], blocks: int) -> None:
        """Note a call of which engines computed all blocks."""
        kind, served = _kind_of(call), tuple(offers.values())
        whole = self._known.wholes.get(kind)
        if whole is None or [*map(id, whole.offers)] != [*map(id, served)]:
            while len(self._known.wholes) >= _FORMS_KEPT:
                del self._known.wholes[next(iter(self._known.wholes))]
            whole = self._known.wholes[kind] = WholeCall(served, blocks)
        whole.by_blocks += 1

    def __call__(self, call: Tensors, by_blocks: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, WholeCall] | None:
        """What the network gives, by its graph; None where it has none, nor gets one now.

        Args:
            call: the tensors that the network is given, by name, residuals of ControlNets among them. Nothing else
                may have to do with its result.
            by_blocks: computes the same call without a graph.
        """
        kind = _kind_of(call)
        whole = self._known.wholes.get(kind)
        if whole is None or not whole.has_engines(self._engines):
            return None
        weights = self._weights_for(whole)
        if weights is None or any(tensor.device not in self._places for tensor in call.values()):
            return None
        digests = frozenset(offer.digest for offer in whole.offers)
        if (graphs := self._pool.networks.of(self._network, self._device, digests)) is None:
            return None
        addresses = tuple([*map(torch.Tensor.data_ptr, weights.values())])
        generation = addresses, tuple(id(offer.engine) for offer in whole.offers)
        if not graphs.holds(generation, call, kind):
            if whole.by_blocks < whole.wait or not leaves_memory(self._device):
                return None
            whole.begin_capture()
        result = self._replayed(whole, graphs, generation, call, kind, weights)
        if result is None:
            return None
        whole.replays += 1
        if whole.compared < _COMPARED:
            return self._compared(whole, graphs, kind, result, by_blocks), whole
        return result, whole

    def _replayed(
        self,
        whole: WholeCall,
        graphs: CudaGraphs,
        generation: Hashable,
        call: Tensors,
        kind: Hashable,
        weights: Mapping[str, torch.Tensor],
    ) -> torch.Tensor | None:
        """The call by its graph, captured first if need be; None where that fails."""
        compute = functools.partial(self._compute, whole, weights)
        watch, bytes_before = MemoryWatch(self._device), graphs.bytes
        try:
            with torch.no_grad():
                result = graphs.run(compute, generation, call, kind, or_raise=True)["out"]
        except waiting_hooks().interruptions:
            raise
        except Exception as error:  # whatever the host's code raises: the blocks' engines go on without a graph
            if watch.ran_out(error):
                log.warning("Slipstream: memory does not suffice for the model's call as one CUDA graph")
            else:
                log.info("Slipstream: the model's call is not replayed as one CUDA graph: %s", error)
            self._refuse(whole, graphs, kind)
            return None
        if graphs.bytes != bytes_before:
            self._pool.on_change(self._device)
        return result

    def _compared(
        self,
        whole: WholeCall,
        graphs: CudaGraphs,
        kind: Hashable,
        result: torch.Tensor,
        by_blocks: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        """What the blocks give, beside what the graph gave."""
        disturb()
        wanted = by_blocks()
        limit = ROUNDING[whole.offers[0].precision]
        error = relative_error({"out": result}, {"out": wanted})
        if error <= limit:
            whole.compared += 1
            if whole.compared == _COMPARED:
                log.info("Slipstream: %s calls of blocks on engines are one CUDA graph from here on", whole.blocks)
        else:
            log.warning(
                "Slipstream: the model's call as one CUDA graph differs from its blocks by %.1e (allowed: %.0e) and is "
                "not used",
                error, limit,
            )  # fmt: skip
            self._refuse(whole, graphs, kind)
        return wanted

    def _refuse(self, whole: WholeCall, graphs: CudaGraphs, kind: Hashable) -> None:
        whole.is_refused = True
        graphs.forget(kind, for_good=True)
        self._pool.on_change(self._device)

    def _weights_for(self, whole: WholeCall) -> Mapping[str, torch.Tensor] | None:
        """All weights of the network, by name; None where not all lie where they stay, in the dtype that is wanted."""
        dtypes = {dtype_of(offer.precision) for offer in whole.offers}
        if len(dtypes) > 1:
            return None
        dtype = dtypes.pop()
        lying = self._weights(dtype)
        if lying is self._found[0]:
            return self._found[1]
        self._found = lying, self._all_of(lying, dtype)
        return self._found[1]

    def _all_of(self, lying: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Mapping[str, torch.Tensor] | None:
        found: dict[str, torch.Tensor] = {}
        for name, place in self._known.copied.weights.items():
            tensor = lying.get(name)
            if tensor is None or tensor.shape != place.shape or tensor.dtype != dtype:
                log.debug("Slipstream: no CUDA graph of the model's call, as %s does not lie where it stays", name)
                return None
            found[name] = tensor
        return found

    def _compute(self, whole: WholeCall, weights: Mapping[str, torch.Tensor], **call: torch.Tensor) -> Tensors:
        """The network's call by its copy.

        Raises:
            _NotByEngines: a block's call is none that its engine is known to compute.
            Exception: whatever the host's code raises.
        """
        trusted = {id(offer) for offer in whole.offers}

        def lead(block: LedBlock, *args: Any, **kwargs: Any) -> Any:
            arguments, _ = block.kind.arguments(type(block.module).forward, args, kwargs)
            form, tensors = taken_apart(arguments)
            inputs = tuple([(tensor.shape, tensor.dtype) for tensor in tensors])
            offer = block.offers.get((form, inputs, self._device, self._effort))
            if offer is None or id(offer) not in trusted or offer.engine is None:
                raise _NotByEngines(f"{block.path} is called otherwise than before")
            given = weights_of(block, offer).among(weights, block.path)
            if given is None:
                raise _NotByEngines(f"the weights of {block.path} do not lie as its engine takes them")
            return offer.engine(tensors, given)

        copied = self._known.copied
        calls = {block.path: functools.partial(lead, block) for block in self._led.blocks}
        with copied.holding(weights), copied.leading(calls):
            args, rest = split_inputs(call)
            return {"out": copied.network(*args, **rest, transformer_options={})}


class NetworkCopy:
    """Layers of the host's code like a network's own, without weights.

    Args:
        fresh: the network as a meta module.

    Attributes:
        weights: of the meta module, by name.
    """

    def __init__(self, fresh: torch.nn.Module) -> None:
        self.network = copy.deepcopy(fresh)
        self._layers = layers_of(self.network)
        self.weights = dict(tensors_of(self._layers))

    @contextmanager
    def holding(self, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Meanwhile its layers compute with these."""
        self._hold(weights)
        try:
            yield
        finally:
            self._hold(self.weights)

    @contextmanager
    def leading(self, calls: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
        """Meanwhile others compute the calls of some layers, which are named by their paths."""
        for path, call in calls.items():
            self._layers[path].__dict__["forward"] = call
        try:
            yield
        finally:
            for path in calls:
                del self._layers[path].__dict__["forward"]

    def _hold(self, weights: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in weights.items():
            path, _, own = name.rpartition(".")
            layer = self._layers[path]
            holder = layer._parameters if own in layer._parameters else layer._buffers
            holder[own] = tensor  # type: ignore[assignment]


@dataclass
class _Known:
    """What is known of a network with these blocks.

    Attributes:
        wholes: by kinds of calls.
    """

    copied: NetworkCopy
    wholes: dict[Hashable, WholeCall] = field(default_factory=dict)


_known: Remembered[_Known] = Remembered()


def _kind_of(call: Tensors) -> Hashable:
    """Equal for calls that are the same work, in the same state of torch's switches."""
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    switches = (
        cuda.allow_tf32, cuda.allow_fp16_reduced_precision_reduction, getattr(cuda, "allow_fp16_accumulation", None),
        cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic,
    )  # fmt: skip
    return CallShape.of(call), switches
