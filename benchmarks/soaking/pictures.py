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


def read(client: Client, picture: Picture) -> tuple[list[Any], Calls]:
    """The values of all pictures of a prompt, see `opened`; and who computed them."""
    found = [opened(client, file) for file in picture.files]
    return [values for values, _ in found], calls_of(found[0][1]) if found else Calls()  # all of a batch say the same


def largest(some: list[Any], others: list[Any]) -> float:
    """The largest difference of a value."""
    return max((float(abs(one - other).max()) for one, other in zip(some, others, strict=True)), default=0.0)


def root_mean_square(some: list[Any], others: list[Any]) -> float:
    """The largest root mean square of a picture's differences."""
    pairs = zip(some, others, strict=True)
    return max((float(((one - other) ** 2).mean() ** 0.5) for one, other in pairs), default=0.0)
