"""Sizes, spans of time and resolutions, as people write and read them."""

from __future__ import annotations

from argparse import ArgumentTypeError
from datetime import timedelta

import pytest

from slipstream.cli import words
from slipstream.core.formatting import say_bytes, say_seconds
from slipstream.runtime.settings.model_settings import Resolution


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 2**30), ("1.5 g", 3 * 2**29), ("500MiB", 500 * 2**20), ("0", 0), ("12b", 12), ("2k", 2048)],
)
def test_sizes(text: str, size: int) -> None:
    assert words.size_in_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "time"),
    [("30d", timedelta(30)), ("12h", timedelta(hours=12)), ("2w", timedelta(14)), ("1.5m", timedelta(0, 90))],
)
def test_spans(text: str, time: timedelta) -> None:
    assert words.span(text) == time


def test_resolutions_are_taken_once() -> None:
    assert words.resolutions("512x512,768x512,512x512") == (Resolution(512, 512), Resolution(768, 512))


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (words.size_in_bytes, "-5GB"),
        (words.size_in_bytes, "5PB"),
        (words.size_in_bytes, ""),
        (words.span, "30"),
        (words.span, "-1d"),
        (words.resolutions, ""),
        (words.count, "-1"),
        (words.count, "1.5"),
        (words.prefix, ""),
        (words.prefix, "a" * 65),
    ],
)
def test_what_cannot_be_read(read, text: str) -> None:
    with pytest.raises(ArgumentTypeError):
        read(text)


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KB"), (3.4 * 2**20, "3.4 MB"), (5 * 2**50, "5120.0 TB")],
)
def test_bytes_in_words(number: float, text: str) -> None:
    assert say_bytes(number) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.44, "0.4 s"), (41.2, "41 s"), (125, "2 min 5 s")])
def test_seconds_in_words(seconds: float, text: str) -> None:
    assert say_seconds(seconds) == text
