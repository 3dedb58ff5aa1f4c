"""The small C++ library behind captures (`arena.cpp`), as functions of Python."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import re
import threading
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("arena.cpp")

_VOID, _INT, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "error": (ctypes.c_char_p, []),
    "arena_new": (_VOID, [_INT]),
    "arena_delete": (None, [_VOID]),
    "give_back": (_INT, []),
    "arena_bytes": (_SIZE, [_VOID]),
    "arena_live": (_SIZE, [_VOID]),
    "arena_enter": (_INT, [_VOID, _INT]),
    "arena_leave": (None, []),
    "capture_begin": (_INT, [_VOID]),
    "capture_end": (_INT, [_VOID, _INT, ctypes.POINTER(_VOID)]),
    "graph_launch": (_INT, [_VOID, _VOID]),
    "graph_delete": (_INT, [_VOID]),
}
"""Result and arguments of each function, whose name in the library begins with `slipstream_`."""


class CaptureError(RuntimeError):
    """A stream capture or the launch of a graph failed. The process and torch's allocator are unharmed."""


class CaptureLibrary:
    """The library's functions.

    Raises:
        OSError, AttributeError: the file was not made for this torch.
    """

    def __init__(self, file: Path) -> None:
        loaded = ctypes.CDLL(str(file))  # never unloaded: memory of tensors is freed by its code
        self._functions = {name: getattr(loaded, f"slipstream_{name}") for name in _FUNCTIONS}
        for name, (result, arguments) in _FUNCTIONS.items():
            self._functions[name].restype, self._functions[name].argtypes = result, arguments

    def get(self, name: str, *arguments: Any) -> Any:
        """Call a function for what it returns."""
        return self._functions[name](*arguments)

    def run(self, name: str, *arguments: Any) -> None:
        """Call a function that may fail.

        Raises:
            CaptureError: it did.
        """
        if self._functions[name](*arguments):
            words: bytes = self._functions["error"]()
            raise CaptureError(words.decode(errors="replace").splitlines()[0])


def library_file(folder: Path) -> Path:
    """Return where the library for this torch and this source lies in `folder`."""
    source = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]
    version = re.sub(r"[^0-9A-Za-z.]+", "-", str(torch.__version__))
    return folder / f"capture-{version}-{source}.so"


_loaded: dict[Path, CaptureLibrary | None] = {}
_loading = threading.Lock()


def loaded_library(folder: Path) -> CaptureLibrary | None:
    """Return the library of `folder`; None where it was not compiled yet, or cannot be loaded, which is logged once."""
    with _loading:
        if folder in _loaded:
            return _loaded[folder]
        file = library_file(folder)
        if not file.is_file():
            return None
        try:
            _loaded[folder] = CaptureLibrary(file)
        except (OSError, AttributeError) as error:
            log.warning("Slipstream: engines run without CUDA graphs: %s cannot be loaded (%s)", file, error)
            _loaded[folder] = None
        return _loaded[folder]
