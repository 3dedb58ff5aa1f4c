"""Which rows the kernel of gated blocks holds whole, as one or two powers of two."""

from __future__ import annotations

LONGEST = 16384


def parts_of(columns: int) -> tuple[int, int] | None:
    """The two powers of two, or the one and 0, that make up a row which the kernel can hold; else None."""
    most = 1 << (columns.bit_length() - 1)
    rest = columns - most
    return (most, rest) if rest & (rest - 1) == 0 and columns <= LONGEST else None
