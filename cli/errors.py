"""Errors of the command line's own."""

from __future__ import annotations

from ..core.errors import SlipstreamError

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
"""Exit statuses."""


class CommandError(SlipstreamError):
    """A command was understood but cannot be carried out."""
