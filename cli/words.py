"""What people write on the command line: sizes, spans of time, resolutions; and how these are shown to them."""

from __future__ import annotations

import math
import re
import time
from argparse import ArgumentTypeError
from datetime import timedelta

from ..runtime.settings import Resolution, check_tokens, parse_resolutions

_BYTES = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_SECONDS = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def size_in_bytes(text: str) -> int:
    """Read "5GB", "500 MiB" or a number of bytes; a kilobyte is 1024 bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", text.strip().lower())
    if match is None:
        raise ArgumentTypeError(f"{text!r} is no size; write for example 5GB or 500MB")
    return int(float(match[1]) * _BYTES[match[2]])


def span(text: str) -> timedelta:
    """Read "30d", "12h", "2w" or "45m"."""
    match = re.fullmatch(r"(\d{1,6}(?:\.\d+)?)\s*([mhdw])", text.strip().lower())
    if match is None:
        raise ArgumentTypeError(f"{text!r} is no span of time; write for example 30d, 12h or 45m")
    return timedelta(seconds=float(match[1]) * _SECONDS[match[2]])


def resolutions(text: str) -> tuple[Resolution, ...]:
    """Read "512x512,768x512"; at least one."""
    try:
        found = parse_resolutions(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None
    if not found:
        raise ArgumentTypeError("name at least one resolution, such as 512x512")
    return tuple(dict.fromkeys(found))


def count(text: str) -> int:
    """Read a whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is no whole number from 1")
    return int(text)


def text_length(text: str) -> int:
    """Read a number of tokens to which texts are padded."""
    try:
        return check_tokens(count(text))
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


def prefix(text: str) -> str:
    """Read the first digits of an engine's digest."""
    if not re.fullmatch(r"[0-9a-f]{1,64}", text.lower()):
        raise ArgumentTypeError(
            f"{text!r} is no engine; write the first digits of its id, as `slipstream list` shows it"
        )
    return text.lower()


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


def say_error(error: float | None) -> str:
    """A relative error, or that there is none yet."""
    return "not checked" if error is None else f"{error:.1e}"


def say_speedup(speedup: float | None) -> str:
    """How many times as fast as the plain model; "-" where that was not measured."""
    return "-" if speedup is None else f"{speedup:.2f}×"


def one_line(text: object) -> str:
    return " ".join(str(text).split())
