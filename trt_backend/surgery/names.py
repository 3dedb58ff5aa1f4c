"""Names of tensors."""

from __future__ import annotations


def fresh_name(name: str, taken: set[str]) -> str:
    """`name`, or the like, that is not taken; it is from now on."""
    number, free = 1, name
    while free in taken:
        number, free = number + 1, f"{name}_{number}"
    taken.add(free)
    return free
