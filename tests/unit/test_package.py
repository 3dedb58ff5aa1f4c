"""The repository's root as a package: under any folder name, installed or not, without leaking `nodes`."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from slipstream.core.version import __version__

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ODD_NAMES = ["ComfyUI-Slipstream-main", "slip.stream v1.0", "nodes"]

# What the requirements of ComfyUI 0.3.64 and 0.33 list, and what torch brings: theirs to choose.
COMFYUI_OWNS = {
    "aiohttp", "alembic", "av", "blake3", "comfy-aimdo", "comfy-kitchen", "comfyui-embedded-docs",
    "comfyui-frontend-package", "comfyui-workflow-templates", "einops", "filelock", "kornia",
    "numpy", "pillow", "psutil", "pydantic", "pydantic-settings", "pyyaml", "requests",
    "safetensors", "scipy", "sentencepiece", "simpleeval", "spandrel", "sqlalchemy", "sympy",
    "tokenizers", "torch", "torchaudio", "torchsde", "torchvision", "tqdm", "transformers",
    "triton", "yarl",
}  # fmt: skip

READY = "[Slipstream] Ready: Python, PyTorch and a C++ compiler are there."

LOAD_AS_COMFYUI_DOES = """
import asyncio, importlib.util, inspect, sys
path = sys.argv[1]
name = path.replace(".", "_x_")
spec = importlib.util.spec_from_file_location(name, path + "/__init__.py")
module = importlib.util.module_from_spec(spec)
sys.modules[name] = module
spec.loader.exec_module(module)
assert inspect.iscoroutinefunction(module.comfy_entrypoint)
assert not hasattr(module, "NODE_CLASS_MAPPINGS")  # else ComfyUI ignores the entrypoint
heavy = {"torch", "numpy", "nodes", "comfy"} & set(sys.modules)
assert not heavy, heavy
"""

RUN_BY_FOLDER = """
import runpy, sys
folder = sys.argv[1]
sys.path.insert(0, folder)  # as Python does for `python <folder>`
sys.argv = [folder, "--help"]
try:
    runpy.run_path(folder, run_name="__main__")
except SystemExit as end:
    assert not end.code, end.code
assert sys.modules["slipstream"].__path__ == [folder], sys.modules["slipstream"].__path__
assert folder not in sys.path
import importlib.util
assert importlib.util.find_spec("nodes") is None
"""


@pytest.fixture(scope="module", params=ODD_NAMES)
def pack(request: pytest.FixtureRequest, root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the pack in a folder with a name of its own."""
    left_out = shutil.ignore_patterns(".*", "__pycache__", "tests", "weights", "out", "*.egg-info", "test-results")
    target = tmp_path_factory.mktemp("custom_nodes").resolve() / request.param
    shutil.copytree(root, target, ignore=left_out)
    return target


