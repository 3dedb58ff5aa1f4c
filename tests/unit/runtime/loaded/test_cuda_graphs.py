"""Engines as CUDA graphs. Needs a GPU; run it once with torch's own allocator and once with CUDA's asynchronous one:
`PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync`, which is ComfyUI's default."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from slipstream.core.protocols import HandOut, Tensors
from slipstream.core.shapes import ShapeProfile
from slipstream.runtime.capture.arena import Arena, give_back
from slipstream.runtime.capture.compiling import compile_library
from slipstream.runtime.capture.library import CaptureError, CaptureLibrary, loaded_library
from slipstream.runtime.loaded.canary import CAPTURE, Canary, EngineCanary
from slipstream.runtime.loaded.cuda_graphs import CudaGraphs, GraphedEngine, Graphing

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")]

CUDA = torch.device("cuda", 0)
MB = 1 << 20


class Engine:
    """Matrix products with a large workspace, on weights that lie where they were given."""

    def __init__(self) -> None:
        self.profile = ShapeProfile.static({"x": (256, 256)})
        self.device_bytes = 0
        self.generation = 0
        self.copies_weights = False
        self.calls = 0
        self.closed = False
        self.in_capture: Callable[[torch.Tensor], object] = lambda x: None
        self.weights: dict[str, torch.Tensor] = {}

    def __call__(self, **tensors: torch.Tensor) -> Tensors:
        self.calls += 1
        wide = torch.cat([tensors["x"]] * 64) @ self.weights["w"]  # 64 × 256 × 256 × 4 bytes
        if torch.cuda.is_current_stream_capturing():
            self.in_capture(wide)
        return {"out": wide.view(64, -1, 256).mean(0)}

    def update_weights(self, weights: dict[str, torch.Tensor], version: object = None) -> None:
        self.generation += weights["w"].data_ptr() != (self.weights["w"].data_ptr() if self.weights else 0)
        self.weights = weights

    def release_weights(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the capture library lies."""
    made: Path = tmp_path_factory.mktemp("capture")
    compile_library(made)
    return made


@pytest.fixture
def library(folder: Path) -> CaptureLibrary:
    found = loaded_library(folder)
    assert found is not None
    return found


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def fast(engine: Engine, folder: Path) -> Iterator[GraphedEngine]:
    made = GraphedEngine(engine, CUDA, Graphing(folder))
    made.update_weights({"w": torch.randn(256, 256, device=CUDA)})
    yield made
    made.close()


def draw(seed: int) -> torch.Tensor:
    return torch.randn(256, 256, generator=torch.Generator().manual_seed(seed)).to(CUDA)


def allocated() -> int:
    """Bytes that torch has given away; the driver's own figure tells of whole pools."""
    torch.cuda.synchronize()
    return int(torch.cuda.memory_allocated())


def right(found: Tensors, x: torch.Tensor, engine: Engine) -> bool:
    return torch.allclose(found["out"], x @ engine.weights["w"], atol=1e-3)


def test_every_call_is_right_and_runs_no_python_after_the_first(engine: Engine, fast: GraphedEngine) -> None:
    inputs = [draw(seed) for seed in range(4)]
    assert right(fast(x=inputs[0]), inputs[0], engine)
    calls = engine.calls
    assert all(right(fast(x=x), x, engine) for x in inputs)
    assert engine.calls == calls


def test_results_that_a_sampler_keeps_are_not_overwritten(engine: Engine, fast: GraphedEngine) -> None:
    inputs = [draw(seed) for seed in range(3)]
    kept = [fast(x=x) for x in inputs]
    kept[1]["out"].mul_(2)  # nor may what is done to one show in another
    assert right(kept[0], inputs[0], engine) and right(kept[2], inputs[2], engine)
    assert right(fast(x=inputs[1]), inputs[1], engine)


def test_numbers_that_change_in_place_are_seen_without_a_capture(engine: Engine, fast: GraphedEngine) -> None:
    x = draw(1)
    fast(x=x)
    calls = engine.calls
    engine.weights["w"].mul_(-3)
    fast.update_weights(engine.weights)
    assert right(fast(x=x), x, engine) and engine.calls == calls


