"""Engines replayed as CUDA graphs: attacks overhead, since a whole call is launched at once.

A graph repeats kernels with the addresses of its capture. So inputs are copied to fixed places first, what comes out is
copied to fresh memory, and when the weights lie elsewhere the graph is captured anew.
"""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import torch

from ..core.protocols import Engine, Tensors
from ..core.shapes import ShapeProfile
from .graph_memory import GraphMemory
from .memory import MemoryWatch

log = logging.getLogger(__name__)


def graphed(engine: Engine, device: torch.device) -> Engine:
    """`engine`, replayed as a CUDA graph where it runs on a GPU."""
    return GraphedEngine(engine, device) if device.type == "cuda" else engine


class GraphedEngine:
    """An engine of one exact shape whose calls are one CUDA graph.

    Work is done on a stream of its own, joined with the caller's by events: never on the default stream, and without
    waiting on the host.
    """

    def __init__(self, engine: Engine, device: torch.device) -> None:
        self._engine = engine
        self._device = device
        self._graph: _Graph | None = None
        self._has_weights = False
        self._is_hopeless = False

    @property
    def profile(self) -> ShapeProfile:
        return self._engine.profile

    @property
    def device_bytes(self) -> int:
        return self._engine.device_bytes + (self._graph.bytes if self._graph else 0)

    @property
    def generation(self) -> int:
        return self._engine.generation

    def __call__(self, **tensors: torch.Tensor) -> Tensors:
        if self._is_hopeless or not self._has_weights or (self._graph is not None and not self._graph.fits(tensors)):
            return self._engine(**tensors)  # which also says what is wrong
        if self._graph is None or self._graph.generation != self._engine.generation:
            self._capture(tensors)
        return self._graph.replay(tensors) if self._graph is not None else self._engine(**tensors)

    def update_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        self._has_weights = False
        self._engine.update_weights(weights)
        self._has_weights = True

    def release_weights(self) -> None:
        """The graph is kept: it is right again as soon as weights lie where they were."""
        self._has_weights = False
        self._engine.release_weights()

    def close(self) -> None:
        self._drop()
        self._has_weights = False
        self._engine.close()

    def _drop(self) -> None:
        if self._graph is not None:
            self._graph.close()
        self._graph = None

    def _capture(self, tensors: Tensors) -> None:
        watch = MemoryWatch(self._device)
        # What is kept here outlives a host's inference mode.
        with _side_stream(self._device), torch.inference_mode(False), torch.no_grad(), _tuned_convolutions():
            try:
                if self._graph is None:
                    self._graph = _Graph(tensors, self._engine(**tensors), self._device)
                self._graph.capture(self._engine)
            except BaseException as error:
                self._drop()
                if watch.ran_out(error) or not isinstance(error, RuntimeError):
                    raise
                self._is_hopeless = True  # something that a graph cannot hold, such as a wait on the host
                log.warning("Slipstream: this engine cannot be captured as a CUDA graph and runs without: %s", error)


class _Graph:
    """One captured call and the places that it reads and writes. Made and used on the stream of `_side_stream`."""

    def __init__(self, inputs: Tensors, outputs: Tensors, device: torch.device) -> None:
        self._device = device
        self._inputs = {name: tensor.clone() for name, tensor in inputs.items()}
        # Results leave the graph for ordinary memory, so that all that it allocates is free at its end.
        self._outputs = {name: torch.empty_like(tensor) for name, tensor in outputs.items()}
        self._memory = GraphMemory(device)
        self._graph = torch.cuda.CUDAGraph()
        self.generation = -1

    @property
    def bytes(self) -> int:
        fixed = (*self._inputs.values(), *self._outputs.values())
        return self._memory.bytes + sum(tensor.nbytes for tensor in fixed)

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

    def fits(self, tensors: Tensors) -> bool:
        return tensors.keys() == self._inputs.keys() and all(
            tensor.shape == self._inputs[name].shape
            and tensor.dtype == self._inputs[name].dtype
            and tensor.device == self._inputs[name].device
            for name, tensor in tensors.items()
        )

    def replay(self, tensors: Tensors) -> Tensors:
        results = {name: torch.empty_like(tensor) for name, tensor in self._outputs.items()}
        with _side_stream(self._device), torch.no_grad():
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
        self._memory.release()


@functools.lru_cache(maxsize=16)
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextmanager
def _side_stream(device: torch.device) -> Iterator[None]:
    """After all that the current stream was given, and before all that it is given next."""
    caller, side = torch.cuda.current_stream(device), _stream(device)
    side.wait_stream(caller)
    try:
        with torch.cuda.stream(side):
            yield
    finally:
        caller.wait_stream(side)


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
