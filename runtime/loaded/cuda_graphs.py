"""Engines replayed as CUDA graphs: a whole call is launched at once, which reduces launch overhead.

A graph repeats kernels with the addresses of its capture. So inputs are copied to fixed buffers first, results are
copied to fresh memory, and when the addresses of weights change the graph is captured anew. Captures allocate nothing,
see `capture`: one that fails harms neither the process nor the picture.

Where others compute in the midst of a call, it is several graphs: their code runs between two of them, and is never
captured.
"""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from ...core.protocols import Engine, HandOut, Tensors
from ...core.shapes import ShapeProfile
from ...core.streams import capture_stream, is_capturing, turns_of, wait_for_streams
from ..capture.arena import Arena, Graph, capture, give_back, prepare_libraries
from ..capture.compiling import compile_in_background
from ..capture.library import CaptureError, CaptureLibrary, loaded_library
from .canary import EngineCanary
from .device_clock import disturb

log = logging.getLogger(__name__)

_GRAPHS_KEPT = 4
"""Sets of shapes of one engine between which one may change without another capture."""

_MANY_KEPT = 512
"""Of functions that share their buffers."""

_PASSES = 4
"""Calls, at most, until a call needs no memory that an earlier one had not set aside."""

_Call = tuple[Hashable, tuple[tuple[str, torch.Size, torch.dtype, torch.device], ...]]
"""What is computed; names, shapes, dtypes and devices of a call's inputs."""

Compute = Callable[..., Tensors]
"""Takes tensors by name and gives tensors by name; a `HandOut` comes first where others compute in its midst."""

_Buffers = weakref.WeakValueDictionary[Hashable, torch.Tensor]
"""Those that graphs share, by what is copied there."""


_local = threading.local()

_capturing = threading.RLock()
"""One capture at a time: they share a stream. Meanwhile no graph is closed, nor its memory freed."""


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


class Graphing:
    """What an engine's graphs need beside a device.

    Args:
        folder: where the capture library lies; None: nothing is captured.
        canary: of the engine.
    """

    def __init__(self, folder: Path | None = None, canary: EngineCanary | None = None) -> None:
        self._folder = folder
        self.canary = canary or EngineCanary(None)

    def library(self) -> CaptureLibrary | None:
        """The library, where captures may be made; one that is missing is compiled in the background."""
        if self._folder is None or not self.canary.allows_graphs:
            return None
        library = loaded_library(self._folder)
        if library is None:
            compile_in_background(self._folder)
        return library


