"""Whether other nodes reach into one block in one call, by what its call is told."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

_PATCHES, _REPLACE, _ATTENTION = "patches", "patches_replace", "optimized_attention_override"
_BLOCK, _INDEX = "block", "block_index"

_FACTS = frozenset(
    {"activations_shape", "attn_precision", "block", "block_index", "block_type", "callbacks", "cond_or_uncond"}
    | {"dim_head", "img_slice", "n_heads", "original_shape", "sample_sigmas", "sigmas", "total_blocks"}
    | {"transformer_index", "transformer_options", "uuids", "wrappers"}
)
"""What a call is told for patches to look at; a block by itself computes the same whatever it is."""


def why_patched(options: Mapping[str, Any], reads: Set[str]) -> str | None:
    """Why a block has to run as it is in this call, in words; None where nothing reaches into it.

    Args:
        options: `transformer_options` of the call.
        reads: all names that the block's code knows.
    """
    for name in options:
        if name in _FACTS or name not in reads and name != _ATTENTION:
            continue
        value = options[name]
        if name == _PATCHES:
            if patch := next((each for each in value if value[each] and each in reads), None):
                return f"another node patches it ({patch})"
        elif name == _REPLACE:
            if replaced := next((each for each in value if each in reads and _is_here(value[each], options)), None):
                return f"another node replaces a part of it ({replaced})"
        elif name == _ATTENTION:
            return "another node replaces the attention function"
        else:
            return f"it is told {name!r}, which engines do not take"
    return None


def _is_here(replacements: Mapping[Any, Any], options: Mapping[str, Any]) -> bool:
    """Whether any replacement is for the block that is called; UNets tell a block which one it is."""
    if not replacements:
        return False
    block = options.get(_BLOCK)
    if block is None:
        return True
    return block in replacements or (*block[:2], options.get(_INDEX, 0)) in replacements
