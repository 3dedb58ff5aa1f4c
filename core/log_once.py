"""Warnings that would come again with every picture."""

from __future__ import annotations

import logging

_said: set[str] = set()


def warn_once(log: logging.Logger, message: str) -> None:
    """Log a warning; the same one no second time in this process."""
    if message not in _said:
        _said.add(message)
        log.warning("%s", message)
