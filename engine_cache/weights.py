"""Digests of a model's numbers."""

from __future__ import annotations

import hashlib
import os
import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..core.errors import UnsupportedModel
from .files import identity, sha256_of
from .key import canonical_json
from .memo import WeightsMemo

_WORKERS = min(4, os.cpu_count() or 1)
_COLUMNS = 1021
"""A prime, so that rows of a matrix that change places change columns here."""

_copying = threading.Lock()


def digest_tensors(named: Mapping[str, torch.Tensor]) -> str:
    """sha256 over the sorted (name, dtype, shape, bytes) of all tensors; not over strides and device.

    A tensor that was hashed before is not hashed again while it is alive and unchanged.

    Raises:
        UnsupportedModel: a tensor has no bytes to read, such as a meta or a sparse one.
    """
    names = sorted(named)
    with ThreadPoolExecutor(_WORKERS) as pool:
        contents = list(pool.map(lambda name: _content(name, named[name]), names))
    rows = [
        [name, str(named[name].dtype), list(named[name].shape), content]
        for name, content in zip(names, contents, strict=True)
    ]
    return hashlib.sha256(canonical_json(rows).encode("ascii")).hexdigest()


def digest_module_file(path: Path | str, memo: WeightsMemo | None = None) -> str:
    """sha256 of a checkpoint file, in hex; read once and remembered by the file's identity.

    Raises:
        OSError: the file cannot be read.
    """
    known = memo.get(path) if memo is not None else None
    if known is not None:
        return known
    seen = identity(Path(path))
    digest = sha256_of(Path(path))
    if memo is not None:
        memo.put(path, digest, seen)
    return digest


@dataclass(frozen=True)
class _Remembered:
    storage: weakref.ref[Any]
    version: int | None
    checksum: bytes
    digest: str


_Place = tuple[int, int, torch.dtype, tuple[int, ...], tuple[int, ...]]

_memory: dict[_Place, _Remembered] = {}


def _content(name: str, tensor: torch.Tensor) -> str:
    """sha256 of one tensor's bytes in logical order.

    The version counter misses writes through `.data` (LoRA fused in place) and is absent in inference
    mode, so a checksum over all bytes, ten times faster than sha256, must agree as well.
    """
    try:
        tensor = tensor.detach()
        if tensor.is_quantized or tensor.layout is not torch.strided:
            raise TypeError(f"it is quantized or {tensor.layout}")
        if tensor.untyped_storage().device.type == "meta":  # also behind a fake tensor
            raise TypeError("it has no numbers")
        place = _place(tensor)
        version = None if tensor.is_inference() else tensor._version
        checksum = _checksum(tensor)
        known = _memory.get(place)
        same = known is not None and known.storage() is tensor.untyped_storage()
        if known and same and (known.version, known.checksum) == (version, checksum):
            return known.digest
        digest = hashlib.sha256(_on_cpu(tensor).numpy().data).hexdigest()
        _remember(place, tensor, version, checksum, digest)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise UnsupportedModel(
            f"The bytes of the tensor {name} ({tensor.dtype}, on {tensor.device}) cannot be read: {error}. "
            f"Load the model's weights as plain tensors."
        ) from error
    return digest


def _place(tensor: torch.Tensor) -> _Place:
    return id(tensor.untyped_storage()), tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _remember(place: _Place, tensor: torch.Tensor, version: int | None, checksum: bytes, digest: str) -> None:
    def forget(dead: weakref.ref[Any]) -> None:
        known = _memory.get(place)
        if known is not None and known.storage is dead:
            _memory.pop(place, None)

    storage = weakref.ref(tensor.untyped_storage(), forget)
    _memory[place] = _Remembered(storage, version, checksum, digest)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes in main memory, in logical order. Copies are made one at a time, views are free."""
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        return _bytes_of(tensor)
    with _copying:
        return _bytes_of(tensor.cpu())


def _checksum(tensor: torch.Tensor) -> bytes:
    """Sums over the bytes in the order in which they lie in memory: shows a change, proves no identity."""
    raw = _bytes_of(_in_memory_order(tensor))
    word = next(kind for kind in _WORDS if raw.data_ptr() % kind.itemsize == raw.storage_offset() % kind.itemsize == 0)
    row = _COLUMNS * word.itemsize
    whole = raw.numel() // row * row
    sums = raw[:whole].view(word).view(-1, _COLUMNS).sum(0, dtype=torch.int64)
    return sums.cpu().numpy().tobytes() + raw[whole:].cpu().numpy().tobytes()


_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def _in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements with axes sorted so that a dense tensor, e.g. a channels_last one, needs no copy."""
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
