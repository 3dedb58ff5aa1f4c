"""Memory of captures: the library's own code over a stand-in for torch's allocator, on a machine without a GPU."""

from __future__ import annotations

import ctypes
import random
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.cpp_extension import include_paths

from slipstream.runtime.capture.arena import Graph, capture
from slipstream.runtime.capture.library import _FUNCTIONS, SOURCE, CaptureError, CaptureLibrary

HERE = Path(__file__).parent
STAND_INS = HERE / "stand_ins"
MB = 1 << 20

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("g++") is None, reason="no g++, with which the library is compiled"
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("capture") / "capture.so"
    torch_libraries = Path(torch.__file__).parent / "lib"
    command = [
        "g++", "-std=c++20", "-O1", "-fPIC", "-shared", "-DTORCH=213", f"-I{STAND_INS}", f"-I{SOURCE.parent}",
        *(f"-I{path}" for path in include_paths()), str(STAND_INS / "calls.cpp"), "-o", str(made),
        f"-L{torch_libraries}", "-lc10", f"-Wl,-rpath,{torch_libraries}",
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, text=True)
    return made


class Torch:
    """torch's allocator, and the library in front of it."""

    def __init__(self, file: Path) -> None:
        self.library = CaptureLibrary(file)
        self._calls = ctypes.CDLL(str(file))
        for name in ("test_tensor", "test_memory", "test_raw"):
            getattr(self._calls, name).restype = ctypes.c_void_p
        self("begin")

    def __call__(self, name: str, *arguments: Any) -> Any:
        """Call one of the stand-in's functions; addresses and sizes are of 64 bits."""
        return getattr(self._calls, f"test_{name}")(*(ctypes.c_uint64(value or 0) for value in arguments))

    def tensor(self, size: int) -> int | None:
        found: int | None = self("tensor", size)
        return found

    def place(self, tensor: int | None) -> int:
        return int(self("memory", tensor) or 0)


@pytest.fixture
def torch_(file: Path) -> Torch:
    found = Torch(file)
    found("set_stream", 1)
    return found


@pytest.fixture
def arena(torch_: Torch) -> Iterator[int]:
    made = torch_.library.get("arena_new", 0)
    yield made
    torch_.library.get("arena_leave")


def test_the_functions_are_those_of_the_source() -> None:
    assert set(_FUNCTIONS) == set(re.findall(r"EXPORTED [^(]*slipstream_(\w+)\(", SOURCE.read_text(encoding="utf-8")))


def test_every_function_of_torchs_allocators_is_handed_on() -> None:
    """What the base class does instead may throw, in destructors too."""
    include = Path(torch.__file__).parent / "include" / "c10"
    headers = "core/Allocator.h", "core/CachingDeviceAllocator.h", "cuda/CUDACachingAllocator.h"
    classes = r"(?:struct C10_API Allocator|DeviceAllocator :|class CUDAAllocator :).*?\n};"
    found: set[str] = set()
    for header in headers:
        for body in re.findall(classes, (include / header).read_text(encoding="utf-8"), re.DOTALL):
            found |= set(re.findall(r"virtual [^;{(]*?\b(\w+)\(", body))
    assert len(found) > 40
    ours = set(re.findall(r"(\w+)\([^;{]*\)\s*(?:const )?override", SOURCE.read_text(encoding="utf-8")))
    assert found - ours - {"Allocator"} == set()


def test_torch_is_told_only_for_as_long_as_a_thread_is_inside(torch_: Torch, arena: int) -> None:
    assert torch_("is_own")
    torch_.library.run("arena_enter", arena, 1)
    assert not torch_("is_own")
    with pytest.raises(CaptureError, match="already"):
        torch_.library.run("arena_enter", arena, 1)
    torch_.library.get("arena_leave")
    assert torch_("is_own")


def test_memory_comes_from_the_arena_and_goes_back_there(torch_: Torch, arena: int) -> None:
    before = torch_("own_blocks")
    torch_.library.run("arena_enter", arena, 1)
    first = torch_.tensor(1000)
    where = torch_.place(first)
    torch_("drop", first)
    again = torch_.tensor(1000)
    assert torch_.place(again) == where and torch_.library.get("arena_live", arena) == 1
    assert torch_("own_blocks") == before + 1 and torch_.library.get("arena_bytes", arena) == 32 * MB
    torch_.library.get("arena_leave")
    torch_("drop", again)
    assert torch_.library.get("arena_live", arena) == 0, "wherever it is freed"
    torch_.library.get("arena_delete", arena)
    torch_.library.run("give_back")
    assert torch_("own_blocks") == before


