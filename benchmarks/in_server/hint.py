"""A picture of edges, white on black, for ControlNets."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .graph import HINT

_SIZE = 512
_EDGE = 48
_SHAPES = 12


def write_hint(folder: Path) -> None:
    """Write the picture, which is always the same, into the server's folder of inputs."""
    from PIL import Image

    generator = np.random.default_rng(0)
    pixels = np.zeros((_SIZE, _SIZE, 3), dtype=np.uint8)
    for _ in range(_SHAPES):
        left, top = generator.integers(0, _SIZE - 2 * _EDGE, 2)
        right, bottom = left + generator.integers(_EDGE, 3 * _EDGE), top + generator.integers(_EDGE, 3 * _EDGE)
        pixels[top:bottom, left:right] = 0
        pixels[top:bottom, [left, min(right, _SIZE - 1)]] = 255
        pixels[[top, min(bottom, _SIZE - 1)], left:right] = 255
    Image.fromarray(pixels).save(folder / HINT)