class CudaGraphs:
    """What a function computes, as CUDA graphs: one for each set of shapes, of those that were used last.

    They are launched on the caller's stream, without waiting on the host. They run one after the other, so they compute
    in the same memory.

    Args:
        are_many: they are those of many small functions, which share the buffers that they read and write as well; no
            tensor of theirs is constant.
    """

    def __init__(self, device: torch.device, graphing: Graphing | None = None, are_many: bool = False) -> None:
        self._device = device
        self._graphing = graphing or Graphing()
        self._graphs: OrderedDict[_Call, _Graph] = OrderedDict()
        self._kept = _MANY_KEPT if are_many else _GRAPHS_KEPT
        self._shared: _Buffers | None = weakref.WeakValueDictionary() if are_many else None
        self._arena: Arena | None = None
        self._hopeless: set[Hashable] = set()

    @property
    def are_possible(self) -> bool:
        """Whether graphs can be captured here and now."""
        return self._graphing.library() is not None

    @property
    def bytes(self) -> int:
        """Device memory of all graphs together, in bytes."""
        computed_in = self._arena.bytes if self._arena else 0
        buffers = {id(tensor): tensor.nbytes for graph in [*self._graphs.values()] for tensor in graph.buffers}
        return computed_in + sum(buffers.values())

    def run(
        self,
        compute: Compute,
        generation: Hashable,
        tensors: Tensors,
        what: Hashable = None,
        constant: frozenset[str] = frozenset(),
        or_raise: bool = False,
        outside: HandOut | None = None,
    ) -> Tensors:
        """What `compute` makes of `tensors`, in fresh tensors.

        Args:
            generation: graphs captured with another generation are invalid.
            what: identifies the function that computes.
            constant: names of tensors that hold the same values for as long as they are the same object; they are
                copied to where the graph reads them only when another one comes.
            or_raise: where no graph can be had, raise instead of computing without.
            outside: what others compute in the midst of `compute`. It is not called while a graph is captured.

        Raises:
            RuntimeError: see `or_raise`.
            Exception: what `outside` raises.
        """
        call = _call_of(tensors, what)
        if outside is None:
            compute = partial(_alone, compute)
        if what not in self._hopeless and self._held(generation, call) is None:
            self._capture(call, compute, generation, tensors, constant, or_raise)
        if (graph := self._graphs.get(call)) is None:
            if or_raise:
                raise CaptureError("it cannot be a CUDA graph")
            return compute(outside, **tensors)
        self._graphs.move_to_end(call)
        return graph.replay(tensors, outside)

    def holds(self, generation: Hashable, tensors: Tensors, what: Hashable) -> bool:
        """Whether `run` would replay what was captured before."""
        return self._held(generation, _call_of(tensors, what)) is not None

    def replayed(
        self, generation: Hashable, tensors: Tensors, what: Hashable, outside: HandOut | None = None
    ) -> Tensors | None:
        """What `run` would give by what was captured before; None where it would capture first."""
        call = _call_of(tensors, what)
        if (graph := self._held(generation, call)) is None:
            return None
        self._graphs.move_to_end(call)
        return graph.replay(tensors, outside)

    def _held(self, generation: Hashable, call: _Call) -> _Graph | None:
        known = self._graphs.get(call)
        return known if known is not None and known.generation == generation else None

    def forget(self, what: Hashable, for_good: bool = False) -> None:
        """Drop the graphs of one function.

        Args:
            for_good: it is not to be captured again.
        """
        if for_good:
            self._hopeless.add(what)
        self._close([call for call in self._graphs if call[0] == what])
        if for_good and not self._graphs:
            self.drop()

    def drop(self) -> None:
        """Give back all memory."""
        if self._arena is None:
            return
        with _capturing:
            wait_for_streams(self._device)  # what was set aside for a capture that failed may still be written to
            self._close([*self._graphs])
            self._arena.close()
            give_back(self._arena.library)
            self._arena = None

    def _close(self, calls: Iterable[_Call]) -> None:
        for call in calls:
            with _capturing:
                wait_for_streams(self._device)  # a graph that still runs must keep its memory
                self._graphs.pop(call).close()

    def _capture(
        self,
        call: _Call,
        compute: Compute,
        generation: Hashable,
        tensors: Tensors,
        constant: frozenset[str],
        or_raise: bool,
    ) -> None:
        """Capture a call, where that can be done.

        Raises:
            Exception: what `compute` raises outside of a capture; the other graphs stay.
            CaptureError: it cannot be captured, and `or_raise` is given.
        """
        if (library := self._graphing.library()) is None:
            return
        disturb()
        try:
            self._try_to_capture(library, call, compute, generation, tensors, constant)
            return
        except CaptureError as error:
            reason = str(error)
        # Out here the error is gone, and with it the frames that kept tensors of the arena alive.
        self._hopeless.add(call[0])  # something that a graph cannot hold, such as a wait on the host
        self.drop()
        with _capturing:
            wait_for_streams(self._device)
            give_back(library)
        if or_raise:
            raise CaptureError(reason)
        log.warning("Slipstream: this engine cannot be captured as a CUDA graph and runs without: %s", reason)

    def _try_to_capture(
        self,
        library: CaptureLibrary,
        call: _Call,
        compute: Compute,
        generation: Hashable,
        tensors: Tensors,
        constant: frozenset[str],
    ) -> None:
        if self._arena is None:
            self._arena = Arena(library, self._device)
        # What is kept here outlives a host's inference mode.
        with _capturing, capture_stream(self._device) as stream, torch.inference_mode(False), torch.no_grad():
            wait_for_streams(self._device)
            give_back(library)
            prepare_libraries(library, self._device)
            graph = self._graphs.get(call) or self._added(call, compute, tensors, constant)
            try:
                with self._graphing.canary.capturing():
                    graph.capture(compute, generation, library, stream)
            except BaseException:
                self.drop()
                raise

    def _added(self, call: _Call, compute: Compute, tensors: Tensors, constant: frozenset[str]) -> _Graph:
        assert self._arena is not None
        handed: list[_Handed] = []

        def note(given: Sequence[torch.Tensor], shape: torch.Size, what: str) -> torch.Tensor:
            if any(each.device.type != self._device.type for each in given):
                raise CaptureError("it hands out tensors that lie elsewhere")
            result = given[0].new_zeros(shape)
            handed.append(_Handed([each.to("meta") for each in given], result.to("meta"), what))
            return result

        try:
            with self._arena.inside(grows=True):
                like = {name: tensor.to("meta") for name, tensor in compute(note, **tensors).items()}
        except BaseException:
            if not self._graphs:
                self.drop()
            raise
        if len(self._graphs) >= self._kept:
            self._close([next(iter(self._graphs))])
        self._graphs[call] = _Graph(tensors, like, handed, self._device, self._arena, constant, self._shared)
        return self._graphs[call]


