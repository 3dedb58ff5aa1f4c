"""Values of options of the benchmarks' commands, for `argparse`."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import TypeVar

_Parsed = TypeVar("_Parsed")


def list_of(parse: Callable[[str], _Parsed]) -> Callable[[str], tuple[_Parsed, ...]]:
    """Return what reads values between commas, each by `parse`, whose ValueError says what is wrong with one."""

    def parse_all(text: str) -> tuple[_Parsed, ...]:
        try:
            found = tuple(dict.fromkeys(parse(part.strip()) for part in text.split(",") if part.strip()))
        except ValueError as error:
            raise ArgumentTypeError(str(error)) from None
        if not found:
            raise ArgumentTypeError("name at least one")
        return found

    return parse_all


def count(text: str) -> int:
    """Read a whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is no whole number from 1")
    return int(text)
