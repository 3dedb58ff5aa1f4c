"""A second process that holds a part of the GPU's memory, so that ComfyUI finds a smaller card."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_HOLD = """
import sys, torch
free, _ = torch.cuda.mem_get_info()
held = torch.empty(max(0, free - int(sys.argv[1])), dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def all_but(gigabytes: int | None, python: Path) -> Iterator[None]:
    """Meanwhile no more than so much of the GPU's memory is free, by one plain allocation; None: all that is free.

    Args:
        python: with torch.

    Raises:
        OSError: the memory cannot be held.
    """
    if gigabytes is None:
        yield
        return
    command = [str(python), "-c", _HOLD, str(gigabytes << 30)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin is not None and holder.stdout is not None
        try:
            if holder.stdout.readline().strip() != "held":
                raise OSError("the GPU's memory cannot be held: no GPU, or no torch for it")
            yield
        finally:
            holder.stdin.close()