def test_weights_that_moved_are_captured_anew(engine: Engine, fast: GraphedEngine) -> None:
    x = draw(1)
    fast(x=x)
    old = engine.weights["w"]
    fast.update_weights({"w": torch.randn(256, 256, device=CUDA)})
    old.zero_()
    assert right(fast(x=x), x, engine)


def test_work_of_the_callers_stream_is_waited_for(engine: Engine, fast: GraphedEngine) -> None:
    fast(x=draw(0))
    stream = torch.cuda.Stream()
    wanted = draw(2)
    for _ in range(10):
        with torch.cuda.stream(stream):
            x = torch.zeros(256, 256, device=CUDA)
            torch.cuda._sleep(20_000_000)
            x.copy_(wanted)
            found = {"out": fast(x=x)["out"] + 0}
        stream.synchronize()
        assert right(found, wanted, engine)


def test_callers_on_several_streams_take_turns(fast: GraphedEngine) -> None:
    class Slow(Engine):
        def __call__(self, **tensors: torch.Tensor) -> Tensors:
            torch.cuda._sleep(5_000_000)
            return super().__call__(**tensors)

    slow, streams = Slow(), [torch.cuda.Stream() for _ in range(3)]
    fast._engine = slow  # type: ignore[assignment]
    fast.update_weights({"w": torch.randn(256, 256, device=CUDA)})
    given = [draw(seed) for seed in range(9)]
    fast(x=given[0])
    torch.cuda.synchronize()
    found = []
    for place, x in enumerate(given):
        with torch.cuda.stream(streams[place % 3]):
            found.append(fast(x=x))
    torch.cuda.synchronize()
    assert all(right(each, x, slow) for each, x in zip(found, given, strict=True))


def test_its_memory_is_known_and_given_back(engine: Engine, fast: GraphedEngine) -> None:
    fast(x=draw(0))
    assert 16 * MB < fast.device_bytes < 128 * MB
    before = allocated()
    fast.close()
    assert before - allocated() >= 16 * MB and engine.closed


def test_it_may_be_captured_in_inference_mode_and_used_outside(engine: Engine, fast: GraphedEngine) -> None:
    x = draw(3)
    with torch.inference_mode():
        assert right(fast(x=x), x, engine)
    assert right(fast(x=x), x, engine)


# ------------------------------------------------------------------------------------------- captures that fail


def wait(x: torch.Tensor) -> None:
    x.sum().item()


def wait_for_all(x: torch.Tensor) -> None:
    torch.cuda.synchronize()


def ask_for_statistics(x: torch.Tensor) -> None:
    torch.cuda.memory_stats_as_nested_dict()
    x.sum().item()


def empty_the_cache(x: torch.Tensor) -> None:
    torch.cuda.empty_cache()
    x.sum().item()


def take_memory(x: torch.Tensor) -> None:
    torch.empty(1 << 33, dtype=torch.uint8, device=CUDA)


def raise_an_error(x: torch.Tensor) -> None:
    raise ValueError("an extension's own error")


_kept: list[torch.Tensor] = []


def keep_and_wait(x: torch.Tensor) -> None:
    _kept.append(x * 2)
    x.sum().item()


FAILURES = [wait, wait_for_all, ask_for_statistics, empty_the_cache, take_memory, raise_an_error, keep_and_wait]


@pytest.mark.parametrize("failure", FAILURES)
def test_a_capture_that_fails_harms_nothing(
    failure: Callable[[torch.Tensor], object], fast: GraphedEngine, library: CaptureLibrary
) -> None:
    engine: Engine = fast._engine  # type: ignore[assignment]
    x = draw(4)
    fast(x=x)
    fast._graphs.drop()
    before = allocated()
    engine.in_capture = failure
    assert right(fast(x=x), x, engine)
    calls = engine.calls
    assert right(fast(x=x), x, engine) and engine.calls == calls + 1, "it runs without a graph from then on"
    if _kept:  # goes with its memory when the next capture gives back
        _kept.clear()
        gc.collect()
        give_back(library)
    assert fast.device_bytes == 0 and allocated() <= before
    assert torch.randn(4, device=CUDA).isfinite().all() and torch.ones(MB, device=CUDA).sum().item() == MB
    torch.cuda.empty_cache()
    torch.cuda.synchronize()


