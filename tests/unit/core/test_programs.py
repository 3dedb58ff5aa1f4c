"""Programs that are started and ended with all that they started, as on Windows: pretended elsewhere."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.core import programs

GROUP = 0x200


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What would be started there, and how."""
    found: list[dict[str, Any]] = []

    def start(command: list[str], **how: Any) -> SimpleNamespace:
        found.append({"command": command, **how})
        return SimpleNamespace(pid=321, stdin=None, poll=lambda: None, wait=lambda: 1)

    monkeypatch.setattr(programs, "os", SimpleNamespace(name="nt"))
    monkeypatch.setattr(subprocess, "CREATE_NEW_PROCESS_GROUP", GROUP, raising=False)
    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(subprocess, "run", start)
    return found


def test_windows_has_process_groups_by_a_flag_and_ends_them_by_a_program(
    begun: list[dict[str, Any]], tmp_path: Path
) -> None:
    program = programs.start(["worker"], tmp_path, os.environ, own_group=True)
    assert begun[0]["creationflags"] == GROUP and "start_new_session" not in begun[0]
    programs.kill_group(program)
    assert begun[1]["command"] == ["taskkill", "/F", "/T", "/PID", "321"]


def test_windows_has_no_signals_for_groups(begun: list[dict[str, Any]]) -> None:
    assert not programs.signal_group(321, "SIGSTOP")
