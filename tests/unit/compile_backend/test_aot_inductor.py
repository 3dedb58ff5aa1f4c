"""Packages: without weights, without a compiler at load, and complete."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slipstream.compile_backend import AOTInductorBackend, aot_inductor
from slipstream.compile_backend.inductor.options import OURS, of_compiler
from slipstream.compile_backend.program import CONSTANTS, SIGNATURE, ProgramSignature
from slipstream.core.errors import BuildFailed, IncompatibleEngine
from slipstream.core.progress import Progress
from slipstream.core.protocols import Artifact
from slipstream.core.spec import BackendConfig, Optimize, Precision
from slipstream.tests.unit.compile_backend.support import (
    CPU,
    TOLERANCE,
    Built,
    assert_right,
    build_here,
    make_inputs,
    make_job,
    make_spec,
    make_weights,
    used_names,
    with_options,
)

_LOADS_AND_RUNS = """
import os, pathlib, runpy, subprocess, sys
root, folder, case, out = sys.argv[1:]
runpy.run_path(root + "/__main__.py")["register"]()
from slipstream.tests.unit.compile_backend.support import *

def blocked(*args, **kwargs):
    raise AssertionError(f"another program was started: {args}")

subprocess.Popen.__init__ = blocked
os.system = os.posix_spawn = os.execv = os.execve = os.fork = blocked
from slipstream.compile_backend import AOTInductorBackend
folder = pathlib.Path(folder)
engine = Built(AOTInductorBackend(), Artifact(folder, tuple(os.listdir(folder)))).load()
weights, inputs = torch.load(case)
engine.update_weights(weights)
torch.save(engine(**inputs), out)
print([name for name in sys.modules if name.startswith(("torch._inductor", "torch._dynamo"))])
"""


@pytest.fixture
def backend() -> AOTInductorBackend:
    return AOTInductorBackend()


# ------------------------------------------------------------------------------------------------ loading


def test_a_package_holds_no_weights(packaged: Built) -> None:
    package = aot_inductor.load_package(packaged.artifact.directory / aot_inductor.PACKAGE, CPU)
    signature = ProgramSignature.read(packaged.artifact.directory)
    assert package.weight_names == {*used_names(), *signature.constants}


@pytest.mark.skipif(os.name == "nt", reason="PATH also finds libraries there")
def test_loading_compiles_nothing(packaged: Built, root: Path, tmp_path: Path) -> None:
    """In a new process without a compiler, that may start no other program."""
    case, out = tmp_path / "case", tmp_path / "out"
    weights, inputs = make_weights(2), make_inputs(2)
    torch.save((weights, inputs), case)
    arguments = [str(path) for path in (root, packaged.artifact.directory, case, out)]
    found = subprocess.run(
        [sys.executable, "-c", _LOADS_AND_RUNS, *arguments],
        env={**os.environ, "PATH": str(tmp_path), "CXX": "/nowhere/g++"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == "[]", "importing the compiler takes seconds at each start"
    assert_right(torch.load(out), weights, inputs)


def test_loading_and_running_leave_the_key_as_it_was(packaged: Built, backend: AOTInductorBackend) -> None:
    """A warm process must ask for the same engine as a fresh one."""
    before = backend.environment(CPU), backend.options(CPU, Precision.FP32, Optimize.BALANCED)
    engine = packaged.load()
    engine.update_weights(make_weights())
    engine(**make_inputs())
    assert (backend.environment(CPU), backend.options(CPU, Precision.FP32, Optimize.BALANCED)) == before


@pytest.mark.parametrize("content", [b"", b"PK\3\4 not an archive", os.urandom(5000)], ids=["empty", "cut", "noise"])
def test_a_package_that_is_none(packaged: Built, tmp_path: Path, content: bytes) -> None:
    artifact = _copy(packaged.artifact, tmp_path)
    (tmp_path / aot_inductor.PACKAGE).write_bytes(content)
    with pytest.raises(IncompatibleEngine, match=r"package\.pt2 cannot be loaded on this machine"):
        Built(packaged.backend, artifact).load()


@pytest.mark.parametrize("name", [aot_inductor.PACKAGE, SIGNATURE, CONSTANTS])
def test_an_artifact_that_lacks_a_file(packaged: Built, tmp_path: Path, name: str) -> None:
    artifact = _copy(packaged.artifact, tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises((IncompatibleEngine, OSError), match=name.replace(".", r"\.")):
        Built(packaged.backend, artifact).load()


def _copy(artifact: Artifact, folder: Path) -> Artifact:
    for name in artifact.files:
        (folder / name).write_bytes((artifact.directory / name).read_bytes())
    return Artifact(folder, artifact.files, artifact.details)


# ----------------------------------------------------------------------------------------------- building


@pytest.fixture
def probed(probes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(probes))


class OneSmallWeight(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x + self.bias,)


def test_a_package_whose_weights_were_written_into_the_code_is_refused(
    artifacts: dict[str, Built], probed: None, backend: AOTInductorBackend, tmp_path: Path
) -> None:
    """Inductor does so with the smallest, unless told otherwise: a LoRA could never change them."""
    job = make_job(backend, tmp_path, build=OneSmallWeight, shapes={"x": (2, 4)})
    said: list[Progress] = []
    with pytest.raises(BuildFailed, match="left 1 of 1 weights out of the package, such as bias"):
        backend.build(with_options(job, always_keep_tensor_constants=False), said.append)
    nodes = ProgramSignature.read(tmp_path).nodes
    assert said == [
        Progress("export", None, "tracing the model"),
        Progress("compile", None, f"compiling {nodes} operations", nodes),
    ]


def test_half_precision_built_for_two_threads(
    artifacts: dict[str, Built], probed: None, backend: AOTInductorBackend, tmp_path: Path
) -> None:
    """It is right with any number of them."""
    precision = Precision.FP16
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        engine = build_here(backend, tmp_path, precision).load()
        weights, inputs = make_weights(1, precision), make_inputs(1, precision)
        engine.update_weights(weights)
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found = engine(**inputs)
            assert {tensor.dtype for tensor in found.values()} == {weights["gain"].dtype}
            assert_right(found, weights, inputs, TOLERANCE[precision])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2])
def test_other_threads_than_it_was_built_for(packaged: Built, threads: int) -> None:
    before = torch.get_num_threads()
    engine, weights = packaged.load(), make_weights()
    engine.update_weights(weights)
    try:
        torch.set_num_threads(threads)
        for seed in range(3):
            assert_right(engine(**make_inputs(seed)), weights, make_inputs(seed))
    finally:
        torch.set_num_threads(before)


# ------------------------------------------------------------------------------------------------ options


def test_options_are_plain_data_that_enter_the_key(backend: AOTInductorBackend) -> None:
    for optimize in Optimize:
        for device in (CPU, torch.device("cuda", 0)):
            options = backend.options(device, Precision.FP16, optimize)
            assert all(isinstance(value, (str, int, float, bool, type(None))) for value in options.values())
            assert options["always_keep_tensor_constants"] is True
            assert options["aot_inductor.package_constants_in_so"] is False


def test_more_build_time_means_other_options(backend: AOTInductorBackend) -> None:
    device = torch.device("cuda", 0)
    levels = Optimize.FAST_BUILD, Optimize.BALANCED, Optimize.MAX
    found = [dict(backend.options(device, Precision.FP16, optimize)) for optimize in levels]
    assert found[0] != found[1] != found[2] and found[2]["coordinate_descent_tuning"] is True


def test_options_are_known_to_this_torch(backend: AOTInductorBackend) -> None:
    from torch._inductor import config

    known = config.get_config_copy()
    for optimize in Optimize:
        options = backend.options(torch.device("cuda", 0), Precision.FP16, optimize)
        spec = replace(make_spec(backend), backend=BackendConfig(backend.name, options))
        assert set(of_compiler(spec)) <= set(known)
        assert all(name.startswith(OURS) for name in set(options) - set(of_compiler(spec)))
