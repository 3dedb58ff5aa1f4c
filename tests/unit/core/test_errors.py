"""Warnings that are not repeated."""

from __future__ import annotations

import logging

import pytest

from slipstream.core.errors import warn_once


def test_a_warning_is_given_once(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("a test")
    for message in ("50 % of it", "50 % of it", "the rest", "50 % of it"):
        warn_once(log, message)
    assert [record.getMessage() for record in caplog.records] == ["50 % of it", "the rest"]
