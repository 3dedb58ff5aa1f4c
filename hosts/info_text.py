"""What happened in a run, in the words of a picture's info text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.formatting import SHOWN


def of_engines(happened: Mapping[str, Any]) -> str:
    """
    Args:
        happened: see `Status.since`.
    """
    parts = [f"{use['calls']} calls by engine {use['digest'][:SHOWN]} ({use['label']})" for use in happened["engines"]]
    parts += [f"{count} by your model: {reason}" for reason, count in happened["reasons"].items()]
    return "; ".join(parts) or "no call of the model"
