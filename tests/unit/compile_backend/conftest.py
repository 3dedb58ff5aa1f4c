"""Artifacts of both backends, built once in a session."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from slipstream.compile_backend import AOTInductorBackend, TorchCompileBackend
from slipstream.core.progress import CancelToken, ignore_progress
from slipstream.core.protocols import Engine
from slipstream.runtime.building.worker_process import run_build
from slipstream.tests.unit.compile_backend.support import Built, make_job

BACKENDS = {"aotinductor": AOTInductorBackend, "torch.compile": TorchCompileBackend}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need compiled artifacts say so where there is no compiler."""
    if shutil.which("g++") is not None:
        return
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and {"artifacts"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.skip(reason="no C++ compiler"))


@pytest.fixture(scope="session")
def probes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A compiler cache for builds, so that the probes of this machine, seconds each, run once."""
    return tmp_path_factory.getbasetemp() / "inductor"


@pytest.fixture(scope="session")
def host_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiler cache of a host on another day: without the graphs that a build left behind."""
    return tmp_path_factory.mktemp("host") / "inductor"


@pytest.fixture(scope="module", autouse=True)
def _use_host_cache(host_cache: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(host_cache))
        yield


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory: pytest.TempPathFactory, probes: Path, host_cache: Path) -> dict[str, Built]:
    """By both backends, side by side."""
    backends = {name: kind() for name, kind in BACKENDS.items()}
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor() as pool:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(probes))
        jobs = {name: make_job(backend, tmp_path_factory.mktemp("job")) for name, backend in backends.items()}
        found = pool.map(lambda job: run_build(job, ignore_progress, CancelToken()).artifact, jobs.values())
        built = {name: Built(backends[name], artifact) for name, artifact in zip(jobs, found, strict=True)}
    shutil.copytree(probes, host_cache, ignore=shutil.ignore_patterns("fxgraph", "aotautograd"), dirs_exist_ok=True)
    return built


@pytest.fixture(scope="session")
def packaged(artifacts: dict[str, Built]) -> Built:
    """By AOTInductor."""
    return artifacts["aotinductor"]


@pytest.fixture(scope="session")
def cached(artifacts: dict[str, Built]) -> Built:
    """By torch.compile."""
    return artifacts["torch.compile"]


@pytest.fixture(scope="module", params=list(BACKENDS))
def built(request: pytest.FixtureRequest, artifacts: dict[str, Built]) -> Built:
    """By each backend."""
    return artifacts[request.param]


@pytest.fixture(scope="module")
def shared_engine(built: Built) -> Engine:
    return built.load()


@pytest.fixture
def engine(shared_engine: Engine) -> Iterator[Engine]:
    """Loaded, without weights."""
    yield shared_engine
    shared_engine.release_weights()
