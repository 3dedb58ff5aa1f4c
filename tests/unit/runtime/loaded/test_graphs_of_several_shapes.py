"""Which graphs an engine keeps that takes several shapes. (What graphs compute is tested on a GPU.)"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import pytest
import torch

from slipstream.core.protocols import Engine as EngineProtocol
from slipstream.core.protocols import Tensors
from slipstream.core.shapes import ShapeProfile, ShapeRange
from slipstream.runtime.capture.library import CaptureError, CaptureLibrary
from slipstream.runtime.loaded import cuda_graphs
from slipstream.runtime.loaded.cuda_graphs import CudaGraphs, GraphedEngine, Graphing, inlined

CUDA = torch.device("cuda", 0)


class Engine:
    """Doubles up to eight numbers."""

    def __init__(self) -> None:
        self.profile = ShapeProfile({"x": (ShapeRange(1, 2, 8),)})
        self.device_bytes = 1000
        self.generation = 1
        self.copies_weights = False
        self.closed = False

    def __call__(self, **tensors: torch.Tensor) -> Tensors:
        if len(tensors["x"]) > 8:
            raise RuntimeError("too many numbers")
        return {"out": 2 * tensors["x"]}

    def update_weights(self, weights: object, version: object = None) -> None: ...

    def release_weights(self) -> None: ...

    def close(self) -> None:
        self.closed = True


class Memory:
    """An arena that grows with the captures in it."""

    made: list[Memory] = []

    def __init__(self, library: object, device: torch.device) -> None:
        self.bytes = 0
        self.library = library
        self.made.append(self)

    @contextmanager
    def inside(self, grows: bool) -> Iterator[None]:
        yield

    def close(self) -> None:
        self.bytes = 0


class Always(Graphing):
    """Captures are possible."""

    def library(self) -> CaptureLibrary:
        return object()  # type: ignore[return-value]


class Graph:
    """Notes captures and replays by the number of its inputs' elements.

    Attributes:
        error: raised by the next captures.
    """

    captures: list[int] = []
    replays: list[int] = []
    open: list[int] = []
    error: BaseException | None = None

    def __init__(
        self,
        inputs: Tensors,
        like: Tensors,
        handed: object,
        device: torch.device,
        memory: Memory,
        constant: frozenset[str],
        shared: object = None,
    ) -> None:
        self.buffers = [torch.empty(10, dtype=torch.int8)]
        self.size = len(inputs["x"])
        self.generation = -1
        self._memory = memory
        self.open.append(self.size)

    def capture(self, compute: EngineProtocol, generation: int, library: object, stream: object) -> None:
        if self.error is not None:
            raise self.error
        self.captures.append(self.size)
        self.generation = generation
        self._memory.bytes = max(self._memory.bytes, 100 * self.size)

    def replay(self, tensors: Tensors, outside: object = None) -> Tensors:
        assert len(tensors["x"]) == self.size
        self.replays.append(self.size)
        return {"out": 2 * tensors["x"]}

    def close(self) -> None:
        self.open.remove(self.size)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> type[Graph]:
    """The graphs of this test."""

    class Fresh(Graph):
        captures: list[int] = []
        replays: list[int] = []
        open: list[int] = []

    @contextmanager
    def no_stream(device: torch.device) -> Iterator[None]:
        yield

    monkeypatch.setattr(Memory, "made", [])
    monkeypatch.setattr(cuda_graphs, "_Graph", Fresh)
    monkeypatch.setattr(cuda_graphs, "Arena", Memory)
    monkeypatch.setattr(cuda_graphs, "capture_stream", no_stream)
    monkeypatch.setattr(cuda_graphs, "prepare_libraries", lambda library, device: None)
    monkeypatch.setattr(cuda_graphs, "give_back", lambda library: None)
    monkeypatch.setattr(cuda_graphs, "wait_for_streams", lambda device: None)
    return Fresh


@pytest.fixture
def engine(graphs: type[Graph]) -> GraphedEngine:
    made = GraphedEngine(Engine(), CUDA, Always())
    made.update_weights({})
    return made


def compute(engine: GraphedEngine, *sizes: int) -> None:
    for size in sizes:
        x = torch.arange(float(size))
        assert torch.equal(engine(x=x)["out"], 2 * x)


def test_shapes_that_take_turns_are_captured_once_each(engine: GraphedEngine, graphs: type[Graph]) -> None:
    compute(engine, 1, 2, 1, 2, 1)
    assert graphs.captures == [1, 2] and graphs.replays == [1, 2, 1, 2, 1]


def test_of_too_many_the_one_not_used_for_longest_goes(engine: GraphedEngine, graphs: type[Graph]) -> None:
    compute(engine, 1, 2, 3, 4, 1, 5)
    assert graphs.open == [1, 3, 4, 5]
    compute(engine, 1, 3, 2)
    assert graphs.captures == [1, 2, 3, 4, 5, 2] and graphs.open == [1, 3, 5, 2]


def test_another_dtype_is_another_graph(engine: GraphedEngine, graphs: type[Graph]) -> None:
    compute(engine, 2)
    assert engine(x=torch.ones(2).half())["out"].dtype == torch.float16
    assert graphs.captures == [2, 2]


def test_each_is_captured_anew_when_it_is_used_after_weights_moved(engine: GraphedEngine, graphs: type[Graph]) -> None:
    compute(engine, 1, 2)
    engine._engine.generation = 2  # type: ignore[misc]
    compute(engine, 2, 2)
    assert graphs.captures == [1, 2, 2]
    compute(engine, 1)
    assert graphs.captures == [1, 2, 2, 1] and graphs.open == [1, 2]


def test_their_memory_is_counted_and_shared(engine: GraphedEngine) -> None:
    assert engine.device_bytes == 1000
    compute(engine, 8, 2, 4)
    assert engine.device_bytes == 1000 + 800 + 3 * 10 and len(Memory.made) == 1


def test_closing_frees_all(engine: GraphedEngine, graphs: type[Graph]) -> None:
    compute(engine, 1, 2, 3)
    engine.close()
    assert graphs.open == [] and Memory.made[0].bytes == 0 and engine._engine.closed  # type: ignore[attr-defined]
    assert engine.device_bytes == 1000


def test_a_call_that_the_engine_refuses_leaves_the_graphs(engine: GraphedEngine, graphs: type[Graph]) -> None:
    compute(engine, 1, 2, 3, 4)
    with pytest.raises(RuntimeError, match="too many numbers"):
        engine(x=torch.zeros(9))
    compute(engine, 1, 2, 3, 4)
    assert graphs.captures == [1, 2, 3, 4]


def test_where_no_graph_can_be_had_the_engine_runs_without(
    engine: GraphedEngine, graphs: type[Graph], caplog: pytest.LogCaptureFixture
) -> None:
    compute(engine, 1)
    graphs.error = CaptureError("it waits on the host")
    compute(engine, 2, 1, 3)
    assert graphs.replays == [1] and graphs.open == [] and engine.device_bytes == 1000
    assert caplog.text.count("it waits on the host") == 1


def test_a_capture_that_runs_out_of_memory_frees_all_and_may_be_tried_again(
    engine: GraphedEngine, graphs: type[Graph]
) -> None:
    compute(engine, 1)
    graphs.error = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        engine(x=torch.zeros(2))
    assert graphs.open == [] and engine.device_bytes == 1000
    graphs.error = None
    compute(engine, 2)
    assert graphs.captures == [1, 2] and len(Memory.made) == 2


# ---------------------------------------------------------------------------------- several functions in one place


def doubled(x: torch.Tensor) -> Tensors:
    return {"out": 2 * x}


def test_functions_are_told_apart_and_forgotten_alone(graphs: type[Graph]) -> None:
    several = CudaGraphs(CUDA, Always())
    for what in ("one", "other", "one"):
        several.run(doubled, 1, {"x": torch.ones(2)}, what)
    assert graphs.captures == [2, 2] and len(Memory.made) == 1
    several.forget("one")
    several.run(doubled, 1, {"x": torch.ones(2)}, "other")
    assert graphs.captures == [2, 2]
    several.run(doubled, 1, {"x": torch.ones(2)}, "one")
    assert graphs.captures == [2, 2, 2]


def test_a_function_that_must_be_a_graph_raises_where_it_cannot_be_one(graphs: type[Graph]) -> None:
    several = CudaGraphs(CUDA, Always())
    graphs.error = CaptureError("it waits on the host")
    with pytest.raises(RuntimeError, match="waits"):
        several.run(doubled, 1, {"x": torch.ones(2)}, "one", or_raise=True)
    graphs.error = None
    with pytest.raises(RuntimeError, match="cannot be"):
        several.run(doubled, 1, {"x": torch.ones(2)}, "one", or_raise=True)
    assert several.run(doubled, 1, {"x": torch.ones(2)}, "other", or_raise=True)["out"].tolist() == [2.0, 2.0]
    several.forget("other", for_good=True)
    with pytest.raises(RuntimeError, match="cannot be"):
        several.run(doubled, 1, {"x": torch.ones(2)}, "other", or_raise=True)


def test_without_the_library_nothing_is_captured(graphs: type[Graph]) -> None:
    engine, several = GraphedEngine(Engine(), CUDA), CudaGraphs(CUDA)
    engine.update_weights({})
    compute(engine, 2, 2)
    assert several.run(doubled, 1, {"x": torch.ones(2)})["out"].tolist() == [2.0, 2.0]
    with pytest.raises(CaptureError, match="cannot be"):
        several.run(doubled, 1, {"x": torch.ones(2)}, "one", or_raise=True)
    assert graphs.captures == [] and not several.are_possible


def test_parts_of_a_larger_graph_have_none_of_their_own(engine: GraphedEngine, graphs: type[Graph]) -> None:
    with inlined():
        compute(engine, 2)
    assert graphs.captures == []
    compute(engine, 2)
    assert graphs.captures == [2]


def test_many_small_functions_share_buffers_and_are_all_kept(graphs: type[Graph]) -> None:
    many = CudaGraphs(CUDA, Always(), are_many=True)
    for what in range(20):
        many.run(Engine(), 1, {"x": torch.ones(2)}, what)
    found = many.replayed(1, {"x": torch.ones(2)}, 3)
    assert found is not None and len(graphs.captures) == len(graphs.open) == 20
    assert many.replayed(2, {"x": torch.ones(2)}, 3) is many.replayed(1, {"x": torch.ones(3)}, 3) is None
    shared: Any = WeakValueDictionary()
    cpu = torch.device("cpu")
    first = cuda_graphs._buffer("x", torch.ones(2), cpu, shared)
    assert cuda_graphs._buffer("x", torch.zeros(2), cpu, shared) is first
    for name, other in (("y", torch.ones(2)), ("x", torch.ones(3)), ("x", torch.ones(2).half())):
        assert cuda_graphs._buffer(name, other, cpu, shared) is not first
    assert cuda_graphs._buffer("x", torch.ones(2), cpu, None) is not first
    del first
    assert not shared