class GraphedEngine:
    """An engine whose calls are CUDA graphs."""

    def __init__(self, engine: Engine, device: torch.device, graphing: Graphing | None = None) -> None:
        self._engine, self._device = engine, device
        self._graphs = CudaGraphs(device, graphing)
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
        if is_inlined() or not self._has_weights or is_capturing(self._device):
            return self._engine(**tensors)  # which also says what is wrong
        return self._graphs.run(self._engine, self._engine.generation, tensors)

    def update_weights(self, weights: Mapping[str, torch.Tensor], version: Hashable = None) -> None:
        self._has_weights = False
        self._engine.update_weights(weights, version)
        self._has_weights = True

    def release_weights(self) -> None:
        """The graphs are kept: they are valid again as soon as the weights are back at the same addresses."""
        self._has_weights = False
        self._engine.release_weights()

    def close(self) -> None:
        self._graphs.drop()
        self._has_weights = False
        self._engine.close()


def _call_of(tensors: Tensors, what: Hashable = None) -> _Call:
    described = ((name, tensor.shape, tensor.dtype, tensor.device) for name, tensor in sorted(tensors.items()))
    return what, tuple(described)


@dataclass
class _Handed:
    """What a call hands out in its midst.

    Attributes:
        given: to others.
        taken: from them.
        what: they compute.
    """

    given: list[torch.Tensor]
    taken: torch.Tensor
    what: str


