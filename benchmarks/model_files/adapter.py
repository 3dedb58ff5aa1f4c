"""An IP-Adapter of random weights for a UNet."""

from __future__ import annotations

from collections.abc import Mapping

import torch

EMBEDDING_WIDTH = 1024
"""Of a picture's embedding, as the smaller of the usual encoders gives it."""

_TOKENS = 4
_SHARE = 0.3
"""How large its keys and values are beside those of a layer that was drawn as usual."""

_PLACES = {
    "sdxl": [(f"input_blocks.{number}", depth) for number, depth in ((4, 2), (5, 2), (7, 10), (8, 10))]
    + [(f"output_blocks.{number}", 10 if number < 3 else 2) for number in range(6)]
    + [("middle_block", 10)]
}
_USUAL_PLACES = (
    [(f"input_blocks.{number}", 1) for number in (1, 2, 4, 5, 7, 8)]
    + [(f"output_blocks.{number}", 1) for number in range(3, 12)]
    + [("middle_block", 1)]
)
"""Of SD1.5: the blocks with attention, and how many layers each has, in the order in which adapters number them."""


def make(family: str, unet: Mapping[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Return an adapter's weights in half precision by the names that its files have.

    Args:
        unet: the UNet's weights, by name.
    """
    generator = torch.Generator().manual_seed(seed)
    found, number = dict[str, torch.Tensor](), -1
    for block, depth in _PLACES.get(family, _USUAL_PLACES):
        for layer in range(depth):
            number += 1
            keys = unet.get(f"{block}.1.transformer_blocks.{layer}.attn2.to_k.weight")
            if keys is not None:
                for name in ("to_k_ip", "to_v_ip"):
                    weight = torch.randn(keys.shape, generator=generator) * _SHARE / keys.shape[1] ** 0.5
                    found[f"ip_adapter.{2 * number + 1}.{name}.weight"] = weight.half()
    width = next(iter(found.values())).shape[1]
    projection = torch.randn(_TOKENS * width, EMBEDDING_WIDTH, generator=generator) / EMBEDDING_WIDTH**0.5
    return {
        "image_proj.proj.weight": projection.half(), "image_proj.proj.bias": torch.zeros(_TOKENS * width).half(),
        "image_proj.norm.weight": torch.ones(width).half(), "image_proj.norm.bias": torch.zeros(width).half(), **found,
    }  # fmt: skip
