"""Calls of a network in which blocks are reused: the network's own forward runs as ever, and blocks that are left out
give what an earlier call had them give.

A block that is computed is computed by whatever would compute it anyway: itself, an engine, another extension's code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ....core.errors import UnsupportedModel
from ....sampling.block_caching import BlockCaching, DeepCache, relative_change
from ..models.model_classes import BlockStack, class_of
from .block_classes import BlockClass, block_class_of

_FORWARD = "forward"

_OWN_WAY = "another extension computes the model's blocks in a way of its own"
_TOO_LITTLE_MEMORY = "memory does not suffice for what would be reused"

Streams = list[torch.Tensor | None]
"""What goes from block to block, in the order of `BlockStack.results`; None where the last block gives none of it."""


class CachedCall(Protocol):
    """One call of a network.

    Attributes:
        is_reused: whether blocks were left out.
        why_none: why a whole call leaves nothing, where it does.
    """

    is_reused: bool
    why_none: str

    def leading(self) -> AbstractContextManager[None]:
        """A context in which the network is called; may be entered again for the same call."""
        ...

    @property
    def kept(self) -> Any:
        """What a whole call leaves for the next ones, or None."""
        ...


@contextmanager
def _led(module: torch.nn.Module, around: Callable[..., Any]) -> Iterator[None]:
    """Meanwhile calls of a module go to `around`, which is given what computed them until now, and their arguments."""
    attributes = vars(module)
    before = attributes.get(_FORWARD)
    attributes[_FORWARD] = functools.partial(around, module.forward)
    try:
        yield
    finally:
        if before is None:
            del attributes[_FORWARD]
        else:
            attributes[_FORWARD] = before


@dataclass(frozen=True)
class _Stack:
    """The blocks of one `BlockStack` in a live network, all of one class."""

    row: BlockStack
    blocks: tuple[torch.nn.Module, ...]
    kind: BlockClass

    def streams(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Streams | None:
        """Of the arguments of a block's call; None where it is called in an unknown way."""
        try:
            given, _ = self.kind.arguments(type(self.blocks[0]).forward, args, kwargs)
            return [given[name] for name in self.row.results]
        except (KeyError, TypeError):
            return None

    def read(self, result: Any) -> Streams:
        """What a block gave."""
        return [*result] if isinstance(result, (tuple, list)) else [result]

    def give(self, streams: Streams) -> Any:
        """As a block gives it."""
        return streams[0] if len(self.row.results) == 1 else tuple(streams)

    @property
    def picture(self) -> int:
        return self.row.results.index(self.row.picture)


@dataclass
class KeptStacks:
    """What a whole call of a transformer leaves.

    Attributes:
        residual: the first block's output minus its input, [B, tokens, channels], of the picture's tokens.
        changes: by stack, its last output minus its first input; of the first stack minus the first block's output.
    """

    residual: torch.Tensor
    changes: dict[str, Streams]


@dataclass
class _Seen:
    """What a call's blocks did so far.

    Attributes:
        blocks: how many were called, each once and in their order.
        in_order: whether all were, on what the one before gave.
        last: what the last one gave.
        starts: by stack, copies of what its changes are measured from: blocks write into their inputs.
    """

    blocks: int = 0
    in_order: bool = True
    last: Streams = field(default_factory=list)
    residual: torch.Tensor | None = None
    starts: dict[str, Streams] = field(default_factory=dict)
    changes: dict[str, Streams] = field(default_factory=dict)


class FirstBlockCall:
    """One call of a transformer, see `FirstBlockCache`.

    Args:
        before: what the last whole call left; None has this one computed whole.
    """

    def __init__(self, stacks: Sequence[_Stack], before: KeptStacks | None, threshold: float) -> None:
        self._stacks, self._before, self._threshold = stacks, before, threshold
        self._numbers = {block: number for number, block in enumerate(each for s in stacks for each in s.blocks)}
        self._seen = _Seen()
        self.is_reused, self.why_none = False, _OWN_WAY

    @contextmanager
    def leading(self) -> Iterator[None]:
        self._seen, self.is_reused = _Seen(), False
        with ExitStack() as until:
            for stack in self._stacks:
                for block in stack.blocks:
                    until.enter_context(_led(block, functools.partial(self._call, stack, block)))
            yield

    @property
    def kept(self) -> KeptStacks | None:
        seen = self._seen
        if self.is_reused or not seen.in_order or seen.blocks != len(self._numbers) or seen.residual is None:
            return None
        return KeptStacks(seen.residual, seen.changes)

    def _call(self, stack: _Stack, block: torch.nn.Module, forward: Callable[..., Any], *args: Any, **kw: Any) -> Any:
        given, number = stack.streams(args, kw), self._numbers[block]
        if self.is_reused and number and given is not None:
            return self._reused(stack, block, given)
        self._note(lambda: self._note_before(stack, block, given))
        result = forward(*args, **kw)
        self._note(lambda: self._note_after(stack, block, stack.read(result)))
        return result

    def _note(self, what: Callable[[], None]) -> None:
        """As long as all went as it should."""
        if self._seen.in_order:
            try:
                what()
            except torch.OutOfMemoryError:
                self._give_up(_TOO_LITTLE_MEMORY)

    def _reused(self, stack: _Stack, block: torch.nn.Module, given: Streams) -> Any:
        if block is not stack.blocks[-1]:
            return stack.give(given)
        assert self._before is not None
        changes = zip(given, self._before.changes[stack.row.name], strict=True)
        return stack.give([None if one is None or change is None else one + change for one, change in changes])

    def _note_before(self, stack: _Stack, block: torch.nn.Module, given: Streams | None) -> None:
        seen, number = self._seen, self._numbers[block]
        is_next = given is not None and seen.blocks == number
        if is_next and block is not stack.blocks[0]:
            is_next = all(one is other for one, other in zip(given or (), seen.last, strict=True))
        if not is_next:
            self._give_up()
        elif block is stack.blocks[0]:
            seen.starts[stack.row.name] = _copies(given or [])

    def _note_after(self, stack: _Stack, block: torch.nn.Module, result: Streams) -> None:
        seen, name, picture = self._seen, stack.row.name, stack.picture
        if not _are_alike(result, seen.starts[name]):
            self._give_up()
            return
        seen.blocks += 1
        seen.last = result
        if seen.blocks == 1:
            start, found = seen.starts[name][picture], result[picture]
            if start is None or found is None:
                self._give_up()
                return
            seen.residual = torch.sub(found, start, out=start)
            seen.starts[name] = _copies(result)
            self.is_reused = self._is_near(seen.residual)
            if not self.is_reused:
                self._before = None  # its memory is for what this call leaves
        if block is stack.blocks[-1]:
            pairs = zip(result, seen.starts.pop(name), strict=True)
            seen.changes[name] = [
                None if one is None or start is None else torch.sub(one, start, out=start) for one, start in pairs
            ]

    def _is_near(self, residual: torch.Tensor) -> bool:
        before = self._before
        if before is None or before.residual.shape != residual.shape:
            return False
        return relative_change(residual, before.residual) < self._threshold

    def _give_up(self, reason: str = _OWN_WAY) -> None:
        """Leave nothing for the next calls."""
        self._seen, self.why_none = _Seen(in_order=False), reason


