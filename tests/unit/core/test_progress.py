"""Cancelling, and the family of errors."""

from __future__ import annotations

import threading
import time

import pytest

from slipstream.core import errors
from slipstream.core.errors import BuildCancelled, BuildFailed, SlipstreamError
from slipstream.core.progress import CancelToken, Progress, ignore_progress


def test_nothing_happens_until_cancelled() -> None:
    token = CancelToken()
    token.raise_if_cancelled("The build")
    assert not token.cancelled and token.wait(0) is False
    ignore_progress(Progress("compile", 0.5, "half"))


def test_the_first_reason_stays_and_is_told() -> None:
    token = CancelToken()
    token.cancel("ComfyUI was interrupted")
    token.cancel("something else")
    assert token.cancelled
    with pytest.raises(
        BuildCancelled, match=r"^The build of X was stopped: ComfyUI was interrupted\. Nothing was kept"
    ):
        token.raise_if_cancelled("The build of X")


def test_a_waiting_thread_wakes_up_at_once() -> None:
    token = CancelToken()
    threading.Timer(0.1, token.cancel).start()
    begin = time.monotonic()
    assert token.wait(30) is True
    assert time.monotonic() - begin < 10
    assert token.reason == "cancelled by the user"


def test_every_error_can_be_caught_as_one() -> None:
    found = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    assert BuildCancelled in found and len(found) > 5
    assert all(issubclass(error, SlipstreamError) and error.__doc__ for error in found)
    assert issubclass(BuildCancelled, BuildFailed)
