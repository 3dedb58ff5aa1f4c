"""Canny's edge detector on batches of pictures ("A Computational Approach to Edge Detection", 1986)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

_GROWTH_STEPS = 24  # hysteresis follows a weak edge for at most this many pixels from a strong one


def canny(pictures: Tensor, low: float = 0.025, high: float = 0.06, sigma: float = 1.0) -> Tensor:
    """Find edges, in whichever colour channel they are strongest: two colours can be equally bright.

    Args:
        pictures: [B, 3, H, W] in [0, 1], any float dtype.
        low: Gradient (per pixel, 0..1 scale) above which a pixel joins an edge that it touches.
        high: Gradient above which a pixel starts an edge.
        sigma: Blur before differentiation, in pixels.

    Returns:
        [B, 1, H, W] bool.
    """
    batch, channels, height, width = pictures.shape
    planes = pictures.float().reshape(batch * channels, 1, height, width)
    dx, dy = (part.view(pictures.shape) for part in _gradient(_blur(planes, sigma)))
    strength, strongest = torch.hypot(dx, dy).max(1, keepdim=True)
    ridge = _thin(strength, dx.gather(1, strongest), dy.gather(1, strongest))
    weak, edges = ridge > low, (ridge > high).float()
    for _ in range(_GROWTH_STEPS):
        edges = F.max_pool2d(edges, 3, 1, 1) * weak
    return edges > 0


def _blur(plane: Tensor, sigma: float) -> Tensor:
    reach = max(1, round(3 * sigma))
    taps = torch.exp(-(torch.arange(-reach, reach + 1, device=plane.device) ** 2) / (2 * sigma**2))
    taps = (taps / taps.sum()).view(1, 1, 1, -1)
    plane = F.conv2d(F.pad(plane, (reach, reach, 0, 0), mode="replicate"), taps)
    return F.conv2d(F.pad(plane, (0, 0, reach, reach), mode="replicate"), taps.transpose(2, 3))


def _gradient(plane: Tensor) -> tuple[Tensor, Tensor]:
    """Sobel's derivative, scaled so that a ramp of 1 per pixel gives 1."""
    kernel = plane.new_tensor([[-1, 0, 1], [-2, 0, 2], [-1, 0, 1]]).view(1, 1, 3, 3) / 8
    padded = F.pad(plane, (1, 1, 1, 1), mode="replicate")
    return F.conv2d(padded, kernel), F.conv2d(padded, kernel.transpose(2, 3))


def _thin(strength: Tensor, dx: Tensor, dy: Tensor) -> Tensor:
    """Keep a pixel only where it is the largest across its edge: non-maximum suppression."""
    padded = F.pad(strength, (1, 1, 1, 1))
    height, width = strength.shape[2:]

    def neighbour(x: int, y: int) -> Tensor:
        return padded[:, :, 1 + y : 1 + y + height, 1 + x : 1 + x + width]

    octant = torch.round(torch.atan2(dy, dx) / (torch.pi / 4)).long() % 4
    kept = torch.zeros_like(strength, dtype=torch.bool)
    for direction, (x, y) in enumerate(((1, 0), (1, 1), (0, 1), (-1, 1))):
        # ">=" on one side only: of two equal neighbours exactly one stays
        largest = (strength > neighbour(x, y)) & (strength >= neighbour(-x, -y))
        kept |= largest & (octant == direction)
    return strength * kept
