"""Engines replayed as CUDA graphs: attacks overhead, since a whole call is launched at once.

A graph repeats kernels with the addresses of its capture. So inputs are copied to fixed places first, what comes out is
copied to fresh memory, and when the weights lie elsewhere the graph is captured anew.
"""

from __future__ import annotations

import gc
import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import torch

from ..core.protocols import Engine, Tensors
from ..core.shapes import ShapeProfile
from ..core.streams import side_stream
from .graph_memory import GraphMemory
from .memory import MemoryWatch

log = logging.getLogger(__name__)

_GRAPHS_KEPT = 4
"""Sets of shapes of one engine between which one may change without another capture."""

_Call = tuple[tuple[str, torch.Size, torch.dtype, torch.device], ...]
"""Names, shapes, dtypes and devices of a call's inputs."""


def graphed(engine: Engine, device: torch.device) -> Engine:
    """`engine`, replayed as a CUDA graph where it runs on a GPU."""
    return GraphedEngine(engine, device) if device.type == "cuda" else engine


class GraphedEngine:
    """An engine whose calls are CUDA graphs, one for each set of shapes, of those that were used last.

    Work is done on a stream of its own, joined with the caller's by events: never on the default stream, and without
    waiting on the host. The graphs run one after the other there, so they compute in the same memory.
    """

    def __init__(self, engine: Engine, device: torch.device) -> None:
        self._engine = engine
        self._device = device
        self._graphs: OrderedDict[_Call, _Graph] = OrderedDict()
        self._memory: GraphMemory | None = None
        self._has_weights = False
        self._is_hopeless = False

    @property
    def profile(self) -> ShapeProfile:
        return self._engine.profile

    @property
    def device_bytes(self) -> int:
        computed_in = self._memory.bytes if self._memory else 0
        return self._engine.device_bytes + computed_in + sum(graph.bytes for graph in self._graphs.values())

    @property
    def generation(self) -> int:
        return self._engine.generation

    @property
    def copies_weights(self) -> bool:
        return self._engine.copies_weights

    def __call__(self, **tensors: torch.Tensor) -> Tensors:
        if self._is_hopeless or not self._has_weights:
            return self._engine(**tensors)  # which also says what is wrong
        call = _call_of(tensors)
        known = self._graphs.get(call)
        if known is None or known.generation != self._engine.generation:
            self._capture(call, tensors)
        if (graph := self._graphs.get(call)) is None:
            return self._engine(**tensors)
        self._graphs.move_to_end(call)
        return graph.replay(tensors)

    def update_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        self._has_weights = False
        self._engine.update_weights(weights)
        self._has_weights = True

    def release_weights(self) -> None:
        """The graphs are kept: they are right again as soon as weights lie where they were."""
        self._has_weights = False
        self._engine.release_weights()

    def close(self) -> None:
        self._drop()
        self._has_weights = False
        self._engine.close()

    def _drop(self) -> None:
        while self._graphs:
            self._graphs.popitem()[1].close()
        if self._memory is not None:
            self._memory.release()
        self._memory = None

    def _capture(self, call: _Call, tensors: Tensors) -> None:
        # What is kept here outlives a host's inference mode.
        with side_stream(self._device), torch.inference_mode(False), torch.no_grad(), _tuned_convolutions():
            if call not in self._graphs:
                self._add(call, tensors)
            watch = MemoryWatch(self._device)
            try:
                self._graphs[call].capture(self._engine)
            except BaseException as error:
                self._drop()
                if watch.ran_out(error) or not isinstance(error, RuntimeError):
                    raise
                self._is_hopeless = True  # something that a graph cannot hold, such as a wait on the host
                log.warning("Slipstream: this engine cannot be captured as a CUDA graph and runs without: %s", error)

    def _add(self, call: _Call, tensors: Tensors) -> None:
        outputs = self._engine(**tensors)  # raises where the call itself is wrong: then the other graphs stay
        if len(self._graphs) >= _GRAPHS_KEPT:
            self._graphs.popitem(last=False)[1].close()
        if self._memory is None:
            self._memory = GraphMemory(self._device)
        self._graphs[call] = _Graph(tensors, outputs, self._device, self._memory)


