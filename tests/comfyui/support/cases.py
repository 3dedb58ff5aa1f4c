"""Cases of a test, and which of them are left out to save time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def with_slow(names: Iterable[str], *slow: str) -> list[Any]:
    """Return `names` as `parametrize` takes them, those named `slow` marked so."""
    names = list(names)
    assert set(slow) <= set(names), "no such case"
    return [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in names]
