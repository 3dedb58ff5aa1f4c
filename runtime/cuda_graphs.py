"""Engines replayed as CUDA graphs: attacks overhead, since a whole call is launched at once.

A graph repeats kernels with the addresses of its capture. So inputs are copied to fixed places first, what comes out is
copied to fresh memory, and when the weights lie elsewhere the graph is captured anew.
"""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress

import torch

from ..core.protocols import Engine, Tensors
from ..core.shapes import ShapeProfile
from ..core.streams import side_stream
from .clock import disturb
from .graph_memory import GraphMemory
from .memory import MemoryWatch

log = logging.getLogger(__name__)

_GRAPHS_KEPT = 4
"""Sets of shapes of one engine between which one may change without another capture."""

_Call = tuple[Hashable, tuple[tuple[str, torch.Size, torch.dtype, torch.device], ...]]
"""What is computed; names, shapes, dtypes and devices of a call's inputs."""

Compute = Callable[..., Tensors]
"""Takes tensors by name and gives tensors by name."""


_local = threading.local()


@contextmanager
def inlined() -> Iterator[None]:
    """Engines that this thread calls meanwhile run without graphs of their own: they are part of a larger one."""
    before = is_inlined()
    _local.inlined = True
    try:
        yield
    finally:
        _local.inlined = before


def is_inlined() -> bool:
    return getattr(_local, "inlined", False)


def graphed(engine: Engine, device: torch.device) -> Engine:
    """`engine`, replayed as a CUDA graph where it runs on a GPU."""
    return GraphedEngine(engine, device) if device.type == "cuda" else engine


