"""Linear layers in eight bits: which of them gain, on which chips, and how their numbers are scaled.

Both ways to make engines share this: numbers of a row are divided by a scale of its own, found anew in each call for
what a layer reads, and whenever the host supplies them for its weights. So no checkpoint has to be calibrated.
"""

from __future__ import annotations

import torch

from .spec import Quantised

FP8 = torch.float8_e4m3fn
DTYPES = {Quantised.FP8: FP8, Quantised.INT8: torch.int8}

LARGEST = {FP8: 448.0, torch.int8: 127.0}
"""The largest number that quantised weights and inputs may have."""

LEAST_SCALE = 1e-12

LEAST_COLUMNS = 640
LEAST_PRODUCT = 2_500_000_000
"""Multiplications of a layer that gains, in one call."""

_STEP = 16
"""Rows and columns of an eight-bit weight are multiples of it."""

CHOOSE_AUTO = "choose precision auto, in the node or, if that is on auto already, in Slipstream's settings"

_LEAST_CAPABILITY = {Quantised.FP8: (8, 9), Quantised.INT8: (8, 0)}
_CHIPS = {
    Quantised.FP8: "an NVIDIA Ada, Hopper or Blackwell GPU (RTX 40 series or newer)",
    Quantised.INT8: "an NVIDIA Ampere GPU (RTX 30 series) or newer",
}


def why_not_on(device: torch.device, wanted: Quantised) -> str | None:
    """Why this chip cannot multiply so; None where it can."""
    if device.type != "cuda":
        return None
    if torch.version.hip is None and torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY[wanted]:
        return None
    return f"{wanted.value} needs {_CHIPS[wanted]}; {CHOOSE_AUTO}"


def why_no_layer(architecture: str, numbers: str) -> str:
    """What to say of a model none of whose layers `gains`."""
    return f"{architecture} has no linear layer that is faster in {numbers} at this size; {CHOOSE_AUTO}"


def gains(samples: int, columns: int, rows: int) -> bool:
    """Whether a layer of a weight [rows, columns] is worth it, by measurement on an H200: those of feed-forward blocks.

    What they read comes from a norm or an activation, so that the kernel which computes it quantises it as well. What
    attention gives would take a kernel more, as much time as the layer saves; small layers are not faster in eight
    bits. Query, key and value would gain another 3 % of SDXL's call in fp8, but with them the result is off by 6 %
    instead of 4 %.

    Args:
        samples: rows of what it reads.
    """
    large = columns >= LEAST_COLUMNS and samples * rows * columns >= LEAST_PRODUCT
    of_attention = rows in (columns, 2 * columns, 3 * columns)
    return large and not of_attention and rows % _STEP == 0 and columns % _STEP == 0


def scale_of_rows(rows: torch.Tensor, eight_bits: torch.dtype) -> torch.Tensor:
    """By what each row is to be divided so that its largest number becomes the largest of `eight_bits`; fp32 [..., 1].

    Symmetric quantisation with a scale for each row, as in torchao's dynamic recipes.
    """
    largest = rows.abs().amax(dim=-1, keepdim=True).float()
    return (largest * (1 / LARGEST[eight_bits])).clamp(min=LEAST_SCALE)


def quantised(rows: torch.Tensor, scale: torch.Tensor, eight_bits: torch.dtype) -> torch.Tensor:
    """Rows in eight bits. No number of a row exceeds its scale, so nothing has to be cut off."""
    scaled = rows.float() * scale.reciprocal()
    return (scaled.round() if eight_bits == torch.int8 else scaled).to(eight_bits)
