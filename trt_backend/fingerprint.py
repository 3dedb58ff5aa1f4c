"""Fingerprints of weights, by which changes in place are detected."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_WORD_BYTES = 4  # half of a factor's: of whole ones, changes of two upper bits would cancel out
_ROW = 8192
_MIX = 0x9E3779B97F4A7C15 - (1 << 64)
_SEED = 20260


def fingerprints(tensors: Sequence[torch.Tensor]) -> list[int]:
    """A 64-bit hash of each tensor's bytes, computed on the tensor's device.

    A multilinear hash (Carter and Wegman, "Universal classes of hash functions", 1979) of rows, mixed, and again of the
    rows' hashes: two different weights collide with a probability of at most 2⁻³².
    """
    if not tensors:
        return []
    found = [_fingerprint(tensor) for tensor in tensors]
    hashes: list[int] = torch.stack([value.to(found[0].device) for value in found]).tolist()
    return hashes


def _fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if raw.storage_offset() % _WORD_BYTES:
        raw = raw.clone()  # part of a larger tensor, and not at a word's place in it
    words = raw[: raw.numel() // _WORD_BYTES * _WORD_BYTES].view(torch.int32)
    rest = raw[words.numel() * _WORD_BYTES :].to(torch.int64)
    whole = words.numel() // _ROW * _ROW
    rows = (words[:whole].view(-1, _ROW) * _factors(_ROW, raw.device)).sum(1)
    rest = torch.cat([words[whole:], rest])
    last = (rest * _factors(_ROW + _WORD_BYTES, raw.device)[: rest.numel()]).sum()
    # Mixed between the two products, so that changes of two rows do not cancel out.
    mixed = (rows ^ (rows >> 29)) * _MIX
    return (mixed * _factors(rows.numel(), raw.device)[: rows.numel()]).sum() + (last ^ (last >> 29)) * _MIX


_cached: dict[tuple[int, torch.device], torch.Tensor] = {}


def _factors(count: int, device: torch.device) -> torch.Tensor:
    """At least `count` random odd numbers, the same ones in every process."""
    length = 1 << max(count - 1, 1).bit_length()
    if (length, device) not in _cached:
        generator = torch.Generator().manual_seed(_SEED)
        drawn = torch.randint(-(1 << 62), 1 << 62, (length,), generator=generator) | 1
        with torch.inference_mode(False):
            _cached[length, device] = drawn.to(device)
    return _cached[length, device]
