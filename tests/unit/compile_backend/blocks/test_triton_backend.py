"""Engines of blocks that need no C++ compiler. Here on the CPU, with a block that the compiler makes no kernel for."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.torch_version import TorchVersion

from slipstream.compile_backend import TorchCompileBackend
from slipstream.compile_backend.blocks import triton_backend
from slipstream.compile_backend.blocks.attention_out import attention_by, call_out
from slipstream.compile_backend.blocks.backend import BlockBackend
from slipstream.compile_backend.blocks.engine import BlockEngine
from slipstream.compile_backend.blocks.program import SIGNATURE
from slipstream.compile_backend.blocks.triton_backend import COMPILED, OLDEST_TORCH, TritonBlockBackend
from slipstream.compile_backend.inductor import options
from slipstream.compile_backend.program import CONSTANTS
from slipstream.core.errors import BuildFailed, IncompatibleEngine
from slipstream.core.progress import ignore_progress
from slipstream.core.protocols import Artifact, BuildJob
from slipstream.core.shapes import ShapeProfile
from slipstream.core.spec import Optimize, Precision, Role
from slipstream.engine_cache import BuildRecord, EngineStore, key_of
from slipstream.engine_cache.workspace import LONGEST_INSIDE
from slipstream.tests.tensors import distance
from slipstream.tests.unit.compile_backend.support import CPU, SmallArchitecture, make_spec

CUDA = torch.device("cuda", 0)
BACKEND = TritonBlockBackend()
EXAMPLE = {"x": (2, 6, 16)}
HEADS = 4

needs_torch = pytest.mark.skipif(
    TorchVersion(str(torch.__version__)) < OLDEST_TORCH, reason="this torch cannot keep blocks without C++"
)


class Block(nn.Module):
    """Matrix products alone, which are not compiled; a constant; attention by the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.out = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16, bias=False)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor | None]:
        shape, attended = [x.shape[0], x.shape[1], x.shape[2]], (self.q(x), self.k(x), HEADS)
        ramp = torch.tensor([*map(float, range(16))], device=x.device)
        return [nn.functional.linear(call_out(shape, attended, {}), self.out.weight, ramp), None]


def attention(q: torch.Tensor, k: torch.Tensor, heads: int) -> torch.Tensor:
    """In the place of a host's."""
    return torch.softmax(q @ k.transpose(1, 2) / heads, -1) @ k


@dataclass(frozen=True)
class BlockKind(SmallArchitecture):
    """A kind of block whose calls have one tensor, of open length."""

    build: Callable[[], nn.Module] = Block
    role: Role = Role.BLOCK
    form: Any = (("x", "tensor"),)

    @property
    def example(self) -> dict[str, tuple[int, ...]]:
        return EXAMPLE

    @property
    def open_axes(self) -> dict[str, tuple[int, ...]]:
        return {"x": (1,)}

    @property
    def stored(self) -> dict[str, Any]:
        return {}


def job_in(folder: Path, build: Callable[[], nn.Module] = Block) -> BuildJob:
    kind = BlockKind(build)
    profile, dtypes = ShapeProfile.static(EXAMPLE), {"x": "float32"}
    spec = make_spec(BACKEND, role=kind.role, fingerprint=kind.fingerprint, profile=profile, dtypes=dtypes)
    return BuildJob(folder, spec, kind, CPU, BACKEND.environment(CPU))


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return BACKEND.build(job_in(tmp_path_factory.mktemp("job")), ignore_progress)


