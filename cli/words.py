"""Parsers for values on the command line: sizes, spans of time, resolutions."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from datetime import timedelta

from ..runtime.settings.model_settings import Resolution, check_tokens, parse_resolutions

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


def one_line(text: object) -> str:
    return " ".join(str(text).split())
