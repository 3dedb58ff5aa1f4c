"""Ctrl-C during a build: soon over, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(os.name == "nt", reason="a signal to one process needs POSIX")

PROGRAM = """
import runpy, sys, time
from types import SimpleNamespace
runpy.run_path(sys.argv[1] + "/__main__.py")["register"]()
from slipstream.cli.interrupt import prompt_interrupts
from slipstream.core.errors import BuildCancelled
from slipstream.engine_cache import EngineStore
from slipstream.runtime.provider import EngineProvider
from slipstream.runtime.building.build_queue import BuildQueue

def build(plan, progress, cancel, may_run):
    with store.scratch("build-x") as folder:
        (folder / "part").write_text("half of an engine")
        print("building", flush=True)
        cancel.wait(60)
        time.sleep(0.5)  # as ending a compiler takes
        cancel.raise_if_cancelled('It')

store = EngineStore(sys.argv[2])
provider = EngineProvider(store, backends=[])
queue = BuildQueue(build)
vars(provider.blocks if sys.argv[3] == "blocks" else provider)["queue"] = queue
try:
    with prompt_interrupts(provider):
        queue.submit(SimpleNamespace(key=SimpleNamespace(digest="d" * 64)), urgent=True).wait()
except KeyboardInterrupt as stop:
    print(stop, file=sys.stderr)
    sys.exit(130)
"""


def interrupt(root: Path, store: Path, times: int, built: str) -> tuple[int, float, str]:
    """Exit status, seconds from Ctrl-C to the end, and stderr."""
    command = [sys.executable, "-c", PROGRAM, str(root), str(store), built]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "building\n"
    assert list(store.glob("tmp/*/part"))
    started = time.monotonic()
    for _ in range(times):
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
    _, err = process.communicate(timeout=30)
    return process.returncode, time.monotonic() - started, err


@pytest.mark.parametrize(
    ("times", "built"),
    [(1, "the whole model"), (3, "the whole model"), (1, "blocks")],
    ids=["once", "impatiently", "engines of blocks"],
)
def test_ends_soon_and_leaves_nothing(root: Path, tmp_path: Path, times: int, built: str) -> None:
    status, seconds, err = interrupt(root, tmp_path / "store", times, built)
    assert status == 130
    assert "nothing was kept" in err and "Traceback" not in err
    assert not list(tmp_path.glob("store/tmp/*")) and not list(tmp_path.glob("store/in_use/*"))
    assert seconds < 10
