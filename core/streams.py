"""CUDA streams of our own, and the order of work on those of others; never a wait on the host."""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch


class Stream(Protocol):
    """As much of `torch.cuda.Stream` as engines need."""

    @property
    def cuda_stream(self) -> int: ...

    def synchronize(self) -> None: ...


class _NoStream:
    """Where there are no streams, work is done in order by itself."""

    cuda_stream = 0

    def synchronize(self) -> None:
        return None


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Inside, libraries that know nothing of torch's devices use this GPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def current_stream(device: torch.device) -> Stream:
    """torch's current stream; a stand-in where `device` has no streams."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else _NoStream()


def is_capturing(device: torch.device) -> bool:
    """Whether what the current stream is given now becomes a CUDA graph, and is not computed."""
    if device.type != "cuda" or not torch.cuda.is_initialized():
        return False
    if device.index in (None, torch.cuda.current_device()):
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def wait_for(device: torch.device) -> None:
    """Block until `device` has finished all work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


_NON_BLOCKING = 1
_DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"


_STREAMS = 3
_SIDE, _BRANCH, _CAPTURE = range(_STREAMS)


@functools.cache
def _stream(device: torch.device, number: int) -> torch.cuda.Stream:
    """A stream that only Slipstream uses; it is never freed.

    torch hands out a pool of 32 in turns, so that sooner or later another thread uses the same one, and its work
    becomes part of our capture or invalidates it.
    """
    with torch.cuda.device(device):
        torch.cuda.mem_get_info(device)  # the driver is asked below for a stream of the context that this makes current
        made = ctypes.c_void_p()
        try:
            if ctypes.CDLL(_DRIVER).cuStreamCreate(ctypes.byref(made), _NON_BLOCKING) == 0:
                return torch.cuda.ExternalStream(made.value, device)
        except (OSError, AttributeError):  # not NVIDIA's driver
            pass
    return torch.cuda.Stream(device)


def wait_for_streams(device: torch.device) -> None:
    """Block until the work on Slipstream's own streams, and that of all turns, has finished.

    Synchronising the whole device would fail while another thread captures a CUDA graph, and invalidate the capture.
    """
    for number in range(_STREAMS):
        _stream(device, number).synchronize()
    turns_of(device).wait()


@functools.cache
def turns_of(device: torch.device) -> Turns:
    """The turns of all work on a device that has to do with the same memory, such as the workspaces of libraries."""
    return Turns(device)


class Turns:
    """Work on the callers' streams that is done in the order in which it is given, whichever thread gives it, and
    whichever stream is current there.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.RLock()
        self._done: torch.cuda.Event | None = None

    @contextmanager
    def turn(self) -> Iterator[Stream]:
        """The current stream, which waits for the turns before; the host waits until those have been given.

        Inside, the device is the current one: what is launched on its default stream goes to no other device's.
        """
        if self._device.type != "cuda":
            yield _NoStream()
            return
        with self._lock, torch.cuda.device(self._device):
            stream = torch.cuda.current_stream(self._device)
            if self._done is None:
                self._done = torch.cuda.Event()
            else:
                stream.wait_event(self._done)
            try:
                yield stream
            finally:
                self._done.record(stream)

    def wait(self) -> None:
        """Block until the last one is done."""
        if self._done is not None:
            self._done.synchronize()


class Branch:
    """Work on a second stream beside the current one, from `begin` to `join`.

    What it hands over is to be allocated before it begins, and what it allocates is to be freed before it ends: then
    no memory is used by one stream while the other gives it away.
    """

    def __init__(self, device: torch.device) -> None:
        self._side = _stream(device, _BRANCH)
        self._device = device
        self._done = torch.cuda.Event()

    @contextmanager
    def begin(self) -> Iterator[None]:
        """Inside, work goes to the second stream, after all that the current one was given."""
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            yield
            self._done.record(self._side)

    def join(self) -> None:
        """The current stream waits for the second one from here on; the host does not."""
        torch.cuda.current_stream(self._device).wait_event(self._done)


@contextmanager
def side_stream(device: torch.device) -> Iterator[Stream]:
    """After all that the current stream was given, and before all that it is given next.

    Tensors that outlive the block are to be allocated outside of it.
    """
    if device.type != "cuda":
        yield _NoStream()
        return
    with _beside_caller(device, _stream(device, _SIDE)) as side:
        yield side


@contextmanager
def capture_stream(device: torch.device) -> Iterator[torch.cuda.Stream]:
    """The stream of a CUDA device on which nothing but captures is done, after all that engines were given before.

    Memory that outlives the block is to be allocated for another stream: whoever frees it later, in whatever thread,
    would have to do with this one in the midst of a capture.
    """
    _stream(device, _CAPTURE).wait_stream(_stream(device, _SIDE))
    with _beside_caller(device, _stream(device, _CAPTURE)) as stream:
        with turns_of(device).turn():
            pass  # It comes behind those before, and is none itself: a capture waits for locks.
        yield stream


@contextmanager
def _beside_caller(device: torch.device, side: torch.cuda.Stream) -> Iterator[torch.cuda.Stream]:
    caller = torch.cuda.current_stream(device)
    if caller == side:
        yield side
        return
    side.wait_stream(caller)
    try:
        with torch.cuda.stream(side):
            yield side
    finally:
        caller.wait_stream(side)
