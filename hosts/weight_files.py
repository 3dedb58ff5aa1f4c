"""What the header of a weights file tells, read without loading the weights."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

_LONGEST_HEAD = 2**27
_USUAL_BYTES = 2
"""Of a number in a checkpoint."""


def parameter_count(file: Path, prefix: str) -> int | None:
    """How many parameters lie under `prefix`, or in the whole file where none do; None where the file cannot be read.

    A file that is no safetensors file counts as a whole, by its size.
    """
    try:
        if file.suffix not in (".safetensors", ".sft"):
            return file.stat().st_size // _USUAL_BYTES
        counts = {name: math.prod(entry["shape"]) for name, entry in _head(file).items() if name != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        return None
    inside = [count for name, count in counts.items() if name.startswith(prefix)]
    return sum(inside or counts.values())


def _head(file: Path) -> dict[str, dict[str, list[int]]]:
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        if length > _LONGEST_HEAD:
            raise ValueError("no head of safetensors")
        found = json.loads(opened.read(length))
    if not isinstance(found, dict):
        raise ValueError("no head of safetensors")
    return found
