"""Saved pictures, and how far they differ."""

from __future__ import annotations

import io
import json
import urllib.parse
from collections.abc import Mapping
from typing import Any

from ..in_server.client import Calls, Client, Picture, calls_of


def opened(client: Client, file: Mapping[str, str]) -> tuple[Any, Mapping[str, Any]]:
    """A saved picture's values [H, W, 3] from 0 to 1, and what Slipstream wrote into it."""
    import numpy
    from PIL import Image

    with Image.open(io.BytesIO(client.fetch("/view?" + urllib.parse.urlencode(file)))) as image:
        values = numpy.asarray(image.convert("RGB"), dtype=numpy.float32) / 255
        return values, json.loads(image.info.get("slipstream", "{}"))


def compared(client: Client, fast: Picture, plain: Picture) -> tuple[float, float, Calls]:
    """The largest difference of a value, the largest root mean square of a picture's differences, and who computed."""
    worst = worst_rms = 0.0
    calls = Calls()
    for one, other in zip(fast.files, plain.files, strict=True):
        (pixels, record), (wanted, _) = (opened(client, file) for file in (one, other))
        worst = max(worst, float(abs(pixels - wanted).max()))
        worst_rms = max(worst_rms, float(((pixels - wanted) ** 2).mean() ** 0.5))
        if one is fast.files[0]:  # all pictures of a batch say the same
            calls = calls_of(record)
    return worst, worst_rms, calls
