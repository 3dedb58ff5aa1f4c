"""The blocks of a live network, and how their calls are led elsewhere for the length of one call of the network.

The blocks stay where they are. A block's call is led by an attribute `forward` of the instance, which torch calls in
place of the class's, hooks around it included; it is there only while the network is called.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ....core.spec import Optimize
from ....runtime.blocks.block_engines import BlockOffer
from ...architecture import Remembered
from ...live_model.account import is_own_method, live_model, names_read
from ...live_model.layer_walk import layers_of
from .block_architecture import Owner, block_digest
from .block_classes import BlockClass, block_class_of, group_class_of
from .block_weights import BlockWeights
from .network_copy import NetworkCopy

_FORWARD = "forward"

Lead = Callable[["LedBlock", tuple[Any, ...], dict[str, Any]], Any]
"""Given a block and the arguments of its call, what computes in its place."""


class BlockCall(NamedTuple):
    """Calls of a block that one engine computes, by form, shapes, device, and how far the engine is optimised."""

    form: Any
    inputs: Any
    device: torch.device
    effort: Optimize


Offers = dict[BlockCall, BlockOffer]

_OFFERS_KEPT = 256
"""By a kind of block: calls of more sizes than so many forget the first ones."""


class LedBlock:
    """One block of a live network.

    Attributes:
        path: in the network.
        kind: its class's row.
        reads: all names that its code knows.
        offers: by calls; shared with all blocks of its kind.
        weights: where they lie, by engines' wants; shared likewise.
    """

    def __init__(self, path: str, module: torch.nn.Module, kind: BlockClass, facts: tuple[Any, ...]) -> None:
        self.path, self.module, self.kind = path, module, kind
        self.offers: Offers
        self.reads, self.offers, self.weights = facts
        self._class_forward: Any = type(module).forward
        self.lead: Lead | None = None
        self._thread = 0
        self._left: dict[str, Any] = {}
        """What lay in the place of the attribute by which its calls are led."""

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """The block itself, without the hooks on it, which run around this."""
        return self._class_forward(self.module, *args, **kwargs)

    def keep(self, call: BlockCall, offer: BlockOffer) -> None:
        """Note what may compute such calls."""
        keep(self.offers, call, offer, _OFFERS_KEPT)

    @property
    def can_be_led(self) -> bool:
        """Whether nobody else leads its calls."""
        return _FORWARD not in self.module.__dict__ or is_own_method(self.module, _FORWARD)

    def begin(self, lead: Lead) -> None:
        """From now on its calls go to `lead`, if they come from this thread."""
        self.lead, self._thread = lead, threading.get_ident()
        own = self.module.__dict__
        self._left = {_FORWARD: own[_FORWARD]} if _FORWARD in own else {}
        own[_FORWARD] = self._forward

    def end(self) -> None:
        own = self.module.__dict__
        if own.get(_FORWARD) == self._forward:  # else somebody put another one there meanwhile
            del own[_FORWARD]
            own.update(self._left)
        self.lead = None

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.lead is None or self._thread != threading.get_ident():
            return self.plain(*args, **kwargs)
        return self.lead(self, args, kwargs)


def keep(known: dict[Any, Any], key: Any, value: Any, most: int) -> None:
    """Note a value in the place of the one that was noted first, where there are as many as may be."""
    while len(known) >= most and key not in known:
        del known[next(iter(known))]
    known[key] = value


class LedNetwork:
    """The blocks of one live network. See `led_network`.

    Args:
        owner: the network's architecture.

    Attributes:
        groups: layers around several of the blocks.
        inside: of the calls of a group in certain shapes: its blocks, each with the options that the group tells it.
        reads: all names that the network's code knows.
        wholes: what is known of the network's calls, for `GraphedNetwork`.
        parts: what is known of its blocks' calls, for `GraphedBlocks`.
        said: the reasons for which blocks compute themselves that were logged.
    """

    def __init__(self, network: torch.nn.Module, owner: Owner) -> None:
        self.owner = owner
        self._lock = threading.Lock()
        self.blocks = [*_blocks_of(network, owner)]
        self.groups = [*_groups_of(network, owner)]
        self._paths = tuple(block.path for block in (*self.blocks, *self.groups))
        self.reads = _names_known(network)
        self.inside: dict[Any, Mapping[LedBlock, Mapping[str, Any]]] = {}
        self.wholes: dict[Any, Any] = {}
        self.parts: dict[Any, Any] = {}
        self.said: set[str] = set()

    @functools.cached_property
    def copied(self) -> NetworkCopy:
        """A copy of the network's code without weights."""
        return NetworkCopy(self.owner.fresh)

    def is_of(self, network: torch.nn.Module) -> bool:
        """Whether the network still has these blocks."""
        return all(_layer_at(network, block.path) is block.module for block in (*self.blocks, *self.groups))

    @contextmanager
    def leading(
        self, network: torch.nn.Module, lead: Lead, lead_group: Lead, is_unchanged: bool = False
    ) -> Iterator[dict[str, str]]:
        """Meanwhile calls of the blocks in this thread go to `lead`, and those of groups to `lead_group`; gives why
        some blocks' do not, by path.

        Args:
            is_unchanged: it was found just now that nothing of the network was changed.

        Where another thread leads them already, none is led.
        """
        if not self._lock.acquire(blocking=False):
            yield {}
            return
        led: list[LedBlock] = []
        try:
            changed = {} if is_unchanged else self._changed(network)
            for blocks, calls in ((self.blocks, lead), (self.groups, lead_group)):
                for block in blocks:
                    if block.path not in changed and block.can_be_led:
                        led.append(block)
                        block.begin(calls)
            yield {block.path: changed[block.path] for block in self.blocks if block.path in changed}
        finally:
            for block in led:
                block.end()
            self._lock.release()

    def _changed(self, network: torch.nn.Module) -> dict[str, str]:
        """What others changed in blocks and groups, in words, by their paths."""
        return live_model(network, self.owner, self.owner.is_part).changed_parts(self._paths)