def test_another_engine_is_captured_after_a_failure(fast: GraphedEngine, folder: Path) -> None:
    first: Engine = fast._engine  # type: ignore[assignment]
    first.in_capture = wait
    x = draw(1)
    fast(x=x)
    second = Engine()
    other = GraphedEngine(second, CUDA, Graphing(folder))
    other.update_weights(first.weights)
    assert right(other(x=x), x, second) and other.device_bytes > MB
    calls = second.calls
    assert right(other(x=x), x, second) and second.calls == calls
    other.close()


def test_too_little_memory_before_a_capture_is_raised(engine: Engine, fast: GraphedEngine) -> None:
    class Huge(Engine):
        def __call__(self, **tensors: torch.Tensor) -> Tensors:
            return {"out": torch.empty(1 << 45, dtype=torch.uint8, device=CUDA)}

    fast._engine = Huge()  # type: ignore[assignment]
    fast.update_weights({"w": torch.randn(256, 256, device=CUDA)})
    with pytest.raises(torch.OutOfMemoryError):
        fast(x=draw(0))
    fast._engine = engine  # type: ignore[assignment]
    fast.update_weights({"w": torch.randn(256, 256, device=CUDA)})
    assert right(fast(x=draw(0)), draw(0), engine)


def test_threads_beside_a_capture_are_left_alone(engine: Engine, fast: GraphedEngine) -> None:
    stop, errors = threading.Event(), []

    def work() -> None:
        while not stop.is_set():
            try:
                with torch.cuda.stream(torch.cuda.Stream()):
                    if torch.ones(1 << 16, device=CUDA).mul_(2).sum().item() != 2 << 16:
                        errors.append("wrong")
            except Exception as error:  # what any of it may raise
                errors.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for seed in range(20):
            fast.update_weights({"w": torch.randn(256, 256, device=CUDA)})
            assert right(fast(x=draw(seed)), draw(seed), engine)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert errors == []


def test_engines_are_closed_by_other_threads_meanwhile(engine: Engine, fast: GraphedEngine, folder: Path) -> None:
    """As when ComfyUI frees memory: nothing that a closed engine frees may have to do with a stream of captures."""
    stop, errors = threading.Event(), []

    def work() -> None:
        x = draw(3)
        while not stop.is_set():
            try:
                other = Engine()
                short = GraphedEngine(other, CUDA, Graphing(folder))
                short.update_weights(engine.weights)
                if not right(short(x=x), x, engine):
                    errors.append("wrong")
                short.close()
            except Exception as error:  # what any of it may raise
                errors.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for seed in range(20):
            fast._graphs.drop()
            assert right(fast(x=draw(seed)), draw(seed), engine)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert errors == []


def test_graphs_go_on_when_workspaces_are_forgotten(engine: Engine, fast: GraphedEngine) -> None:
    """Others may have torch free all workspaces of cuBLAS, to which captured products write."""
    x = draw(0)
    fast(x=x)
    torch._C._cuda_clearCublasWorkspaces()
    ours = torch.zeros(64 * MB, dtype=torch.uint8, device=CUDA)
    assert right(fast(x=x), x, engine)
    assert not ours.any()


def test_a_mark_stands_while_a_capture_is_made(engine: Engine, folder: Path, tmp_path: Path) -> None:
    seen: list[list[str]] = []
    engine.in_capture = lambda x: seen.append([path.name for path in tmp_path.glob("*.json")])
    canary = Canary(tmp_path, dict)
    fast = GraphedEngine(engine, CUDA, Graphing(folder, EngineCanary(canary, "f" * 64)))
    fast.update_weights({"w": torch.randn(256, 256, device=CUDA)})
    assert right(fast(x=draw(0)), draw(0), engine)
    assert len(seen) == 1 and CAPTURE in seen[0][0]
    assert list(tmp_path.glob("*.json")) == []
    fast.close()


# ------------------------------------------------------------------------------------------------- the arena


