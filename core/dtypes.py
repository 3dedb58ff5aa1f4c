"""Names of dtypes and precisions."""

from __future__ import annotations

import torch

from .errors import UnsupportedModel
from .spec import EngineSpec, Precision

WHOLE_NUMBERS = ("timesteps", "time_ids")
"""Inputs that count, and keep their dtype: 999 is no number in bf16."""

_DTYPES = {Precision.FP32: torch.float32, Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16}


def dtype_of(precision: Precision) -> torch.dtype:
    return _DTYPES[precision]


def precision_of(dtype: torch.dtype) -> Precision:
    """
    Raises:
        UnsupportedModel: no precision computes in `dtype`.
    """
    for precision, candidate in _DTYPES.items():
        if candidate == dtype:
            return precision
    raise UnsupportedModel(f"The model computes in {dtype_name(dtype)}; engines compute in fp32, fp16 or bf16")


def dtype_name(dtype: torch.dtype) -> str:
    """E.g. "float16"."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """The inverse of `dtype_name`."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype of torch")
    return dtype


def input_dtypes(spec: EngineSpec) -> dict[str, torch.dtype]:
    """Input name -> dtype that the engine takes."""
    return {name: dtype_named(dtype) for name, dtype in spec.dtypes.items()}