class _Graph:
    """One captured call and the buffers that it reads and writes.

    Args:
        inputs: of a call like those to come.
        like: its results, on the meta device.
        handed: what it hands out, on the meta device.
        arena: in which it computes; shared with graphs that never run at the same time.
        constant: see `CudaGraphs.run`.
        shared: buffers of graphs that never run at the same time either; None: it has its own.
    """

    def __init__(
        self,
        inputs: Tensors,
        like: Tensors,
        handed: Sequence[_Handed],
        device: torch.device,
        arena: Arena,
        constant: frozenset[str],
        shared: _Buffers | None = None,
    ) -> None:
        self._device = device
        # Results leave the arena for ordinary memory, which the next replay does not write to.
        with torch.cuda.stream(torch.cuda.default_stream(device)):  # see `capture_stream`
            self._inputs = {name: _buffer(name, tensor, device, shared) for name, tensor in inputs.items()}
            self._outputs = {name: _buffer(f"{name} given", each, device, shared) for name, each in like.items()}
            self._handed = [*_handing(handed, device, shared)]
        torch.cuda.current_stream(device).wait_stream(torch.cuda.default_stream(device))
        for name, tensor in inputs.items():
            self._inputs[name].copy_(tensor)
        self._arena = arena
        self._graphs: list[Graph] = []
        self._constant = constant
        self._copied: dict[str, weakref.ref[torch.Tensor]] = {}
        self.generation: Hashable = None

    @property
    def buffers(self) -> Iterator[torch.Tensor]:
        """What it reads and writes, without what it computes in."""
        yield from self._inputs.values()
        yield from self._outputs.values()
        for each in self._handed:
            yield from (*each.given, each.taken)

    def capture(
        self, compute: Compute, generation: Hashable, library: CaptureLibrary, stream: torch.cuda.Stream
    ) -> None:
        """Record the call as it is now, on the current stream, and launch it once.

        Raises:
            CaptureError: it cannot be captured.
        """
        self._set_memory_aside(compute)
        stream.synchronize()
        try:
            with _no_garbage_collection(), self._arena.inside(grows=False):
                graphs = capture(library, stream, partial(self._record, compute))
        except CaptureError:
            raise
        except Exception as error:  # outside of a capture it computed: what a graph cannot hold is to blame
            raise CaptureError(str(error)) from error
        with turns_of(self._device).turn():
            for graph in graphs:
                graph.launch(stream)
        wait_for_streams(self._device)
        self.close()
        self._graphs, self.generation = graphs, generation

    def _set_memory_aside(self, compute: Compute) -> None:
        """Compute until the arena holds all that a call needs; kernels are loaded and libraries have chosen theirs."""
        for _ in range(_PASSES):
            before = self._arena.bytes
            with self._arena.inside(grows=True):
                self._record(compute)
            if self._arena.bytes == before:
                return

    def _record(self, compute: Compute, cut: Callable[[], None] = lambda: None) -> None:
        # A function of its own: what it allocated is free again when it ends.
        for name, tensor in compute(_handing_out(self._handed, cut), **self._inputs).items():
            self._outputs[name].copy_(tensor)

    def replay(self, tensors: Tensors, outside: HandOut | None = None) -> Tensors:
        assert self._graphs
        results = {name: torch.empty_like(tensor) for name, tensor in self._outputs.items()}
        put: Callable[[], object] = partial(self._put_all, tensors)
        for graph, handed in zip(self._graphs, [*self._handed, None], strict=True):
            with turns_of(self._device).turn() as stream, torch.no_grad():
                put()
                graph.launch(stream)
                if handed is None:
                    for name, result in results.items():
                        result.copy_(self._outputs[name])
            if handed is not None:
                assert outside is not None  # others may have turns meanwhile, in other memory
                put = partial(handed.taken.copy_, outside(handed.given, handed.taken.shape, handed.what))
        return results

    def _put_all(self, tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            self._put(name, tensor)

    def _put(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a tensor into the graph's input buffer, unless its values are there already."""
        if name in self._constant:
            if (copied := self._copied.get(name)) is not None and copied() is tensor:
                return
            self._copied[name] = weakref.ref(tensor)
        self._inputs[name].copy_(tensor)

    def close(self) -> None:
        """Free its graphs; the device must have finished with them."""
        for graph in self._graphs:
            graph.close()
        self._graphs = []


def _alone(compute: Compute, hand_out: HandOut | None, /, **tensors: torch.Tensor) -> Tensors:
    """What a function gives in whose midst nobody else computes."""
    return compute(**tensors)


def _handing(handed: Iterable[_Handed], device: torch.device, shared: _Buffers | None) -> Iterator[_Handed]:
    """Buffers for what is handed out, and for what comes back."""
    for place, each in enumerate(handed):
        given = [_buffer(f"{number} out", like, device, shared) for number, like in enumerate(each.given)]
        yield _Handed(given, _buffer(f"{place} back", each.taken, device, shared), each.what)


def _handing_out(handed: Iterable[_Handed], cut: Callable[[], None]) -> HandOut:
    """Takes what a call hands out into its buffers, and ends the graph there."""
    left = iter(handed)

    def hand_out(given: Sequence[torch.Tensor], shape: torch.Size, what: str) -> torch.Tensor:
        each = next(left, None)
        if each is None or (each.what, each.taken.shape, len(each.given)) != (what, shape, len(given)):
            raise CaptureError("it hands out something else at each call")
        for buffer, tensor in zip(each.given, given, strict=True):
            buffer.copy_(tensor)
        cut()
        return each.taken

    return hand_out


def _buffer(name: str, like: torch.Tensor, device: torch.device, shared: _Buffers | None) -> torch.Tensor:
    """Memory for tensors such as `like`; on the device where that is on none."""
    where = device if like.is_meta else like.device
    if shared is None:
        return torch.empty_like(like, device=where)
    place = name, like.shape, like.stride(), like.dtype, where
    if (found := shared.get(place)) is None:
        found = shared[place] = torch.empty_like(like, device=where)
    return found


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """What is collected in the midst of a capture could wait for the device, which would void it."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