def test_without_leave_to_grow_too_much_is_an_error_that_harms_nothing(torch_: Torch, arena: int) -> None:
    torch_.library.run("arena_enter", arena, 1)
    torch_("drop", torch_.tensor(MB))
    torch_.library.get("arena_leave")
    torch_.library.run("arena_enter", arena, 0)
    fits = torch_.tensor(30 * MB)
    assert fits and torch_.tensor(4 * MB) is None
    assert b"were not set aside" in torch_.library.get("error")
    torch_("drop", fits)
    assert torch_.library.get("arena_live", arena) == 0


def test_streams_do_not_share_memory(torch_: Torch, arena: int) -> None:
    torch_.library.run("arena_enter", arena, 1)
    first = torch_.tensor(MB)
    where = torch_.place(first)
    torch_("drop", first)
    torch_("set_stream", 2)
    other = torch_.tensor(MB)
    assert not where <= torch_.place(other) < where + 32 * MB
    torch_("drop", other)


def test_other_threads_and_devices_are_left_to_torch(torch_: Torch, arena: int) -> None:
    torch_.library.run("arena_enter", arena, 1)
    before = torch_("own_blocks")
    thread = threading.Thread(target=lambda: made.append(torch_.tensor(100)))
    made: list[int | None] = []
    thread.start()
    thread.join()
    assert torch_("own_blocks") == before + 1 and torch_.library.get("arena_live", arena) == 0
    torch_("set_device", 1)
    made.append(torch_.tensor(100))
    torch_("set_device", 0)
    assert torch_("own_blocks") == before + 2 and torch_.library.get("arena_live", arena) == 0
    for tensor in made:
        torch_("drop", tensor)
    assert torch_("own_blocks") == before


def test_pools_of_others_are_told_of_by_torch(torch_: Torch, arena: int) -> None:
    torch_.library.run("arena_enter", arena, 1)
    assert torch_("uses_of_a_pool") == 7


def test_no_arena_is_entered_in_front_of_another_allocator(torch_: Torch, arena: int) -> None:
    torch_("other", 1)
    with pytest.raises(CaptureError, match="another extension changed"):
        torch_.library.run("arena_enter", arena, 1)
    torch_("other", 0)
    torch_.library.run("arena_enter", arena, 1)
    with pytest.raises(CaptureError, match="closed"):
        torch_.library.run("arena_enter", None, 1)


def test_what_is_torch_s_own_is_freed_by_torch_also_inside(torch_: Torch, arena: int) -> None:
    before = torch_("own_blocks")
    outside, raw = torch_.tensor(100), torch_("raw", 100)
    torch_.library.run("arena_enter", arena, 1)
    torch_("drop", outside)
    torch_("raw_delete", raw)
    assert torch_("own_blocks") == before
    workspace = torch_("raw", 100)
    assert torch_.library.get("arena_live", arena) == 1
    torch_("raw_delete", workspace)
    assert torch_.library.get("arena_live", arena) == 0


def test_a_capture_asks_torch_for_nothing_that_it_must_not(torch_: Torch, arena: int) -> None:
    assert torch_("asked") == 1
    torch_.library.run("arena_enter", arena, 1)
    emptied, recorded = torch_("emptied"), torch_("recorded")
    torch_("empty")
    tensor = torch_.tensor(10)
    torch_("record", tensor)
    assert torch_("asked") == 0 and torch_("emptied") == emptied and torch_("recorded") == recorded
    torch_("drop", tensor)


def test_an_arena_that_is_deleted_stays_for_its_tensors(torch_: Torch, arena: int) -> None:
    before = torch_("own_blocks")
    torch_.library.run("arena_enter", arena, 1)
    tensor = torch_.tensor(10)
    torch_.library.get("arena_leave")
    torch_.library.get("arena_delete", arena)
    torch_.library.run("give_back")
    assert torch_("own_blocks") == before + 1
    torch_("drop", tensor)
    assert torch_("own_blocks") == before + 1, "whoever freed it may not free memory of the device at that moment"
    torch_.library.run("give_back")
    assert torch_("own_blocks") == before


def test_no_memory_at_all_is_no_block(torch_: Torch, arena: int) -> None:
    torch_.library.run("arena_enter", arena, 1)
    nothing = torch_.tensor(0)
    assert torch_.place(nothing) == 0 and torch_.library.get("arena_live", arena) == 0
    torch_("drop", nothing)