def _call_of(tensors: Tensors) -> _Call:
    return tuple((name, tensor.shape, tensor.dtype, tensor.device) for name, tensor in sorted(tensors.items()))


class _Graph:
    """One captured call and the places that it reads and writes. Made and used on the stream of `side_stream`.

    Args:
        memory: in which it computes; shared with graphs that never run at the same time.
    """

    def __init__(self, inputs: Tensors, outputs: Tensors, device: torch.device, memory: GraphMemory) -> None:
        self._device = device
        self._inputs = {name: tensor.clone() for name, tensor in inputs.items()}
        # Results leave the graph for ordinary memory, so that all that it allocates is free at its end.
        self._outputs = {name: torch.empty_like(tensor) for name, tensor in outputs.items()}
        self._memory = memory
        self._graph = torch.cuda.CUDAGraph()
        self.generation = -1

    @property
    def bytes(self) -> int:
        """Without the memory that it computes in."""
        return sum(tensor.nbytes for tensor in (*self._inputs.values(), *self._outputs.values()))

    def capture(self, engine: Engine) -> None:
        """Record the call as it is now. The graph before this one lends it its memory."""
        engine(**self._inputs)  # kernels are loaded and libraries have chosen theirs before anything is recorded
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with self._memory.measured():
            with _capturing(graph, self._memory):
                self._record(engine)
            graph.replay()  # some allocators take the graph's memory only now
            torch.cuda.synchronize(self._device)
        self._graph, before = graph, self._graph
        before.reset()
        self.generation = engine.generation

    def _record(self, engine: Engine) -> None:
        # A function of its own: nothing that was allocated in a capture may be freed after it.
        for name, tensor in engine(**self._inputs).items():
            self._outputs[name].copy_(tensor)

    def replay(self, tensors: Tensors) -> Tensors:
        results = {name: torch.empty_like(tensor) for name, tensor in self._outputs.items()}
        with side_stream(self._device), torch.no_grad():
            for name, tensor in tensors.items():
                self._inputs[name].copy_(tensor)
            self._graph.replay()
            for name, result in results.items():
                result.copy_(self._outputs[name])
        return results

    def close(self) -> None:
        torch.cuda.synchronize(self._device)  # a graph that still runs must keep its memory
        self._graph.reset()
        self._inputs, self._outputs = {}, {}


@contextmanager
def _capturing(graph: torch.cuda.CUDAGraph, memory: GraphMemory) -> Iterator[None]:
    collects = gc.isenabled()
    gc.disable()  # tensors that are freed in the midst of a capture would end it
    try:
        # "thread_local": what other threads do with the GPU meanwhile (previews, uploads) is none of the graph's.
        graph.capture_begin(pool=memory.handle, capture_error_mode="thread_local")
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):  # the capture is void; what made it so is what matters
                graph.capture_end()
            raise
        graph.capture_end()
    except BaseException:
        _end_failed_capture(memory)
        raise
    finally:
        if collects:
            gc.enable()


def _end_failed_capture(memory: GraphMemory) -> None:
    """torch believes that it still captures: its allocator until it is told, its random generators until they see the
    end of another capture. Left so, the next random number of this process would raise."""
    memory.abandon_capture()
    another = torch.cuda.CUDAGraph()
    with suppress(RuntimeError), torch.cuda.stream(torch.cuda.Stream()):
        number = torch.zeros(1, device="cuda")
        another.capture_begin(capture_error_mode="thread_local")
        number.add_(1)
        another.capture_end()


@contextmanager
def _tuned_convolutions() -> Iterator[None]:
    """cuDNN measures its algorithms for each new shape; the fastest goes into the graph."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
