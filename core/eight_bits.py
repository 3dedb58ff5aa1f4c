"""Linear layers in eight bits: which are faster, on which GPUs, and how their weights and inputs are scaled.

Compiled and TensorRT engines share this. Each row has a scale of its own: for a layer's input it is computed in every
call, for its weights whenever the host supplies them. So no checkpoint has to be calibrated.
"""

from __future__ import annotations

import torch

from .spec import Quantised

FP8 = torch.float8_e4m3fn
DTYPES = {Quantised.FP8: FP8, Quantised.INT8: torch.int8}

LARGEST = {FP8: 448.0, torch.int8: 127.0}
"""The largest value of a quantised weight or input."""

LEAST_SCALE = 1e-12

LEAST_COLUMNS = 640
LEAST_PRODUCT = 2_500_000_000
"""Multiplications in one call from which on a layer is faster in eight bits."""

_STEP = 16
"""Rows and columns of an eight-bit weight are multiples of it."""

CHOOSE_AUTO = "choose precision auto, in the node or, if that is on auto already, in Slipstream's settings"

_LEAST_CAPABILITY = {Quantised.FP8: (8, 9), Quantised.INT8: (8, 0)}
_CHIPS = {
    Quantised.FP8: "an NVIDIA Ada, Hopper or Blackwell GPU (RTX 40 series or newer)",
    Quantised.INT8: "an NVIDIA Ampere GPU (RTX 30 series) or newer",
}


def why_not_on(device: torch.device, wanted: Quantised) -> str | None:
    """Why this GPU has no such 8-bit arithmetic; None where it has, and for any device that is no GPU."""
    if device.type != "cuda":
        return None
    if torch.version.hip is None and torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY[wanted]:
        return None
    return f"{wanted.value} needs {_CHIPS[wanted]}; {CHOOSE_AUTO}"


def why_no_layer(architecture: str, precision: str) -> str:
    """The message for a model none of whose layers `gains`."""
    return f"{architecture} has no linear layer that is faster in {precision} at this size; {CHOOSE_AUTO}"


def gains(samples: int, columns: int, rows: int) -> bool:
    """Whether a linear layer with a weight [rows, columns] is faster in eight bits, as measured on an H200.

    Large layers of feed-forward blocks are: their input comes from a norm or an activation, whose kernel quantises it
    in passing. The output of attention would need a kernel of its own, which costs what the layer saves. Quantised
    query, key and value layers would save another 3 % of SDXL's call in fp8, but raise its error from 4 % to 6 %.

    Args:
        samples: rows of the layer's input [samples, columns].
    """
    large = columns >= LEAST_COLUMNS and samples * rows * columns >= LEAST_PRODUCT
    of_attention = rows in (columns, 2 * columns, 3 * columns)
    return large and not of_attention and rows % _STEP == 0 and columns % _STEP == 0


def scale_of_rows(rows: torch.Tensor, eight_bits: torch.dtype) -> torch.Tensor:
    """The scale of each row, fp32 [..., 1]: divided by it, the largest magnitude becomes the largest of `eight_bits`.

    Symmetric quantisation with a scale for each row, as in torchao's dynamic recipes.
    """
    largest = rows.abs().amax(dim=-1, keepdim=True).float()
    return (largest * (1 / LARGEST[eight_bits])).clamp(min=LEAST_SCALE)


def quantised(rows: torch.Tensor, scale: torch.Tensor, eight_bits: torch.dtype) -> torch.Tensor:
    """`rows` divided by `scale` (of `scale_of_rows`) and rounded to `eight_bits`; the range needs no clamp."""
    scaled = rows.float() * scale.reciprocal()
    return (scaled.round() if eight_bits == torch.int8 else scaled).to(eight_bits)
