"""torch's switches of rounding, set by their older names or their newer ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from slipstream.runtime.checking.rounding_switches import exact_fp32, rounding_switches, rounds_to_tf32


class Older:
    """As before torch 2.9."""

    def __init__(self) -> None:
        self.allow_tf32 = False


class Newer(Older):
    """As where somebody set the newer name."""

    def __init__(self) -> None:
        self.fp32_precision = "ieee"
        self.is_read_by_older_name = 0

    @property
    def allow_tf32(self) -> bool:
        self.is_read_by_older_name += 1
        raise RuntimeError("mix of the legacy and new APIs")

    @allow_tf32.setter
    def allow_tf32(self, wanted: bool) -> None:
        raise RuntimeError("mix of the legacy and new APIs")


@pytest.fixture(params=[Older, Newer])
def matmul(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made = request.param()
    monkeypatch.setattr(torch.backends.cuda, "matmul", made)
    monkeypatch.setattr(torch.backends, "cudnn", Older())
    yield made


def switch_on(matmul: Any) -> None:
    if isinstance(matmul, Newer):
        matmul.fp32_precision = "tf32"
    else:
        matmul.allow_tf32 = True


def test_switches_are_read_by_the_name_that_they_were_set_by(matmul: Any) -> None:
    before = rounding_switches()
    assert not rounds_to_tf32()
    switch_on(matmul)
    assert rounds_to_tf32() and rounding_switches() != before


def test_products_are_exact_meanwhile(matmul: Any) -> None:
    switch_on(matmul)
    with exact_fp32():
        assert not rounds_to_tf32()
    assert rounds_to_tf32()
