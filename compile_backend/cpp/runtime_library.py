"""The C++ runtime library that packages are linked with: it has to be the one that torch itself uses.

Where only a static libstdc++ is found, a compiler links a second copy of it into the package, without a word. Two
copies in one process do not agree on their locales, and the first regular expression of the package's loader crashes.
"""

from __future__ import annotations

import functools
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...core.errors import BuildFailed
from ...core.programs import FAILURES, run

_SHARED_LIBRARIES = (b"libstdc++.so", b"libc++.so")
_PROBE = "int probe(int x) { if (x) throw x; return 1; }\n"  # an exception needs the runtime library
_PROBE_SECONDS = 60


@contextmanager
def shared_cpp_runtime(folder: Path) -> Iterator[None]:
    """Let torch compile with a compiler that links the C++ runtime as a shared library.

    Args:
        folder: where a wrapper of the compiler is put if one is needed.

    Raises:
        BuildFailed: this machine's compiler cannot link it so.
    """
    compiler = compiler_with_shared_runtime(folder)
    if compiler == _usual_compiler():
        yield
        return
    import torch._inductor.config

    with torch._inductor.config.patch({"cpp.cxx": (None, compiler)}):
        yield


def compiler_with_shared_runtime(folder: Path) -> str:
    """Return the C++ compiler, or a wrapper of it in `folder`, that links the C++ runtime as a shared library.

    Raises:
        BuildFailed: this machine's compiler cannot link it so.
    """
    compiler = _usual_compiler()
    if sys.platform != "linux" or links_shared_runtime(compiler):
        return compiler
    wrapper = _wrapper(compiler, folder)
    if wrapper is None or not links_shared_runtime(wrapper):
        raise BuildFailed(
            f"The C++ compiler ({compiler}) links its runtime library statically, and packages with a second copy of "
            "it crash; install the compiler's shared runtime (on Debian or Ubuntu: sudo apt install g++) and try again"
        )
    return wrapper


def _usual_compiler() -> str:
    return os.environ.get("CXX") or "g++"


@functools.lru_cache(maxsize=8)
def links_shared_runtime(compiler: str) -> bool:
    """Whether a library made by `compiler` needs the shared C++ runtime; True where that cannot be found out."""
    with tempfile.TemporaryDirectory(prefix="slipstream-") as folder:
        source, library = Path(folder, "probe.cpp"), Path(folder, "probe.so")
        source.write_text(_PROBE, encoding="utf-8")
        command = [compiler, "-shared", "-fPIC", "-o", str(library), str(source)]
        try:
            done = run(command, _PROBE_SECONDS)
            # Where it fails, the build itself tells what is wrong with this compiler.
            return done.returncode != 0 or any(name in library.read_bytes() for name in _SHARED_LIBRARIES)
        except FAILURES:
            return True


def _wrapper(compiler: str, folder: Path) -> str | None:
    """A compiler that finds the runtime library of this process before any other; None where there is none."""
    loaded = _loaded_runtime()
    if loaded is None:
        return None
    libraries = folder / "cpp_runtime"
    libraries.mkdir(exist_ok=True)
    link = libraries / "libstdc++.so"
    link.unlink(missing_ok=True)
    link.symlink_to(loaded)
    script = libraries / "g++"  # by its name torch knows which options it takes
    script.write_text(
        f'#!/bin/sh\nexec {shlex.quote(compiler)} -L{shlex.quote(str(libraries))} "$@"\n', encoding="utf-8"
    )
    script.chmod(0o755)
    return str(script)


def _loaded_runtime() -> Path | None:
    """The libstdc++ that torch brought into this process."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        paths = (line.split(maxsplit=5)[-1].strip() for line in maps if "libstdc++.so" in line)
        return next((Path(path) for path in paths), None)
