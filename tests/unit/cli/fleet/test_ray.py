"""A matrix on a real Ray cluster of several nodes on this machine, one of whose workers is killed on the way."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.engine_cache.travel.remote_store import RemoteStore
from slipstream.tests.unit.cli.fleet.conftest import builds


@pytest.fixture
def cluster(pretended: Path) -> Iterator[Any]:
    """Two nodes with a GPU each, or so they say, whose processes know where builds are pretended."""
    ray = pytest.importorskip("ray", reason="no Ray; `python tools/test.py --everything` installs it")
    from ray.cluster_utils import Cluster

    def node(kind: str) -> dict[str, Any]:
        return {"num_cpus": 1, "num_gpus": 1, "resources": {f"accelerator_type:{kind}": 1}}

    made = Cluster(initialize_head=True, head_node_args={**node("H100"), "include_dashboard": False})
    made.add_node(**node("L4"))
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_each_engine_is_built_once_though_a_worker_is_killed(
    cli, cluster: Any, pretended: Path, tmp_path: Path
) -> None:
    models = [
        {"model": "one", "resolutions": ["64x64", "128x64"]},
        {"model": "two", "resolutions": ["64x64"]},  # the same engine as one's first
        {"model": "three", "resolutions": ["192x64"], "gpu": "L4"},
    ]
    (tmp_path / "m.json").write_text(json.dumps({"models": models}))
    (pretended / "doomed-three").touch()
    url = str(tmp_path / "remote")
    words = ["build", "--matrix", tmp_path / "m.json", "--ray", cluster.address, "--remote", url]
    done = cli(*words, "--json")
    assert done.status == 0, done.err + done.out
    rows = done.json["builds"]
    assert [row["status"] for row in rows] == [0, 0, 0, 0]
    assert len({row["where"] for row in rows}) > 1, "all ran in one process"
    assert not (pretended / "doomed-three").exists(), "no worker was killed"
    assert builds(pretended) == 3 and len(RemoteStore(url).digests()) == 3
    again = cli(*words, "--json")
    assert again.status == 0 and builds(pretended) == 3


class PretendedRay:
    """Runs no task; `asked` has what each one was to have."""

    exceptions = SimpleNamespace(RayError=RuntimeError)

    def __init__(self, **offered: float) -> None:
        self.offered, self.asked = offered, list[dict[str, Any]]()

    def init(self, **_: Any) -> None: ...

    def shutdown(self) -> None: ...

    def cluster_resources(self) -> dict[str, float]:
        return self.offered

    def remote(self, function: Any) -> Any:
        return self

    def options(self, *, num_cpus: float, max_retries: int, retry_exceptions: bool, **resources: Any) -> Any:
        self.asked.append(resources)
        number = len(self.asked)
        return SimpleNamespace(remote=lambda *_: number)

    def wait(self, waiting: list[int], num_returns: int) -> tuple[list[int], list[int]]:
        return waiting[:1], waiting[1:]

    def get(self, reference: int) -> tuple[int, dict[str, Any], str, int]:
        return 0, {"engines": []}, "there", 1


def test_no_two_builds_share_a_gpu(cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = [
        {"model": "one", "resolutions": ["64x64"]},
        {"model": "two", "resolutions": ["64x64"], "gpu": ["H100", "L4"]},
    ]
    (tmp_path / "m.json").write_text(json.dumps({"models": models}))
    words = ["build", "--matrix", tmp_path / "m.json", "--ray", "127.0.0.1:9", "--remote", tmp_path / "remote"]
    kinds = [{"num_gpus": 1, "accelerator_type": "H100"}, {"num_gpus": 1, "accelerator_type": "L4"}]
    for ray, wanted in (
        (PretendedRay(CPU=8.0, GPU=2.0, **{"accelerator_type:H100": 1.0}), [{"num_gpus": 1}, *kinds]),
        (PretendedRay(CPU=8.0), [{}, *kinds]),
    ):
        monkeypatch.setitem(sys.modules, "ray", ray)
        done = cli(*words)
        assert done.status == 0 and ray.asked == wanted
        missing = [line for line in done.err.splitlines() if "no machine of the cluster" in line]
        assert len(missing) == (1 if "GPU" in ray.offered else 2) and "L4" in missing[-1]


def test_a_cluster_that_is_not_there(cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(**_: Any) -> None:
        raise ConnectionError("nobody answers")

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=unreachable))
    (tmp_path / "m.json").write_text(json.dumps({"models": [{"model": "one", "resolutions": ["64x64"]}]}))
    done = cli("build", "--matrix", tmp_path / "m.json", "--ray", "127.0.0.1:9", "--remote", tmp_path / "remote")
    assert done.status == 1 and "cannot be reached" in done.err
