"""Quantised weights as GGUF files hold them: blocks of bytes, each of so many weights and the scales that they share.

The layouts are those of ggml's types (`block_q8_0`, `block_q4_K` and so on in its `ggml-common.h`). All is integer
arithmetic and products, element by element, so that one kernel makes a matrix of the bytes. Products are in fp16, as
ComfyUI-GGUF has them; a kernel may round less often.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

_DequantiseBlocks = Callable[[torch.Tensor], torch.Tensor]
"""Takes blocks as bytes, uint8 [blocks, type_size], and gives their weights, fp16 [blocks, block_size]."""


@dataclass(frozen=True)
class GgmlType:
    """How one of ggml's types stores weights.

    Attributes:
        block_size: weights in a block.
        type_size: bytes of a block.
        dequantise_blocks: gives the weights of blocks.
    """

    block_size: int
    type_size: int
    dequantise_blocks: _DequantiseBlocks

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Of the bytes, [rows, bytes of a row], that a matrix is stored as; None for what is no such matrix."""
        if len(shape) != 2 or shape[1] % self.block_size:
            return None
        return shape[0], shape[1] // self.block_size * self.type_size

    def dequantised(self, stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The matrix in `dtype`, [rows, columns], of bytes in uint8, [rows, bytes of a row]."""
        weights = self.dequantise_blocks(stored.reshape(-1, self.type_size))
        return weights.to(dtype).reshape(stored.shape[0], -1)


def _half(blocks: torch.Tensor, place: int) -> torch.Tensor:
    """A number in fp16 that begins at a byte, [blocks, 1]."""
    low, high = (blocks[:, place + each : place + each + 1].to(torch.int16) for each in (0, 1))
    return (low | (high << 8)).view(torch.float16)


def _parts(given: torch.Tensor, bits: int) -> torch.Tensor:
    """Numbers of so many bits: the lowest of each byte, then those above; [..., bytes] to [..., 8 / bits, bytes]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=given.device)
    return (given.unsqueeze(-2) >> shifts[:, None]) & ((1 << bits) - 1)


def _halves(given: torch.Tensor) -> torch.Tensor:
    """Of four bits, in one row: [..., bytes] to [..., 2 · bytes]."""
    return _parts(given, 4).flatten(-2)


def _quarters(given: torch.Tensor) -> torch.Tensor:
    """Of two bits: [..., bytes] to [..., 4 · bytes]."""
    return _parts(given, 2).flatten(-2)


def _fifth_bits(given: torch.Tensor) -> torch.Tensor:
    """The bits of four bytes, one byte after the other, each worth 16: [blocks, 4] to [blocks, 32]."""
    return _parts(given, 1).transpose(1, 2).flatten(1) << 4


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * blocks[:, 2:].view(torch.int8).half()


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * (_halves(blocks[:, 2:]).half() - 8)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _halves(blocks[:, 4:]).half() + _half(blocks, 2)


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * ((_halves(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])).half() - 16)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    whole = _halves(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return _half(blocks, 0) * whole.half() + _half(blocks, 2)


def _runs(blocks: torch.Tensor, begin: int, end: int, runs: int) -> torch.Tensor:
    """Some bytes of each block in equal parts, [blocks, runs, bytes]."""
    return blocks[:, begin:end].reshape(len(blocks), runs, -1)


def _scales_and_minima(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of `_q4_k` and `_q5_k`: by what each eighth of a block is multiplied, and what is taken off; [blocks, 8, 1]."""
    low, middle, high = (blocks[:, begin : begin + 4] for begin in (4, 8, 12))
    scales = torch.cat([low & 63, (high & 15) | (low >> 6 << 4)], 1)
    minima = torch.cat([middle & 63, (high >> 4) | (middle >> 6 << 4)], 1)
    scale, minimum = _half(blocks, 0) * scales.half(), _half(blocks, 2) * minima.half()
    return scale[:, :, None], minimum[:, :, None]


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    scale, minimum = _scales_and_minima(blocks)
    whole = _halves(_runs(blocks, 16, 144, 4)).reshape(len(blocks), 8, 32)
    return (scale * whole.half() - minimum).flatten(1)


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    scale, minimum = _scales_and_minima(blocks)
    fifth = _parts(blocks[:, 16:48], 1) << 4
    whole = _halves(_runs(blocks, 48, 176, 4)).reshape(len(blocks), 8, 32) | fifth
    return (scale * whole.half() - minimum).flatten(1)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    low = _halves(_runs(blocks, 0, 128, 2))
    whole = (low | (_quarters(_runs(blocks, 128, 192, 2)) << 4)).reshape(len(blocks), 16, 16)
    scale = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8).half()
    return (scale[:, :, None] * (whole.half() - 32)).flatten(1)


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    low = _quarters(_runs(blocks, 32, 96, 2)).reshape(len(blocks), 16, 16)
    has_more = _parts(blocks[:, :32], 1).reshape(len(blocks), 16, 16)
    first = _halves(blocks[:, 96:104])
    scales = (first | (_quarters(blocks[:, 104:108]) << 4)).half() - 32
    scale = _half(blocks, 108) * scales
    return (scale[:, :, None] * (low.half() + 4 * has_more.half() - 4)).flatten(1)


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    whole = _quarters(_runs(blocks, 16, 80, 2)).reshape(len(blocks), 16, 16)
    scale = _half(blocks, 80) * (blocks[:, :16] & 15).half()
    minimum = _half(blocks, 82) * (blocks[:, :16] >> 4).half()
    return (scale[:, :, None] * whole.half() - minimum[:, :, None]).flatten(1)


TYPES = {
    "Q8_0": GgmlType(32, 34, _q8_0),
    "Q5_1": GgmlType(32, 24, _q5_1),
    "Q5_0": GgmlType(32, 22, _q5_0),
    "Q4_1": GgmlType(32, 20, _q4_1),
    "Q4_0": GgmlType(32, 18, _q4_0),
    "Q6_K": GgmlType(256, 210, _q6_k),
    "Q5_K": GgmlType(256, 176, _q5_k),
    "Q4_K": GgmlType(256, 144, _q4_k),
    "Q3_K": GgmlType(256, 110, _q3_k),
    "Q2_K": GgmlType(256, 84, _q2_k),
}
"""By ggml's names."""
