"""What people may write for a block cache, and how changes are measured."""

from __future__ import annotations

import pytest
import torch

from slipstream.sampling.block_caching import DeepCache, FirstBlockCache, parse_caching, relative_change


@pytest.mark.parametrize(
    ("text", "caching"),
    [
        ("", None),
        ("  ", None),
        ("block cache 0.08", FirstBlockCache(0.08)),
        (" Block  Cache 0", FirstBlockCache(0.0)),
        ("deep cache 3", DeepCache(3)),
        ("deep cache 1", DeepCache(1)),
    ],
)
def test_what_may_be_written(text: str, caching: object) -> None:
    assert parse_caching(text) == caching
    assert caching is None or parse_caching(str(caching)) == caching


@pytest.mark.parametrize(
    "text",
    [
        "block cache", "block cache 1.5", "block cache -0.1", "block cache nan", "block cache 0,08", "deep cache 2.5",
        "deep cache 0", "deep cache 11", "deep cache inf", "deep 3", "0.08",
        "deep cache 3 block cache 0.1", "tea cache 3",
    ],
)  # fmt: skip
def test_what_may_not_is_answered_with_what_may(text: str) -> None:
    with pytest.raises(ValueError, match="no block cache. Write block cache and a threshold") as error:
        parse_caching(text)
    assert repr(text) in str(error.value)


def test_the_picture_that_changed_most_decides() -> None:
    before = torch.ones(2, 3, 4)
    now = before.clone()
    now[1] *= 1.5
    assert relative_change(now, before) == 0.5
    assert relative_change(before.half(), before.half()) == 0.0


def test_no_change_can_be_told_of_what_is_not_finite() -> None:
    before = torch.ones(1, 3, 4)
    for now, then in ((before * torch.nan, before), (before, before * torch.nan), (before * 0, before * 0)):
        assert not relative_change(now, then) < 1
