"""Warnings that would otherwise be repeated with every picture."""

from __future__ import annotations

import logging

_said: set[str] = set()


def warn_once(log: logging.Logger, message: str) -> None:
    """Log a warning unless this process has logged the same message before."""
    if message not in _said:
        _said.add(message)
        log.warning("%s", message)
