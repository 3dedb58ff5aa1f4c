"""The outcomes of a run of tests as a file that is kept: what was tried, on what, and what was left out."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch

from slipstream.runtime.checking.measure import commit

from .server import on_gpu

VARIABLE = "SLIPSTREAM_TEST_REPORT"
_ENDED = "ended from outside"
facts: dict[str, str] = {}
"""What tests tell of what they ran on, such as a server's device and allocator."""


class Report:
    """A plugin of pytest that writes the file named by `SLIPSTREAM_TEST_REPORT`, after each test anew: a run that is
    ended from outside leaves what it got to."""

    def __init__(self, file: Path, comfyui: str) -> None:
        self._file = file
        self._comfyui = comfyui
        self._outcomes: dict[str, dict[str, object]] = {}
        self._wanted = 0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._wanted = len(session.items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the worst of a test's parts; it has passed once its last one has."""
        known = self._outcomes.setdefault(report.nodeid, {"outcome": _ENDED, "seconds": 0.0})
        known["seconds"] = round(float(str(known["seconds"])) + report.duration, 2)
        if report.outcome != "passed":
            known["outcome"] = report.outcome
            said = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            known["why"] = said.strip().splitlines()[-1][:300]
        if report.when == "teardown":
            if known["outcome"] == _ENDED:
                known["outcome"] = "passed"
            self._write()

    def pytest_sessionfinish(self) -> None:
        self._write()

    def _write(self) -> None:
        outcomes = [str(each["outcome"]) for each in self._outcomes.values()]
        content = {
            "comfyui": self._comfyui,
            "flags": " ".join(Path(word).name for word in os.environ.get("SLIPSTREAM_TEST_FLAGS", "").split()),
            "device": torch.cuda.get_device_name() if on_gpu() and torch.cuda.is_available() else "CPU",
            "torch": str(torch.__version__),
            "commit": os.environ.get("SLIPSTREAM_TEST_COMMIT") or commit(),
            "ended": time.strftime("%Y-%m-%dT%H:%M:%S"),
            **facts,
            **{name: outcomes.count(name) for name in ("passed", "failed", "skipped", _ENDED)},
            "not_reached": self._wanted - len(outcomes),
            "tests": self._outcomes,
        }
        self._file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
