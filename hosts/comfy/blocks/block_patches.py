"""Whether other nodes reach into one block in one call, by what its call is told; and what computes its attention."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from ...model_patches import is_there
from ..models.diffusion_model import plain_attention, scaled_dot_product_attention
from .block_classes import OPTIONS, OVERRIDE, BlockClass

_PATCHES, _REPLACE = "patches", "patches_replace"
_BLOCK, _INDEX = "block", "block_index"

FACTS = frozenset(
    {"activations_shape", "attn_precision", "block", "block_index", "block_type", "callbacks", "cond_or_uncond"}
    | {"dim_head", "img_slice", "n_heads", "original_shape", "sample_sigmas", "sigmas", "total_blocks"}
    | {"transformer_index", "transformer_options", "uuids", "wrappers"}
)
"""What a call is told for patches to look at; a block by itself computes the same whatever it is."""


def why_patched(options: Mapping[str, Any], reads: Set[str], is_group: bool = False) -> str | None:
    """Why a block has to run as it is in this call, in words; None where nothing but attention is another one's.

    Args:
        options: `transformer_options` of the call.
        reads: all names that the block's code knows.
        is_group: it is a layer around blocks.
    """
    for name in options:
        if name in FACTS or name == OVERRIDE or name not in reads:
            continue
        value = options[name]
        if name == _PATCHES:
            if patch := next((each for each in value if each in reads and is_there(value[each])), None):
                return f"another node patches it ({patch})"
        elif name == _REPLACE:
            if replaced := next(
                (each for each in value if each in reads and _is_here(value[each], options, is_group)), None
            ):
                return f"another node replaces a part of it ({replaced})"
        else:
            return f"it is told {name!r}, which engines do not take"
    return None


def patches_in(options: Any) -> list[str]:
    """What other nodes put into the options of a run, by its names and by how many parts of the model it concerns.

    Args:
        options: `transformer_options`, with whatever others put there.
    """
    found: list[str] = []
    for name, value in options.items() if isinstance(options, Mapping) else ():
        if name in (_PATCHES, _REPLACE) and isinstance(value, Mapping):
            counts = {str(each): _count(given) for each, given in value.items()}
            found += (f"{each} {count}" for each, count in counts.items() if count)
        elif name not in FACTS:
            found.append(str(name))
    return sorted(found)


def _count(given: Any) -> int:
    """How many patches there are; one where they are not counted."""
    return len(given) if isinstance(given, (list, tuple, Mapping, Set)) else 1


def _is_here(replacements: Mapping[Any, Any], options: Mapping[str, Any], is_group: bool = False) -> bool:
    """Whether any replacement is for the block that is called, or for one in the group that is; UNets tell a block
    which one it is, and groups which blocks they lie in."""
    if not replacements:
        return False
    block = options.get(_BLOCK)
    if block is None:
        return True
    if is_group:
        return any(not isinstance(each, tuple) or each[:2] == tuple(block[:2]) for each in replacements)
    return block in replacements or (*block[:2], options.get(_INDEX, 0)) in replacements


_ATTENTION = "comfy.ldm.modules.attention"

_EXACT = frozenset(f"attention_{name}" for name in ("basic", "flash", "pytorch", "split", "sub_quad", "xformers"))
"""ComfyUI's ways to compute attention itself. Those that round it (SageAttention, comfy-kitchen) are called out."""


def attention_outside(
    kind: BlockClass, options: Mapping[str, Any] | None, arguments: dict[str, Any]
) -> Callable[..., Any] | None:
    """What computes a block's attention in this call, in the midst of its engine: the function of ComfyUI that the
    block itself would call, with the options of its call, by which that finds another node's. None where engines
    compute what it does: it rounds nothing, and nobody replaces it.

    Args:
        kind: of the block.
        options: `transformer_options` of the call.
        arguments: of the call, by name; a function among them that computes attention is taken out.

    Raises:
        TypeError: the block is to be told what computes its attention, and is not.
    """
    if not kind.has_attention:
        return None
    if kind.attends is not None:
        function = arguments.pop(kind.attends, None)
        if not callable(function):
            raise TypeError("nothing computes its attention")
    else:
        function = importlib.import_module(kind.attention or _ATTENTION).optimized_attention
    is_replaced = kind.takes_options and options is not None and OVERRIDE in options
    if not is_replaced and _is_exact(function):
        return None

    def attention(*args: Any, **kwargs: Any) -> Any:
        own = {OPTIONS: {} if options is None else options} if kind.takes_options else {}
        return function(*args, **kwargs, **own)

    return attention


def exact_attention(*args: Any, **kwargs: Any) -> Any:
    """What engines of blocks that call nothing out compute."""
    return scaled_dot_product_attention(None, *args, **kwargs)


@contextmanager
def attending_exactly(kind: BlockClass, options: dict[str, Any] | None) -> Iterator[None]:
    """Meanwhile a block that is called with these options computes its attention by `exact_attention`."""
    with plain_attention(kind.attention):
        if options is None:
            yield
            return
        missing = object()
        before = options.get(OVERRIDE, missing)
        options[OVERRIDE] = scaled_dot_product_attention
        try:
            yield
        finally:
            if before is missing:
                del options[OVERRIDE]
            else:
                options[OVERRIDE] = before


def _is_exact(function: Any) -> bool:
    """Whether it is one of ComfyUI's, in nothing but ComfyUI's own wrapper."""
    while isinstance(function, FunctionType) and function.__globals__.get("__name__") == _ATTENTION:
        if (inner := function.__dict__.get("__wrapped__")) is None:
            return function.__name__ in _EXACT
        function = inner
    return False
