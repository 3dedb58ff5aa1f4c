"""C code that launches triton's kernels from Python, which ahead-of-time builds hardly need. Attacks building time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class _Launcher:
    """In the place of a launcher of triton's: a first launch does nothing, and the code is compiled for a second."""

    def __init__(self, make: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self._make: Callable[[], Any] = lambda: make(*args, **kwargs)
        self._launch: Any = None
        self._was_called = False

    def __call__(self, *args: Any) -> Any:
        if not self._was_called:
            self._was_called = True
            return None
        if self._launch is None:
            self._launch = self._make()
        return self._launch(*args)


@contextmanager
def launchers_when_needed(device: torch.device) -> Iterator[None]:
    """Let triton compile no launcher, a C compiler's run for each kind of arguments, for kernels launched only once.

    torch's ahead-of-time compiler launches each kernel once, on inputs that it makes up, and what it writes down of the
    kernel is known before. Only kernels of which it times several variants are launched again.
    """
    driver = _driver() if device.type == "cuda" else None
    if driver is None:
        yield
        return
    before = driver.launcher_cls
    driver.launcher_cls = lambda *args, **kwargs: _Launcher(before, *args, **kwargs)
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
