"""Names of dtypes and precisions."""

from __future__ import annotations

import torch

from .errors import UnsupportedModel
from .spec import EngineSpec, Precision

INTEGER_INPUTS = ("timesteps", "time_ids")
"""Inputs that keep their dtype in every precision: bf16 cannot represent a timestep such as 999."""

_DTYPES = {Precision.FP32: torch.float32, Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16}


def dtype_of(precision: Precision) -> torch.dtype:
    """The torch dtype of a precision."""
    return _DTYPES[precision]


def precision_of(dtype: torch.dtype) -> Precision:
    """The inverse of `dtype_of`.

    Raises:
        UnsupportedModel: engines do not compute in `dtype`.
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
        raise ValueError(f"{name!r} is not a torch dtype")
    return dtype


def input_dtypes(spec: EngineSpec) -> dict[str, torch.dtype]:
    """Input name -> dtype that the engine takes."""
    return {name: dtype_named(dtype) for name, dtype in spec.dtypes.items()}
