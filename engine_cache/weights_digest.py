"""Digests of a model's weights, computed on their own device, since a model holds gigabytes."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy
import torch

from ..core.errors import UnsupportedModel
from .key import canonical_json

_COLUMNS = 1024
_WORD = torch.int32.itemsize
_ROWS_AT_ONCE = 1024
"""Their products take 8 MiB."""


def digest_tensors(named: Mapping[str, torch.Tensor], device: torch.device | None = None) -> str:
    """sha256 over the sorted (name, dtype, shape, sums) of all tensors; not over strides and device.

    A tensor's bytes in logical order are rows of 1024 signed words of 32 bits. Each row is multiplied by an odd number
    of 64 bits of its own, and the columns are summed modulo 2^64; bytes behind the last row are taken as they are.
    The digest is limited by memory bandwidth, on a GPU too, from which only the sums are copied. One changed word in a
    column always changes the digest, several with odds of 1 - 2^-32 if the factors were random: multilinear hashing
    (Lemire and Kaser, "Strongly universal string hashing is fast", 2014). It is not collision resistant against an
    attacker.

    Args:
        device: that sums what lies in RAM, where its memory suffices; None: the CPU. The digest is the same.

    Raises:
        UnsupportedModel: a tensor has no bytes to read, such as a meta or a sparse one, or memory does not suffice.
    """
    names, sums = sorted(named), dict[str, torch.Tensor]()
    for name in names:
        with _reading(f"the tensor {name} ({named[name].dtype}, on {named[name].device})"):
            sums[name] = _sums(named[name], device)
    with _reading("the model's tensors"):
        found = dict(_on_cpu(sums))
    rows = [[name, str(named[name].dtype), list(named[name].shape)] for name in names]
    digest = hashlib.sha256(canonical_json(rows).encode("ascii"))
    for name in names:
        digest.update(found[name].numpy().data)
    return digest.hexdigest()


@contextmanager
def _reading(what: str) -> Iterator[None]:
    """Turn errors inside the block into one that names `what`.

    Raises:
        UnsupportedModel: torch or the tensor's class raised something inside.
    """
    try:
        yield
    except (RuntimeError, TypeError, ValueError) as error:
        short = isinstance(error, torch.OutOfMemoryError)
        advice = "Free some of the device's memory." if short else "Load the model's weights as plain tensors."
        raise UnsupportedModel(f"The bytes of {what} cannot be read: {error}. {advice}") from error


def _sums(tensor: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    """Bytes that stand for all of the tensor's bytes."""
    raw = _bytes_of(tensor.detach())
    whole = raw.numel() // (_COLUMNS * _WORD) * (_COLUMNS * _WORD)
    if not whole:
        return raw
    if device is not None and raw.device.type == "cpu":
        with contextlib.suppress(torch.OutOfMemoryError):
            return _sums_of_bytes(raw.to(device), whole)
    return _sums_of_bytes(raw, whole)


def _sums_of_bytes(raw: torch.Tensor, whole: int) -> torch.Tensor:
    """
    Args:
        whole: bytes in whole rows.
    """
    words = raw[:whole].view(torch.int32).view(-1, _COLUMNS)
    return torch.cat([_sums_of_columns(words).view(torch.uint8), raw[whole:]])


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """In logical order, and where words of 32 bits may begin."""
    if tensor.is_quantized or tensor.layout is not torch.strided:
        raise TypeError(f"it is quantized or {tensor.layout}")
    if type(tensor) is torch.Tensor:  # subclasses may keep their data elsewhere
        _check_is_there(tensor)
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).as_subclass(torch.Tensor)
    _check_is_there(raw)
    return raw if raw.data_ptr() % _WORD == raw.storage_offset() % _WORD == 0 else raw.clone()


def _check_is_there(tensor: torch.Tensor) -> None:
    """Check that a tensor has memory to read.

    Raises:
        TypeError: it is a meta or fake tensor, or its storage was freed by an offloading extension.
    """
    storage = tensor.untyped_storage()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last + 1) * tensor.itemsize if tensor.numel() else 0
    if storage.device.type == "meta" or storage.nbytes() < needed:
        raise TypeError("it holds no data")


def _sums_of_columns(words: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(_COLUMNS, dtype=torch.int64, device=words.device)
    factors = _factors((len(words) - 1).bit_length(), words.device)
    for part, odd in zip(words.split(_ROWS_AT_ONCE), factors.split(_ROWS_AT_ONCE), strict=False):
        total += (part * odd[: len(part)]).sum(0)
    return total


@functools.lru_cache(maxsize=64)
def _factors(bits: int, device: torch.device) -> torch.Tensor:
    """An odd number for each of 2^bits rows, by SplitMix64 (Steele, Lea and Flood, 2014)."""
    with numpy.errstate(over="ignore"):
        state = numpy.arange(1, 2**bits + 1, dtype=numpy.uint64) * numpy.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    odd = (state ^ (state >> numpy.uint64(31))) | numpy.uint64(1)
    return torch.from_numpy(odd.view(numpy.int64)).to(device)[:, None]


def _on_cpu(sums: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Copy all sums of one device at once, since every copy synchronises with the device."""
    places = defaultdict(list)
    for name, each in sums.items():
        places[each.device].append(name)
    for there in places.values():
        sizes = [sums[name].numel() for name in there]
        yield from zip(there, torch.cat([sums[name] for name in there]).cpu().split(sizes), strict=True)
