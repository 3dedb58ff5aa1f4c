"""Model files in GGUF, the format of llama.cpp, whose matrices are stored in 8 bits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

BLOCK_SIZE = 32
"""Weights that share a scale in Q8_0."""


def save(tensors: Mapping[str, torch.Tensor], architecture: str, path: Path) -> None:
    """Write a model file: matrices in Q8_0, all else in fp32.

    Args:
        architecture: as GGUF files of its kind call it.

    Raises:
        ImportError: the Python that runs this lacks the package `gguf`.
    """
    import gguf

    writer = gguf.GGUFWriter(str(path), architecture)
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and tensor.shape[1] % BLOCK_SIZE == 0:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, in_q8_0(tensor).numpy(), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def in_q8_0(weight: torch.Tensor) -> torch.Tensor:
    """Return a matrix as bytes, uint8 [rows, columns / 32 · 34].

    Of each 32 weights these are their scale in fp16, then whole numbers from -127 to 127.
    """
    blocks = weight.float().view(len(weight), -1, BLOCK_SIZE)
    scale = (blocks.abs().amax(2, keepdim=True) / 127).half()
    whole = (blocks / scale.float().clamp_min(1e-12)).round().clamp(-127, 127).to(torch.int8)
    return torch.cat([scale.view(torch.int8), whole], 2).view(torch.uint8).flatten(1)
