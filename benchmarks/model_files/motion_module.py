"""AnimateDiff's motion module of random weights for SD1.5."""

from __future__ import annotations

from collections.abc import Iterator

import torch

_LEVELS = (320, 640, 1280, 1280)
"""Widths of the UNet's levels on the way down."""
PLACES = (("down_blocks", 2, _LEVELS), ("up_blocks", 3, _LEVELS[::-1]))
"""Of its modules: the side of the UNet, how many each level has there, and how wide they are."""
_FRAMES = 32
"""The most at once."""
_SHARE = 0.3
"""How large what a module adds is beside a layer that was drawn as usual."""

Named = Iterator[tuple[str, torch.Tensor]]


def make(seed: int) -> dict[str, torch.Tensor]:
    """Return a motion module's weights in half precision by the names that its files have."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{side}.{level}.motion_modules.{number}.temporal_transformer.{name}": value.half()
        for side, count, widths in PLACES
        for level, width in enumerate(widths)
        for number in range(count)
        for name, value in _transformer(width, generator)
    }


def _transformer(width: int, generator: torch.Generator) -> Named:
    """One of its modules: attention between the frames at each place of the picture, twice, and a feed-forward."""

    def linear(name: str, rows: int, columns: int, gain: float = 0.8, has_bias: bool = True) -> Named:
        yield f"{name}.weight", torch.randn(rows, columns, generator=generator) * gain / columns**0.5
        if has_bias:
            yield f"{name}.bias", torch.zeros(rows)

    def norm(name: str) -> Named:
        yield f"{name}.weight", torch.ones(width)
        yield f"{name}.bias", torch.zeros(width)

    yield from norm("norm")
    yield from linear("proj_in", width, width)
    for number in range(2):
        attention = f"transformer_blocks.0.attention_blocks.{number}"
        for name in ("to_q", "to_k", "to_v"):
            yield from linear(f"{attention}.{name}", width, width, has_bias=False)
        yield from linear(f"{attention}.to_out.0", width, width)
        yield f"{attention}.pos_encoder.pe", 0.5 * torch.randn(1, _FRAMES, width, generator=generator)
        yield from norm(f"transformer_blocks.0.norms.{number}")
    yield from linear("transformer_blocks.0.ff.net.0.proj", 8 * width, width)
    yield from linear("transformer_blocks.0.ff.net.2", width, 4 * width)
    yield from norm("transformer_blocks.0.ff_norm")
    yield from linear("proj_out", width, width, _SHARE)
