"""Says in plain words what this machine lacks for Slipstream. Installs nothing and never fails.

ComfyUI-Manager runs it once after `requirements.txt`, a WebUI at every start: so the standard library
only, and fast.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
OLDEST_PYTHON = (3, 10)
OLDEST_TORCH = (2, 8)
COMPILERS = {
    "win32": (("cl", "clang-cl"), "install the Build Tools for Visual Studio with the C++ workload"),
    "darwin": (("clang++",), "run `xcode-select --install`"),
    "linux": (("g++", "c++", "clang++"), "install g++ (`sudo apt install g++` on Debian and Ubuntu)"),
}
NVIDIA_DRIVER = Path("/proc/driver/nvidia")
TENSORRT = ("tensorrt_rtx_bindings", "tensorrt_rtx", "tensorrt")


def missing() -> Iterator[str]:
    """Yield what is missing, what that means and what to do about it, one sentence group each."""
    yield from _python()
    yield from _torch()
    yield from _modules()
    yield from _compiler()


def _python() -> Iterator[str]:
    if sys.version_info < OLDEST_PYTHON:
        yield (
            f"Python {_dotted(sys.version_info[:2])} is too old: Slipstream needs {_dotted(OLDEST_PYTHON)} "
            "or newer and will not load. Update the Python of ComfyUI, or of the WebUI."
        )


def _torch() -> Iterator[str]:
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        yield "PyTorch is not installed, so nothing will run. Install it as the manual of ComfyUI or the WebUI says."
        return
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST_TORCH:
        yield (
            f"PyTorch {version} is too old for engines: models will run as plain PyTorch. "
            f"Update the PyTorch of ComfyUI, or of the WebUI, to {_dotted(OLDEST_TORCH)} or newer."
        )


def _modules() -> Iterator[str]:
    lines = (HERE / "requirements.txt").read_text(encoding="utf-8").splitlines()
    wanted = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    absent = [name for name in wanted if importlib.util.find_spec(re.split(r"[^\w]", name)[0]) is None]
    if absent:
        yield (
            f"{', '.join(absent)} not installed, so the command line shows plain text. "
            f'Run: "{sys.executable}" -m pip install -r "{HERE / "requirements.txt"}"'
        )


def _compiler() -> Iterator[str]:
    names, remedy = COMPILERS.get(sys.platform, COMPILERS["linux"])
    chosen = os.environ.get("CXX")
    if not any(map(shutil.which, (chosen, *names) if chosen else names)):
        yield (
            f"No C++ compiler found (looked for {', '.join(names)}): {_without_compiler()}. To change that, {remedy}."
        )


def _without_compiler() -> str:
    """What a missing C++ compiler costs."""
    chosen = os.environ.get("CC")
    has_c = sys.platform == "win32" or any(map(shutil.which, [chosen] if chosen else ["gcc", "clang"]))  # for triton
    if _has_nvidia() and importlib.util.find_spec("triton") and has_c:
        return "triton builds engines without one, which take longer to load and to launch, without CUDA graphs"
    return "engines cannot be compiled here, and models without a finished engine run as plain PyTorch"


def _has_nvidia() -> bool:
    # The driver's own program would take a second to ask.
    return NVIDIA_DRIVER.exists() or shutil.which("nvidia-smi") is not None


def hints() -> Iterator[str]:
    """Yield what could be there besides, though nothing needs it."""
    if _has_nvidia() and not any(map(importlib.util.find_spec, TENSORRT)):
        yield (
            "Optional: TensorRT engines. Which TensorRT fits this GPU and the command that installs it is said by: "
            f'"{sys.executable}" "{HERE}" build --model demo --resolution 256x256 --backend tensorrt'
        )


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def main() -> None:
    """Print what is missing, or that all is there; then what else could be."""
    found = list(missing())
    for sentence in found:
        print(f"[Slipstream] {sentence}")
    if not found:
        print("[Slipstream] Ready: Python, PyTorch and a C++ compiler are there.")
    for sentence in hints():
        print(f"[Slipstream] {sentence}")


if __name__ == "__main__":
    main()
