"""The weights of a network's blocks in one sampling run, as engines take them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import ExitStack

import torch

from ....compile_backend.blocks.engine import BlockEngine
from ....core.dtypes import dtype_of
from ....core.errors import UnsupportedModel
from ....runtime.blocks.block_engines import BlockOffer
from ...live_model.held_weights import Hold
from ...live_model.layer_walk import layers_of
from ..blocks.block_architecture import say_stored
from ..blocks.block_weights import are_staged, dequantised_bytes, stored_weights
from ..blocks.led_network import LedBlock, weights_of
from ..process.free_memory import available

Weights = Mapping[str, torch.Tensor]
"""By their names in the network."""


class RunWeights:
    """Where the weights of blocks lie: looked up once a run, and anew once others changed them in its midst.

    Args:
        in_place: gives those weights of the network that lie on its device, where it computes in a dtype, for the
            length of the run.
        are_asked_for: see `BlockCalls`.

    Attributes:
        is_held: whether it was noted, or soon is, which weights the run began with.
    """

    def __init__(
        self,
        network: torch.nn.Module,
        device: torch.device,
        in_place: Callable[[torch.dtype], Weights],
        are_asked_for: bool,
    ) -> None:
        self._device, self._are_asked_for = device, are_asked_for
        self._in_place: Callable[[torch.dtype], Weights] = functools.cache(in_place)
        self._layers = [*layers_of(network).values()]
        self._staying: dict[tuple[LedBlock, BlockEngine], list[torch.Tensor] | None] = {}
        """As engines take them; None where ComfyUI has to cast them at each call."""
        self._stored: dict[tuple[LedBlock, torch.dtype], str | UnsupportedModel] = {}
        """How those lie that are cast at each call; or why engines do not take them."""
        self._at_hand: dict[LedBlock, bool] = {}
        self._hold = Hold()
        self.is_held = False

    def of(self, block: LedBlock, offer: BlockOffer, until: ExitStack) -> list[torch.Tensor] | None:
        """A block's weights as its engine takes them.

        None where ComfyUI would have to cast them to another form for the engine, or memory lacks for all of them at
        once and they are large, and blocks were not asked for: that takes longer than it gains.

        Args:
            until: closed once the call has been made.

        Raises:
            UnsupportedModel: they are of a kind, or of a shape, that the engine does not take.
        """
        assert offer.engine is not None
        known, place, dtype = weights_of(block, offer), (block, offer.engine), dtype_of(offer.precision)
        if place not in self._staying:
            self._staying[place] = known.among(self.lying(dtype), block.path)
        if (staying := self._staying[place]) is not None:
            return staying
        if not (self._are_asked_for or self.are_at_hand(block, dtype)):
            return None
        return known.of(block.module, self._device, until, may_copy=self._are_asked_for)

    def staying(self, block: LedBlock, engine: BlockEngine | None) -> list[torch.Tensor] | None:
        """What `of` found to lie where it stays for the run; None where it found none, or was not asked yet."""
        return None if engine is None else self._staying.get((block, engine))

    def stored_in(self, block: LedBlock, dtype: torch.dtype) -> str:
        """How those of the block's weights lie that its engine casts itself, as a form has it.

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

    def forget_stored(self) -> None:
        """Weights may be others than those that were looked at."""
        self._stored.clear()

    def are_at_hand(self, block: LedBlock, dtype: torch.dtype) -> bool:
        """Whether a block's weights lie where they stay for the run, in what it computes in, or ComfyUI stages them in
        that, or its layers dequantise them at each call in any case and memory suffices for all of them at once."""
        if block not in self._at_hand:
            found = [self.lying(dtype).get(f"{block.path}.{name}") for name, _ in block.module.named_parameters()]
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

    def lying(self, dtype: torch.dtype) -> Weights:
        """Those weights of the network that lie where they stay for the run."""
        if not self.is_held:
            self.is_held = True
            self._hold.why_changed(self._layers)  # what the run begins with, see `forget_if_changed`
        return self._in_place(dtype)

    def lying_soon_held(self, dtype: torch.dtype) -> Weights:
        """What `lying` gives, for a graph: once it is launched, `forget_if_changed` notes what the run begins with."""
        self.is_held = True
        return self._in_place(dtype)

    def forget_if_changed(self) -> bool:
        """Whether others changed weights in the midst of the run; from then on they are looked up at each call."""
        if not self.is_held or not self._hold.why_changed(self._layers):
            return False
        self._in_place = lambda _: {}
        self._staying = dict.fromkeys(self._staying)
        self._stored.clear()
        self._at_hand.clear()
        return True
