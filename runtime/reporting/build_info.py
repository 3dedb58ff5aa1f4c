"""Builds that wait or run, as plain data."""

from __future__ import annotations

from typing import Any

from ..building.build_queue import Ticket


def describe_build(ticket: Ticket, held: bool) -> dict[str, Any]:
    """What pages show of a build; docs/web-api.md names the fields under *build*.

    Args:
        held: whether it holds still since the host is busy.
    """
    spec, progress = ticket.plan.spec, ticket.progress
    return {
        "id": ticket.plan.key.digest,
        "label": str(ticket.plan),
        "role": spec.role.value,
        "backend": spec.backend.name,
        "precision": spec.precision_name,
        "state": ticket.state.value,
        "held": held,
        "phase": progress.phase,
        "fraction": fraction_of(ticket),
        "message": progress.message,
        "estimate_s": None if ticket.estimate is None else round(ticket.estimate, 1),
        "seconds": float(int(ticket.seconds)),  # whole ones, so that a build that tells nothing is told once a second
        "left_s": seconds_left(ticket),
    }


def fraction_of(ticket: Ticket) -> float | None:
    """Of a build, 0 to 1, with as many digits as show."""
    fraction = ticket.progress.fraction
    return None if fraction is None else round(fraction, 3)


def seconds_left(ticket: Ticket) -> float | None:
    """Of a build, by earlier ones; 0 where it takes longer than these."""
    return None if ticket.estimate is None else float(round(max(0.0, ticket.estimate - ticket.seconds)))
