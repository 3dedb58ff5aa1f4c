"""The calls of a network whose blocks are on engines, in one sampling run.

The network's own forward runs as ever. A block's call goes to its engine where there is one and nothing reaches into
the block in that call; the block computes itself otherwise. An engine's first calls are compared with what the block
itself gives, which is what the picture is made of until then.
"""

from __future__ import annotations

import functools
import logging
import re
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import torch

from ....compile_backend.blocks.attention_out import Attention, AttentionFailed, attention_by
from ....compile_backend.blocks.call_form import taken_apart, tensor_names
from ....compile_backend.blocks.engine import BlockEngine, ones_of
from ....core.dtypes import dtype_of, precision_of
from ....core.errors import UnsupportedModel
from ....core.formatting import say_share
from ....core.protocols import ModelSource, Tensors
from ....core.spec import Optimize, Precision, Role
from ....core.streams import is_capturing, wait_for
from ....runtime.blocks.block_engines import BUILD_DEVICE_BYTES, AwaitedBuild, BlockOffer, builds_at_once
from ....runtime.building.build_queue import Ticket
from ....runtime.checking.rounding_switches import rounds_to_tf32
from ....runtime.checking.step_times import id_of_blocks
from ....runtime.checking.verify import ROUNDING
from ....runtime.loaded.device_memory import bytes_for_others, give_back_unused
from ....runtime.module import AcceleratedModule, ByBlocks, Run, Waiting
from ....runtime.planning.plan import CallShape
from ....runtime.settings.model_settings import BuildPolicy, Settings
from ...live_model.held_weights import Hold
from ...live_model.layer_walk import layers_of
from ...model_patches import why_not_in_this_mode
from ...stand_in import copied
from ..models.diffusion_model import plain_attention
from ..process.build_waiting import waiting_hooks
from ..process.current_weights import places_of
from ..process.dynamic_vram import weights_in_place
from ..process.free_memory import available
from ..process.staged_pages import given_back
from .block_architecture import STORED, ComfyBlock, Owner, say_stored
from .block_classes import OPTIONS, PLACE, layer_at
from .block_patches import patches_in, why_patched
from .block_weights import are_staged, dequantised_bytes, stored_weights
from .computed_outside import Outside, StandIns, exact_attention, outside_of
from .graphed_blocks import GraphedBlocks
from .graphed_network import Called, GraphedNetwork, called_as_a_group, each_once
from .led_network import LedBlock, LedNetwork, keep, led_network, weights_of
from .trials import Trial, compared, read

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")

Weights = Mapping[str, torch.Tensor]

_Inside = dict[LedBlock, tuple[Outside | None, dict[str, Any]]]
"""Blocks in a group, with what is called out of them, and the options that they are told."""

_COARSER = 5e-3
"""Relative error that the block's own rounding explains in fp32: where that is multiplied in TF32, or where its layers
multiply the scales of weights in fp16, as those of GGUF do."""

_TRIALS = 8
"""Calls after which an engine that could not be compared, as the block gave no finite values, is left alone."""

_SIZES = 2
"""In how many sizes an engine is compared before it serves in others unseen, where calls are few."""

_FRUITLESS_CALLS = 4
"""Calls of one shape in which no block had an engine, or hope of one: the run's other calls of that shape are left to
the model, since asking takes time at each."""

CALLS_BY_HAND = 8
"""Calls at most that a test run makes of a network, whose engines of blocks are built, compared and then in use."""

_GROUPS_KEPT = 512
"""Calls of layers around blocks in other shapes, of which it is known what the layer tells its blocks."""

_CAST = "ComfyUI casts its weights at each call"

_TOO_LITTLE_MEMORY = "memory does not suffice for its engine"

_CAPTURED = "a CUDA graph is being captured"
"""By others, in which no result can be read, and no weights may move."""

_NUMBER = re.compile(r"(?<!\w)\d+\b")
"""A number that stands alone in a layer's path, such as the one in `blocks.3.attn1`."""

_ON_THEIR_WAY = "their engines are on their way, or are being compared"


@dataclass
class BlockShare:
    """What became of the blocks' calls in one call of the network.

    Attributes:
        engine: calls that engines computed.
        apart: those of them that no graph repeats, since their engine casts their weights itself.
        outside: those of them of which something was called out.
        waiting: calls whose engine is on its way, or is being compared.
        eager: calls by the reason for which the block computed itself.
        without: those of them for which there is no engine in this run.
    """

    engine: int = 0
    apart: int = 0
    outside: int = 0
    waiting: int = 0
    without: int = 0
    eager: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        """All calls."""
        return self.engine + self.waiting + self.eager.total()

    def add(self, other: BlockShare) -> None:
        """Count those of another one as well."""
        self.engine += other.engine
        self.apart += other.apart
        self.outside += other.outside
        self.waiting += other.waiting
        self.without += other.without
        self.eager.update(other.eager)

    @property
    def is_by_engines(self) -> bool:
        """Whether engines computed all blocks, and graphs may repeat what they did."""
        return self.engine > 0 and not (self.apart or self.waiting or self.eager)

    @property
    def is_by_engines_alone(self) -> bool:
        """Whether a graph may repeat all of it."""
        return self.is_by_engines and not self.outside

    @property
    def is_fruitless(self) -> bool:
        """Whether no block will have an engine in this run, for calls like this one."""
        return 0 < self.without == self.eager.total() and not self.engine and not self.waiting

    @property
    def why_none(self) -> str:
        """The reason for which most blocks computed themselves."""
        reasons = self.eager + Counter({_ON_THEIR_WAY: self.waiting})
        return max(reasons, key=lambda reason: reasons[reason], default="none of them was called")

    def __str__(self) -> str:
        return f"{self.engine} of {self.total} calls of blocks on engines"


