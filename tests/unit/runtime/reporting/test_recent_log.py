"""The last lines of the log."""

from __future__ import annotations

import logging

from slipstream.runtime.reporting.recent_log import RecentLog


def logger_with(recent: RecentLog) -> logging.Logger:
    logger = logging.Logger("test")
    logger.addHandler(recent)
    return logger


def test_lines_come_in_order_and_once() -> None:
    recent = RecentLog()
    logger = logger_with(recent)
    logger.info("the %s", "first")
    logger.warning("the second")
    found = recent.after(0)
    assert [(line["n"], line["level"], line["text"]) for line in found["lines"]] == [
        (1, "info", "the first"),
        (2, "warning", "the second"),
    ]
    assert found["next"] == 2 and recent.after(2) == {"lines": [], "next": 2}
    assert [line["n"] for line in recent.after(1)["lines"]] == [2]


def test_the_oldest_go() -> None:
    recent = RecentLog(keep=3)
    logger = logger_with(recent)
    for number in range(10):
        logger.info("%d", number)
    assert [line["n"] for line in recent.after(0)["lines"]] == [8, 9, 10]


def test_a_page_from_before_a_restart_gets_all() -> None:
    recent = RecentLog()
    logger_with(recent).info("after the restart")
    assert len(recent.after(400)["lines"]) == 1


def test_an_error_comes_with_its_trace_and_a_bad_record_harms_nobody(capsys) -> None:
    recent = RecentLog()
    logger = logger_with(recent)
    try:
        raise ValueError("inside")
    except ValueError:
        logger.exception("it broke")
    logger.info("%d", "no number")
    logger.info("x" * 100_000)
    first, last = recent.after(0)["lines"]
    assert "it broke" in first["text"] and "ValueError: inside" in first["text"]
    assert len(last["text"]) < 10_000
