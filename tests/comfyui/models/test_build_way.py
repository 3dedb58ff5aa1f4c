"""The way of a build request through the folders, from Build Engine to the engine that was compared with its model."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

import pytest

import slipstream
from slipstream.core.protocols import BuildJob
from slipstream.core.spec import EngineSpec
from slipstream.engine_cache import EngineKey, EngineStore
from slipstream.hosts.comfy.node_state import watched_nodes
from slipstream.hosts.comfy.process import shared_provider
from slipstream.nodes.build_engine import BuildEngine
from slipstream.runtime.building.build_queue import Ticket
from slipstream.runtime.module import AcceleratedModule
from slipstream.runtime.planning.plan import CallShape, Plan
from slipstream.runtime.provider import Made, Prepared
from slipstream.runtime.settings.model_settings import Settings
from slipstream.tests.comfyui.support.models import tiny
from slipstream.tests.comfyui.support.quick import quick_provider

ROOT = Path(slipstream.__file__).parent
REQUEST = (AcceleratedModule, Settings, CallShape, Prepared, Plan, EngineSpec, EngineKey, Ticket, BuildJob, Made)
"""A build request in its forms: what the user chose, what is wanted for it, and what is made of that."""

MOST_FOLDERS, MOST_RETURNS = 12, 1
"""As measured. The one return is the queue's: its thread has the provider build what was asked for."""

ONLOOKER = "slipstream-announce"
"""The thread that shows the queue to the page, at times of its own. It builds nothing; where it looks in during a
build, it reads tickets in `runtime/reporting` too."""


class Way:
    """The calls that were handed the request, by folder.

    Attributes:
        folders: that were entered.
        returns: calls, as names of caller and called function, that went back into a folder which waits for an answer.
    """

    def __init__(self) -> None:
        self.folders: set[str] = set()
        self.returns: set[tuple[str, str]] = set()
        self._known: dict[CodeType, str | None] = {}

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        """As `sys.setprofile` wants it."""
        if threading.current_thread().name == ONLOOKER:
            return
        if event != "call" or (folder := self._folder_of(frame.f_code)) is None or not _is_handed_request(frame):
            return
        self.folders.add(folder)
        callers = list(self._callers(frame))
        if callers and callers[0][0] != folder and folder in {each for each, _ in callers}:
            self.returns.add((callers[0][1], frame.f_code.co_name))

    def _callers(self, frame: FrameType) -> Iterator[tuple[str, str]]:
        """Folder and name of each of our functions that waits for this one, the nearest first."""
        caller = frame.f_back
        while caller is not None:
            if (folder := self._folder_of(caller.f_code)) is not None:
                yield folder, caller.f_code.co_name
            caller = caller.f_back

    def _folder_of(self, code: CodeType) -> str | None:
        if code not in self._known:
            file = Path(code.co_filename)
            inside = file.is_relative_to(ROOT) and "tests" not in file.relative_to(ROOT).parts
            self._known[code] = file.parent.relative_to(ROOT).as_posix() if inside else None
        return self._known[code]


def _is_handed_request(frame: FrameType) -> bool:
    names = inspect.getargs(frame.f_code)
    given = [frame.f_locals.get(name) for name in (*names.args, names.varargs or "", names.varkw or "")]
    flat = [part for each in given for part in (each if isinstance(each, (list, tuple)) else (each,))]
    return any(isinstance(each, REQUEST) for each in flat)


@contextmanager
def followed(way: Way) -> Iterator[None]:
    """Meanwhile `way` is told of all calls, of threads that begin meanwhile too."""
    threading.setprofile(way)
    sys.setprofile(way)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


class Node(BuildEngine):
    """As ComfyUI runs it."""

    hidden = SimpleNamespace(prompt={}, unique_id="7", extra_pnginfo=None)


def test_a_build_request_enters_few_folders_and_seldom_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    way = Way()
    store = EngineStore(tmp_path)
    with quick_provider(store) as provider:
        monkeypatch.setattr(shared_provider, "provider", lambda: provider)
        monkeypatch.setattr(watched_nodes, "provider", lambda: provider)
        watched_nodes.announcer.cache_clear()
        model = tiny.model()
        with followed(way):
            Node.execute(model, "64x64", 2, 77, "auto", "auto", "balanced")
    watched_nodes.announcer.cache_clear()
    assert len(store.list()) == 1
    assert {"nodes", "hosts/comfy/building", "runtime", "runtime/building", "engine_cache"} <= way.folders
    assert len(way.folders) <= MOST_FOLDERS, sorted(way.folders)
    assert len(way.returns) <= MOST_RETURNS, sorted(way.returns)
