"""A network's whole call over engines of its blocks as one CUDA graph. Attacks launch overhead.

A call whose blocks all ran on engines is computed once more by a copy of the network, and that is what is captured: the
host's code with layers of its own, which hold no weights but compute with the live model's where they lie, and engines
in the place of blocks. So neither other nodes' code nor ComfyUI's staging of weights can be part of a capture. What
the graph gives is compared with what the blocks give, twice, before a picture is made of it.

So it is with a layer around several blocks, where another node computes elsewhere in the network.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from ....compile_backend.blocks.attention_out import Attention, AttentionFailed, attended, handed_out_to
from ....compile_backend.blocks.call_form import taken_apart
from ....core.dtypes import dtype_of
from ....core.errors import SlipstreamError, UnsupportedModel
from ....core.formatting import say_share
from ....core.protocols import HandOut, Tensors
from ....runtime.blocks.block_engines import BlockEngines, BlockOffer
from ....runtime.checking.rounding_switches import rounding_switches
from ....runtime.checking.verify import ROUNDING, relative_error
from ....runtime.loaded.cuda_graphs import CudaGraphs
from ....runtime.loaded.device_clock import disturb
from ....runtime.loaded.device_memory import MemoryWatch
from ....runtime.module import AcceleratedModule
from ....runtime.planning.plan import CallShape
from ....runtime.settings.model_settings import Settings
from ..blocks.computed_outside import Outside, StandIns, Told
from ..blocks.led_network import BlockCall, LedBlock, LedNetwork, keep, weights_of
from ..process.build_waiting import waiting_hooks
from ..process.current_weights import places_of
from ..process.dynamic_vram import leaves_memory

log = logging.getLogger(__name__)

_CALLS_BEFORE = 2
"""Calls by blocks before the first capture, which takes about as long as five of them."""

_REPAID = 32
"""Replays after which a capture has repaid what it took. Where they were fewer, the next one waits twice as long."""

_MOST_CALLS_BEFORE = 256

_FORMS_KEPT = 512
"""Of the calls of one network and of its groups."""

COMPARED = 2
"""Replays that are held against blocks: the second one shows whether the first left anything behind."""


Called = Callable[[torch.nn.Module, Tensors], Tensors]
"""What a network gives for a call's tensors, by names of both."""

_NOTHING: Mapping[str, Outside] = MappingProxyType({})


class _NotByEngines(SlipstreamError):
    """A block of the copy has no engine that has proved itself."""


class Captured:
    """Calls that are captured once they are made often.

    Attributes:
        directly: calls since the last capture that were made without a graph.
        replays: of the last capture.
        compared: replays that gave what the call gave without a graph.
        is_refused: there will be no graph in this process.
    """

    def __init__(self) -> None:
        self.directly = self.replays = self.compared = 0
        self.is_refused = self._was_captured = False
        self._wait = _CALLS_BEFORE

    @property
    def is_due(self) -> bool:
        """Whether there were as many calls without a graph as come before the next capture."""
        return self.directly >= self._wait

    def begin(self) -> None:
        """Note that a graph is made, in the place of one that may have had to go too early."""
        if self._was_captured:
            self._wait = _CALLS_BEFORE if self.replays >= _REPAID else min(2 * self._wait, _MOST_CALLS_BEFORE)
        self.directly = self.replays = self.compared = 0
        self._was_captured = True

    def put_off(self) -> None:
        """Have no graph for a long while."""
        self.directly, self._wait = 0, _MOST_CALLS_BEFORE


class WholeCall(Captured):
    """Calls of a network, or of one group, in one form, of which engines computed all blocks.

    Attributes:
        offers: of these engines, each once.
        blocks: calls of blocks in one such call.
        left: what it leaves in `transformer_options`.
        told: by the paths of blocks what these tell the functions in their midst.
    """

    def __init__(
        self,
        offers: tuple[BlockOffer, ...],
        blocks: int,
        left: Mapping[str, Any],
        told: Mapping[str, Told | None],
    ) -> None:
        super().__init__()
        self.offers, self.blocks, self.left, self.told = offers, blocks, left, told

    def has_engines(self, engines: BlockEngines) -> bool:
        """Whether there may be a graph, as each engine is there and proved itself."""
        if self.is_refused or any(map(engines.is_refused, self.offers)):
            return False
        return all(offer.engine is not None and offer.is_trusted for offer in self.offers)


