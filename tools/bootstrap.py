"""What every developer command needs first: virtual environments and ComfyUI checkouts.

Standard library only, because it runs before anything is installed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = Path.home() / ".cache" / "slipstream"
WINDOWS = os.name == "nt"

# Pinned together; torch goes in alone and first, so that nothing else chooses one.
CPU_TORCH = "2.13.0"
CPU_TORCHVISION = "torchvision==0.28.0"
CPU_TORCHAUDIO = "torchaudio==2.11.0"

SLOW_TEST_REQUIREMENTS = ("ray; python_version < '3.14'", "adlfs", "gcsfs", "kubernetes-validate", "modal")
"""Large packages, which the tests that run without `--everything` do not import."""
AZURITE = "azurite@3.37.0"
"""Azure's storage on this machine, a package of npm, for slow tests alone."""

COMFYUI_TEST_REQUIREMENTS = (
    "requests",  # ComfyUI 0.3.64 imports it without listing it
    "pytest",
    "pytest-timeout",
    "diffusers",
    "filelock",
    "rich",
    "safetensors",
    "cryptography",  # signs engines that one server is given by another
    "websocket-client",
    "pillow",
    "onnx",
    "onnxscript",
    "onnx-graphsurgeon",
    "onnxruntime",
    "playwright",  # drives the browser that `provide_chromium` finds or installs
    # Builds without a GPU, so the tests build with it.
    "tensorrt-rtx-cu13-bindings; sys_platform == 'linux' and platform_machine == 'x86_64'",
    "tensorrt-rtx-cu13-libs; sys_platform == 'linux' and platform_machine == 'x86_64'",
)


# The engine manager's page is tried in the Gradios of today's hosts: AUTOMATIC1111's, Forge's, and the newest. Beside
# the first two go packages of their day, as these hosts pin them.
_OLD = ("httpx==0.24.1", "huggingface_hub<1", "numpy<2", "pandas<3", "pillow<11", "playwright")
GRADIOS: dict[str, tuple[str, ...]] = {
    "3.41.2": ("gradio==3.41.2", "fastapi==0.94.0", "httpcore==0.17.3", "pydantic<2", *_OLD),
    "4.40.0": ("gradio==4.40.0", "fastapi==0.104.1", "pydantic==2.8.2", *_OLD),
    "6": ("gradio>=6,<7", "playwright"),
}
NEWEST_GRADIO = "6"
NEWEST_OLD_PYTHON = (3, 12)
"""For which there are such old packages."""


class SetupError(Exception):
    """An environment could not be made; the message says why and what to do."""


@dataclass(frozen=True)
class Stage:
    """One call of pip."""

    title: str
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Recipe:
    """All that a virtual environment is made from; a change of it remakes the environment."""

    stages: tuple[Stage, ...]
    mend_torchvision: bool = False
    inputs: tuple[str, ...] = field(default=())
    shared: Path | None = None
    """Packages of another environment with the same Python, found behind its own."""

    def digests(self) -> list[str]:
        """Return the hashes of this recipe and of those that end after one of its stages, which it serves too."""
        return [replace(self, stages=self.stages[:count]).digest() for count in range(len(self.stages) + 1)]

    def digest(self) -> str:
        """Return a hash over all of the recipe."""
        parts = [self.mend_torchvision, self.inputs, [stage.arguments for stage in self.stages]]
        parts += [str(self.shared)] if self.shared else []
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


# --------------------------------------------------------------------------------------------- environments


def project_python(whole: bool = False) -> Path:
    """Return the Python of the project's own `.venv`, made or brought up to date first.

    Args:
        whole: with the large packages that only slow tests ask for.
    """
    stages = (*_torch_stages(), Stage("Slipstream and its developer tools", ("-e", f"{ROOT}[dev]")))
    if whole:
        stages += (Stage("what slow tests ask for", SLOW_TEST_REQUIREMENTS),)
        _provide_azurite()
    # What pip reads of it; the settings of the tools come behind.
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8").split("[tool.ruff]")[0]
    return _ensure(ROOT / ".venv", Recipe(stages, inputs=(project,)))


