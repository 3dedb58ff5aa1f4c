"""How figures are shown to people: on the command line, on pages."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from .spec import Role

SHOWN = 12
"""Digits of a digest that people get to see."""


def say_bytes(number: float) -> str:
    """E.g. "3.4 MB"."""
    if number < 1024:
        return f"{number:.0f} B"
    units = ("KB", "MB", "GB", "TB")
    power = min(len(units), int(math.log2(number) // 10))
    return f"{number / 2 ** (10 * power):.1f} {units[power - 1]}"


def say_seconds(seconds: float) -> str:
    """E.g. "0.4 s", "41 s", "2 min 5 s"."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


def say_time(posix: float) -> str:
    """In local time, to the minute."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(posix))


def say_when(iso: str) -> str:
    """A time that is written down with its zone, in local time."""
    return say_time(datetime.fromisoformat(iso).timestamp())


def say_error(error: float | None) -> str:
    """A relative error, or that there is none yet."""
    return "not checked" if error is None else say_share(error)


def say_engine_error(engine: Mapping[str, Any]) -> str:
    """The error of an engine, of which `engine_info.summary` tells. One of blocks is compared anew in each process, and
    no error of it is kept."""
    return "-" if engine["role"] == Role.BLOCK.value else say_error(engine["error"])


def say_share(fraction: float) -> str:
    """A relative error in per cent, e.g. "1.3 %", "0.044 %", "under 0.001 %"; "inf" and "nan" as they are."""
    if not math.isfinite(fraction):
        return str(fraction)
    if (percent := 100 * abs(fraction)) < 0.001:
        return "under 0.001 %" if percent else "0 %"
    return f"{percent:.0f} %" if percent >= 10 else f"{percent:.2g} %"


def say_ms(ms: float) -> str:
    """A time in milliseconds, e.g. "312" or "8.4"."""
    return f"{ms:.0f}" if round(ms, 1) >= 10 else f"{ms:.1f}"


def say_precisely(ms: float) -> str:
    """The same where it is compared with one that is close, e.g. "98.3"."""
    return f"{ms:.0f}" if ms >= 1000 else f"{ms:.1f}"


def say_times(eager_ms: float, engine_ms: float, timed_by: str) -> str:
    """Without Slipstream and with an engine, e.g. "312 → 104 ms a step"."""
    return f"{say_ms(eager_ms)} → {say_ms(engine_ms)} ms a {timed_by}"


def say_speed(engine: Mapping[str, Any]) -> str:
    """How fast an engine is, of which `engine_info.summary` tells, e.g. "312 → 104 ms a step (3.0x)"."""
    if engine["speedup"] is None:
        return "not measured yet"
    times = say_times(engine["eager_ms"], engine["engine_ms"], engine["timed_by"])
    return f"{times} ({say_speedup(engine['speedup'])})"


def say_speedup(speedup: float | None) -> str:
    """How many times as fast as the user's model without Slipstream, e.g. "3.0x"; "-" where that was not measured."""
    return "-" if speedup is None else f"{speedup:.1f}x"


_BACKENDS = {
    "aotinductor": "compiled",
    "torch.compile": "compiled",
    "aotinductor-blocks": "compiled",
    "triton-blocks": "compiled, without C++",
    "tensorrt": "TensorRT",
}


def say_backend(name: str) -> str:
    """What people call the engines of a backend."""
    return _BACKENDS.get(name, name)


def say_state(engine: Mapping[str, Any]) -> str:
    """Whether an engine, as `engine_info.summary` tells of it, would be used now; if not, why."""
    return f"{engine['state']}: {'; '.join(engine['reasons'])}" if engine["reasons"] else str(engine["state"])
