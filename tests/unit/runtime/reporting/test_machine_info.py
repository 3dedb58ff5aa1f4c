"""A few facts about this machine."""

from __future__ import annotations

import platform
from dataclasses import replace
from pathlib import Path

from slipstream import __version__
from slipstream.engine_cache import BuildHistory, PastBuild
from slipstream.runtime.reporting.machine_info import describe_machine
from slipstream.tests.fakes import CPU, NullBackend

BUILD = PastBuild(platform.node(), "cpu", 1, "null", "balanced", "a" * 64, 10, 100, 30.0, "unet")


class Broken(NullBackend):
    def why_unavailable(self, device: object) -> str | None:
        raise OSError("libcuda.so: wrong ELF class")


def test_backends_and_builds(tmp_path: Path) -> None:
    missing, half = NullBackend("missing"), NullBackend("half")
    missing.unavailable, half.cannot_build = "not installed", "no compiler"
    history = BuildHistory(tmp_path)
    backends = [NullBackend("good"), missing, half, Broken("broken")]
    assert describe_machine(CPU, backends, history)["typical_build_s"] is None
    for seconds in (10.0, 40.0, 30.0):
        history.add(replace(BUILD, seconds=seconds))
    history.add(replace(BUILD, seconds=3.0, role="vae_decode"))
    history.add(replace(BUILD, seconds=5.0, role="vae_encode"))
    history.add(replace(BUILD, seconds=30.0, role=""))  # of before kinds were noted
    history.add(replace(BUILD, machine="another", seconds=1000.0))
    assert describe_machine(CPU, backends, history) == {
        "gpu": None,
        "backends": {
            "good": None,
            "missing": "not installed",
            "half": "no compiler",
            "broken": "OSError: libcuda.so: wrong ELF class",
        },
        "typical_build_s": 20.0,
        "build_s": {"unet": 30.0, "controlnet": None, "vae": 4.0, "text_encoder": None},
        "version": __version__,
    }