def test_what_lies_in_an_arena_is_apart_from_all_else(library: CaptureLibrary) -> None:
    arena = Arena(library, CUDA)
    backend = torch.cuda.get_allocator_backend()
    with arena.inside(grows=True):
        inside = [torch.full((size,), size, device=CUDA, dtype=torch.int32) for size in range(1, 4000, 97)]
        assert torch.cuda.get_allocator_backend() == backend
    outside = torch.zeros(8 * MB, dtype=torch.uint8, device=CUDA)
    assert all(bool((tensor == len(tensor)).all()) for tensor in inside) and not outside.any()
    assert arena.live == len(inside) and arena.bytes > 0
    del inside[::2]
    with arena.inside(grows=False):
        again = [torch.full((size,), -size, device=CUDA, dtype=torch.int32) for size in range(1, 4000, 194)]
    assert all(bool((tensor == len(tensor)).all()) for tensor in inside)
    assert all(bool((tensor == -len(tensor)).all()) for tensor in again)
    with arena.inside(grows=False), pytest.raises(torch.OutOfMemoryError, match="not set aside"):
        torch.empty(1 << 32, dtype=torch.uint8, device=CUDA)
    del inside, again
    assert arena.live == 0
    arena.close()
    assert arena.bytes == 0


def test_a_tensor_outlives_its_arena(library: CaptureLibrary) -> None:
    arena = Arena(library, CUDA)
    with arena.inside(grows=True):
        kept = torch.arange(1000, device=CUDA)
    arena.close()
    torch.cuda.empty_cache()
    others = [torch.zeros(MB, device=CUDA) for _ in range(64)]
    assert kept.sum().item() == 999 * 500 and len(others) == 64
    before = allocated()
    del kept
    give_back(library)
    assert before - allocated() >= 32 * MB


def test_captures_need_an_empty_stream_of_their_own(library: CaptureLibrary) -> None:
    with pytest.raises(CaptureError):
        library.run("capture_begin", 0)  # CUDA does not capture the default stream


# ------------------------------------------------------------------------------------------------ many of them


def test_many_captures_take_no_more_memory_than_one(engine: Engine, fast: GraphedEngine) -> None:
    x = draw(5)
    fast(x=x)
    bytes_of_one = fast.device_bytes
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    for seed in range(8):
        weights = draw(seed)
        fast.update_weights({"w": weights})
        assert right(fast(x=x), x, engine)
    torch.cuda.synchronize()
    assert fast.device_bytes == bytes_of_one
    assert before - torch.cuda.mem_get_info()[0] < 64 * MB


def test_a_call_that_is_wrong_is_left_to_the_engine_and_harms_no_other(engine: Engine, fast: GraphedEngine) -> None:
    x = draw(0)
    fast(x=x)
    with pytest.raises(RuntimeError):
        fast(x=torch.randn(8, 8, device=CUDA))
    calls = engine.calls
    assert right(fast(x=x), x, engine) and engine.calls == calls


def test_shapes_take_turns_without_another_capture(engine: Engine, fast: GraphedEngine) -> None:
    inputs = [draw(seed)[: 64 * (1 + seed)] for seed in range(4)]
    assert all(right(fast(x=x), x, engine) for x in inputs)
    calls = engine.calls
    for turn in range(3):
        found = [fast(x=x + turn) for x in inputs]
        assert all(right(one, x + turn, engine) for one, x in zip(found, inputs, strict=True))
    assert engine.calls == calls


def test_graphs_of_several_shapes_share_their_memory(engine: Engine, fast: GraphedEngine) -> None:
    largest = draw(0)
    fast(x=largest)
    bytes_of_one = fast.device_bytes
    for rows in (64, 128, 192):
        assert right(fast(x=largest[:rows]), largest[:rows], engine)
    assert fast.device_bytes < 1.5 * bytes_of_one
    weights = draw(9)
    fast.update_weights({"w": weights})
    for rows in (64, 256):
        assert right(fast(x=largest[:rows]), largest[:rows], engine)


def test_functions_are_captured_by_name(folder: Path) -> None:
    several = CudaGraphs(CUDA, Graphing(folder))
    x = draw(0)
    for factor in (2, 3):
        found = several.run(lambda x, by=factor: {"out": x * by}, 0, {"x": x}, what=factor, or_raise=True)
        assert torch.equal(found["out"], x * factor)
    several.drop()
    assert several.bytes == 0


