"""Features in channels last throughout: reduces memory traffic, since kernels that mix two layouts are slow.

Convolutions want [N, H, W, C] in memory. Where a model's code makes [N, C, H, W] of features, say after attention, all
that is joined with them follows, and is turned round element by element before the next convolution.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from .graph import Graph, argument, aten, shape_of


def keep_channels_last(graph: Graph) -> None:
    for node in graph.calls(aten.contiguous.default, aten.clone.default):
        if (
            _is_picture(node)
            and not graph.is_written(node)
            and argument(node, 1, "memory_format") in (None, torch.contiguous_format)
        ):
            assert isinstance(node.args[0], Node)
            graph.replace(node, _channels_last, node.args[0])
    for node in graph.calls(aten.cat.default):
        if _is_picture(node) and argument(node, 1, "dim", 0) in (1, -3):
            graph.replace(node, _joined_channels, node.args[0])
    for node in graph.calls(aten.upsample_nearest2d.vec, aten.upsample_nearest2d.default):
        if _doubles(node):
            graph.replace(node, _doubled, node.args[0])
    for node in graph.calls(aten.view.default):  # what was contiguous by the model's code may not be so any more
        if not graph.is_written(node):
            node.target = aten.reshape.default


def _is_picture(node: Node) -> bool:
    """Whether it is read as one. What attention is given, [N, tokens, heads, channels], has four axes too."""
    return len(shape_of(node)) == 4 and bool(node.users) and all(user.target in _READ_PICTURES for user in node.users)


_READ_PICTURES = {
    aten.conv2d.default,
    aten.group_norm.default,
    aten.add.Tensor,
    aten.cat.default,
    aten.silu.default,
    aten.upsample_nearest2d.vec,
    aten.upsample_nearest2d.default,
}


def _doubles(node: Node) -> bool:
    assert isinstance(node.args[0], Node)
    before, after = shape_of(node.args[0]), shape_of(node)
    return len(before) == 4 and after[2:] == (2 * before[2], 2 * before[3])


def _channels_last(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _joined_channels(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.permute(0, 2, 3, 1) for part in parts], -1).permute(0, 3, 1, 2)


def _doubled(x: torch.Tensor) -> torch.Tensor:
    """Nearest-neighbour upsampling by 2, without computing an index for each element."""
    n, c, h, w = x.shape
    pixels = x.permute(0, 2, 3, 1)[:, :, None, :, None].expand(n, h, 2, w, 2, c)
    return pixels.reshape(n, 2 * h, 2 * w, c).permute(0, 3, 1, 2)
