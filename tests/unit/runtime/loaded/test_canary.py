"""An engine that ended a process is treated with care by the next ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from slipstream.core.protocols import Tensors
from slipstream.runtime.loaded import canary as module
from slipstream.runtime.loaded.canary import CAPTURE, LOAD, USE, Canary, EngineCanary, FirstCall
from slipstream.tests.unit.runtime.doomed import Doomed

ROOT = Path(__file__).resolve().parents[4]
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
import threading, time
from pathlib import Path
from slipstream.runtime.loaded.canary import Canary
canary, inside = Canary(Path({folder!r}), dict), threading.Event()
def use():
    with canary.watching({digest!r}, "capture", True):
        inside.set()
        time.sleep(600)
threading.Thread(target=use, daemon=True).start()  # its block is cut off, not ended
assert inside.wait(60)
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


def marks(folder: Path) -> int:
    return len(list(folder.glob("*.json")))


def age(folder: Path, days: float) -> None:
    for path in folder.iterdir():
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime - days * 24 * 3600))


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


@pytest.mark.parametrize(
    ("crashes", "ends"),
    [
        ({(LOAD, True), (LOAD, False)}, [True, False]),
        ({(USE, True), (USE, False)}, [True, False]),
        ({(CAPTURE, True)}, [True]),
        ({(CAPTURE, True), (USE, False)}, [True, False]),
        ({(USE, False)}, []),
    ],
)
def test_an_engine_ends_few_processes(folder: Path, crashes: set[tuple[str, bool]], ends: list[bool]) -> None:
    """Processes one after the other use it as they may; wherever it crashes, it does so each time."""
    assert processes(folder, crashes, on_a_gpu=True) == ends


def test_an_engine_without_graphs_ends_one_process(folder: Path) -> None:
    assert processes(folder, {(USE, False)}, on_a_gpu=False) == [False]
    assert processes(folder.with_name("other"), {(LOAD, False)}, on_a_gpu=False) == [False]


def processes(folder: Path, crashes: set[tuple[str, bool]], on_a_gpu: bool) -> list[bool]:
    """Whether each that died did so with CUDA graphs."""
    ends = []
    for _ in range(8):
        canary = Canary(folder, dict)  # of the next process
        for phase in (LOAD, USE, CAPTURE):
            death = canary.death_of(ENGINE)
            graphs = on_a_gpu and death is None
            if (death is not None and not death.with_graphs) or (phase == CAPTURE and not graphs):
                break
            if (phase, graphs) in crashes:
                die(folder, phase=phase, graphs=graphs)
                ends.append(graphs)
                break
            with canary.watching(ENGINE, phase, graphs):
                pass
    return ends


def test_a_death_without_graphs_counts_before_one_with_them(canary: Canary, folder: Path) -> None:
    die(folder)
    assert canary.caution(ENGINE).startswith("It runs without CUDA graphs: the program ended while its CUDA graph")
    die(folder, phase=LOAD, graphs=False)
    death = canary.death_of(ENGINE)
    assert death is not None and not death.with_graphs
    assert canary.caution(ENGINE).startswith("It is not used: the program ended while it was loaded (process ")


@pytest.fixture(params=["as this system does", "as one does that tells nothing of processes"])
def knows_processes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    if request.param.startswith("as one"):
        monkeypatch.setattr(module, "_started", lambda pid: None)
    yield request.param.startswith("as this")


def test_a_living_process_condemns_nothing(canary: Canary, folder: Path, knows_processes: bool) -> None:
    other = Doomed(folder, ENGINE, CAPTURE, True, {})
    try:
        assert canary.death_of(ENGINE) is None
        canary.forget(ENGINE)
        assert marks(folder) == 1, "its mark is its own"
    finally:
        other.end()
    assert canary.death_of(ENGINE) is not None


def test_this_process_condemns_nothing(canary: Canary, knows_processes: bool) -> None:
    with canary.watching(ENGINE, CAPTURE, True):
        assert canary.death_of(ENGINE) is None


def test_an_orderly_end_is_no_death(canary: Canary, folder: Path) -> None:
    code = ORDERLY.format(root=str(ROOT), folder=str(folder), digest=ENGINE)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n" and canary.death_of(ENGINE) is None


def test_a_power_cut_is_no_death(canary: Canary, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    die(folder)
    monkeypatch.setattr(module, "_boot", lambda: "after the machine was started again")
    assert canary.death_of(ENGINE) is None


def test_another_machine_at_the_same_folder_has_its_own_marks(
    canary: Canary, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    die(folder)
    with monkeypatch.context() as there:
        there.setattr(module.socket, "gethostname", lambda: "another machine")
        assert canary.death_of(ENGINE) is None
        canary.forget(ENGINE)
        with canary.watching(ENGINE, CAPTURE, True):
            pass
    assert canary.death_of(ENGINE) is not None


def test_an_update_is_a_reason_to_try_again(folder: Path) -> None:
    die(folder, torch="2.8")
    assert Canary(folder, lambda: {"torch": "2.8"}).death_of(ENGINE) is not None
    assert Canary(folder, lambda: {"torch": "2.9"}).death_of(ENGINE) is None


def test_whoever_has_other_versions_removes_no_mark(folder: Path) -> None:
    """A second ComfyUI with another torch, or the command line without the GPU: it must not send the first one back."""
    die(folder, torch="2.8", driver="580")
    other = Canary(folder, lambda: {"torch": "2.8"})
    assert other.caution(ENGINE) == ""
    for graphs in (True, False):
        for phase in (LOAD, USE, CAPTURE):
            with other.watching(ENGINE, phase, graphs):
                pass
    assert Canary(folder, lambda: {"torch": "2.8", "driver": "580"}).death_of(ENGINE) is not None


def test_old_marks_that_count_for_nothing_are_removed_by_a_new_one(folder: Path) -> None:
    die(folder, torch="2.8")
    die(folder, OTHER, torch="2.9")
    (folder / "damaged.json").write_text("{")
    (folder / "left.lock").touch()
    newer = Canary(folder, lambda: {"torch": "2.9"})
    age(folder, 29)
    with newer.watching(ENGINE, USE, True):
        assert marks(folder) == 4
    age(folder, 2)
    assert newer.death_of(ENGINE) is None and newer.death_of(OTHER) is not None
    assert marks(folder) == 3, "reading removes nothing"
    with newer.watching(ENGINE, USE, True):
        assert marks(folder) == 2
    assert [path.name.partition(".")[0] for path in folder.iterdir()] == [OTHER[:24]]
    assert newer.death_of(OTHER) is not None


def test_somebody_who_tries_again_forgets_it(canary: Canary, folder: Path) -> None:
    die(folder)
    die(folder, phase=USE, graphs=False)
    die(folder, OTHER)
    canary.forget(ENGINE)
    assert canary.death_of(ENGINE) is None and canary.death_of(OTHER) is not None
    assert {path.name.partition(".")[0] for path in folder.iterdir()} == {OTHER[:24]}, "no lock stays without its mark"


def test_who_tries_again_forgets_what_other_versions_left(folder: Path) -> None:
    die(folder, torch="2.8")
    Canary(folder, lambda: {"torch": "2.9"}).forget(ENGINE)
    assert list(folder.iterdir()) == []


def test_a_death_in_the_meantime_is_not_forgiven(canary: Canary, folder: Path) -> None:
    with canary.watching(ENGINE, USE, False):
        die(folder, phase=USE, graphs=False)
    assert marks(folder) == 1


def test_a_server_that_does_not_know_of_the_death_forgives_none(canary: Canary, folder: Path) -> None:
    """It loaded the engine before, and goes on capturing: otherwise the other one would crash at each start."""
    early = EngineCanary(canary, ENGINE)
    die(folder)
    with early.capturing():
        pass
    with canary.watching(ENGINE, USE, True):
        pass
    assert early.allows_graphs and not EngineCanary(canary, ENGINE).allows_graphs


def test_an_engine_that_was_loaded_with_care_knows_when_that_is_over(canary: Canary, folder: Path) -> None:
    die(folder)
    careful = EngineCanary(canary, ENGINE)
    assert not careful.is_outdated
    canary.forget(ENGINE)
    assert careful.is_outdated and not careful.allows_graphs
    assert not EngineCanary(canary, ENGINE).is_outdated


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


def test_a_full_disk_leaves_nothing(canary: Canary, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, *_: object, **__: object) -> None:
        path.touch()
        raise OSError("no space is left")

    monkeypatch.setattr(Path, "write_text", full)
    with canary.watching(ENGINE, USE, True):
        assert list(folder.iterdir()) == []


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