class Around:
    """Doubles, has others compute twice in its midst, and adds what it doubled; weights that it reads stay the same."""

    def __init__(self) -> None:
        self.calls = 0
        self.shapes = [torch.Size((256, 256)), torch.Size((128, 256))]

    def __call__(self, outside: HandOut, **tensors: torch.Tensor) -> Tensors:
        self.calls += 1
        doubled = 2 * tensors["x"]
        first = outside([doubled, doubled.t().contiguous()], self.shapes[0], "first")
        second = outside([first[:128] + 1], self.shapes[1], "second")
        return {"out": doubled + first + torch.cat([second, second])}


def others(given: Sequence[torch.Tensor], shape: torch.Size, what: str) -> torch.Tensor:
    """Waits for the device, as code that nobody may capture does."""
    assert given[0].shape == shape
    factor = float(given[0].abs().max().item() >= 0) * {"first": 3.0, "second": 5.0}[what]
    result = factor * given[0] if len(given) == 1 else factor * given[1].t().contiguous()
    for tensor in given:
        torch.cuda.synchronize()
        assert tensor.isfinite().all()
    return result


def around(x: torch.Tensor) -> torch.Tensor:
    second = 5 * (6 * x[:128] + 1)
    return 8 * x + torch.cat([second, second])


def test_others_compute_between_graphs(folder: Path) -> None:
    graphs, compute, calls = CudaGraphs(CUDA, Graphing(folder), are_many=True), Around(), Counter[str]()

    def outside(given: Sequence[torch.Tensor], shape: torch.Size, what: str) -> torch.Tensor:
        assert not torch.cuda.is_current_stream_capturing()
        calls[what] += 1
        return others(given, shape, what)

    kept, made = [], []
    for seed in range(4):
        x = draw(seed)
        kept.append((x, graphs.run(compute, 1, {"x": x}, "around", or_raise=True, outside=outside)["out"]))
        assert calls == {"first": seed + 1, "second": seed + 1}
        made.append(compute.calls)
    assert len(set(made)) == 1
    x = draw(5)
    found = graphs.replayed(1, {"x": x}, "around", outside)
    assert found is not None
    for given, result in [*kept, (x, found["out"])]:
        torch.testing.assert_close(result, around(given))
    graphs.drop()


def test_what_others_raise_between_graphs_is_raised_and_harms_nothing(folder: Path) -> None:
    graphs, compute, x = CudaGraphs(CUDA, Graphing(folder), are_many=True), Around(), draw(0)

    def fail(given: Sequence[torch.Tensor], shape: torch.Size, what: str) -> torch.Tensor:
        if what == "second":
            raise ValueError("mine")
        return others(given, shape, what)

    for _ in range(2):
        with pytest.raises(ValueError, match="mine"):
            graphs.run(compute, 1, {"x": x}, "around", or_raise=True, outside=fail)
        found = graphs.run(compute, 1, {"x": x}, "around", or_raise=True, outside=others)
        torch.testing.assert_close(found["out"], around(x))
    graphs.drop()


def test_a_call_that_hands_out_something_else_each_time_is_no_graph(folder: Path) -> None:
    graphs, x = CudaGraphs(CUDA, Graphing(folder), are_many=True), draw(0)
    calls = iter(range(100))

    def compute(outside: HandOut, **tensors: torch.Tensor) -> Tensors:
        return {"out": outside([tensors["x"]], tensors["x"].shape, str(next(calls)))}

    with pytest.raises(CaptureError, match="something else"):
        graphs.run(compute, 1, {"x": x}, "changing", or_raise=True, outside=lambda given, shape, what: given[0] + 1)
    found = graphs.run(Around(), 1, {"x": x}, "around", or_raise=True, outside=others)
    torch.testing.assert_close(found["out"], around(x))
    graphs.drop()


def test_many_that_hand_out_share_the_memory_for_it(folder: Path) -> None:
    graphs, x = CudaGraphs(CUDA, Graphing(folder), are_many=True), draw(0)
    graphs.run(Around(), 1, {"x": x}, 0, or_raise=True, outside=others)
    one = graphs.bytes
    for what in range(1, 6):
        found = graphs.run(Around(), 1, {"x": x}, what, or_raise=True, outside=others)
        torch.testing.assert_close(found["out"], around(x))
    assert graphs.bytes == one
    graphs.drop()