def comfyui_python(checkout: Path) -> Path:
    """Return the Python of the environment in which a ComfyUI checkout runs under test.

    It is ours, beside the cache: the user's own ComfyUI environment is never touched.
    """
    listed = (checkout / "requirements.txt").read_text(encoding="utf-8").splitlines()
    wanted = [line.strip() for line in listed if _requirement_name(line) not in ("", *_TORCH_FAMILY)]
    venv = CACHE / "venvs" / _environment_name(checkout)
    stages = (
        *_torch_stages(),
        *_torchvision_stages(),
        Stage("ComfyUI's requirements", (*wanted, *COMFYUI_TEST_REQUIREMENTS)),
    )
    provide_chromium()
    return _ensure(venv, Recipe(stages, mend_torchvision=_plain_torch_brings_cuda()))


def gradio_python(name: str, project: Path) -> Path:
    """Return the Python of the environment in which the page is tried with one of `GRADIOS`.

    It shares the packages of the project's environment, torch above all, so it has that one's Python.
    """
    provide_chromium()
    shared = _in_site_packages(project.parent.parent, "pip")[0].parent
    stages = (Stage(f"Gradio {name}", GRADIOS[name]),)
    recipe = Recipe(stages, inputs=(str(_version_of(project)),), shared=shared)
    return _ensure(CACHE / "venvs" / f"gradio-{name}", recipe, project)


def why_no_gradio(name: str, project: Path) -> str | None:
    """Return why the page cannot be tried with one of `GRADIOS`, and what to do; None where it can."""
    if name == NEWEST_GRADIO or _version_of(project) <= NEWEST_OLD_PYTHON:
        return None
    here, newest = (".".join(map(str, version)) for version in (_version_of(project), NEWEST_OLD_PYTHON))
    return (
        f"Gradio {name} needs Python {newest} or older, and .venv has {here}; remove .venv and run this command with "
        "such a Python"
    )


@functools.cache
def _version_of(python: Path) -> tuple[int, int]:
    code = "import sys; print(*sys.version_info[:2])"
    told = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    major, minor = map(int, told.stdout.split())
    return major, minor


@functools.cache
def provide_chromium() -> str | None:
    """Return a browser for the tests of ComfyUI's page; Debian's is installed where this may be done.

    Without one those tests are left out, with the reason.
    """
    found = _find_chromium()
    if found or not _is_root_of_debian():
        return found
    install = ("apt-get", "install", "-y", "--no-install-recommends", "chromium")
    _say("installing Chromium (once)")
    try:
        _run(("apt-get", "update"), "apt-get update")
        _run(install, " ".join(install))
    except SetupError as why:
        _say(f"without Chromium, ComfyUI's page is not tested: {why}")
    return _find_chromium()


def _provide_azurite() -> None:
    """Install Azurite beside the cache where npm is there; without it tests of Azure's storage are left out."""
    folder, npm = CACHE / "azurite", shutil.which("npm")
    if npm is None or shutil.which("azurite-blob", path=str(folder / "node_modules" / ".bin")):
        return
    _say("installing Azurite (once)")
    try:
        _run((npm, "install", "--no-audit", "--no-fund", "--prefix", str(folder), AZURITE), f"npm install {AZURITE}")
    except SetupError as why:
        _say(f"without Azurite, stores in Azure are not tested: {why}")


def _find_chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None)


def _is_root_of_debian() -> bool:
    may = sys.platform == "linux" and os.geteuid() == 0
    return may and Path("/etc/debian_version").exists() and shutil.which("apt-get") is not None


_TORCH_FAMILY = ("torch", "torchvision", "torchaudio")


def _requirement_name(line: str) -> str:
    bare = line.split("#")[0].strip()
    for separator in "<>=!~[; ":
        bare = bare.split(separator)[0]
    return bare.lower()


def _environment_name(checkout: Path) -> str:
    if checkout.parent == CACHE:
        return checkout.name
    return f"{checkout.name}-{hashlib.sha256(str(checkout).encode()).hexdigest()[:8]}"


def _torch_stages() -> tuple[Stage, ...]:
    return (Stage("torch", tuple(_torch_requirement())),)


def _torchvision_stages() -> tuple[Stage, ...]:
    if "torchvision" in " ".join(_torch_requirement()):
        return ()
    if not _plain_torch_brings_cuda():
        return (Stage("torchvision, torchaudio", ("torchvision", "torchaudio")),)
    # Their dependencies would replace the CPU torch.
    return (Stage("torchvision, torchaudio", ("--no-deps", CPU_TORCHVISION, CPU_TORCHAUDIO)),)