def _are_alike(result: Streams, start: Streams) -> bool:
    """Whether a block gave what has the forms of what its stack began with, or none of some of it."""
    if len(result) != len(start) or all(each is None for each in result):
        return False
    pairs = [(one, other) for one, other in zip(result, start, strict=True) if one is not None and other is not None]
    return all(torch.is_tensor(one) and (one.shape, one.dtype) == (other.shape, other.dtype) for one, other in pairs)


def _copies(streams: Streams) -> Streams:
    return [None if each is None else each.clone() for each in streams]


class DeepCall:
    """One call of a UNet, see `DeepCache`.

    Args:
        layers: of the part below the top level, in the order of their calls.
        before: what that part gave to the top level in the last whole call, [B, C, H, W]; None has this one computed
            whole.
    """

    def __init__(self, layers: Sequence[torch.nn.Module], before: torch.Tensor | None) -> None:
        self._layers, self._before = layers, before
        self.is_reused, self.why_none = before is not None, _OWN_WAY
        self._found: list[torch.Tensor] = []

    @contextmanager
    def leading(self) -> Iterator[None]:
        self._found = []
        with ExitStack() as until:
            if self.is_reused:
                for layer in self._layers[:-1]:
                    until.enter_context(_led(layer, _left_out))
            until.enter_context(_led(self._layers[-1], self._last))
            yield

    @property
    def kept(self) -> torch.Tensor | None:
        return self._found[0] if len(self._found) == 1 else None

    def _last(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._before is not None:
            return self._before
        self._found.append(found := forward(*args, **kwargs))
        return found


def _left_out(forward: Callable[..., Any], x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """One channel of it: what left out blocks hand on and join to each other is of no use, and so shall be small."""
    return x[:, :1]


MakeCall = Callable[[Any], CachedCall]
"""Makes one call of a network, given what a whole one left, or None."""


def cached_calls(network: torch.nn.Module, caching: BlockCaching) -> MakeCall:
    """What makes the calls of a live network.

    Raises:
        UnsupportedModel: the network has no blocks that could be reused in this way.
    """
    row = class_of(network)
    if row is None:
        raise UnsupportedModel(f"the blocks of {type(network).__name__} are not known")
    if isinstance(caching, DeepCache):
        if row.stacks:
            raise UnsupportedModel(f"{caching} is not for a transformer; write block cache 0.08")
        layers = _deep_layers(network)
        return lambda before: DeepCall(layers, before)
    if not row.stacks:
        raise UnsupportedModel(f"{caching} is not for a UNet; write deep cache 3")
    stacks = [stack for each in row.stacks if (stack := _stack_of(network, each)) is not None]
    if sum(len(each.blocks) for each in stacks) < 2:
        raise UnsupportedModel("this model has one block alone")
    return lambda before: FirstBlockCall(stacks, before, caching.threshold)


def _stack_of(network: Any, row: BlockStack) -> _Stack | None:
    """None where the list is empty."""
    if not (blocks := tuple(getattr(network, row.name))):
        return None
    kind = block_class_of(blocks[0])
    if kind is None or any(type(block) is not type(blocks[0]) for block in blocks):
        raise UnsupportedModel(f"another extension replaced blocks of {row.name}")
    return _Stack(row, blocks, kind)


def _deep_layers(network: Any) -> list[torch.nn.Module]:
    """Of a UNet, all below the top level: from the first downsampling to the last upsampling."""
    inputs, outputs = [*network.input_blocks], [*network.output_blocks]
    top = next((n for n, block in enumerate(inputs) if type(block[0]).__name__ == "Downsample"), len(inputs))
    if top >= len(inputs) or len(outputs) != len(inputs):
        raise UnsupportedModel("this UNet has one level alone")
    middle = [] if network.middle_block is None else [network.middle_block]
    return [layer for block in (*inputs[top:], *middle, *outputs[:-top]) for layer in block]
