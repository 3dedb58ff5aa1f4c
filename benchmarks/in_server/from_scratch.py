"""A model without any engine yet: pictures from the first on, with a rest after each in which builds may run.

Each variant has a server of its own, an empty store, and empty caches of torch and triton. The node builds in the
background, as it does where nobody chooses.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from ..measuring.deadline import Deadline, OutOfTime
from ..subjects.rows import Row, append
from .block import Pictures
from .client import Client, Picture, PictureFailed
from .plan import Block
from .process import Installation, Server, ServerDied
from .rows import figures_of, result_file
from .variants import ServerVariant

PREFIX = "from-scratch-"
"""How the names of files with these rows begin."""

_BUILT = re.compile(r"Slipstream: built (.+) in (\d+) s(?: \((.+)\))?")


def measure(
    installation: Installation,
    cases: Iterable[str],
    variants: Iterable[str],
    seconds: float,
    rest: float,
    common: Row,
    out: Path,
    deadline: Deadline,
    say: Callable[[str], None],
) -> list[str]:
    """Measure each variant for so many seconds from its first picture on; returns what went wrong, a line each.

    Args:
        installation: prepared.
        rest: seconds after each picture.
        common: fields of all rows.
    """
    troubles = []
    for case in cases:
        for variant in variants:
            folder = installation.work / "from-scratch" / f"{case}-{variant}"
            caches = {f"{name}_CACHE_DIR": str(folder / name.lower()) for name in ("TORCHINDUCTOR", "TRITON")}
            if ServerVariant.of(variant).is_ours:
                caches = {}  # its builds have caches of their own, and none of a user's is to serve them
            fresh = replace(installation, engines=folder / "engines", variables={**installation.variables, **caches})
            fresh.engines.mkdir(parents=True)
            row: Row = {"case": case, "variant": variant, "rest_s": rest, "pictures": [], "builds": []}
            server = Server(fresh, (), f"from-scratch-{case}-{variant}")
            try:
                _measure_one(server, fresh, row, min(seconds, deadline.seconds_left), deadline, say)
            except (ServerDied, PictureFailed, OutOfTime) as error:
                row["failed"] = str(error)
                troubles.append(f"{case}, {variant}: {error}")
            row["builds"] = builds_in(server.log_file.read_text(encoding="utf-8", errors="replace"))
            append(result_file(out, common.get("gpu"), date.today(), PREFIX), [{**row, **common}])
    return troubles


def _measure_one(
    server: Server, installation: Installation, row: Row, seconds: float, deadline: Deadline, say: Callable[[str], None]
) -> None:
    with server:
        server.start(deadline)
        with Client(server, deadline, seconds + 600) as client:
            pictures = Pictures(client, installation.work / "output", build="background")
            block = Block((), row["case"], row["variant"])
            began = time.monotonic()
            while (at := time.monotonic() - began) < seconds:
                row["pictures"].append(_told(at, pictures.next(block, len(row["pictures"])), client))
                say(f"{block.case} {block.variant} {row['pictures'][-1]}")
                time.sleep(row["rest_s"])


def _told(at: float, picture: Picture, client: Client) -> dict[str, Any]:
    """When a picture was asked for, how long it took, and who computed it."""
    figures = figures_of(picture.client_s, picture.nodes)
    told: dict[str, Any] = {"at_s": round(at, 3)}
    told |= {name: round(figures[name], 3) for name in ("client_s", "sampler_s", "step_ms") if name in figures}
    calls = client.calls(picture)
    if calls is not None:
        told |= {"engine_calls": calls.engine, "of_blocks": calls.of_blocks, "eager_calls": calls.eager}
    return told


def builds_in(log: str) -> list[dict[str, Any]]:
    """The builds that a server's log tells of: what, seconds, and the seconds of its parts in words."""
    return [
        {"what": what, "seconds": int(seconds), "parts": parts or None} for what, seconds, parts in _BUILT.findall(log)
    ]