def python(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


def test_loads_as_comfyui_does_without_anything_heavy(pack: Path, tmp_path: Path) -> None:
    done = python("-I", "-c", LOAD_AS_COMFYUI_DOES, pack, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_runs_by_its_folder_uninstalled(pack: Path, tmp_path: Path) -> None:
    done = python(pack, "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "build" in done.stdout and "usage" in done.stdout.lower()


def test_runs_by_a_relative_folder(pack: Path) -> None:
    done = python(pack.name, "--help", cwd=pack.parent)
    assert done.returncode == 0, done.stderr


def test_running_leaks_no_nodes(pack: Path, tmp_path: Path) -> None:
    done = python("-I", "-c", RUN_BY_FOLDER, pack, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_tests_see_the_package_and_no_stray_nodes(root: Path) -> None:
    import slipstream

    assert slipstream.__path__ == [str(root)]
    assert all(Path(entry or ".").resolve() != root for entry in sys.path)
    assert inspect.iscoroutinefunction(slipstream.comfy_entrypoint)


def test_a_clones_folder_may_have_any_name(root: Path) -> None:
    """pytest runs the package's file as one of no package where the folder's name is no Python name."""
    spec = importlib.util.spec_from_file_location("no_package", root / "__init__.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert callable(module.comfy_entrypoint)


def test_every_room_is_packaged(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    left_out = {"tests", "tools", "benchmarks", "build", "dist"}
    found = {
        ".".join(["slipstream", *file.parent.relative_to(root).parts])
        for file in root.rglob("__init__.py")
        if not any(part in left_out or part.startswith(".") for part in file.relative_to(root).parts)
    }
    assert set(project["tool"]["setuptools"]["packages"]) == found


def test_the_project_says_what_comfyui_reads(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    assert {"PublisherId", "DisplayName", "Icon", "requires-comfyui"} <= set(project["tool"]["comfy"])
    assert "comfyui" not in project["project"]["name"].lower()  # the registry's rule
    assert project["project"]["version"] == __version__, "comfy-cli reads no other version"
    assert isinstance(project["project"]["urls"], dict)


def test_requirements_leave_comfyuis_own_packages_alone(root: Path) -> None:
    lines = (root / "requirements.txt").read_text(encoding="utf-8").splitlines()
    wanted = [line for line in lines if line.strip() and not line.startswith("#")]
    assert wanted
    for line in wanted:
        assert re.fullmatch(r"[\w.-]+", line), f"{line}: no pins, no options"
        assert line.lower().replace("_", "-") not in COMFYUI_OWNS


def test_the_installer_is_fast_and_repeatable(root: Path, tmp_path: Path) -> None:
    times, outputs = [], set()
    for _ in range(3):
        began = os.times()
        done = python("-I", root / "install.py", cwd=tmp_path)
        ended = os.times()  # of the processor: the machine may be busy with others
        times.append(ended.children_user + ended.children_system - began.children_user - began.children_system)
        assert done.returncode == 0 and not done.stderr
        outputs.add(done.stdout)
    (output,) = outputs
    ready, *hints = output.splitlines()
    assert ready == READY
    assert all(hint.startswith("[Slipstream] Optional: ") for hint in hints)
    assert min(times) < 0.2
    assert not list(tmp_path.iterdir())


def test_the_installer_names_what_is_missing(root: Path, tmp_path: Path) -> None:
    bare = "import runpy, sys; sys.path[:] = [p for p in sys.path if 'site-packages' not in p]; " + (
        f"runpy.run_path({str(root / 'install.py')!r}, run_name='__main__')"
    )
    environment = {"PATH": str(tmp_path)}
    command = [sys.executable, "-I", "-S", "-c", bare]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for word in ("PyTorch is not installed", "pip install -r", "No C++ compiler"):
        assert word in done.stdout


@pytest.fixture
def installer(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """As on a machine where all that is needed is there, without an NVIDIA GPU and without TensorRT."""
    spec = importlib.util.spec_from_file_location("slipstream_install", root / "install.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "missing", lambda: iter(()))
    monkeypatch.setattr(module, "NVIDIA_DRIVER", tmp_path / "driver")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for name in module.TENSORRT:
        monkeypatch.setitem(sys.modules, name, None)  # as Python marks what cannot be imported
    return module


def gpu_by_its_driver(folder: Path) -> None:
    (folder / "driver").mkdir()


def gpu_by_its_program(folder: Path) -> None:
    program = folder / "bin" / ("nvidia-smi.exe" if sys.platform == "win32" else "nvidia-smi")
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)


@pytest.mark.skipif(sys.platform == "win32", reason="there triton brings a compiler along")
@pytest.mark.parametrize("has_triton", [True, False])
@pytest.mark.parametrize("has_c", [True, False])
@pytest.mark.parametrize("has_gpu", [True, False])
def test_the_installer_says_what_a_missing_cpp_compiler_costs(
    installer: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_gpu: bool, has_c: bool, has_triton: bool
) -> None:
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(installer.importlib.util, "find_spec", lambda name: name == "triton" and has_triton)
    if has_gpu:
        gpu_by_its_driver(tmp_path)
    if has_c:
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "gcc").write_text("#!/bin/sh\n")
        (tmp_path / "bin" / "gcc").chmod(0o755)
    (sentence,) = installer._compiler()
    without = "triton builds engines without one" in sentence
    assert without is (has_gpu and has_c and has_triton) and ("cannot be compiled here" in sentence) is not without


@pytest.mark.parametrize("add_gpu", [gpu_by_its_driver, gpu_by_its_program])
def test_the_installer_tells_of_tensorrt_where_there_is_a_gpu(
    installer: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], add_gpu: Callable[[Path], None]
) -> None:
    add_gpu(tmp_path)
    installer.main()
    ready, hint = capsys.readouterr().out.splitlines()
    assert ready == READY, "nothing is missing without it"
    assert hint.startswith("[Slipstream] Optional: TensorRT") and hint.endswith("--backend tensorrt")


def test_the_command_that_the_installer_names_is_one(
    installer: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from slipstream.cli.commands import make_parser

    gpu_by_its_driver(tmp_path)
    installer.main()
    words = shlex.split(capsys.readouterr().out.splitlines()[1].split(" is said by: ")[1].replace("\\", "/"))
    assert Path(words[0]) == Path(sys.executable) and Path(words[1]) == installer.HERE
    assert make_parser().parse_args(words[2:]).backend == "tensorrt"


@pytest.mark.parametrize("name", ["tensorrt_rtx_bindings", "tensorrt_rtx", "tensorrt"])
def test_the_installer_is_silent_where_tensorrt_is(
    installer: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    gpu_by_its_driver(tmp_path)
    (tmp_path / f"{name}.py").write_text("raise AssertionError('imported')")
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    installer.main()
    assert capsys.readouterr().out.splitlines() == [READY]


def test_the_installer_is_silent_without_a_gpu(installer: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    installer.main()
    assert capsys.readouterr().out.splitlines() == [READY]