def _torch_requirement() -> list[str]:
    """Return pip's arguments for torch; `SLIPSTREAM_TORCH` overrides them."""
    override = os.environ.get("SLIPSTREAM_TORCH", "").strip()
    if override:
        return shlex.split(override)
    return [f"torch=={CPU_TORCH}"] if _plain_torch_brings_cuda() else ["torch"]


def _plain_torch_brings_cuda() -> bool:
    """Tell whether an unpinned torch would download CUDA that this machine cannot use."""
    return sys.platform == "linux" and shutil.which("nvidia-smi") is None


def _ensure(venv: Path, recipe: Recipe, maker: Path = Path(sys.executable)) -> Path:
    """Return the Python of an environment that `maker` made, now if need be."""
    python = _python_of(venv)
    if _is_current(venv, recipe):
        return python
    venv.parent.mkdir(parents=True, exist_ok=True)
    with _locked(venv.with_name(venv.name + ".lock")):
        if not _is_current(venv, recipe):
            _make(venv, recipe, maker)
    return python


_SHARING = "slipstream-shared.pth"


def _make(venv: Path, recipe: Recipe, maker: Path) -> None:
    started = time.monotonic()
    _say(f"setting up {venv} (once)")
    stamp = venv / "slipstream-stamp"
    stamp.unlink(missing_ok=True)
    for link in _in_site_packages(venv, _SHARING):
        link.unlink()  # else pip would count what it leads to as installed
    if not _runs(_python_of(venv)):
        _run([str(maker), "-m", "venv", "--clear", str(venv)], f"python -m venv {venv}")
    for number, stage in enumerate(recipe.stages, 1):
        _say(f"  {number}/{len(recipe.stages)} {stage.title}")
        _pip(venv, stage.arguments)
    if recipe.mend_torchvision:
        _mend_torchvision(venv)
    if recipe.shared:
        (_in_site_packages(venv, "pip")[0].parent / _SHARING).write_text(f"{recipe.shared}\n", encoding="utf-8")
    stamp.write_text("\n".join(recipe.digests()), encoding="utf-8")
    _say(f"  ready after {time.monotonic() - started:.0f} s")


def _is_current(venv: Path, recipe: Recipe) -> bool:
    stamp = venv / "slipstream-stamp"
    if not (stamp.is_file() and _python_of(venv).exists()):
        return False
    return recipe.digest() in stamp.read_text(encoding="utf-8").split()


def _python_of(venv: Path) -> Path:
    return venv / ("Scripts/python.exe" if WINDOWS else "bin/python")


def _runs(python: Path) -> bool:
    if not python.exists():
        return False
    return subprocess.run([str(python), "-m", "pip", "--version"], capture_output=True).returncode == 0


def _pip(venv: Path, arguments: Sequence[str]) -> None:
    constraints = _hold_torch(venv)
    command = [str(_python_of(venv)), "-m", "pip", "install", "--disable-pip-version-check"]
    _run([*command, *constraints, *arguments], "pip install")


def _hold_torch(venv: Path) -> list[str]:
    """Return the constraint that keeps the torch already there, whatever later packages ask for."""
    installed = _in_site_packages(venv, "torch-*.dist-info")
    if not installed:
        return []
    version = installed[0].name.removeprefix("torch-").removesuffix(".dist-info")
    held = venv / "constraints.txt"
    held.write_text(f"torch=={version}\n", encoding="utf-8")
    return ["-c", str(held)]


def _mend_torchvision(venv: Path) -> None:
    """Make the CUDA builds of torchvision and torchaudio importable beside a CPU torch."""
    declares = "# Slipstream: declared, never called"
    for extension in _in_site_packages(venv, "torchvision/extension.py"):
        text = extension.read_text(encoding="utf-8")
        if declares not in text:
            schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            lines = [f"\n\nif not _has_ops():  {declares}", '    for _name in ("nms", "qnms"):']
            lines += [f'        torch.library.define("torchvision::" + _name, "{schema}")', ""]
            extension.write_text(text + "\n".join(lines), encoding="utf-8")
    for library in _in_site_packages(venv, "torchaudio/lib/*.so"):
        library.unlink()