@pytest.mark.parametrize("seed", range(20))
def test_tensors_never_overlap_and_nothing_is_lost(seed: int, torch_: Torch, arena: int) -> None:
    draw, before = random.Random(seed), torch_("own_blocks")
    there: dict[int, tuple[int, int]] = {}
    torch_.library.run("arena_enter", arena, 1)
    for _ in range(600):
        if there and draw.random() < 0.48:
            torch_("drop", there_key := draw.choice(list(there)))
            del there[there_key]
            continue
        torch_("set_stream", draw.choice((1, 2)))
        size = draw.choice((draw.randint(1, 5000), draw.randint(1, 8 * MB), draw.randint(30 * MB, 70 * MB)))
        tensor = torch_.tensor(size)
        assert tensor is not None
        start = torch_.place(tensor)
        assert start % 512 == 0
        assert all(start + size <= first or last <= start for first, last in there.values())
        there[tensor] = start, start + size
    held = torch_.library.get("arena_bytes", arena)
    assert torch_.library.get("arena_live", arena) == len(there)
    torch_.library.get("arena_leave")
    for tensor in there:
        torch_("drop", tensor)
    torch_.library.run("arena_enter", arena, 0)
    for stream in (1, 2):
        torch_("set_stream", stream)
        largest = torch_.tensor(30 * MB)
        assert largest is not None, "freed blocks are joined again"
        torch_("drop", largest)
    assert torch_.library.get("arena_bytes", arena) == held
    torch_.library.get("arena_leave")
    torch_.library.get("arena_delete", arena)
    torch_.library.run("give_back")
    assert torch_("own_blocks") == before


def test_the_same_calls_find_the_same_room(torch_: Torch, arena: int) -> None:
    """A capture repeats what a call before it did: it never needs more."""
    draw = random.Random(7)
    calls = [(draw.randint(1, 20 * MB), draw.random() < 0.5) for _ in range(300)]

    def run(grows: int) -> list[int]:
        torch_.library.run("arena_enter", arena, grows)
        there, places = [], []
        for size, drops in calls:
            tensor = torch_.tensor(size)
            assert tensor is not None
            places.append(torch_.place(tensor))
            there.append(tensor)
            if drops:
                torch_("drop", there.pop(len(there) // 2))
        for tensor in there:
            torch_("drop", tensor)
        torch_.library.get("arena_leave")
        return places

    for _ in range(4):
        before = torch_.library.get("arena_bytes", arena)
        run(1)
        if torch_.library.get("arena_bytes", arena) == before:
            break
    assert run(0) == run(0)


def test_a_void_capture_is_an_error(torch_: Torch) -> None:
    with pytest.raises(CaptureError, match="beginning"):
        torch_.library.run("capture_begin", 0)
    made = ctypes.c_void_p()
    torch_("make_void", 1)
    torch_.library.run("capture_begin", 5)
    with pytest.raises(CaptureError, match="ending a stream capture: operation failed"):
        torch_.library.run("capture_end", 5, 1, ctypes.byref(made))
    torch_("make_void", 0)
    torch_.library.run("capture_begin", 5)
    torch_.library.run("capture_end", 5, 1, ctypes.byref(made))
    assert made.value == 5
    torch_.library.run("graph_launch", made, 5)
    torch_.library.run("graph_delete", made)


class Stream:
    cuda_stream = 5

    def synchronize(self) -> None: ...


def test_a_capture_that_is_cut_gives_several_graphs(torch_: Torch) -> None:
    def work(cut: Callable[[], None]) -> None:
        cut()
        cut()

    assert len(capture(torch_.library, Stream(), lambda cut: None)) == 1
    assert len(capture(torch_.library, Stream(), work)) == 3


def test_of_a_capture_that_fails_behind_a_cut_nothing_is_left(torch_: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Graph] = []
    monkeypatch.setattr(Graph, "close", lambda graph: closed.append(graph))

    def work(cut: Callable[[], None]) -> None:
        cut()
        torch_("make_void", 1)
        cut()

    with pytest.raises(CaptureError, match="ending a stream capture"):
        capture(torch_.library, Stream(), work)
    torch_("make_void", 0)
    assert len(closed) == 1
    assert len(capture(torch_.library, Stream(), lambda cut: cut())) == 2
