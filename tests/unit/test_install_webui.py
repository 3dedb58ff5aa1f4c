"""The installer as a WebUI runs it: at every start, by its path, with the WebUI's folder before all others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Whatever starts a program or opens a connection could change the WebUI's packages.
WATCHED = """
import os, runpy, socket, subprocess, sys
def refuse(*args, **kwargs):
    raise AssertionError(f"the installer did more than look: {args}")
subprocess.Popen = os.system = os.execv = socket.socket = refuse
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@pytest.fixture
def webui(tmp_path: Path) -> Path:
    """A folder with what a WebUI's own has beside `launch.py`, of which nothing may be imported."""
    for name in ("modules", "backend", "gradio"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise AssertionError('{name} was imported')")
    (tmp_path / "launch.py").write_text("raise AssertionError('launch was imported')")
    return tmp_path


def start(webui: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{webui}{os.pathsep}"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=webui, env=environment, capture_output=True, text=True, timeout=60)


def processor_seconds() -> float:
    """Of the processes that this one has started: the machine may be busy with others."""
    spent = os.times()
    return spent.children_user + spent.children_system


def test_a_start_waits_less_than_a_fifth_of_a_second(root: Path, webui: Path) -> None:
    times = []
    for _ in range(5):
        began = processor_seconds()
        done = start(webui, str(root / "install.py"))
        times.append(processor_seconds() - began)
        assert done.returncode == 0 and not done.stderr
    assert min(times) < 0.2


def test_it_installs_and_upgrades_nothing(root: Path, webui: Path) -> None:
    before = sorted(webui.rglob("*.py"))
    done = start(webui, "-c", WATCHED, str(root / "install.py"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[Slipstream] ")
    assert sorted(webui.rglob("*.py")) == before


def test_no_package_of_a_webui_is_asked_for(root: Path) -> None:
    """What a WebUI pins is never in the list that ComfyUI's manager installs from."""
    wanted = (root / "requirements.txt").read_text(encoding="utf-8").lower()
    lines = [line for line in wanted.splitlines() if line and not line.startswith("#")]
    assert not {"torch", "numpy", "pillow", "gradio", "fastapi", "pydantic"} & set(lines)
