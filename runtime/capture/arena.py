"""Device memory for captures, and the graphs that come of them."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

from ...core.streams import Stream
from .library import CaptureError, CaptureLibrary

log = logging.getLogger(__name__)

_workspaces: dict[torch.device, Arena] = {}
"""Where cuBLAS's workspaces for captures lie. Graphs go on writing to them, so they are never freed either."""

_SIDE = 16
"""Rows and columns of a matrix for which cuBLAS wants a workspace."""


class Arena:
    """Memory that is set aside for captures: torch takes it once, and what a thread inside allocates comes from it.

    Nothing in it may be needed after the calls that allocated it, since every replay of a graph writes to it anew.
    """

    def __init__(self, library: CaptureLibrary, device: torch.device) -> None:
        index = device.index if device.index is not None else torch.cuda.current_device()
        self.library = library
        self._handle: int | None = library.get("arena_new", index)

    @property
    def bytes(self) -> int:
        """Device memory that it holds, in bytes."""
        return 0 if self._handle is None else int(self.library.get("arena_bytes", self._handle))

    @property
    def live(self) -> int:
        """Number of tensors and workspaces that lie in it at this moment."""
        return 0 if self._handle is None else int(self.library.get("arena_live", self._handle))

    @contextmanager
    def inside(self, grows: bool) -> Iterator[None]:
        """What this thread allocates on the device meanwhile lies in the arena.

        Args:
            grows: whether torch may give it more memory; otherwise `torch.OutOfMemoryError` is raised for what does
                not fit, without harm.
        """
        self.library.run("arena_enter", self._handle, int(grows))
        try:
            yield
        finally:
            self.library.get("arena_leave")

    def close(self) -> None:
        """Leave the memory behind, for `give_back`: now, or when the last tensor that lies in it goes."""
        if self._handle is not None:
            self.library.get("arena_delete", self._handle)
            self._handle = None


def give_back(library: CaptureLibrary) -> None:
    """Free what closed arenas have left behind. The device must be done with it."""
    try:
        library.run("give_back")
    except CaptureError as error:
        log.warning("Slipstream: memory of CUDA graphs could not be freed: %s", error)


def prepare_libraries(library: CaptureLibrary, device: torch.device) -> None:
    """Have cuBLAS's workspaces for the current stream allocated where they stay for good.

    torch keeps one for each stream, and another extension may have torch forget them all at any time.
    """
    arena = _workspaces.get(device)
    if arena is None:
        arena = _workspaces[device] = Arena(library, device)
    with arena.inside(grows=True):
        ones = torch.ones((_SIDE, _SIDE), dtype=torch.float16, device=device)
        torch.mm(ones, ones)
        torch.addmm(ones[0], ones, ones)


class Graph:
    """Work that was captured, ready to be launched again and again."""

    def __init__(self, library: CaptureLibrary, handle: int) -> None:
        self._library = library
        self._handle: int | None = handle

    def launch(self, stream: Stream) -> None:
        """Enqueue the work on `stream`.

        Raises:
            CaptureError: CUDA refused.
        """
        self._library.run("graph_launch", self._handle, stream.cuda_stream)

    def close(self) -> None:
        """Free it. The device must be done with it."""
        if self._handle is not None:
            with suppress(CaptureError):
                self._library.run("graph_delete", self._handle)
            self._handle = None


def capture(library: CaptureLibrary, stream: Stream, work: Callable[[Callable[[], None]], None]) -> list[Graph]:
    """Record what `work` enqueues on `stream`, which is the current one; nothing of it is computed.

    Args:
        work: is given a function that ends a graph: what follows is one of its own.

    Returns:
        The graphs, to be launched in this order.

    Raises:
        CaptureError: `work` did what no graph can hold, such as waiting for the device.
        Exception: what `work` raises.
    """
    graphs: list[Graph] = []

    def begin() -> None:
        library.run("capture_begin", stream.cuda_stream)

    def end() -> None:
        made = ctypes.c_void_p()
        library.run("capture_end", stream.cuda_stream, 1, ctypes.byref(made))
        assert made.value is not None
        graphs.append(Graph(library, made.value))

    def cut() -> None:
        end()
        begin()

    begin()
    try:
        work(cut)
    except BaseException:
        with suppress(CaptureError):  # the capture is void; what made it so is what matters
            library.run("capture_end", stream.cuda_stream, 0, ctypes.byref(ctypes.c_void_p()))
        for graph in graphs:
            graph.close()
        raise
    end()
    return graphs
