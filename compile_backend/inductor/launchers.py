"""How kernels are launched while a package is built: once each, and oftener to time variants. Reduces build time."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import compress
from typing import Any

import torch

_Launch = Callable[..., Any]

_MOST_ARGUMENTS = 100
"""torch launches with 120 at most."""


class _Launcher:
    """In the place of a launcher of triton's, for one kernel.

    Args:
        make: compiles triton's own, which is done where torch's cannot launch the kernel.
        source, metadata: of the kernel.
    """

    def __init__(self, make: Callable[[Any, Any], _Launch], source: Any, metadata: Any) -> None:
        self._make: Callable[[], _Launch] = lambda: make(source, metadata)
        self._launch: _Launch | None = None
        with suppress(Exception):  # another torch or triton, or a kind of argument that torch does not launch with
            self._launch = _by_torch(source, metadata)

    def __call__(self, *args: Any) -> Any:
        if self._launch is None:
            self._launch = self._make()
        return self._launch(*args)


@contextmanager
def launched_by_torch(device: torch.device) -> Iterator[None]:
    """Let kernels be launched from Python by what torch has for that, where triton would have a C compiler write a
    launcher for each kind of arguments."""
    driver = _driver() if device.type == "cuda" else None
    if driver is None:
        yield
        return
    before = driver.launcher_cls
    driver.launcher_cls = lambda source, metadata: _Launcher(before, source, metadata)
    try:
        yield
    finally:
        driver.launcher_cls = before


def _driver() -> Any:
    """Triton's, of this GPU; None where this triton makes launchers otherwise."""
    try:
        from triton.runtime import driver

        return driver.active if hasattr(driver.active, "launcher_cls") else None
    except Exception:  # no triton, or one that finds no GPU: the build tells
        return None


def _kernels_of_torch() -> type:
    """The class that knows how a kernel's arguments are told to torch's launcher; its module's name has changed.

    Raises:
        ImportError: this torch has none.
    """
    for name in ("static_triton_launcher", "static_cuda_launcher"):
        with suppress(ImportError):
            found: type = importlib.import_module(f"torch._inductor.runtime.{name}").StaticallyLaunchedCudaKernel
            return found
    raise ImportError("this torch launches no kernels of triton's by itself")


def _by_torch(source: Any, metadata: Any) -> _Launch:
    """What launches a kernel by torch's own launcher, which takes all but the constants among the arguments.

    Raises:
        Exception: it cannot launch this one.
    """
    from torch._C import _StaticCudaLauncher

    if torch.version.hip:
        raise NotImplementedError("AMD's kernels are launched in another way")
    kernels: Any = _kernels_of_torch()
    known = kernels.__new__(kernels)
    kinds: str = known.arg_ty_from_signature(source)
    constants = {*known.full_constexprs}
    is_given = [kind != "constexpr" and at not in constants for at, kind in enumerate(source.signature.values())]
    sizes = [getattr(metadata, f"{name}_scratch_size", None) for name in ("global", "profile")]
    is_usual = metadata.num_ctas == 1 and not (metadata.launch_cooperative_grid or metadata.launch_pdl)
    if any(sizes) or not is_usual or len(kinds) > _MOST_ARGUMENTS:
        raise NotImplementedError("the kernel is launched in a way of its own")
    scratch = [None for size in sizes if size is not None]  # none of which it uses
    kinds += len(scratch) * "O"

    def launch(x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
        given = *compress(rest[-len(is_given) :], is_given), *scratch
        _StaticCudaLauncher._launch_kernel(function, x, y, z, metadata.num_warps, metadata.shared, kinds, given, stream)

    return launch
