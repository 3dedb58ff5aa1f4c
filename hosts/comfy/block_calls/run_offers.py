"""The engines of blocks that one sampling run asks for, and the builds that it waits for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ....compile_backend.blocks.call_form import tensor_names
from ....compile_backend.blocks.engine import ones_of
from ....core.dtypes import precision_of
from ....core.errors import UnsupportedModel
from ....core.spec import Precision
from ....runtime.blocks.block_engines import BUILD_DEVICE_BYTES, AwaitedBuild, BlockOffer, builds_at_once
from ....runtime.building.build_queue import Ticket
from ....runtime.loaded.device_memory import bytes_for_others, give_back_unused
from ....runtime.module import AcceleratedModule
from ....runtime.provider import HostHooks
from ....runtime.settings.model_settings import Settings
from ..blocks.block_architecture import ComfyBlock, Owner
from ..blocks.led_network import BlockCall, LedBlock
from ..process.staged_pages import given_back

_SIZES = 2
"""In how many sizes an engine is compared before it serves in others unseen, where calls are few."""


class RunOffers:
    """The offers for the calls of a network's blocks in one run.

    Args:
        owner: the network's architecture.
        module: is told which builds the run waits for.
    """

    def __init__(
        self, owner: Owner, device: torch.device, module: AcceleratedModule, settings: Settings, hooks: HostHooks
    ) -> None:
        self._owner, self._device, self._settings, self._hooks = owner, device, settings, hooks
        self._engines, self._status = module.provider.blocks, module.status
        self._asked: dict[int, BlockOffer] = {}
        """Those that this run asked for, by id."""
        self._wished: dict[int, BlockOffer] = {}
        """Those on their way that calls lacked since the last wait, by id."""
        self._awaited: dict[int, AwaitedBuild] = {}
        """Builds that the calls of this run wait for, or waited for, by the offers' ids."""

    def known(self, block: LedBlock, form: Any, inputs: Any) -> BlockOffer | None:
        """The offer for calls in this form and these sizes; None where nobody asked for one yet."""
        return block.offers.get(self._call(form, inputs))

    def _call(self, form: Any, inputs: Any) -> BlockCall:
        return BlockCall(form, inputs, self._device, self._settings.effort)

    def ask(self, block: LedBlock, form: Any, tensors: Sequence[torch.Tensor], inputs: Any) -> BlockOffer:
        """Have an engine looked for, and built where the settings say so."""
        architecture = self._architecture(block, form, tensors)
        dtypes = tuple(tensor.dtype for tensor in tensors)
        try:
            precision = precision_of_inputs(tensors)
        except UnsupportedModel as error:
            offer = BlockOffer(architecture, inputs, Precision.FP32)
            offer.refuse(str(error))
        else:
            optimize, policy = self._settings.effort, self._settings.policy
            offer = self._engines.offer(
                architecture, dtypes, precision, self._device, optimize, policy, self._hooks.by_hand
            )
        block.keep(self._call(form, inputs), offer)
        self._asked[id(offer)] = offer
        return offer

    def is_to_be_asked_for_again(self, offer: BlockOffer) -> bool:
        """Whether an offer without an engine may have one by now: once a run, by hand whatever the reason was."""
        if offer.engine is not None or offer.is_coming or id(offer) in self._asked:
            return False
        return not offer.is_final or self._hooks.by_hand

    def by_other_sizes(
        self, block: LedBlock, form: Any, tensors: Sequence[torch.Tensor], inputs: Any
    ) -> BlockOffer | None:
        """An engine that is known from calls of several other sizes, and takes this one; None where there is none."""
        call, ones = self._call(form, inputs), ones_of(inputs)
        known = [
            offer
            for other, offer in block.offers.items()
            if other._replace(inputs=inputs) == call and offer.is_trusted and not self._engines.is_refused(offer)
            if not offer.is_lent or ones_of(offer.inputs) == ones
        ]
        for (engine, is_lent), count in Counter((offer.engine, offer.is_lent) for offer in known).items():
            if engine is not None and count >= _SIZES and engine.accepts(inputs, ones_too=is_lent):
                model = next(offer for offer in known if (offer.engine, offer.is_lent) == (engine, is_lent))
                found = replace(model, architecture=self._architecture(block, form, tensors), inputs=inputs)
                block.keep(call, found)
                return found
        return None

    def _architecture(self, block: LedBlock, form: Any, tensors: Sequence[torch.Tensor]) -> ComfyBlock:
        example = {name: tuple(tensor.shape) for name, tensor in zip(tensor_names(form), tensors, strict=True)}
        axes = {name: block.kind.open_axes.get(name.partition(".")[0], ()) for name in example}
        return ComfyBlock(self._owner, block.path, form, example, axes)

    def wish(self, offer: BlockOffer) -> None:
        """A call lacked this engine, which is on its way."""
        self._wished[id(offer)] = offer

    def tell_builds(self) -> None:
        """Let the node show the builds that this run waits for, from its first one on."""
        self._awaited |= {number: offer.build for number, offer in self._wished.items()}
        if self._awaited:
            awaited = [*self._awaited.values()]
            self._status.block_builds = lambda: _tickets_of(awaited)
            self._status.on_change()

    def wait(self) -> None:
        """Wait for the engines that this run's calls lacked."""
        wished, self._wished = [*self._wished.values()], {}
        lacking = 0
        if tickets := _tickets_of(offer.build for offer in wished if offer.is_coming):
            give_back_unused(self._device)  # build processes need memory of their own
            free = bytes_for_others(self._device)
            builds = builds_at_once(by_memory=len(tickets))
            lacking = 0 if free is None else builds * BUILD_DEVICE_BYTES - free
        try:
            with given_back(self._device, lacking):
                self._engines.wait_for(wished, self._hooks.progress, self._hooks.check_interrupted)
        except BaseException:
            for ticket in _tickets_of(offer.build for offer in wished):
                ticket.cancel("the run that waited for it was interrupted")
            raise


def _tickets_of(awaited: Iterable[AwaitedBuild]) -> list[Ticket]:
    """The builds, each once: blocks of a kind share theirs."""
    return [*dict.fromkeys(each.ticket for each in awaited if each.ticket is not None)]


def precision_of_inputs(tensors: Sequence[torch.Tensor]) -> Precision:
    """That a block computes in, by its inputs.

    Raises:
        UnsupportedModel: engines do not compute in it.
    """
    return precision_of(dtype_of_inputs(tensors))


def dtype_of_inputs(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    """Likewise, whatever it is: the shortest of theirs, since tables of positions come in fp32."""
    found = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
    return min(found, key=lambda dtype: dtype.itemsize, default=torch.int64)
