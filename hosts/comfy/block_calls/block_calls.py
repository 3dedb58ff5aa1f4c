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
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch

from ....compile_backend.blocks.attention_out import Attention, AttentionFailed, attention_by
from ....compile_backend.blocks.call_form import taken_apart
from ....core.dtypes import dtype_of
from ....core.errors import UnsupportedModel
from ....core.protocols import ModelSource, Tensors
from ....core.spec import Optimize, Role
from ....core.streams import is_capturing, wait_for
from ....runtime.blocks.block_engines import BlockOffer
from ....runtime.checking.step_times import id_of_blocks
from ....runtime.module import AcceleratedModule, ByBlocks, Run, Waiting
from ....runtime.planning.plan import CallShape
from ....runtime.settings.model_settings import BuildPolicy, Settings
from ...model_patches import why_not_in_this_mode
from ...stand_in import copied
from ..blocks.block_architecture import STORED, Owner
from ..blocks.block_classes import OPTIONS, PLACE, layer_at
from ..blocks.block_patches import patches_in, why_patched
from ..blocks.computed_outside import Outside, StandIns, exact_attention, outside_of
from ..blocks.led_network import LedBlock, LedNetwork, keep, led_network
from ..models.diffusion_model import plain_attention
from ..process.build_waiting import waiting_hooks
from ..process.current_weights import places_of
from ..process.dynamic_vram import weights_in_place
from .block_share import BlockShare
from .graphed_blocks import GraphedBlocks
from .graphed_network import Called, GraphedNetwork, called_as_a_group, each_once
from .run_offers import RunOffers, dtype_of_inputs, precision_of_inputs
from .run_weights import RunWeights, Weights
from .trials import EngineTrials

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")

_Inside = dict[LedBlock, tuple[Outside | None, dict[str, Any]]]
"""Blocks in a group, with what is called out of them, and the options that they are told."""

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
        self._module = module
        self._engines, self._settings, self._status = module.provider.blocks, settings, module.status
        self._are_asked_for = are_asked_for and settings.optimize is Optimize.BLOCKS
        self._hooks = replace(waiting_hooks(), by_hand=module.by_hand)
        self._weights = RunWeights(network, device, in_place, self._are_asked_for)
        self._offers = RunOffers(owner, device, module, settings, self._hooks)
        self._trials = EngineTrials(self._engines, device)
        self._too_large: set[int] = set()
        """Offers whose engines ran out of memory in this run, by id."""
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
        self._times = module.provider.step_times
        timed_by = "step" if owner.role is Role.UNET else "call"
        self.id = id_of_blocks(owner.fingerprint.architecture, device, timed_by, patches)
        self._places = places_of(device)
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
        was_held, call = self._weights.is_held, each_once(call)
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
                self._network, led, self._device, self._module, self._settings, self._weights.lying_soon_held, called
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
        self._trials.settle()
        if self._graphed_blocks is not None:
            self._graphed_blocks.settle()
        self._offers.tell_builds()
        if self._settings.policy is BuildPolicy.FIRST_USE or self._hooks.by_hand:
            self._offers.wait()
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
            if stored := self._weights.stored_in(block, dtype_of_inputs(tensors)):
                form = tuple(sorted((*form, *taken_apart({STORED: stored})[0])))
        except TypeError as error:
            return self._plain(block, args, kwargs, f"it is called in an unknown way ({error})")
        except UnsupportedModel as error:
            return self._plain(block, args, kwargs, str(error))
        inputs = tuple([(tensor.shape, tensor.dtype) for tensor in tensors])
        offer = self._offers.known(block, form, inputs)
        if offer is None and self._is_seldom_called:
            offer = self._offers.by_other_sizes(block, form, tensors, inputs)
        if is_capturing(self._device) and not self._may_be_captured(block, offer):
            return self._plain(block, args, kwargs, _CAPTURED, outside)
        if offer is None or self._offers.is_to_be_asked_for_again(offer):
            if not (self._are_asked_for or self._may_be_at_hand(block, tensors)):
                return self._plain(block, args, kwargs, _CAST, outside)
            offer = self._offers.ask(block, form, tensors, inputs)
            self._trials.forget(offer)
        engine = offer.engine
        if engine is None:
            if offer.is_coming:
                self._offers.wish(offer)
                return self._rest(block, args, kwargs, outside)
            self.share.without += 1
            return self._plain(block, args, kwargs, offer.reason, outside)
        if self._engines.is_refused(offer):
            offer.refuse("its engine was found wrong", is_final=False)
            return self._plain(block, args, kwargs, offer.reason, outside)
        if not offer.is_trusted and self._trials.has_one(offer):
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
        self._trials.compare(offer, found, wanted)
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
            common = self._network, self._led, self._device, self._module, self._settings, self._weights.lying
            self._graphed_groups[group] = GraphedNetwork(*common, called_as_a_group, group.path)
        return self._graphed_groups[group]

    @property
    def _may_have_parts(self) -> bool:
        """Whether calls of single blocks and groups may be CUDA graphs in the call that is made now."""
        return self._is_by_parts and not self._hooks.by_hand and not is_capturing(self._device)

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
            self._trials.compare(offer, found, wanted)

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

    def _may_be_captured(self, block: LedBlock, offer: BlockOffer | None) -> bool:
        """Whether others may capture what an engine does: it has proved itself, and its weights lie where they stay."""
        return offer is not None and offer.is_trusted and self._weights.staying(block, offer.engine) is not None

    def _may_be_at_hand(self, block: LedBlock, tensors: Sequence[torch.Tensor]) -> bool:
        try:
            return self._weights.are_at_hand(block, dtype_of(precision_of_inputs(tensors)))
        except UnsupportedModel:
            return True  # which is told where its engine is asked for

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
                weights = self._weights.of(block, offer, until)
                if weights is None:
                    return _CAST
                if offer.is_trusted and weights is self._weights.staying(block, offer.engine):
                    if (found := self._replayed(block, offer, tensors, weights, outside)) is not None:
                        return found
                if outside is not None:
                    until.enter_context(attention_by(functools.partial(self._attend, stand_in or outside.called())))
                if offer.is_trusted or self._trials.had_one(offer):
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
            self._weights.forget_stored()
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

    def _check_weights(self) -> None:
        """Look weights up anew, at each call, once others changed them in the midst of the run."""
        if self._weights.forget_if_changed():
            if self._graphed_blocks is not None:
                self._graphed_blocks.forget_weights()
            self._graphed_groups.clear()


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


def _is_left_alone(group: LedBlock, options: dict[str, Any]) -> bool:
    """Whether nothing of others has to do with what a layer around blocks gives."""
    if why_patched(options, group.reads, is_group=True) is not None:
        return False
    return outside_of(group.module, group.kind, options, {}, group.reads) is None


def _forms_of(outsides: Mapping[str, Outside]) -> dict[str, Any]:
    return {path: outside.form for path, outside in outsides.items()}