class BlockCalls:
    """The calls of one network's blocks.

    Args:
        owner: the network's architecture.
        module: is told which builds these calls wait for.
        in_place: gives those weights of the network that lie on its device, where it computes in a dtype, by name, for
            the length of the run.
        ending: closed when the run is over.
        is_seldom_called: its calls are few, and of ever other sizes. An engine serves in one more size at once where it
            gave what the block itself gave in several others.
        patches: see `id_of_blocks`.
        are_asked_for: the user chose them, where the settings have blocks alone; else they have to be faster than the
            model wherever they serve: with weights that are at hand.

    Attributes:
        id: see `id_of_blocks`.
    """

    def __init__(
        self,
        network: torch.nn.Module,
        owner: Owner,
        device: torch.device,
        module: AcceleratedModule,
        settings: Settings,
        in_place: Callable[[torch.dtype], Weights],
        ending: ExitStack,
        is_seldom_called: bool = False,
        patches: Iterable[str] = (),
        are_asked_for: bool = True,
    ) -> None:
        self._network, self._owner, self._device = network, owner, device
        self._is_seldom_called = is_seldom_called
        self._in_place: Callable[[torch.dtype], Weights] = functools.cache(in_place)
        self._layers = [*layers_of(network).values()]
        self._given: dict[tuple[LedBlock, BlockEngine], list[torch.Tensor] | None] = {}
        """Weights of blocks as their engines take them; None where ComfyUI has to cast them at each call."""
        self._stored: dict[tuple[LedBlock, torch.dtype], str | UnsupportedModel] = {}
        """How weights of blocks lie that are cast at each call; or why engines do not take them."""
        self._at_hand: dict[LedBlock, bool] = {}
        """See `_are_at_hand`."""
        self._too_large: set[int] = set()
        """Offers whose engines ran out of memory in this run, by id."""
        self._hold = Hold()
        self._is_held = False
        self._led: LedNetwork | None = None
        self._graphed: GraphedNetwork | None = None
        self._graphed_blocks: GraphedBlocks | None = None
        self._graphed_groups: dict[LedBlock, GraphedNetwork] = {}
        self._without_graph: set[LedBlock | CallShape] = set()
        """Groups, and shapes of the network's calls, whose last call no graph could have repeated."""
        self._is_steady = False
        """Whether all calls such as the last one are the same work, whatever other nodes do in them."""
        self._is_by_parts = False
        """Whether the call that is made now may have blocks replayed one by one."""
        self._inside: _Inside | None = None
        """Blocks that engines computed in the group that is called now; None outside of groups."""
        self._has_stand_ins = False
        """Whether stand-ins are called out to, since a graph is compared."""
        self._reads: frozenset[str] = frozenset()
        self._served: dict[int, BlockOffer] = {}
        """Offers whose engines computed blocks in the last call of the network."""
        self._earlier: Mapping[str, dict[str, Any]] = {}
        """By the paths of blocks what functions in their midst gave in this call, before its graph failed."""
        self._module = module
        self._engines, self._settings, self._status = module.provider.blocks, settings, module.status
        self._are_asked_for = are_asked_for and settings.optimize is Optimize.BLOCKS
        self._hooks = replace(waiting_hooks(), by_hand=module.by_hand)
        self._awaited: dict[int, AwaitedBuild] = {}
        """Builds that the calls of this run wait for, or waited for, by the offers' ids."""
        self._times = module.provider.step_times
        timed_by = "step" if owner.role is Role.UNET else "call"
        self.id = id_of_blocks(owner.fingerprint.architecture, timed_by, patches)
        self._places = places_of(device)
        self._asked: dict[int, BlockOffer] = {}
        """Offers that this run asked for."""
        self._wished: dict[int, BlockOffer] = {}
        self._trials: dict[int, tuple[BlockOffer, Trial]] = {}
        """By the offers' ids: their engines' results beside those of the blocks."""
        self._tried: Counter[int] = Counter()
        self._resting = 0
        """How many blocks around the one that is called compute themselves only until their engines are ready."""
        self._fruitless: dict[Hashable, list[str]] = {}
        """By the shape of calls that were fruitless, see `BlockShare`: the reason of each."""
        self._shares = threading.local()
        """With several GPUs other threads compute other parts of a batch: the `share` of each; and beside it, until the
        network's call is over, what became of blocks that are called from within engines."""
        self._ending, self._is_running = ending, False
        if module.by_hand and self._times is not None:
            self._times.forgive_blocks(self.id)

    @property
    def share(self) -> BlockShare:
        """Of the last call of the network in this thread."""
        return getattr(self._shares, "last", None) or BlockShare()

    @share.setter
    def share(self, share: BlockShare) -> None:
        self._shares.last = share

    def settle_graphs(self, runs: Iterable[Run]) -> None:
        """The runs of the network are over: where other engines than those of blocks answered, graphs go."""
        if not {None, self.id}.issuperset(answer.engine for run in runs for answer in run.answers):
            self.drop_graphs()

    def drop_graphs(self) -> None:
        """Give their memory back."""
        self._module.provider.pool.networks.drop(self._network)

    def __call__(
        self,
        compute: Callable[[], _Result],
        is_unchanged: bool = False,
        shape: Hashable = None,
        by_parts: bool = True,
    ) -> _Result:
        """What `compute` gives, which calls the network; by hand again until it is known which engines serve.

        Args:
            is_unchanged: it was found just now that nothing of the network was changed, its weights included.
            shape: of the call, where all calls of that shape call the same blocks.
            by_parts: calls of single blocks may be CUDA graphs, since there will be none of the whole.
        """
        self._is_steady = is_unchanged and shape is not None
        if self.is_fruitless(shape):
            self.passed(self._fruitless[shape][-1])
            return compute()
        self._is_by_parts = by_parts and self._is_often_called and self.may_have_graphs(shape)
        result = self.once(compute, is_unchanged)
        if shape is not None and self.share.is_fruitless and not self._hooks.by_hand:
            self._fruitless.setdefault(shape, []).append(self.share.why_none)
        for _ in range(CALLS_BY_HAND if self._hooks.by_hand else 0):
            if not self.share.waiting:
                break
            result = self.once(compute)
        return result

    @property
    def _is_often_called(self) -> bool:
        """Whether it is called in each step, so that what a capture takes is soon repaid."""
        return self._owner.role in (Role.UNET, Role.CONTROLNET)

    def is_fruitless(self, shape: Hashable) -> bool:
        """Whether the run's other calls of this shape are left to the model, whose blocks have no engines."""
        return len(self._fruitless.get(shape, ())) >= _FRUITLESS_CALLS

    def whole(
        self,
        compute: Callable[[], Tensors],
        call: Tensors,
        called: Called,
        options: Mapping[str, Any],
        shape: Hashable = None,
    ) -> Tensors:
        """The same for a call of a network that is unchanged, by one CUDA graph where it has one.

        Args:
            compute: leaves what it is given as it is.
            call: all tensors that the network is given, by name. Nothing but these and `options` has to do with it.
                A tensor that has several names is one buffer of a graph.
            called: gives what a copy of the network makes of them.
            options: `transformer_options`.
            shape: as above.
        """
        graphed = self._graphs(called) if self._why_not() is None else None
        if graphed is None or why_patched(options, self._reads) is not None:
            return self(compute, True, shape)
        if self._hooks.by_hand:
            return self(compute, True, shape)
        self._keep_graphs()
        self._check_weights()
        was_held, call = self._is_held, each_once(call)
        found = graphed(call, lambda: self(compute, True, shape, by_parts=False))
        if not was_held:
            self._check_weights()  # of what it began with
        if found is not None:
            result, whole = found
            self.share = BlockShare(whole.blocks)
            return result
        form = CallShape.of(call)
        result = self(compute, True, shape, form in self._without_graph or not graphed.may_have_graph(call))
        if self.share.is_by_engines_alone:
            self._without_graph.discard(form)
            graphed.note(call, self._served, self.share.engine)
        elif not self.share.waiting:
            self._without_graph.add(form)
        return result

    def _keep_graphs(self) -> None:
        """For the rest of the run; not sooner: while the model is loaded its graphs may give way."""
        if not self._is_running:
            self._is_running = True
            self._ending.enter_context(self._module.provider.pool.networks.running(self._network))

    def _graphs(self, called: Called) -> GraphedNetwork | None:
        """Those of the network's whole calls; None where its blocks are not led, or there are no graphs."""
        if self._graphed is None and self.may_have_graphs() and not isinstance(led := self._blocks(), str):
            self._graphed = GraphedNetwork(
                self._network, led, self._device, self._module, self._settings, self._lying_soon_held, called
            )
            self._reads = led.reads
        return self._graphed

    def may_have_graphs(self, shape: Hashable = None) -> bool:
        """Whether whole calls of this shape are captured on this device, where the user wants that."""
        if self.is_fruitless(shape):
            return False
        return self._settings.levers.one_graph and self._module.provider.pool.networks.may_be_had(self._device)

    def once(self, compute: Callable[[], _Result], is_unchanged: bool = False) -> _Result:
        """The same, by hand too without another call."""
        self.share = BlockShare()
        self._served.clear()
        if (reason := self._why_not()) is not None:
            self.share.eager[reason] += 1
            return compute()
        led = self._blocks()
        if isinstance(led, str):
            self.share.eager[led] += 1
            return compute()
        if not is_unchanged:
            self._check_weights()
        if self._hooks.by_hand:
            led.parts.clear()  # what was refused a graph is tried again
            led.wholes.clear()
            self.drop_graphs()
        elif self._graphed_blocks is not None:
            self._graphed_blocks.begin()
        self._shares.within = BlockShare()
        with led.leading(self._network, self._lead, self._lead_group, is_unchanged) as changed:
            result = compute()
        self.share.add(self._shares.within)
        self.share.eager.update(changed.values())
        self._say_reasons()
        self._settle()
        if self._graphed_blocks is not None:
            self._graphed_blocks.settle()
        self._tell_builds()
        if self._settings.policy is BuildPolicy.FIRST_USE or self._hooks.by_hand:
            self._wait()
        return result

    def passed(self, reason: str) -> None:
        """A call of the network in which no engine of blocks has a part, and why."""
        self.share = BlockShare()
        self.share.eager[reason] += 1

    def _blocks(self) -> LedNetwork | str:
        """The network's blocks; or why none are led."""
        if self._led is None:  # one that is replaced later is one that was changed, see `LedNetwork.leading`
            try:
                self._led = led_network(self._network, self._owner)
            except UnsupportedModel as error:
                log.debug("Slipstream: no blocks are led: %s", error)
                return str(error)
        return self._led

    def answer(self) -> ByBlocks | str:
        """What engines had to do with the last call, which is counted; or why nothing."""
        self._status.count_calls_of_blocks(self.share.engine, self.share.total)
        if not self.share.engine:
            return Waiting(self.share.why_none) if self.share.waiting else self.share.why_none
        return ByBlocks(str(self.share), None if self.share.waiting else self.id, self._is_steady)

    @property
    def digests(self) -> list[str]:
        """Of the engines that this process has for the network's blocks."""
        blocks = self._led.blocks if self._led is not None else []
        offers = (offer for block in blocks for offer in block.offers.values() if offer.engine is not None)
        return [*dict.fromkeys(offer.digest for offer in offers)]

    def _tell_builds(self) -> None:
        """Let the node show the builds that this run waits for, from its first one on."""
        self._awaited |= {number: offer.build for number, offer in self._wished.items()}
        if self._awaited:
            awaited = [*self._awaited.values()]
            self._status.block_builds = lambda: tickets_of(awaited)
            self._status.on_change()

    def _say_reasons(self) -> None:
        """Log each reason for which a block computes itself, once a model: one where they differ in numbers alone."""
        if self._led is None:
            return
        for reason in sorted(self.share.eager.keys() - self._led.said):
            if (alike := _NUMBER.sub("", reason)) not in self._led.said:
                log.info("Slipstream: blocks run as they are where %s", reason)
            self._led.said |= {reason, alike}

    def _why_not(self) -> str | None:
        if torch.compiler.is_compiling():
            return "another node compiles the model"
        if is_capturing(self._device):
            return _CAPTURED
        if self._times is not None and (reason := self._times.why_not_blocks(self.id)):
            return reason
        return why_not_in_this_mode(self._device) or self._engines.why_unavailable(self._device)

    def _lead(self, block: LedBlock, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute one call of a block."""
        if self._resting:
            return block.plain(*args, **kwargs)
        try:
            arguments, options = block.kind.arguments(type(block.module).forward, args, kwargs)
            outside = outside_of(block.module, block.kind, options, arguments, block.reads)
            if options and (reason := why_patched(options, block.reads, outside.names if outside else ())):
                return self._plain(block, args, kwargs, reason)
            if outside is not None:
                arguments |= outside.form
                outside.given.update(self._earlier.get(block.path, {}))
            form, tensors = taken_apart(arguments)
            if stored := self._stored_in(block, _dtype_of(tensors)):
                form = tuple(sorted((*form, *taken_apart({STORED: stored})[0])))
        except TypeError as error:
            return self._plain(block, args, kwargs, f"it is called in an unknown way ({error})")
        except UnsupportedModel as error:
            return self._plain(block, args, kwargs, str(error))
        inputs = tuple([(tensor.shape, tensor.dtype) for tensor in tensors])
        offer = block.offers.get((form, inputs, self._device, self._settings.effort))
        if offer is None and self._is_seldom_called:
            offer = self._by_other_sizes(block, form, tensors, inputs)
        if is_capturing(self._device) and not self._may_be_captured(block, offer):
            return self._plain(block, args, kwargs, _CAPTURED, outside)
        if offer is None or self._is_to_be_asked_for_again(offer):
            if not (self._are_asked_for or self._may_be_at_hand(block, tensors)):
                return self._plain(block, args, kwargs, _CAST, outside)
            offer = self._ask(block, form, tensors, inputs)
        engine = offer.engine
        if engine is None:
            if offer.is_coming:
                self._wished[id(offer)] = offer
                return self._rest(block, args, kwargs, outside)
            self.share.without += 1
            return self._plain(block, args, kwargs, offer.reason, outside)
        if self._engines.is_refused(offer):
            offer.refuse("its engine was found wrong", is_final=False)
            return self._plain(block, args, kwargs, offer.reason, outside)
        if not offer.is_trusted and id(offer) in self._trials:
            return self._rest(block, args, kwargs, outside)
        if any(tensor.device not in self._places or tensor.requires_grad for tensor in tensors):
            reason = "its inputs lie elsewhere, or gradients are asked for"
            return self._plain(block, args, kwargs, reason, outside)
        if outside is not None and not offer.is_trusted:
            self._try_with_stand_ins(block, offer, tensors, options, outside, args, kwargs)
            return self._rest(block, args, kwargs, outside)
        if self._inside is not None:
            self._inside[block] = outside, dict(options or {})
        stand_in: Attention | None = None
        if outside is not None:
            outside.told = offer.told
            stand_in = StandIns(outside).in_the_engine if self._has_stand_ins else None
        found = self._computed(block, offer, tensors, outside, stand_in)
        if isinstance(found, str):
            if self._has_stand_ins and outside is not None:  # the block itself would call what they stand for
                raise torch.OutOfMemoryError(found) if found == _TOO_LITTLE_MEMORY else UnsupportedModel(found)
            return self._plain(block, args, kwargs, found, outside)
        if offer.is_trusted:
            self.share.engine += 1
            self.share.apart += bool(stored)
            if outside is not None:
                self.share.outside += 1
                outside.given.clear()
            self._served[id(offer)] = offer
            return found
        wanted = self._rest(block, args, kwargs, outside)
        self._compare(offer, found, wanted)
        return wanted

    def _lead_group(self, group: LedBlock, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute one call of a layer around blocks: as one CUDA graph, where that of the network is none."""
        graphed = self._graphs_of(group)
        if graphed is None or self._resting:
            return group.plain(*args, **kwargs)
        try:
            call, options = group.kind.arguments(type(group.module).forward, args, kwargs)
        except (TypeError, UnsupportedModel):
            options = None
        if not options or self._led is None:
            return group.plain(*args, **kwargs)
        place = group.path, tuple([(name, getattr(value, "shape", None)) for name, value in call.items()])
        if (outsides := self._outsides_in(group, place, call, options)) is None:
            return self._apart(group, place, args, kwargs, self._is_by_parts)[0]
        before = replace(self.share, eager=Counter(self.share.eager))

        def by_blocks() -> Tensors:
            return {"out": self._with_stand_ins_in(group, place, args, kwargs)}

        found = graphed(call, by_blocks, outsides, self._attend)
        self.share = before
        if found is not None:
            result, whole = found
            self.share.engine += whole.blocks
            self.share.outside += len(outsides)
            self._served |= {id(offer): offer for offer in whole.offers}
            options.update(copied(whole.left))
            return result["out"]
        by_parts = group in self._without_graph or not graphed.may_have_graph(call, outsides)
        self._earlier = {path: outside.given for path, outside in outsides.items()}
        try:
            result, share, served, found_out = self._apart(group, place, args, kwargs, by_parts)
        finally:
            self._earlier = {}
        if share.is_by_engines and _forms_of(found_out) == _forms_of(outsides):
            self._without_graph.discard(group)
            left = {name: copied(options[name]) for name in group.kind.writes if name in options}
            graphed.note(call, served, share.engine, left, found_out)
        else:
            self._without_graph.add(group)
        return result

    def _outsides_in(
        self, group: LedBlock, place: Hashable, call: Mapping[str, Any], options: dict[str, Any]
    ) -> dict[str, Outside] | None:
        """What others compute in the blocks of a group, by the blocks' paths; None where that is not known, or where
        they do more than that.

        Args:
            place: see `_apart`.
        """
        if any(not isinstance(value, torch.Tensor) or value.requires_grad for value in call.values()):
            return None
        if _is_left_alone(group, options):
            return {}
        blocks = self._led.inside.get(place, {}) if self._led is not None else {}
        names = frozenset().union(*(block.kind.names_outside for block in blocks))
        if not blocks or why_patched(options, group.reads, names, is_group=True) is not None:
            return None
        found, before = {}, {name: options[name] for name in group.kind.writes if name in options}
        try:
            for block, told in blocks.items():
                options.update(told)
                outside = outside_of(block.module, block.kind, options, {}, block.reads)
                if why_patched(options, block.reads, outside.names if outside else ()) is not None:
                    return None
                if outside is not None:
                    found[block.path] = replace(outside, tells=told)
            return found
        finally:
            for name in group.kind.writes:
                options.pop(name, None)
            options.update(before)

    def _with_stand_ins_in(
        self, group: LedBlock, place: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What a layer around blocks gives without a graph, with stand-ins for what is called out."""
        self._has_stand_ins = True
        try:
            return self._apart(group, place, args, kwargs)[0]
        finally:
            self._has_stand_ins = False

    def _apart(
        self,
        group: LedBlock,
        place: Hashable,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        by_parts: bool = False,
    ) -> tuple[Any, BlockShare, dict[int, BlockOffer], dict[str, Outside]]:
        """What a layer around blocks gives, what engines had to do with that, and what was called out of blocks, by
        their paths.

        Args:
            place: the same for calls of the same layer with the same shapes.
            by_parts: calls of single blocks may be CUDA graphs.
        """
        share, served, before, outer = self.share, self._served, self._is_by_parts, self._inside
        inside: _Inside = {}
        self.share, self._served, self._is_by_parts, self._inside = BlockShare(), {}, by_parts, inside
        try:
            result = group.plain(*args, **kwargs)
            if self.share.is_by_engines and self._led is not None:
                written = group.kind.writes
                told = {
                    block: {name: own[name] for name in written if name in own} for block, (_, own) in inside.items()
                }
                keep(self._led.inside, place, told, _GROUPS_KEPT)
            outsides = {block.path: outside for block, (outside, _) in inside.items() if outside is not None}
            return result, self.share, self._served, outsides
        finally:
            share.add(self.share)
            served.update(self._served)
            self.share, self._served, self._is_by_parts, self._inside = share, served, before, outer

    def _graphs_of(self, group: LedBlock) -> GraphedNetwork | None:
        """Those of the calls of a layer around blocks; None where there are none in this call of the network."""
        if not self._may_have_parts or self._led is None:
            return None
        if group not in self._graphed_groups:
            self._keep_graphs()
            common = self._network, self._led, self._device, self._module, self._settings, self._lying
            self._graphed_groups[group] = GraphedNetwork(*common, called_as_a_group, group.path)
        return self._graphed_groups[group]

    @property
    def _may_have_parts(self) -> bool:
        """Whether calls of single blocks and groups may be CUDA graphs in the call that is made now."""
        return self._is_by_parts and not self._hooks.by_hand and not is_capturing(self._device)

    def _compare(self, offer: BlockOffer, found: Any, wanted: Any) -> None:
        """Hold an engine's result against the block's; where memory does not suffice for that, a later one."""
        with suppress(torch.OutOfMemoryError):
            self._trials[id(offer)] = offer, compared(found, wanted)

    def _try_with_stand_ins(
        self,
        block: LedBlock,
        offer: BlockOffer,
        tensors: Sequence[torch.Tensor],
        options: dict[str, Any] | None,
        outside: Outside,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Compare an engine that calls something out with its block, both with stand-ins for what is called out.

        Another node's function may count its calls, or add noise: it is called once, by the block, for the picture.
        """
        stand_ins = StandIns(outside)
        try:
            wanted = self._with_stand_ins(block, stand_ins, options, args, kwargs)
        except self._hooks.interruptions:
            raise
        except torch.OutOfMemoryError:
            return
        except UnsupportedModel as error:
            return offer.refuse(str(error), is_final=False)
        except Exception as error:  # whatever the block makes of them: with what they stand for it goes on
            return offer.refuse(f"its engine cannot be compared ({type(error).__name__}: {error})", is_final=False)
        found = self._computed(block, offer, tensors, outside, stand_ins.in_the_engine)
        if not isinstance(found, str):
            offer.told = stand_ins.told
            self._compare(offer, found, wanted)

    def _with_stand_ins(
        self,
        block: LedBlock,
        stand_ins: StandIns,
        options: dict[str, Any] | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        given = block.kind.by_name(type(block.module).forward, args, kwargs)
        given.pop(OPTIONS, None)
        named = copied(given, with_tensors=True)
        if options is not None:
            named[OPTIONS] = stand_ins.in_the_place_of_others(copied(options, with_tensors=True))
        if block.kind.attends is not None:
            named[block.kind.attends] = exact_attention
        self._resting += 1
        try:
            with plain_attention(block.kind.attention):
                return block.plain(**named)
        finally:
            self._resting -= 1

    def _stored_in(self, block: LedBlock, dtype: torch.dtype) -> str:
        """How those of the block's weights lie that its engine casts itself, as a form has it; looked at once a run.

        Args:
            dtype: that it computes in.

        Raises:
            UnsupportedModel: engines do not take them.
        """
        if (known := self._stored.get((block, dtype))) is None:
            try:
                known = say_stored(stored_weights(block.module, self._device, dtype))
            except UnsupportedModel as error:
                known = error
            self._stored[block, dtype] = known
        if isinstance(known, str):
            return known
        raise UnsupportedModel(str(known))

    def _is_to_be_asked_for_again(self, offer: BlockOffer) -> bool:
        """Whether an offer without an engine may have one by now: once a run, by hand whatever the reason was."""
        if offer.engine is not None or offer.is_coming or id(offer) in self._asked:
            return False
        return not offer.is_final or self._hooks.by_hand

    def _plain(
        self,
        block: LedBlock,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        reason: str,
        outside: Outside | None = None,
    ) -> Any:
        """The block itself, whose parts may be on engines; of `outside` nothing is called again."""
        self.share.eager[reason] += 1
        with outside.given_already() if outside else nullcontext():
            return block.plain(*args, **kwargs)

    def _rest(
        self, block: LedBlock, args: tuple[Any, ...], kwargs: dict[str, Any], outside: Outside | None = None
    ) -> Any:
        """The block itself until its engine is ready; none is asked for its parts."""
        self.share.waiting += 1
        self._resting += 1
        try:
            with outside.given_already() if outside else nullcontext():
                return block.plain(*args, **kwargs)
        finally:
            self._resting -= 1

    def _ask(self, block: LedBlock, form: Any, tensors: Sequence[torch.Tensor], inputs: Any) -> BlockOffer:
        """Have an engine looked for, and built where the settings say so."""
        architecture = self._architecture(block, form, tensors)
        dtypes = tuple(tensor.dtype for tensor in tensors)
        try:
            precision = _precision_of(tensors)
        except UnsupportedModel as error:
            offer = BlockOffer(architecture, inputs, Precision.FP32)
            offer.refuse(str(error))
        else:
            optimize, policy = self._settings.effort, self._settings.policy
            offer = self._engines.offer(
                architecture, dtypes, precision, self._device, optimize, policy, self._hooks.by_hand
            )
        block.keep((form, inputs, self._device, self._settings.effort), offer)
        self._asked[id(offer)] = offer
        self._tried.pop(id(offer), None)  # of one that was forgotten
        return offer

    def _architecture(self, block: LedBlock, form: Any, tensors: Sequence[torch.Tensor]) -> ComfyBlock:
        example = {name: tuple(tensor.shape) for name, tensor in zip(tensor_names(form), tensors, strict=True)}
        axes = {name: block.kind.open_axes.get(name.partition(".")[0], ()) for name in example}
        return ComfyBlock(self._owner, block.path, form, example, axes)

    def _by_other_sizes(
        self, block: LedBlock, form: Any, tensors: Sequence[torch.Tensor], inputs: Any
    ) -> BlockOffer | None:
        """An engine that is known from calls of several other sizes, and takes this one; None where there is none."""
        alike, ones = (form, self._device, self._settings.effort), ones_of(inputs)
        known = [
            offer
            for (other, _, *rest), offer in block.offers.items()
            if (other, *rest) == alike and offer.is_trusted and not self._engines.is_refused(offer)
            if not offer.is_lent or ones_of(offer.inputs) == ones
        ]
        for (engine, is_lent), count in Counter((offer.engine, offer.is_lent) for offer in known).items():
            if engine is not None and count >= _SIZES and engine.accepts(inputs, ones_too=is_lent):
                model = next(offer for offer in known if (offer.engine, offer.is_lent) == (engine, is_lent))
                architecture = self._architecture(block, form, tensors)
                found = replace(model, architecture=architecture, inputs=inputs)
                block.keep((form, inputs, self._device, self._settings.effort), found)
                return found
        return None

    def _may_be_captured(self, block: LedBlock, offer: BlockOffer | None) -> bool:
        """Whether others may capture what an engine does: it has proved itself, and its weights lie where they stay."""
        if offer is None or offer.engine is None or not offer.is_trusted:
            return False
        return self._given.get((block, offer.engine)) is not None

    def _may_be_at_hand(self, block: LedBlock, tensors: Sequence[torch.Tensor]) -> bool:
        try:
            return self._are_at_hand(block, dtype_of(_precision_of(tensors)))
        except UnsupportedModel:
            return True  # which is told where its engine is asked for

    def _are_at_hand(self, block: LedBlock, dtype: torch.dtype) -> bool:
        """Whether a block's weights lie where they stay for the run, in what it computes in, or ComfyUI stages them in
        that, or its layers dequantise them at each call in any case and memory suffices for all of them at once; looked
        up once a run."""
        if block not in self._at_hand:
            found = [self._lying(dtype).get(f"{block.path}.{name}") for name, _ in block.module.named_parameters()]
            lie_there = all(tensor is not None and tensor.dtype == dtype for tensor in found)
            self._at_hand[block] = (
                lie_there
                or are_staged(block.module, dtype, self._device)
                or 0 < dequantised_bytes(block.module, dtype) <= self._room
            )
        return self._at_hand[block]

    @functools.cached_property
    def _room(self) -> int:
        """Bytes that were available on the device when it was asked first in this run."""
        return available(self._device)

    def _computed(
        self,
        block: LedBlock,
        offer: BlockOffer,
        tensors: Sequence[torch.Tensor],
        outside: Outside | None,
        stand_in: Attention | None,
    ) -> Any:
        """What an engine gives; or why the block has to compute itself, in words.

        Args:
            outside: what the engine calls out.
            stand_in: called in its place; None where it is called itself.
        """
        assert offer.engine is not None
        if id(offer) in self._too_large:
            return _TOO_LITTLE_MEMORY
        try:
            with ExitStack() as until, torch.no_grad():
                weights = self._weights(block, offer, until)
                if weights is None:
                    return _CAST
                if offer.is_trusted and weights is self._given.get((block, offer.engine)):
                    if (found := self._replayed(block, offer, tensors, weights, outside)) is not None:
                        return found
                if outside is not None:
                    until.enter_context(attention_by(functools.partial(self._attend, stand_in or outside.called())))
                if offer.is_trusted or self._tried[id(offer)]:
                    return offer.engine(tensors, weights)
                with self._engines.first_use(offer):
                    found = offer.engine(tensors, weights)
                    wait_for(self._device)
                    return found
        except self._hooks.interruptions:
            raise
        except AttentionFailed as failed:
            if isinstance(failed.error, torch.OutOfMemoryError):
                return _TOO_LITTLE_MEMORY
            if not isinstance(failed.error, UnsupportedModel):
                raise failed.error from None  # another node's own, as it would be in the block
            offer.refuse(str(failed.error), is_final=False)
            return offer.reason
        except UnsupportedModel as error:
            self._stored.clear()  # weights may be others than those that were looked at
            return str(error)
        except torch.OutOfMemoryError:
            self._too_large.add(id(offer))
            return _TOO_LITTLE_MEMORY
        except Exception as error:  # whatever compiled code, or ComfyUI's cast, raises: the picture goes on
            reason = f"its engine failed ({type(error).__name__}: {error})"
            self._engines.refuse(offer, reason)
            return reason

    def _replayed(
        self,
        block: LedBlock,
        offer: BlockOffer,
        tensors: Sequence[torch.Tensor],
        weights: list[torch.Tensor],
        outside: Outside | None,
    ) -> Any:
        """What the engine gives, by CUDA graphs of this block alone, or why they do not, in words; None where there are
        none."""
        if not self._may_have_parts or self._led is None:
            return None
        if self._graphed_blocks is None:
            self._keep_graphs()
            self._graphed_blocks = GraphedBlocks(
                self._network, self._device, self._module, self._led.parts, self._attend
            )
        return self._graphed_blocks(block, offer, tensors, weights, outside)

    def _attend(self, attention: Attention, *args: Any, **kwargs: Any) -> Any:
        """Attention in the midst of an engine. Blocks that it calls compute themselves, but for one that is called out
        as a whole: it has an engine of its own, of which the one around it knows nothing."""
        if layer_at(kwargs.get(PLACE, "")) is not None:
            return self._whole(functools.partial(attention, *args, **kwargs))
        self._resting += 1
        try:
            return attention(*args, **kwargs)
        finally:
            self._resting -= 1

    def _whole(self, compute: Callable[[], _Result]) -> _Result:
        """What a block in the midst of an engine gives, whose share is told when the call of the network is over."""
        outer = self.share, self._served, self._inside
        self.share, self._served, self._inside = BlockShare(), {}, None
        try:
            return compute()
        finally:
            self._shares.within.add(self.share)
            self.share, self._served, self._inside = outer

    def _weights(self, block: LedBlock, offer: BlockOffer, until: ExitStack) -> list[torch.Tensor] | None:
        """A block's weights as its engine takes them: looked up once a run where they lie where they stay.

        None where ComfyUI would have to cast them to another form for the engine, or memory lacks for all of them at
        once and they are large, and blocks were not asked for: that takes longer than it gains.
        """
        assert offer.engine is not None
        known, place, dtype = weights_of(block, offer), (block, offer.engine), dtype_of(offer.precision)
        if place not in self._given:
            self._given[place] = known.among(self._lying(dtype), block.path)
        if (given := self._given[place]) is not None:
            return given
        if not (self._are_asked_for or self._are_at_hand(block, dtype)):
            return None
        return known.of(block.module, self._device, until, may_copy=self._are_asked_for)

    def _lying(self, dtype: torch.dtype) -> Weights:
        """Those weights of the network that lie where they stay for the run, by name."""
        if not self._is_held:
            self._is_held = True
            self._hold.why_changed(self._layers)  # what the run begins with, see `_check_weights`
        return self._in_place(dtype)

    def _lying_soon_held(self, dtype: torch.dtype) -> Weights:
        """What `_lying` gives, for a graph: `whole` notes what the run begins with once the graph is launched."""
        self._is_held = True
        return self._in_place(dtype)

    def _check_weights(self) -> None:
        """Look weights up anew, at each call, once others changed them in the midst of the run."""
        if self._is_held and self._hold.why_changed(self._layers):
            if self._graphed_blocks is not None:
                self._graphed_blocks.forget_weights()
            self._graphed_groups.clear()
            self._in_place = lambda _: {}
            self._given = dict.fromkeys(self._given)
            self._stored.clear()
            self._at_hand.clear()

    def _settle(self) -> None:
        """Read what this call's trials gave: one wait for all of them."""
        trials, self._trials = [*self._trials.values()], {}
        for (offer, _), (error, is_finite) in zip(trials, read([trial for _, trial in trials]), strict=True):
            limit = self._limit(offer)
            self._tried[id(offer)] += 1
            if error <= limit:
                offer.is_trusted = True
                log.debug("Slipstream: checked an engine of blocks, relative error %.1e: %s", error, offer.digest[:12])
            elif is_finite:
                name = offer.architecture.fingerprint.architecture_name
                apart, allowed = say_share(error), say_share(limit)
                reason = f"the engine for {name} differs from the block by {apart} (allowed: {allowed})"
                self._engines.refuse(offer, reason)
            elif self._tried[id(offer)] >= _TRIALS:
                offer.refuse("the block computes NaN or Inf, so that its engine cannot be compared with it")

    def _limit(self, offer: BlockOffer) -> float:
        """The relative error with which an engine may serve."""
        is_in_tf32 = self._device.type == "cuda" and rounds_to_tf32()
        is_coarser = is_in_tf32 or any(each.ggml for each in offer.architecture.stored.values())
        return _COARSER if is_coarser and offer.precision is Precision.FP32 else ROUNDING[offer.precision]

    def _wait(self) -> None:
        """Wait for the engines that this run's calls lacked."""
        wished, self._wished = [*self._wished.values()], {}
        lacking = 0
        if tickets := tickets_of(offer.build for offer in wished if offer.is_coming):
            give_back_unused(self._device)  # build processes need memory of their own
            free = bytes_for_others(self._device)
            builds = builds_at_once(by_memory=len(tickets))
            lacking = 0 if free is None else builds * BUILD_DEVICE_BYTES - free
        try:
            with given_back(self._device, lacking):
                self._engines.wait_for(wished, self._hooks.progress, self._hooks.check_interrupted)
        except BaseException:
            for ticket in tickets_of(offer.build for offer in wished):
                ticket.cancel("the run that waited for it was interrupted")
            raise


def block_calls_of(
    network: torch.nn.Module,
    source: ModelSource,
    module: AcceleratedModule,
    settings: Settings,
    patcher: Any,
    ending: ExitStack,
    are_asked_for: bool = True,
) -> BlockCalls | None:
    """The calls of a network's blocks where these are to run on engines of their own.

    Args:
        patcher: of the network's model.
        ending: closed when the run is over.
        are_asked_for: see `BlockCalls`.
    """
    if not settings.runs_by_blocks(source.architecture.role, source.device.type):
        return None
    if settings.optimize is not Optimize.BLOCKS and module.provider.supply.never_builds:
        return None  # stores hold engines of whole models
    in_place = functools.partial(weights_in_place, patcher, network, ending=ending)
    owner = cast(Owner, source.architecture)
    options = getattr(patcher, "model_options", {}).get("transformer_options", {})
    parts = network, owner, source.device, module, settings.for_blocks
    return BlockCalls(*parts, in_place, ending, patches=patches_in(options), are_asked_for=are_asked_for)


def tickets_of(awaited: Iterable[AwaitedBuild]) -> list[Ticket]:
    """The builds, each once: blocks of a kind share theirs."""
    return [*dict.fromkeys(each.ticket for each in awaited if each.ticket is not None)]


def _is_left_alone(group: LedBlock, options: dict[str, Any]) -> bool:
    """Whether nothing of others has to do with what a layer around blocks gives."""
    if why_patched(options, group.reads, is_group=True) is not None:
        return False
    return outside_of(group.module, group.kind, options, {}, group.reads) is None


def _forms_of(outsides: Mapping[str, Outside]) -> dict[str, Any]:
    return {path: outside.form for path, outside in outsides.items()}


def _precision_of(tensors: Sequence[torch.Tensor]) -> Precision:
    """That a block computes in: the shortest of its inputs', since tables of positions come in fp32.

    Raises:
        UnsupportedModel: engines do not compute in it.
    """
    return precision_of(_dtype_of(tensors))


def _dtype_of(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    """Likewise, whatever it is."""
    found = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
    return min(found, key=lambda dtype: dtype.itemsize, default=torch.int64)
