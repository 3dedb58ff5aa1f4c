"""An engine that ended a process is treated with care by the next ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slipstream.core.protocols import Tensors
from slipstream.runtime import canary as module
from slipstream.runtime.canary import CAPTURE, USE, Canary, EngineCanary, FirstCall
from slipstream.tests.unit.runtime.doomed import Doomed

ROOT = Path(__file__).resolve().parents[3]
ENGINE, OTHER = "a" * 64, "b" * 64
CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are made by fork here")

ORDERLY = """
import importlib.util, sys
place = {root!r}
spec = importlib.util.spec_from_file_location("slipstream", place + "/__init__.py", submodule_search_locations=[place])
package = importlib.util.module_from_spec(spec)
sys.modules["slipstream"] = package
spec.loader.exec_module(package)
from pathlib import Path
from slipstream.runtime.canary import Canary
watching = Canary(Path({folder!r}), dict).watching({digest!r}, "use", False)
watching.__enter__()
print(len(list(Path({folder!r}).glob("*.json"))))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "marks"


@pytest.fixture
def canary(folder: Path) -> Canary:
    return Canary(folder, dict)


def die(folder: Path, digest: str = ENGINE, phase: str = CAPTURE, graphs: bool = True, **versions: str) -> None:
    Doomed(folder, digest, phase, graphs, versions).end()


def test_what_goes_well_leaves_nothing(canary: Canary, folder: Path) -> None:
    with canary.watching(ENGINE, USE, True):
        assert len(list(folder.glob("*.json"))) == 1
    assert list(folder.iterdir()) == [] and canary.death_of(ENGINE) is None


def test_an_error_is_no_death(canary: Canary, folder: Path) -> None:
    with pytest.raises(RuntimeError), canary.watching(ENGINE, CAPTURE, True):
        raise RuntimeError("survived")
    assert canary.death_of(ENGINE) is None and list(folder.iterdir()) == []


def test_a_killed_process_is_a_death_of_its_engine_alone(canary: Canary, folder: Path) -> None:
    die(folder)
    death = canary.death_of(ENGINE)
    assert death is not None and death.with_graphs and "CUDA graph was captured" in str(death)
    assert canary.death_of(OTHER) is None
    assert not EngineCanary(canary, ENGINE).allows_graphs and EngineCanary(canary, OTHER).allows_graphs
    assert Canary(folder, dict).death_of(ENGINE) is not None, "for every later process"


def test_a_death_without_graphs_counts_before_one_with_them(canary: Canary, folder: Path) -> None:
    die(folder, phase=USE, graphs=False)
    die(folder)
    death = canary.death_of(ENGINE)
    assert death is not None and not death.with_graphs and "used for the first time" in str(death)


def test_a_living_process_condemns_nothing(canary: Canary, folder: Path) -> None:
    other = Doomed(folder, ENGINE, CAPTURE, True, {})
    try:
        assert canary.death_of(ENGINE) is None
        canary.forget(ENGINE)
        assert len(list(folder.glob("*.json"))) == 1, "its mark is its own"
    finally:
        other.end()
    assert canary.death_of(ENGINE) is not None


def test_an_orderly_end_is_no_death(canary: Canary, folder: Path) -> None:
    code = ORDERLY.format(root=str(ROOT), folder=str(folder), digest=ENGINE)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n" and canary.death_of(ENGINE) is None


def test_a_power_cut_is_no_death(canary: Canary, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    die(folder)
    monkeypatch.setattr(module, "_boot", lambda: "after the machine was started again")
    assert canary.death_of(ENGINE) is None and list(folder.glob("*.json")) == []


def test_an_update_is_a_reason_to_try_again(folder: Path) -> None:
    die(folder, torch="2.8")
    assert Canary(folder, lambda: {"torch": "2.8"}).death_of(ENGINE) is not None
    assert Canary(folder, lambda: {"torch": "2.9"}).death_of(ENGINE) is None
    assert Canary(folder, lambda: {"torch": "2.8"}).death_of(ENGINE) is None, "it was forgotten"


def test_somebody_who_tries_again_forgets_it(canary: Canary, folder: Path) -> None:
    die(folder)
    die(folder, phase=USE, graphs=False)
    die(folder, OTHER)
    canary.forget(ENGINE)
    assert canary.death_of(ENGINE) is None and canary.death_of(OTHER) is not None


def test_a_later_success_of_the_same_kind_forgets_it(canary: Canary, folder: Path) -> None:
    die(folder)
    with canary.watching(ENGINE, USE, True):
        pass
    assert canary.death_of(ENGINE) is not None, "that was something else"
    with canary.watching(ENGINE, CAPTURE, True):
        pass
    assert canary.death_of(ENGINE) is None


def test_another_process_with_the_same_number_is_another(canary: Canary, folder: Path) -> None:
    die(folder)
    (mark,) = folder.glob("*.json")
    content = json.loads(mark.read_text())
    mark.write_text(json.dumps({**content, "pid": os.getpid(), "started": "0"}))
    assert canary.death_of(ENGINE) is not None
    mark.write_text(json.dumps({**content, "pid": os.getpid(), "started": module._started(os.getpid())}))
    assert canary.death_of(ENGINE) is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"phase": "use"}'])
def test_a_damaged_mark_says_nothing(content: str, canary: Canary, folder: Path) -> None:
    die(folder)
    (mark,) = folder.glob("*.json")
    mark.write_text(content)
    assert canary.death_of(ENGINE) is None


def test_where_nothing_can_be_written_nothing_is_watched(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    canary = Canary(blocked / "marks", dict)
    with canary.watching(ENGINE, USE, True):
        pass
    assert canary.death_of(ENGINE) is None


class Engine:
    def __init__(self, folder: Path) -> None:
        self.marks: list[int] = []
        self.device_bytes = 7
        self._folder = folder

    def __call__(self, **tensors: torch.Tensor) -> Tensors:
        self.marks.append(len(list(self._folder.glob("*.json"))))
        return tensors


def test_only_the_first_call_is_watched(canary: Canary, folder: Path) -> None:
    engine = Engine(folder)
    first = FirstCall(engine, CPU, lambda: canary.watching(ENGINE, USE, False))  # type: ignore[arg-type]
    for _ in range(3):
        assert first(x=torch.ones(1))["x"].item() == 1
    assert engine.marks == [1, 0, 0] and first.is_over and first.device_bytes == 7
