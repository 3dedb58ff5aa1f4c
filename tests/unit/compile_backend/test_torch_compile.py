"""torch.compile with its cache carried along: kernels are found, not compiled again."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from slipstream.compile_backend import TorchCompileBackend
from slipstream.compile_backend.inductor.options import PROGRAM_DEVICE
from slipstream.compile_backend.torch_compile import CACHE
from slipstream.core.errors import IncompatibleEngine
from slipstream.core.spec import Optimize, Precision
from slipstream.tests.unit.compile_backend.support import (
    TOLERANCE,
    Built,
    assert_right,
    build_here,
    make_inputs,
    make_weights,
)

_LOADS_AND_COUNTS = """
import json, os, pathlib, runpy, sys
root, folder, case, out = sys.argv[1:]
runpy.run_path(root + "/__main__.py")["register"]()
from slipstream.tests.unit.compile_backend.support import *
from slipstream.compile_backend import TorchCompileBackend
from torch._dynamo.utils import counters
folder = pathlib.Path(folder)
engine = Built(TorchCompileBackend(), Artifact(folder, tuple(os.listdir(folder)))).load()
weights, inputs = torch.load(case)
engine.update_weights(weights)
torch.save(engine(**inputs), out)
print(json.dumps({"inductor": counters["inductor"], "stats": counters["stats"]}))
"""


def test_a_new_process_finds_the_graph_in_the_artifacts_cache(
    cached: Built, root: Path, tmp_path: Path, host_cache: Path
) -> None:
    case, out = tmp_path / "case", tmp_path / "out"
    weights, inputs = make_weights(2), make_inputs(2)
    torch.save((weights, inputs), case)
    arguments = [str(path) for path in (root, _only_the_artifact(cached, tmp_path / "artifact"), case, out)]
    found = subprocess.run(
        [sys.executable, "-c", _LOADS_AND_COUNTS, *arguments],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(_without_graphs(host_cache, tmp_path / "inductor"))},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert found.returncode == 0, found.stderr
    counters = json.loads(found.stdout.splitlines()[-1])
    assert counters["inductor"]["fxgraph_cache_hit"] == 1
    assert "fxgraph_cache_miss" not in counters["inductor"]
    assert_right(torch.load(out), weights, inputs)


def _without_graphs(cache: Path, folder: Path) -> Path:
    return shutil.copytree(cache, folder, ignore=shutil.ignore_patterns("fxgraph", "aotautograd"))


def _only_the_artifact(built: Built, folder: Path) -> Path:
    folder.mkdir()
    for name in built.artifact.files:
        (folder / name).write_bytes((built.artifact.directory / name).read_bytes())
    return folder


def test_new_weights_do_not_compile_again(cached: Built) -> None:
    """A LoRA a run; at its limit of recompilations torch gives up."""
    from torch._dynamo.utils import counters

    engine = cached.load()
    engine.update_weights(make_weights())
    engine(**make_inputs())
    before = counters["stats"]["unique_graphs"]
    for seed in range(10):
        weights = {name: torch.nn.Parameter(tensor) for name, tensor in make_weights(seed).items()}
        engine.update_weights(weights if seed % 2 else make_weights(seed))
        assert_right(engine(**make_inputs(seed)), weights, make_inputs(seed))
        engine.release_weights()
    assert counters["stats"]["unique_graphs"] == before


def test_inputs_in_another_layout_do_not_compile_again(cached: Built) -> None:
    from torch._dynamo.utils import counters

    engine, weights = cached.load(), make_weights()
    engine.update_weights(weights)
    engine(**make_inputs())
    before = counters["stats"]["unique_graphs"]
    inputs = make_inputs(1)
    one_row = torch.cat([inputs["hint"], inputs["hint"]], 1)[:, :4]  # contiguous, with an odd stride of the first axis
    assert one_row.is_contiguous() and one_row.stride() == (8, 1)
    x = inputs["x"].to(memory_format=torch.channels_last)
    assert_right(engine(**{**inputs, "hint": one_row, "x": x}), weights, inputs)
    assert counters["stats"]["unique_graphs"] == before


def test_half_precision(
    artifacts: dict[str, Built], probes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(probes))
    engine = build_here(TorchCompileBackend(), tmp_path, Precision.BF16).load()
    weights, inputs = make_weights(1, Precision.BF16), make_inputs(1, Precision.BF16)
    engine.update_weights(weights)
    assert_right(engine(**inputs), weights, inputs, TOLERANCE[Precision.BF16])


def test_a_cache_of_noise(cached: Built, tmp_path: Path) -> None:
    """Its checksum is compared before; still it must not crash the host."""
    folder = _only_the_artifact(cached, tmp_path / "artifact")
    (folder / CACHE).write_bytes(os.urandom(1000))
    noisy = Built(cached.backend, type(cached.artifact)(folder, cached.artifact.files))
    try:
        engine = noisy.load()
    except IncompatibleEngine:
        return
    engine.update_weights(make_weights())
    assert_right(engine(**make_inputs()), make_weights(), make_inputs())


def test_a_program_of_noise(cached: Built, tmp_path: Path) -> None:
    folder = _only_the_artifact(cached, tmp_path / "artifact")
    (folder / "program.pt2").write_bytes(os.urandom(1000))
    with pytest.raises(IncompatibleEngine, match="cannot be loaded on this machine"):
        Built(cached.backend, type(cached.artifact)(folder, cached.artifact.files)).load()


def test_a_second_gpu_has_engines_of_its_own() -> None:
    """Its number is part of their programs. The first one's engines are kept by the same key as ever."""

    def options(number: int) -> Mapping[str, object]:
        return TorchCompileBackend().options(torch.device("cuda", number), Precision.FP16, Optimize.FAST_BUILD)

    assert options(1) == {**options(0), PROGRAM_DEVICE: 1} and PROGRAM_DEVICE not in options(0)
