"""Which TensorRT this machine takes and the command that installs it, in words. Nothing is installed here."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from ..core.environment import Environment

EXPORT_PACKAGES = {"onnx": "onnx", "onnxscript": "onnxscript", "onnx_graphsurgeon": "onnx-graphsurgeon"}
"""Module -> package, of all that is needed to write a model down as the graph that TensorRT reads."""

OLDEST_CAPABILITY = (7, 5)


@dataclass(frozen=True)
class Edition:
    """One of the two TensorRTs.

    Attributes:
        title: for people.
        requirements: what pip is to install, `{cuda}` standing for CUDA's major version.
        drivers: the oldest NVIDIA driver for each major version of CUDA that there are packages for.
    """

    title: str
    requirements: tuple[str, ...]
    drivers: Mapping[int, int]


RTX = Edition(
    title="TensorRT for RTX",
    requirements=("tensorrt-rtx-cu{cuda}-bindings>=1.5,<2", "tensorrt-rtx-cu{cuda}-libs>=1.5,<2"),
    drivers={12: 525, 13: 580},
)
FULL = Edition(
    title="the full TensorRT (pip fetches its libraries from NVIDIA while it installs)",
    requirements=("tensorrt-cu{cuda}>=10.16,<12",),
    drivers={12: 535, 13: 580},
)


def runs_rtx(capability: tuple[int, int]) -> bool:
    """Whether TensorRT for RTX has kernels for GPUs of this compute capability; it builds anywhere, but runs on few."""
    return capability in {(7, 5), (8, 0), (8, 6), (8, 9)} or capability >= (12, 0)


def is_installed(module: str) -> bool:
    """Whether a module could be imported, without doing so."""
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # something stands in for it that does not say where it is from
        return False


def missing_packages() -> list[str]:
    """The modules of `EXPORT_PACKAGES` that cannot be found. None is imported."""
    return [module for module in EXPORT_PACKAGES if not is_installed(module)]


def advice(device: torch.device) -> str:
    """What `how_to_install` says of this machine, for a model on `device`."""
    cuda = torch.version.cuda or (f"hip {torch.version.hip}" if torch.version.hip else None)
    capability = driver = None
    if device.type == "cuda" and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability(device)
        driver = Environment.current(device).driver
    return how_to_install(sys.executable or "python", sys.platform, cuda, capability, driver)


def advice_on_packages(modules: Iterable[str]) -> str:
    """What `how_to_add` says of this machine.

    Args:
        modules: of `EXPORT_PACKAGES`.
    """
    return how_to_add([EXPORT_PACKAGES[module] for module in modules], sys.executable or "python", sys.platform)


def how_to_add(packages: Iterable[str], python: str, platform: str) -> str:
    """The command that installs no more than these packages; see `how_to_install`."""
    command = _command(python, platform, packages)
    return f"To add what is missing, run `{command}` and start this program again"


def how_to_install(
    python: str, platform: str, cuda: str | None, capability: tuple[int, int] | None, driver: str | None
) -> str:
    """Which TensorRT fits and the command that installs it, else why none does and what would change that.

    Like every reason it ends without a full stop, since callers go on behind it: with what to choose instead, say.

    Args:
        python: path of the interpreter that is to find TensorRT.
        platform: by `sys.platform`'s names.
        cuda: what torch was built for, such as "13.0", on AMD such as "hip 6.4"; None for neither.
        capability: the GPU's; None where the model runs on no GPU.
        driver: the NVIDIA driver's version; None where it is not known.
    """
    if platform == "darwin":
        return "TensorRT runs on NVIDIA GPUs only, which macOS has no drivers for"
    if cuda is None:
        return (
            "TensorRT runs on NVIDIA GPUs only, and this torch was built without CUDA. Where there is such a GPU, "
            "install torch for CUDA the way ComfyUI's own manual says"
        )
    if cuda.startswith("hip"):
        return f"TensorRT runs on NVIDIA GPUs only, and this torch is for AMD's ({cuda})"
    if capability is None:
        return f"TensorRT runs on NVIDIA GPUs only, and the model runs on none here. {_mend_gpu(cuda)}"
    if capability < OLDEST_CAPABILITY:
        return (
            f"TensorRT needs a GPU of compute capability {_dotted(OLDEST_CAPABILITY)} or newer, GeForce GTX 16, "
            f"RTX 20 and later, and this one has {_dotted(capability)}"
        )
    edition = RTX if runs_rtx(capability) else FULL
    if _major(cuda) not in edition.drivers:
        return _wrong_cuda(cuda)
    wanted = [requirement.format(cuda=_major(cuda)) for requirement in edition.requirements]
    command = _command(python, platform, [*wanted, *EXPORT_PACKAGES.values()])
    return (
        f"This GPU (compute capability {_dotted(capability)}) takes {edition.title}; "
        f"{_driver_needed(edition, cuda, driver)}. To install it, run `{command}` and start this program again"
    )


def _mend_gpu(cuda: str) -> str:
    oldest = RTX.drivers.get(_major(cuda))
    which = f" ({oldest} or newer for CUDA {_major(cuda)})" if oldest else ""
    return f"Where there is one, check its driver{which} and that this program was not told to use the CPU"


def _wrong_cuda(cuda: str) -> str:
    known = " and ".join(map(str, RTX.drivers))
    return (
        f"TensorRT's packages are known here for CUDA {known}, and this torch was built for CUDA {cuda}. "
        "Install a torch for one of these the way ComfyUI's own manual says"
    )


def _driver_needed(edition: Edition, cuda: str, driver: str | None) -> str:
    oldest = edition.drivers[_major(cuda)]
    needed = f"for CUDA {_major(cuda)} it needs NVIDIA driver {oldest} or newer"
    if driver is None or _major(driver) >= oldest:
        return needed
    return f"{needed}, and this machine has {driver}: update the driver first"


def _command(python: str, platform: str, packages: Iterable[str]) -> str:
    """Makes pip install `packages`."""
    return " ".join(_quoted(word, platform) for word in [python, "-m", "pip", "install", *packages])


def _quoted(word: str, platform: str) -> str:
    """`word` as the system's shell takes it for one: < and > would redirect."""
    if platform != "win32":
        return shlex.quote(word)
    return word if re.fullmatch(r"[\w.:\\/+-]+", word) else f'"{word}"'


def _major(version: str) -> int:
    """The first number of a version; 0 where it begins with none."""
    found = re.match(r"\d+", version)
    return int(found[0]) if found else 0


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
