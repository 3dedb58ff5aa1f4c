"""Failures on purpose, inside a server's own process: each once, at a named moment of an engine's life."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch
from aiohttp import web
from server import PromptServer

_PATH = "/slipstream_test/fail"
_HUGE = 1 << 45
_kept: list[torch.Tensor] = []


def _wait(x: torch.Tensor) -> None:
    x.sum().item()


def _synchronize(x: torch.Tensor) -> None:
    torch.cuda.synchronize()


def _ask_for_statistics(x: torch.Tensor) -> None:
    torch.cuda.memory_stats()
    x.sum().item()


def _empty_the_cache(x: torch.Tensor) -> None:
    torch.cuda.empty_cache()
    x.sum().item()


def _take_memory(x: torch.Tensor) -> None:
    torch.empty(1 << 33, dtype=torch.uint8, device=x.device)


def _keep_and_wait(x: torch.Tensor) -> None:
    _kept.append(x * 2)
    x.sum().item()


def _raise(x: torch.Tensor) -> None:
    raise RuntimeError("a failure on purpose")


def _run_out(x: torch.Tensor) -> None:
    torch.empty(_HUGE, dtype=torch.uint8, device=x.device)


def _kill(x: torch.Tensor) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


_IN_CAPTURE = {
    "wait": _wait, "synchronize": _synchronize, "statistics": _ask_for_statistics, "empty cache": _empty_the_cache,
    "memory": _take_memory, "keep": _keep_and_wait, "raise": _raise, "kill": _kill,
}  # fmt: skip
_IN_CALL = {"raise": _raise, "out of memory": _run_out, "kill": _kill}


class Failures:
    """What fails next. Nothing does until a test asks for it."""

    def __init__(self) -> None:
        self._next: tuple[str, str] | None = None
        self._is_in_place = False
        self.done: list[str] = []

    async def ask(self, request: web.Request) -> web.Response:
        """Take where and how to fail; answers what has failed so far."""
        wanted = await request.json()
        self._put_in_place()
        self._next = (wanted["where"], wanted["how"]) if wanted.get("where") else None
        _kept.clear()
        return web.json_response({"done": self.done})

    def at(self, where: str, x: torch.Tensor | None = None) -> None:
        """Fail here, if this is where."""
        if self._next is None or self._next[0] != where:
            return
        (_, how), self._next = self._next, None
        self.done.append(f"{where}: {how}")
        ways: dict[str, Callable[[Any], None]] = _IN_CAPTURE if where == "capture" else _IN_CALL
        ways[how](x if x is not None else torch.ones(1))

    def _put_in_place(self) -> None:
        if self._is_in_place:
            return
        self._is_in_place = True
        pack = next(name.removesuffix(".nodes.extension") for name in sys.modules if name.endswith(".nodes.extension"))

        def part(name: str) -> Any:
            return importlib.import_module(f"{pack}.{name}")

        self._around(part("compile_backend.engine").CompiledEngine, "__call__", self._before_call, after=True)
        self._around(part("compile_backend.blocks.engine").BlockEngine, "__call__", self._before_call, after=True)
        self._around(part("compile_backend.engine").CompiledEngine, "_bind", lambda: self.at("bind"))
        self._around(part("compile_backend.aot_inductor").AOTInductorBackend, "load", lambda: self.at("load"))
        self._around(part("runtime.capture.arena").Graph, "launch", lambda: self.at("launch"))
        self._around(part("hosts.comfy.step_graph.step").Step, "_denoised", lambda: self._in_capture_only("step"))

    def _in_capture_only(self, where: str) -> None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            self.at(where)

    def _before_call(self, results: Any) -> None:
        given = [results] if isinstance(results, torch.Tensor) else getattr(results, "values", lambda: results)()
        x = next(each for each in given if each is not None)
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            self.at("capture", x)
        else:
            self.at("call", x)

    def _around(self, owner: Any, name: str, fail: Callable[..., None], after: bool = False) -> None:
        function = getattr(owner, name)

        def instead(*args: Any, **kwargs: Any) -> Any:
            if after:
                result = function(*args, **kwargs)
                fail(result)
                return result
            fail()
            return function(*args, **kwargs)

        setattr(owner, name, instead)


def allow_failures() -> None:
    """Let tests ask for failures in this process."""
    PromptServer.instance.routes.post(_PATH)(Failures().ask)
