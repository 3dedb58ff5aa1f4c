"""The GPU while pictures run: memory in use on the whole device, power and clock; and holding some memory back."""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

_PERIOD = 0.05
_QUERY = "memory.used,power.draw,clocks.sm"


@dataclass(frozen=True)
class Reading:
    """One look at the GPU.

    Attributes:
        at: by `time.monotonic`.
        used_mb: memory in use on the whole device, MiB.
        watts, mhz: None where the driver does not tell.
    """

    at: float
    used_mb: float
    watts: float | None
    mhz: float | None


class Driver(Protocol):
    """A way to ask a GPU's driver.

    Attributes:
        gpu: the GPU's name.
        version: of the driver.
    """

    gpu: str
    version: str

    def read(self) -> Reading:
        """Look at the GPU once."""
        ...


class Monitor:
    """Looks at the GPU several times a second in a thread of its own, as a context.

    Args:
        driver: None where there is no GPU: nothing is ever read then.
    """

    def __init__(self, driver: Driver | None) -> None:
        self.driver = driver
        self._readings: list[Reading] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> Monitor:
        if self.driver is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join(5)

    def between(self, begin: float, end: float) -> list[Reading]:
        """Return the readings of a span of time, by `time.monotonic`."""
        return [reading for reading in list(self._readings) if begin <= reading.at <= end]

    def used_mb(self) -> float | None:
        """Return the memory in use now, in MiB."""
        return None if self.driver is None else self.driver.read().used_mb

    def _follow(self) -> None:
        assert self.driver is not None
        while not self._is_over.wait(_PERIOD):
            with contextlib.suppress(Exception):  # a reading that fails is one less
                self._readings.append(self.driver.read())


def find_driver() -> Driver | None:
    """Return a way to ask the GPU that CUDA shows first: by NVML's Python package, else by nvidia-smi, else None."""
    for find in (_Nvml, _NvidiaSmi):
        with contextlib.suppress(Exception):  # no package, no program, no GPU
            return find(_device())
    return None


def _device() -> str:
    """The first GPU that CUDA may use, by its index or UUID."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"


_HOLD = """
import sys, torch
free, _ = torch.cuda.mem_get_info()
held = torch.empty(max(0, free - int(sys.argv[1])), dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def all_but(gigabytes: int | None, python: Path) -> Iterator[None]:
    """Meanwhile no more than so much of the GPU's memory is free, by one plain allocation; None: all that is free.

    Args:
        python: with torch.

    Raises:
        OSError: the memory cannot be held.
    """
    if gigabytes is None:
        yield
        return
    command = [str(python), "-c", _HOLD, str(gigabytes << 30)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin is not None and holder.stdout is not None
        try:
            if holder.stdout.readline().strip() != "held":
                raise OSError("the GPU's memory cannot be held: no GPU, or no torch for it")
            yield
        finally:
            holder.stdin.close()


class _Nvml:
    def __init__(self, device: str) -> None:
        self._nvml: Any = importlib.import_module("pynvml")
        self._nvml.nvmlInit()
        by_index, by_uuid = self._nvml.nvmlDeviceGetHandleByIndex, self._nvml.nvmlDeviceGetHandleByUUID
        self._handle = by_index(int(device)) if device.isdecimal() else by_uuid(device)
        self.gpu = _text(self._nvml.nvmlDeviceGetName(self._handle))
        self.version = _text(self._nvml.nvmlSystemGetDriverVersion())

    def read(self) -> Reading:
        memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        watts = _or_none(lambda: self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1000)
        mhz = _or_none(lambda: self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM))
        return Reading(time.monotonic(), memory.used / 2**20, watts, mhz)


class _NvidiaSmi:
    def __init__(self, device: str) -> None:
        self._device = device
        self.gpu, self.version = self._ask("name,driver_version")

    def read(self) -> Reading:
        used, watts, mhz = self._ask(_QUERY)
        return Reading(time.monotonic(), float(used), _or_none(lambda: float(watts)), _or_none(lambda: float(mhz)))

    def _ask(self, what: str) -> Sequence[str]:
        command = ["nvidia-smi", f"--id={self._device}", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
        return [part.strip() for part in done.stdout.strip().splitlines()[0].split(",")]


def _text(name: str | bytes) -> str:
    """Older packages give bytes."""
    return name.decode() if isinstance(name, bytes) else name


def _or_none(ask: Callable[[], float]) -> float | None:
    try:
        return float(ask())
    except Exception:  # a driver that does not tell
        return None
