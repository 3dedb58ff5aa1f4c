"""The command `ui`, as far as it goes without Gradio."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from slipstream.cli import ui

Command = Callable[..., Any]


def test_without_gradio_it_is_said_how_to_get_it(cli: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ui, "is_there", lambda: False)
    done = cli("ui")
    assert done.status == 1 and 'pip install "slipstream[ui]"' in done.err


def test_other_addresses_ask_for_a_password(cli: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ui, "is_there", lambda: True)
    monkeypatch.delenv(ui.PASSWORD_VARIABLE, raising=False)
    done = cli("ui", "--listen", "0.0.0.0")
    assert done.status == 1 and "Refused to listen at 0.0.0.0 without a password" in done.err


def test_a_model_that_is_no_file(cli: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ui, "is_there", lambda: True)
    done = cli("ui", "--model", "gone.safetensors")
    assert done.status == 1 and "There is no file gone.safetensors" in done.err