class CudaGraphs:
    """What a function computes, as CUDA graphs: one for each set of shapes, of those that were used last.

    Work is done on a stream of its own, joined with the caller's by events: never on the default stream, and without
    waiting on the host. The graphs run one after the other there, so they compute in the same memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: OrderedDict[_Call, _Graph] = OrderedDict()
        self._memory: GraphMemory | None = None
        self._hopeless: set[Hashable] = set()

    @property
    def bytes(self) -> int:
        """Device memory of all graphs together."""
        computed_in = self._memory.bytes if self._memory else 0
        return computed_in + sum(graph.bytes for graph in self._graphs.values())

    def run(
        self,
        compute: Compute,
        generation: Hashable,
        tensors: Tensors,
        what: Hashable = None,
        constant: frozenset[str] = frozenset(),
        or_raise: bool = False,
    ) -> Tensors:
        """What `compute` makes of `tensors`, in fresh tensors.

        Args:
            generation: another one voids what was captured before.
            what: tells functions apart.
            constant: names of tensors that hold the same numbers for as long as they are the same object; they are
                copied to where the graph reads them only when another one comes.
            or_raise: where no graph can be had, raise instead of computing without.

        Raises:
            RuntimeError: see `or_raise`.
        """
        call = _call_of(tensors, what)
        if what in self._hopeless and or_raise:
            raise RuntimeError("it cannot be a CUDA graph")
        if what not in self._hopeless:
            known = self._graphs.get(call)
            if known is None or known.generation != generation:
                self._capture(call, compute, generation, tensors, constant, or_raise)
        if (graph := self._graphs.get(call)) is None:
            return compute(**tensors)
        self._graphs.move_to_end(call)
        return graph.replay(tensors)

    def holds(self, generation: Hashable, tensors: Tensors, what: Hashable) -> bool:
        """Whether `run` would replay what was captured before."""
        known = self._graphs.get(_call_of(tensors, what))
        return known is not None and known.generation == generation

    def forget(self, what: Hashable, for_good: bool = False) -> None:
        """Drop the graphs of one function.

        Args:
            for_good: it is not to be captured again.
        """
        if for_good:
            self._hopeless.add(what)
        for call in [call for call in self._graphs if call[0] == what]:
            self._graphs.pop(call).close()

    def drop(self) -> None:
        """Give back all memory."""
        while self._graphs:
            self._graphs.popitem()[1].close()
        if self._memory is not None:
            self._memory.release()
        self._memory = None

    def _capture(
        self,
        call: _Call,
        compute: Compute,
        generation: Hashable,
        tensors: Tensors,
        constant: frozenset[str],
        or_raise: bool,
    ) -> None:
        disturb()
        # What is kept here outlives a host's inference mode.
        with side_stream(self._device), torch.inference_mode(False), torch.no_grad(), _tuned_convolutions():
            if call not in self._graphs:
                self._add(call, compute, tensors, constant)
            watch = MemoryWatch(self._device)
            try:
                self._graphs[call].capture(compute, generation)
            except BaseException as error:
                self.drop()
                if watch.ran_out(error) or not isinstance(error, RuntimeError):
                    raise
                self._hopeless.add(call[0])  # something that a graph cannot hold, such as a wait on the host
                if or_raise:
                    raise
                log.warning("Slipstream: this engine cannot be captured as a CUDA graph and runs without: %s", error)

    def _add(self, call: _Call, compute: Compute, tensors: Tensors, constant: frozenset[str]) -> None:
        outputs = compute(**tensors)  # raises where the call itself is wrong: then the other graphs stay
        if len(self._graphs) >= _GRAPHS_KEPT:
            self._graphs.popitem(last=False)[1].close()
        if self._memory is None:
            self._memory = GraphMemory(self._device)
        self._graphs[call] = _Graph(tensors, outputs, self._device, self._memory, constant)


class GraphedEngine:
    """An engine whose calls are CUDA graphs."""

    def __init__(self, engine: Engine, device: torch.device) -> None:
        self._engine = engine
        self._graphs = CudaGraphs(device)
        self._has_weights = False

    @property
    def profile(self) -> ShapeProfile:
        return self._engine.profile

    @property
    def device_bytes(self) -> int:
        return self._engine.device_bytes + self._graphs.bytes

    @property
    def generation(self) -> int:
        return self._engine.generation

    @property
    def copies_weights(self) -> bool:
        return self._engine.copies_weights

    def __call__(self, **tensors: torch.Tensor) -> Tensors:
        if is_inlined() or not self._has_weights:
            return self._engine(**tensors)  # which also says what is wrong
        return self._graphs.run(self._engine, self._engine.generation, tensors)

    def update_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        self._has_weights = False
        self._engine.update_weights(weights)
        self._has_weights = True

    def release_weights(self) -> None:
        """The graphs are kept: they are right again as soon as weights lie where they were."""
        self._has_weights = False
        self._engine.release_weights()

    def close(self) -> None:
        self._graphs.drop()
        self._has_weights = False
        self._engine.close()


def _call_of(tensors: Tensors, what: Hashable = None) -> _Call:
    described = ((name, tensor.shape, tensor.dtype, tensor.device) for name, tensor in sorted(tensors.items()))
    return what, tuple(described)


class _Graph:
    """One captured call and the places that it reads and writes. Made and used on the stream of `side_stream`.

    Args:
        memory: in which it computes; shared with graphs that never run at the same time.
        constant: see `CudaGraphs.run`.
    """

    def __init__(
        self,
        inputs: Tensors,
        outputs: Tensors,
        device: torch.device,
        memory: GraphMemory,
        constant: frozenset[str] = frozenset(),
    ) -> None:
        self._device = device
        self._inputs = {name: tensor.clone() for name, tensor in inputs.items()}
        # Results leave the graph for ordinary memory, so that all that it allocates is free at its end.
        self._outputs = {name: torch.empty_like(tensor) for name, tensor in outputs.items()}
        self._memory = memory
        self._graph = torch.cuda.CUDAGraph()
        self._constant = constant
        self._copied: dict[str, weakref.ref[torch.Tensor]] = {}
        self.generation: Hashable = None

    @property
    def bytes(self) -> int:
        """Without the memory that it computes in."""
        return sum(tensor.nbytes for tensor in (*self._inputs.values(), *self._outputs.values()))

    def capture(self, compute: Compute, generation: Hashable) -> None:
        """Record the call as it is now. The graph before this one lends it its memory."""
        compute(**self._inputs)  # kernels are loaded and libraries have chosen theirs before anything is recorded
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with self._memory.measured():
            with _capturing(graph, self._memory):
                self._record(compute)
            graph.replay()  # some allocators take the graph's memory only now
            torch.cuda.synchronize(self._device)
        self._graph, before = graph, self._graph
        before.reset()
        self.generation = generation

    def _record(self, compute: Compute) -> None:
        # A function of its own: nothing that was allocated in a capture may be freed after it.
        for name, tensor in compute(**self._inputs).items():
            self._outputs[name].copy_(tensor)

    def replay(self, tensors: Tensors) -> Tensors:
        results = {name: torch.empty_like(tensor) for name, tensor in self._outputs.items()}
        with side_stream(self._device), torch.no_grad():
            for name, tensor in tensors.items():
                self._put(name, tensor)
            self._graph.replay()
            for name, result in results.items():
                result.copy_(self._outputs[name])
        return results

    def _put(self, name: str, tensor: torch.Tensor) -> None:
        """Into the graph's own place, unless it is there already."""
        if name in self._constant:
            if (copied := self._copied.get(name)) is not None and copied() is tensor:
                return
            self._copied[name] = weakref.ref(tensor)
        self._inputs[name].copy_(tensor)

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