def case(seed: int, length: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A call's input, and a block's weights."""
    generator = torch.Generator().manual_seed(seed)
    block = Block()
    drawn = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in block.named_parameters()}
    return torch.randn(2, length, 16, generator=generator), drawn


CASES = (0, 6), (1, 11), (2, 3)


def computed(engine: BlockEngine, seed: int, length: int) -> torch.Tensor:
    x, weights = case(seed, length)
    assert engine.accepts(((x.shape, x.dtype),))
    with torch.inference_mode(), attention_by(attention):  # as hosts call it
        found, nothing = engine([x], [weights[name] for name, _, _ in engine.weights])
    assert nothing is None
    return found.clone()


def eager(seed: int, length: int) -> torch.Tensor:
    x, weights = case(seed, length)
    with torch.no_grad(), attention_by(attention):
        found: torch.Tensor = torch.func.functional_call(Block(), weights, (x,))[0]
    return found


_LOADS_AND_COMPUTES = """
import os, pathlib, runpy, sys
root, folder, out = sys.argv[1:]
runpy.run_path(root + "/__main__.py")["register"]()
from slipstream.tests.unit.compile_backend.blocks.test_triton_backend import *
from torch._inductor.runtime import autotune_cache
started = []
autotune_cache.has_triton = lambda: started.append("triton's driver")
begin = {"subprocess.Popen", "os.posix_spawn", "os.fork", "os.exec", "os.system"}
sys.addaudithook(lambda event, arguments: started.append(str(arguments)) if event in begin else None)
artifact = Artifact(pathlib.Path(folder), tuple(os.listdir(folder)))
one, other = BACKEND.load_block(artifact, CPU), BACKEND.load_block(artifact, CPU)
found = [computed(engine, *each) for each in CASES for engine in (one, other)]
found.append(computed(one, *CASES[0]))
torch.save(found, out)
print(json.dumps(started))
"""


@needs_torch
def test_a_new_process_computes_by_it_without_any_compiler(artifact: Artifact, root: Path, tmp_path: Path) -> None:
    """In any size, with the weights of each call, and without a process of its own."""
    folder = tmp_path / "artifact"
    folder.mkdir()
    for name in artifact.files:
        (folder / name).write_bytes((artifact.directory / name).read_bytes())
    environment = {**os.environ, "PATH": str(tmp_path), "CXX": "/nowhere/g++", "CC": "/nowhere/gcc"}
    environment |= {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", _LOADS_AND_COMPUTES, str(root), str(folder), str(tmp_path / "out")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []
    found = torch.load(tmp_path / "out")
    wanted = [eager(*each) for each in CASES for _ in range(2)] + [eager(*CASES[0])]
    assert all(distance(*pair) < 1e-5 for pair in zip(found, wanted, strict=True))


@needs_torch
def test_a_file_that_was_damaged_is_refused(artifact: Artifact, tmp_path: Path) -> None:
    for name in artifact.files:
        (tmp_path / name).write_bytes((artifact.directory / name).read_bytes())
    (tmp_path / COMPILED).write_bytes((tmp_path / COMPILED).read_bytes()[:-100])
    with pytest.raises(IncompatibleEngine, match="cannot be loaded on this machine"):
        BACKEND.load_block(Artifact(tmp_path, artifact.files), CPU)


@needs_torch
def test_kernels_that_another_process_would_number_otherwise_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    monkeypatch.setitem(kernel_side_table.id_to_kernel, 0, object())
    with pytest.raises(BuildFailed, match="triton kernels of its own"):
        BACKEND.build(job_in(tmp_path), ignore_progress)


@needs_torch
@pytest.mark.parametrize("optimize", [Optimize.FAST_BUILD, Optimize.BALANCED, Optimize.MAX])
def test_options_are_known_to_this_torch_and_try_nothing(optimize: Optimize) -> None:
    from torch._inductor import config

    for device in (CPU, CUDA):
        options = BACKEND.options(device, Precision.FP16, optimize)
        assert options["triton.autotune_pointwise"] is False and options["deterministic"] is True
        assert "coordinate_descent_tuning" not in options
        assert {name for name in options if not name.startswith("slipstream.")} <= set(config.get_config_copy())


@needs_torch
@pytest.mark.parametrize("optimize", [Optimize.FAST_BUILD, Optimize.BALANCED, Optimize.MAX])
@pytest.mark.parametrize("backend", [BACKEND, BlockBackend(), TorchCompileBackend()], ids=lambda backend: backend.name)
def test_on_windows_files_are_not_named_after_all_operations_of_a_kernel(
    backend: Any, optimize: Optimize, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their paths would be too long there."""
    from torch._inductor import config

    name = "triton.descriptive_names"
    monkeypatch.setattr(options, "sys", SimpleNamespace(platform="linux"))
    assert name not in backend.options(CUDA, Precision.FP16, optimize)
    monkeypatch.setattr(options, "sys", SimpleNamespace(platform="win32"))
    assert backend.options(CUDA, Precision.FP16, optimize)[name] == ""
    assert name not in backend.options(CPU, Precision.FP16, optimize) and name in config.get_config_copy()


@needs_torch
def test_all_its_names_are_names_on_windows(artifact: Artifact, tmp_path: Path) -> None:
    """Where some characters and words are none, and capitals do not tell names apart."""
    store = EngineStore(tmp_path)
    job = job_in(tmp_path)
    with store.scratch(f"build-{key_of(job.spec, job.environment).short}"):
        entry = store.put(key_of(job.spec, job.environment), artifact, label="blocks", build=BuildRecord(1.0))
        found = [path.relative_to(tmp_path) for path in tmp_path.rglob("*")]
    assert {COMPILED, CONSTANTS, SIGNATURE} <= {path.name for path in found if path.parent.name == entry.digest}
    assert not any(PureWindowsPath(part).is_reserved() for path in found for part in path.parts)
    assert not any(re.search(r'[<>:"\\|?*\x00-\x1f]|[. ]$', part) for path in found for part in path.parts)
    assert len({str(path).lower() for path in found}) == len(found)
    assert max(len(str(path)) for path in found) <= LONGEST_INSIDE


def test_what_it_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "on CUDA, not on cpu" in (BACKEND.why_unavailable(CPU) or "")
    assert "not on cuda:1" in (BACKEND.why_unavailable(torch.device("cuda", 1)) or "")
    monkeypatch.setattr(torch, "__version__", "2.10.0")
    assert "torch 2.11 or newer" in (BACKEND.why_unavailable(CUDA) or "")
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "pip install triton" in (BACKEND.why_unavailable(CUDA) or "")
    monkeypatch.setattr(triton_backend, "why_no_triton", lambda: None)
    monkeypatch.setattr(triton_backend, "why_no_c_compiler", lambda: "no C compiler was found")
    assert BACKEND.why_unavailable(CUDA) is None and BACKEND.why_cannot_build(CUDA) == "no C compiler was found"


def test_neither_a_cpp_compiler_nor_the_toolkit_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    monkeypatch.setattr(triton_backend, "why_no_triton", lambda: None)
    monkeypatch.setenv("CC", sys.executable)  # triton's own need on Linux
    assert BACKEND.why_cannot_build(CUDA) is None