def _in_site_packages(venv: Path, pattern: str) -> list[Path]:
    return [*venv.glob(f"lib/python*/site-packages/{pattern}"), *venv.glob(f"Lib/site-packages/{pattern}")]


# -------------------------------------------------------------------------------------------------- ComfyUI


def find_comfyui() -> list[Path]:
    """Return the ComfyUI checkouts to work with.

    `COMFYUI_DIR` names them (separated as in PATH); without it, the one that this pack is installed in,
    else every `~/.cache/slipstream/ComfyUI*`.
    """
    named = [Path(part) for part in os.environ.get("COMFYUI_DIR", "").split(os.pathsep) if part.strip()]
    for checkout in named:
        if not is_comfyui(checkout):
            raise SetupError(f"COMFYUI_DIR names {checkout}, which holds no ComfyUI (no main.py and comfy/ there).")
    if named:
        return [checkout.resolve() for checkout in named]
    host = ROOT.parent.parent
    if ROOT.parent.name == "custom_nodes" and is_comfyui(host):
        return [host]
    return sorted(path for path in CACHE.glob("ComfyUI*") if is_comfyui(path))


def find_webuis() -> list[tuple[Path, Path]]:
    """Return checkouts of WebUIs to test in, each with the Python that has its packages.

    `WEBUI_DIR` names checkouts (separated as in PATH), else every `~/.cache/slipstream/webui-*` counts; `WEBUI_PYTHON`
    names the Python, else it is that of `~/.cache/slipstream/venvs/webui`. None is made here: what WebUIs ask for does
    not go together with today's packages, and tests/webui/README.md says what is enough.
    """
    python = Path(os.environ.get("WEBUI_PYTHON") or _python_of(CACHE / "venvs" / "webui"))
    named = [Path(part).resolve() for part in os.environ.get("WEBUI_DIR", "").split(os.pathsep) if part.strip()]
    found = named or [webui for path in sorted(CACHE.glob("webui-*")) for webui in (path, path / "webui")]
    return [(webui, python) for webui in found if (webui / "modules").is_dir() and python.exists()]


def is_comfyui(folder: Path) -> bool:
    """Tell whether a folder is a ComfyUI checkout."""
    return (folder / "main.py").is_file() and (folder / "comfy").is_dir()


# -------------------------------------------------------------------------------------------------- helpers


def _say(text: str) -> None:
    print(f"[setup] {text}", flush=True)


def _run(command: Sequence[str], title: str) -> None:
    """Run a command quietly but for a sign of life; on failure show how its output ended."""
    tail: deque[str] = deque(maxlen=25)
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
    )
    assert process.stdout is not None
    shown = time.monotonic()
    for line in process.stdout:
        tail.append(line.rstrip())
        if line.strip() and time.monotonic() - shown > 5:
            shown = time.monotonic()
            _say(f"      {line.strip()[:90]}")
    if process.wait() != 0:
        raise SetupError(_explain(title, list(tail)))


def _explain(title: str, tail: list[str]) -> str:
    text = "\n".join(tail)
    offline = (
        "NewConnectionError",
        "Temporary failure in name resolution",
        "getaddrinfo failed",
        "ProxyError",
    )
    advice = "The lines above say why; after mending it, run the same command again."
    if any(sign in text for sign in offline):
        advice = "This machine cannot reach the package index. Connect it and run the command again."
    if "No space left" in text:
        advice = "The disk is full: the environments need about 6 GB. Free some space and run the command again."
    return f"{text}\n\n{title} failed. {advice}"


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock across processes; the system lets it go when its holder dies."""
    with path.open("w", encoding="utf-8") as handle:
        if sys.platform == "win32":
            import msvcrt

            held = False
            while not held:
                with contextlib.suppress(OSError):  # it gives up after ten seconds
                    msvcrt.locking(handle.fileno(), msvcrt.LK_LOCK, 1)
                    held = True
        else:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    for found in find_comfyui():
        print(comfyui_python(found))
    ours = project_python()
    for wanted in GRADIOS:
        print(why_no_gradio(wanted, ours) or gradio_python(wanted, ours))
