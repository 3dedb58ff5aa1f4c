"""Errors of the command line's own."""

from __future__ import annotations

from ..core.errors import SlipstreamError

OK, FAILED, USAGE, MISSING, INTERRUPTED = 0, 1, 2, 3, 130
"""Exit statuses; MISSING: nothing failed, but engines are not there."""


class CommandError(SlipstreamError):
    """A command was understood but cannot be carried out."""
