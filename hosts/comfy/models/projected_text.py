"""Keys and values of a UNet's attention over the text, which are the same in every step, as an input of its engine.

All of a network's projections of the text lie side by side in one tensor [N, tokens, width], which takes the text's
place: a network whose projections are stand-ins reads its parts from there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_PROJECTIONS = ("to_k", "to_v")


class _Part(torch.nn.Module):
    """Stands where the text is projected; it is projected already."""

    def __init__(self, begin: int, end: int) -> None:
        super().__init__()
        self.begin, self.end = begin, end

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return text[..., self.begin : self.end]


Within = tuple[str, ...] | None
"""Names of the network's modules that count; None for all of them."""


def take_projected(network: torch.nn.Module, within: Within = None) -> list[tuple[torch.nn.Module, str, Any]]:
    """Let a network take the projected text for its text; what stood there before."""
    before: list[tuple[torch.nn.Module, str, Any]] = []
    end = 0
    for attention in _attentions(network, within):
        for name in _PROJECTIONS:
            projection: Any = attention._modules[name]
            begin, end = end, end + projection.weight.shape[0]
            before.append((attention, name, projection))
            attention._modules[name] = _Part(begin, end)
    return before


@contextmanager
def projected_already(network: torch.nn.Module, within: Within = None) -> Iterator[None]:
    """Meanwhile a live network takes the projected text for its text."""
    before = take_projected(network, within)
    try:
        yield
    finally:
        for attention, name, projection in before:
            attention._modules[name] = projection


def project(network: torch.nn.Module, context: torch.Tensor, within: Within = None) -> torch.Tensor:
    """The text [N, tokens, dim] as all of a live network's attentions see it, [N, tokens, width]."""
    layers: list[Any] = [
        attention._modules[name] for attention in _attentions(network, within) for name in _PROJECTIONS
    ]
    return torch.cat([layer(context) for layer in layers], dim=-1)


def _attentions(network: torch.nn.Module, within: Within) -> list[torch.nn.Module]:
    """Those over the text, in the order of the network's modules."""
    from comfy.ldm.modules.attention import BasicTransformerBlock

    parts = [part for name, part in network.named_children() if within is None or name in within]
    blocks: list[Any] = [
        layer for part in parts for layer in part.modules() if isinstance(layer, BasicTransformerBlock)
    ]
    return [block.attn2 for block in blocks if block.attn2 is not None]
