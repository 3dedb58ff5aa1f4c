"""What an engine runs on."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import device as Device

from .spec import NOT_IN_KEY, HoldsMappings
from .version import __version__


@dataclass(frozen=True)
class Environment(HoldsMappings):
    """The machine and software that an artifact depends on.

    A change of `driver` asks for verification, not for a rebuild.

    Attributes:
        device: "cpu" or "cuda".
        cpu: the instructions that code compiled on this machine may use, GPU engines' host code included: torch's name
            for the vector level, and a digest of all, e.g. "AVX512 3f9a61c2".
        threads: CPU threads that compiled CPU code is laid out for; 0 on a GPU.
        versions: further packages that shape the artifact, e.g. {"triton": "3.6.0"}.
    """

    device: str
    os: str
    machine: str
    torch: str
    cpu: str | None = None
    threads: int = 0
    gpu: str | None = None
    compute_capability: str | None = None
    cuda: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    driver: str | None = field(default=None, metadata=NOT_IN_KEY)

    def __post_init__(self) -> None:
        object.__setattr__(self, "versions", MappingProxyType(dict(sorted(self.versions.items()))))

    @classmethod
    def current(cls, device: Device | str = "cpu", packages: tuple[str, ...] = ()) -> Environment:
        """Look at this machine.

        Args:
            device: where the engine is to run; a CUDA index picks the card.
            packages: distributions whose versions matter to the backend; the missing ones are left out.
        """
        device = torch.device(device)
        versions = {name: found for name in packages if (found := _version(name)) is not None}
        common = {
            "os": platform.system(),
            "machine": platform.machine(),
            "torch": str(torch.__version__),
            "cpu": _instructions(),
            "versions": versions,
        }
        if device.type != "cuda":
            return cls(device=device.type, threads=torch.get_num_threads(), **common)  # type: ignore[arg-type]
        major, minor = torch.cuda.get_device_capability(device)
        return cls(
            device="cuda",
            gpu=torch.cuda.get_device_name(device),
            compute_capability=f"{major}.{minor}",
            cuda=torch.version.cuda or f"hip {torch.version.hip}",
            driver=driver_version(),
            **common,  # type: ignore[arg-type]
        )


# Compilers choose among these by name; other flags come and go with kernels and microcode.
_INSTRUCTION_SETS = re.compile(
    r"(s?sse|avx|amx|fma|f16c|bmi|abm|adx|movbe|popcnt|aes|vaes|sha|pclmul|vpclmul|gfni|xop|sve|asimd|fphp|bf16|i8mm)"
)


@functools.lru_cache(maxsize=1)
def _instructions() -> str:
    names = " ".join(sorted(filter(_INSTRUCTION_SETS.match, _cpu_flags()))) or platform.processor()
    return f"{torch.backends.cpu.get_cpu_capability()} {hashlib.sha256(names.encode()).hexdigest()[:8]}"


def _cpu_flags() -> list[str]:
    """Names of the first CPU's features; empty where the system has no list of them (Windows, macOS)."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            lines = [line.partition(":") for line in file]
    except OSError:
        return []
    return next((value.split() for name, _, value in lines if name.strip().lower() in ("flags", "features")), [])


def _version(distribution: str) -> str | None:
    try:
        return _installed_version(distribution)
    except importlib.metadata.PackageNotFoundError:  # it may be installed later
        return None


@functools.lru_cache(maxsize=64)
def _installed_version(distribution: str) -> str:
    """Cached, since reading takes half a millisecond and every run asks for each engine."""
    return importlib.metadata.version(distribution)


@functools.cache
def versions_now() -> dict[str, str]:
    """Versions of Slipstream, torch and the driver, which may change an engine's behaviour but not its key."""
    driver = driver_version() if torch.cuda.is_available() else None
    return {"Slipstream": __version__, "torch": str(torch.__version__), **({"the driver": driver} if driver else {})}


@functools.lru_cache(maxsize=1)
def driver_version() -> str | None:
    """The NVIDIA driver's version: from the kernel module on Linux, else from nvidia-smi; None when neither tells."""
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            words = file.readline().split()
        return next((word for word in words if word[0].isdigit() and "." in word), None)
    except OSError:
        return _ask_nvidia_smi()


def _ask_nvidia_smi() -> str | None:
    from .programs import FAILURES, run

    try:
        found = run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], 10)
    except FAILURES:
        return None
    lines = [] if found.returncode else found.stdout.split()
    return lines[0] if lines else None
