"""The process that has imported what builds need, and becomes a build process by a fork, in milliseconds.

Protocol: standard input is a socket. The host sends a message with the standard input and output of the process that it
wants. It is told in JSON: `{"pid"}` of what was begun, `{"refusal": why}` where that failed, `{"pid", "code"}` of what
has ended, and `{"unfit": why}` where nothing can be forked. The socket's end means that nobody needs it any more.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
from collections.abc import Callable
from contextlib import suppress

from ...core.programs import fork
from .worker import be_nice

FORK = "fork"
"""The word by which a process becomes this one."""

IDLE_SECONDS = 120.0
"""Without a build process, it ends after so long."""

_LOOK_SECONDS = 0.2
"""Between two looks at what has ended: no signal has to come for that, which others may block."""

_IMPORTED = (
    "torch.export._trace",
    "torch.utils.cpp_extension",
    "torch._dynamo",
    "torch._functorch.aot_autograd",
    "torch._inductor.choices",
    "torch._inductor.codegen.cpp_wrapper_gpu",
    "torch._inductor.codegen.cuda_combined_scheduling",
    "torch._inductor.compile_fx",
    "torch._inductor.lowering",
    "torch._inductor.runtime.triton_heuristics",
    "triton.compiler",
    "einops",
    "safetensors.torch",
    "scipy.ndimage",
    "..planning.backends",
)
"""What a build would import, in seconds. ComfyUI's own modules are not among them: they ask for the GPU at once."""

HAS_CUDA = "SLIPSTREAM_HAS_CUDA"
"""The variable by which the host says whether torch finds a GPU: 1 or 0."""


def serve(work: Callable[[], int]) -> int:
    """Become a build process whenever the host wants one.

    Args:
        work: what a build process does. It finds the host's files as its standard input and output.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a host that ignores it would have exit codes lost
    host = _claim_socket()
    be_nice()
    _import_all()
    if why := _why_unfit():
        _say(host, {"unfit": why})
        _await_end(host)
        return 1
    gc.collect()
    gc.freeze()  # what is never freed is never written to, and stays shared
    if _fork_as_told(host):
        return work()
    return 0


def _import_all() -> None:
    """Import without a word to the driver: some modules ask torch for a GPU, which starts the driver's threads."""
    import torch

    asked, has_cuda = torch.cuda.is_available, os.environ.pop(HAS_CUDA) == "1"
    torch.cuda.is_available = lambda: has_cuda
    try:
        for name in _IMPORTED:
            with suppress(Exception):  # not there, or of another version: a build imports what it needs
                importlib.import_module(name, __package__)
    finally:
        torch.cuda.is_available = asked


def _claim_socket() -> socket.socket:
    host = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    return host


def _await_end(host: socket.socket) -> None:
    """Until the host has read what it was told: what it has sent, left unread, would take that away."""
    host.settimeout(IDLE_SECONDS)
    with suppress(OSError):
        while host.recv(1):
            pass


def _why_unfit() -> str | None:
    """What forbids forks: a child has none of its parent's threads, and cannot use a GPU that its parent has used."""
    import torch

    if len(os.listdir("/proc/self/task")) > 1:
        return "its libraries run threads"
    if (child := fork()) == 0:
        os._exit(int(torch.cuda._is_in_bad_fork()))
    return "its libraries have touched the GPU" if os.waitpid(child, 0)[1] else None


def _fork_as_told(host: socket.socket) -> bool:
    """Fork until nobody wants it any more: False. In a child it returns at once: True."""
    running: set[int] = set()
    host.setblocking(True)
    while True:
        is_idle = not running
        ready, _, _ = select.select([host.fileno()], [], [], IDLE_SECONDS if is_idle else _LOOK_SECONDS)
        running -= _tell_of_ends(host, running)
        if not ready and is_idle:
            return False
        if not ready:
            continue
        message, files, _, _ = socket.recv_fds(host, 1, 2)
        if not message:
            return False
        try:
            child = fork()
        except OSError as error:
            _say(host, {"refusal": str(error)})
        else:
            if child == 0:
                host.close()
                _take_streams(files)
                return True
            running.add(child)
            _say(host, {"pid": child})
        for file in files:
            os.close(file)


def _take_streams(files: list[int]) -> None:
    os.setsid()  # it is signalled together with what it starts
    for place, file in enumerate(files):
        os.dup2(file, place)
        os.close(file)


def _tell_of_ends(host: socket.socket, running: set[int]) -> set[int]:
    """Returns: the processes that have ended."""
    ended = set()
    for pid in running:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            ended.add(pid)
            _say(host, {"pid": pid, "code": os.waitstatus_to_exitcode(status)})
    return ended


def _say(host: socket.socket, what: dict[str, object]) -> None:
    with suppress(OSError):  # the host is gone, which the next read tells
        host.send(json.dumps(what).encode())
