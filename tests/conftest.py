"""Makes the repository importable as `slipstream`; skips what this machine cannot run, saying why."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import logging
import os
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Started in the background, a program ignores Ctrl-C, and so would all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# More threads than free cores spin against each other: measured up to 26 times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The keys of whoever runs the tests stay as they are; processes that tests start share these.
os.environ["SLIPSTREAM_KEYS"] = tempfile.mkdtemp(prefix="slipstream-keys-")
atexit.register(shutil.rmtree, os.environ["SLIPSTREAM_KEYS"], ignore_errors=True)


def _register_package() -> None:
    """Import the root as `slipstream` and keep it off the path, where our `nodes` would shadow ComfyUI's."""
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]
    if "slipstream" in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(
        "slipstream", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["slipstream"] = module
    spec.loader.exec_module(module)


_register_package()


@functools.cache
def _missing(need: str) -> str | None:
    """Return why tests that need something cannot run here, or None where they can."""
    if need == "gpu":
        import torch

        return None if torch.cuda.is_available() else "no CUDA GPU"
    if need == "trt":
        found = any(map(importlib.util.find_spec, ("tensorrt", "tensorrt_rtx", "tensorrt_rtx_bindings")))
        return _missing("gpu") if found else "no TensorRT"
    if need == "diffusers":
        return None if importlib.util.find_spec("diffusers") else "no diffusers"
    if need == "browser":
        return None if importlib.util.find_spec("playwright") else "no playwright"
    return None


_OF_A_HOST = ("comfyui", "webui")
"""Folders whose tests all get the marker of that name, so that `-m comfyui` finds them."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let `tools/test.py` leave out slow tests."""
    parser.addoption("--without-slow", action="store_true", help="skip tests marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by their folder; skip what this machine cannot run or was told to leave out, each with its reason."""
    leave_out = pytest.mark.skip(reason="slow: only `python tools/test.py --everything` runs it")
    for item in items:
        for name in _OF_A_HOST:
            if ROOT / "tests" / name in item.path.parents:
                item.add_marker(name)
        for marker in list(item.iter_markers()):
            reason = _missing(marker.name)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))
        if config.getoption("--without-slow") and item.get_closest_marker("slow"):
            item.add_marker(leave_out)  # the first reason counts: what cannot run here is not left out to save time


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the repository."""
    return ROOT


@pytest.fixture
def logging_as_before() -> Iterator[None]:
    """A command sets up the logging of its process."""
    ours, theirs = logging.getLogger("slipstream"), logging.getLogger()
    before = [(logger, logger.handlers, logger.level, logger.propagate) for logger in (ours, theirs)]
    with warnings.catch_warnings():
        yield
    for logger, handlers, level, propagate in before:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)
