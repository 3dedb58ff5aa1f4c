"""Whether other nodes reach into one block in one call, by what its call is told."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from typing import Any

from ...model_patches import is_there
from .block_classes import OVERRIDE

PATCHES, REPLACE = "patches", "patches_replace"
BLOCK, _INDEX = "block", "block_index"

FACTS = frozenset(
    {"activations_shape", "attn_precision", "block", "block_index", "block_type", "callbacks", "cond_or_uncond"}
    | {"dim_head", "img_slice", "n_heads", "original_shape", "sample_sigmas", "sigmas", "total_blocks"}
    | {"transformer_index", "transformer_options", "uuids", "wrappers"}
)
"""What a call is told for patches to look at; a block by itself computes the same whatever it is."""


def why_patched(
    options: Mapping[str, Any], reads: Set[str], places: Collection[str] = (), is_group: bool = False
) -> str | None:
    """Why a block has to run as it is in this call, in words; None where nothing but attention is another one's.

    Args:
        options: `transformer_options` of the call.
        reads: all names that the block's code knows.
        places: at which other nodes may compute, see `computed_outside`.
        is_group: it is a layer around blocks.
    """
    for name in options:
        if name in FACTS or name == OVERRIDE or name not in reads:
            continue
        value = options[name]
        if name == PATCHES:
            others = (each for each in value if each in reads and each not in places)
            if patch := next((each for each in others if is_there(value[each])), None):
                return f"another node patches it ({patch})"
        elif name == REPLACE:
            others = (each for each in value if each in reads and each not in places)
            if replaced := next((each for each in others if _is_here(value[each], options, is_group)), None):
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
        if name in (PATCHES, REPLACE) and isinstance(value, Mapping):
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
    block = options.get(BLOCK)
    if block is None:
        return True
    if is_group:
        return any(not isinstance(each, tuple) or each[:2] == tuple(block[:2]) for each in replacements)
    return key_of_block(replacements, options) in replacements


def key_of_block(replacements: Mapping[Any, Any], options: Mapping[str, Any]) -> Any:
    """The key under which a replacement is for the block that is called; no key where the block is told none."""
    block = options.get(BLOCK)
    if block is None:
        return None
    among_others = (*block[:2], options.get(_INDEX, 0))
    return among_others if among_others in replacements else block