class GraphedNetwork:
    """The whole calls of one network, or of one group in it, in one sampling run.

    Args:
        led: the network's blocks, which stay while it has these.
        path: of the group; empty for the network.
        weights: gives those weights of the network that lie on its device, where it computes in a dtype, by name, for
            as long as it gives the same ones.
        called: gives what the network, or the group, makes of a call's tensors.
    """

    def __init__(
        self,
        network: torch.nn.Module,
        led: LedNetwork,
        device: torch.device,
        module: AcceleratedModule,
        settings: Settings,
        weights: Callable[[torch.dtype], Mapping[str, torch.Tensor]],
        called: Called,
        path: str = "",
    ) -> None:
        self._network, self._led, self._device, self._path = network, led, device, path
        self._called = called
        self._wholes: dict[Hashable, WholeCall] = led.wholes
        self._pool, self._engines = module.provider.pool, module.provider.blocks
        self._effort, self._weights, self._places = settings.effort, weights, places_of(device)
        self._found: tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor] | None] = {}, None
        self._addresses: tuple[int, ...] = ()
        """Of the weights; looked up once a run: what others move in its midst lies elsewhere, see `BlockCalls`."""

    def note(
        self,
        call: Tensors,
        offers: Mapping[int, BlockOffer],
        blocks: int,
        left: Mapping[str, Any] | None = None,
        outsides: Mapping[str, Outside] = _NOTHING,
    ) -> None:
        """Note a call of which engines computed all blocks."""
        kind, served = self._kind_of(call, outsides), tuple(offers.values())
        whole = self._wholes.get(kind)
        if whole is None or [*map(id, whole.offers)] != [*map(id, served)]:
            told = {path: outside.told for path, outside in outsides.items()}
            whole = WholeCall(served, blocks, left or {}, told)
            keep(self._wholes, kind, whole, _FORMS_KEPT)
        whole.directly += 1

    def __call__(
        self,
        call: Tensors,
        by_blocks: Callable[[], Tensors],
        outsides: Mapping[str, Outside] = _NOTHING,
        attend: Callable[..., Any] | None = None,
    ) -> tuple[Tensors, WholeCall] | None:
        """What the network gives, by its graph; None where it has none, nor gets one now.

        Args:
            call: the tensors that it is given, as `each_once` names them, residuals among them. Nothing else but
                `outsides` may have to do with its result.
            by_blocks: computes the same call without a graph, with stand-ins for what is called out.
            outsides: what others compute in its blocks, by the blocks' paths.
            attend: calls what is called out, which it is given with its arguments.

        Raises:
            BaseException: what others raise in the midst of a block.
        """
        kind = self._kind_of(call, outsides)
        whole = self._wholes.get(kind)
        if whole is None or not whole.has_engines(self._engines):
            return None
        weights = self._weights_for(whole)
        if weights is None or any(tensor.device not in self._places for tensor in call.values()):
            return None
        digests = frozenset(offer.digest for offer in whole.offers)
        with self._pool.networks.using(self._network, self._device, digests, parts=bool(self._path)) as graphs:
            if graphs is None:
                return None
            return self._by_graph(whole, graphs, kind, call, weights, by_blocks, outsides, attend)

    def may_have_graph(self, call: Tensors, outsides: Mapping[str, Outside] = _NOTHING) -> bool:
        """Whether there is a graph of calls like this one, or may be one once they are made more often."""
        whole = self._wholes.get(self._kind_of(call, outsides))
        return whole is None or (whole.has_engines(self._engines) and self._weights_for(whole) is not None)

    def _by_graph(
        self,
        whole: WholeCall,
        graphs: CudaGraphs,
        kind: Hashable,
        call: Tensors,
        weights: Mapping[str, torch.Tensor],
        by_blocks: Callable[[], Tensors],
        outsides: Mapping[str, Outside],
        attend: Callable[..., Any] | None,
    ) -> tuple[Tensors, WholeCall] | None:
        generation = self._addresses, tuple(id(offer.engine) for offer in whole.offers)
        is_new = not graphs.holds(generation, call, kind)
        if is_new:
            if not whole.is_due or not leaves_memory(self._device):
                return None
            whole.begin()
        watch = MemoryWatch(self._device)
        is_compared = whole.compared < COMPARED
        try:
            outside = _handed_out(whole, outsides, None if is_compared else attend)
            found = self._replayed(whole, graphs, generation, call, kind, weights, outsides, outside)
            if is_new and not leaves_memory(self._device):
                raise torch.OutOfMemoryError("the graph leaves too little memory for sampling")
            whole.replays += 1
            result = self._compared(whole, graphs, kind, found, by_blocks) if is_compared else by_each_name(found)
            return None if is_compared and outsides else (result, whole)  # which no stand-in may have to do with
        except waiting_hooks().interruptions:
            raise
        except AttentionFailed as failed:
            if not isinstance(failed.error, (UnsupportedModel, torch.OutOfMemoryError)):
                raise failed.error from None  # another node's own, as it would be in the block
            whole.put_off()
            graphs.forget(kind)
            return None
        except Exception as error:  # whatever the host's code raises: the blocks' engines go on without a graph
            if watch.ran_out(error):
                if not self._path:
                    log.warning("Slipstream: memory does not suffice for a call by blocks as one CUDA graph")
                whole.put_off()
                graphs.drop()
            else:
                if self._path:
                    log.info("Slipstream: calls of a block are not replayed as a CUDA graph: %s", error)
                else:
                    log.info("Slipstream: a call by blocks is not replayed as one CUDA graph: %s", error)
                self._refuse(whole, graphs, kind)
            return None
        finally:
            if is_new:
                self._pool.on_change(self._device)

    def _replayed(
        self,
        whole: WholeCall,
        graphs: CudaGraphs,
        generation: Hashable,
        call: Tensors,
        kind: Hashable,
        weights: Mapping[str, torch.Tensor],
        outsides: Mapping[str, Outside],
        outside: HandOut | None,
    ) -> Tensors:
        """The call by its graph, captured first if need be.

        Raises:
            whatever the host's code raises in a capture, an interruption among it.
        """
        interruptions: list[BaseException] = []

        def compute(*out: HandOut, **tensors: torch.Tensor) -> Tensors:
            try:
                return self._compute(whole, weights, outsides, *out, **tensors)
            except waiting_hooks().interruptions as error:
                interruptions.append(error)
                raise

        try:
            with torch.no_grad():
                return graphs.run(compute, generation, call, kind, or_raise=True, outside=outside)
        except Exception:
            if interruptions:  # older ComfyUIs' are errors like any other
                raise interruptions[0] from None
            raise

    def _compared(
        self,
        whole: WholeCall,
        graphs: CudaGraphs,
        kind: Hashable,
        result: Tensors,
        by_blocks: Callable[[], Tensors],
    ) -> Tensors:
        """What the blocks give, beside what the graph gave."""
        disturb()
        wanted = by_blocks()
        limit = ROUNDING[whole.offers[0].precision]
        error = relative_error(result, each_once(wanted))
        if error <= limit:
            whole.compared += 1
            if whole.compared == COMPARED and not self._path:
                log.info("Slipstream: %s calls of blocks on engines are one CUDA graph from here on", whole.blocks)
        elif not all(bool(each.isfinite().all()) for each in wanted.values()):  # nothing can be compared with that
            whole.put_off()
            graphs.forget(kind)
        else:
            apart, allowed = say_share(error), say_share(limit)
            if self._path:
                log.warning(
                    "Slipstream: the CUDA graph of %s differs from its engine by %s (allowed: %s) and is not used",
                    self._path, apart, allowed,
                )  # fmt: skip
            else:
                log.warning(
                    "Slipstream: a call by blocks as one CUDA graph differs from the blocks by %s (allowed: %s) and is "
                    "not used",
                    apart, allowed,
                )  # fmt: skip
            self._refuse(whole, graphs, kind)
        return wanted

    def _refuse(self, whole: WholeCall, graphs: CudaGraphs, kind: Hashable) -> None:
        whole.is_refused = True
        graphs.forget(kind, for_good=True)

    def _weights_for(self, whole: WholeCall) -> Mapping[str, torch.Tensor] | None:
        """All weights of the call, by name; None where not all lie where they stay, in the dtype that is wanted."""
        dtypes = {dtype_of(offer.precision) for offer in whole.offers}
        if len(dtypes) != 1:
            return None
        dtype = dtypes.pop()
        lying = self._weights(dtype)
        if lying is not self._found[0]:
            self._found = lying, self._all_of(lying, dtype)
            self._addresses = tuple([*map(torch.Tensor.data_ptr, (self._found[1] or {}).values())])
        return self._found[1]

    def _all_of(self, lying: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Mapping[str, torch.Tensor] | None:
        found: dict[str, torch.Tensor] = {}
        for name, place in self._led.copied.weights_in(self._path).items():
            tensor = lying.get(name)
            if tensor is None or tensor.shape != place.shape or tensor.dtype != dtype:
                log.debug("Slipstream: no CUDA graph of the model's call, as %s does not lie where it stays", name)
                return None
            found[name] = tensor
        return found

    def _compute(
        self,
        whole: WholeCall,
        weights: Mapping[str, torch.Tensor],
        outsides: Mapping[str, Outside],
        hand_out: HandOut | None = None,
        /,
        **call: torch.Tensor,
    ) -> Tensors:
        """The call by the network's copy.

        Raises:
            _NotByEngines: a block's call is none that its engine is known to compute.
            Exception: whatever the host's code raises.
        """
        trusted = {id(offer) for offer in whole.offers}

        def lead(block: LedBlock, *args: Any, **kwargs: Any) -> Any:
            arguments, _ = block.kind.arguments(type(block.module).forward, args, kwargs)
            outside = outsides.get(block.path)
            form, tensors = taken_apart(arguments | outside.form if outside else arguments)
            inputs = tuple([(tensor.shape, tensor.dtype) for tensor in tensors])
            offer = block.offers.get(BlockCall(form, inputs, self._device, self._effort))
            if offer is None or id(offer) not in trusted or offer.engine is None:
                raise _NotByEngines(f"{block.path} is called otherwise than before")
            given = weights_of(block, offer).among(weights, block.path)
            if given is None:
                raise _NotByEngines(f"the weights of {block.path} do not lie as its engine takes them")
            if outside is None or hand_out is None:
                return offer.engine(tensors, given)
            with handed_out_to(functools.partial(_of_block, hand_out, block.path)):
                return offer.engine(tensors, given)

        copied = self._led.copied
        start = f"{self._path}." if self._path else ""
        blocks = (block for block in self._led.blocks if block.path.startswith(start))
        calls = {block.path: functools.partial(lead, block) for block in blocks}
        with copied.holding(weights), copied.leading(calls):
            return each_once(self._called(copied.network.get_submodule(self._path), by_each_name(call)))

    def _kind_of(self, call: Tensors, outsides: Mapping[str, Outside]) -> Hashable:
        """Equal for calls that are the same work, in the same state of torch's switches."""
        forms = tuple([(path, *outside.form.items()) for path, outside in outsides.items()])
        return self._path, CallShape.of(call), rounding_switches(), forms


def each_once(tensors: Tensors) -> Tensors:
    """Return each tensor once, under all names that it has, joined by spaces.

    Many blocks of a model take the same residual of a ControlNet: a graph has one buffer for it.
    """
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    return {" ".join(each): tensors[each[0]] for each in names.values()}


def by_each_name(tensors: Tensors) -> Tensors:
    """Return each tensor under each of its names: the inverse of `each_once`."""
    return {name: tensor for names, tensor in tensors.items() for name in names.split()}


def called_as_a_group(group: torch.nn.Module, call: Tensors) -> Tensors:
    """Return what a layer around blocks gives where no other extension patches it."""
    found = group(**call, transformer_options={})
    return {"out": found.contiguous()}  # as the group gives it to whatever follows


def _of_block(
    hand_out: HandOut, path: str, given: Sequence[torch.Tensor], shape: torch.Size, call: str
) -> torch.Tensor:
    """Hand out a call of a block's, with the block's path in front of it."""
    return hand_out(given, shape, f"{path} {call}")


def _handed_out(whole: WholeCall, outsides: Mapping[str, Outside], attend: Callable[..., Any] | None) -> HandOut | None:
    """What computes what the blocks of a call hand out; stand-ins where `attend` is None."""
    if not outsides:
        return None

    @functools.cache
    def attention_of(path: str) -> Attention:
        """One for all calls out of a block: what it tells functions is theirs to write into."""
        outside = outsides[path]
        outside.told = whole.told[path]
        if attend is None:
            return StandIns(outside).in_the_engine
        return functools.partial(attend, outside.called(are_lent=True))

    def compute(given: Sequence[torch.Tensor], shape: torch.Size, what: str) -> torch.Tensor:
        path, _, call = what.partition(" ")
        return attended(attention_of(path), given, shape, call)

    return compute