class _Last:
    """The blocks that a network had when it was asked last."""

    led: LedNetwork | None = None


_known: Remembered[_Last] = Remembered()


def led_network(network: torch.nn.Module, owner: Owner) -> LedNetwork:
    """The blocks of a live network, the same ones as long as it has these."""
    last = _known.get(network, owner.fingerprint.architecture, _Last)
    if last.led is None or not last.led.is_of(network):
        last.led = LedNetwork(network, owner)
    return last.led


def _blocks_of(network: torch.nn.Module, owner: Owner) -> Iterator[LedBlock]:
    facts: dict[str, tuple[Any, ...]] = {}
    fresh = layers_of(owner.fresh)
    for path, module in layers_of(network).items():
        kind = block_class_of(module)
        if kind is None or path == "" or type(fresh.get(path)) is not type(module):
            continue
        digest = block_digest(fresh[path])
        if digest not in facts:
            facts[digest] = _names_known(module), {}, {}
        yield LedBlock(path, module, kind, facts[digest])


def _groups_of(network: torch.nn.Module, owner: Owner) -> Iterator[LedBlock]:
    fresh = layers_of(owner.fresh)
    for path, module in layers_of(network).items():
        kind = group_class_of(module)
        if kind is not None and type(fresh.get(path)) is type(module):
            yield LedBlock(path, module, kind, (_names_known(module), {}, {}))


def _layer_at(network: torch.nn.Module, path: str) -> torch.nn.Module | None:
    """The layer of a path; None where there is none any more. Quicker for some layers than a walk over all."""
    layer: torch.nn.Module | None = network
    for name in path.split("."):
        if layer is None:
            break
        layer = layer._modules[name] if name in layer._modules else None  # those of scripted layers are no dict
    return layer


def _names_known(block: torch.nn.Module) -> frozenset[str]:
    kinds: set[Any] = {type(layer) for layer in layers_of(block).values()}
    ours = (kind for kind in kinds if not kind.__module__.startswith("torch."))
    return frozenset().union(*map(names_read, ours))


def weights_of(block: LedBlock, offer: BlockOffer) -> BlockWeights:
    """Where the weights that an offer's engine takes lie in a block."""
    assert offer.engine is not None
    if (known := block.weights.get(offer.engine)) is None:
        known = block.weights[offer.engine] = BlockWeights(offer.engine.weights, offer.architecture.stored)
    return known
