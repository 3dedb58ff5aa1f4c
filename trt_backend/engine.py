"""A TensorRT plan as an `Engine`, on torch's memory and streams; every return code is checked."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch

from ..core.errors import IncompatibleEngine, ShapeOutsideProfile
from ..core.protocols import Tensors
from ..core.shapes import Shape, ShapeProfile, profile_for
from ..core.streams import Stream, current_stream, on_device, side_stream
from .fingerprint import fingerprints
from .library import Library
from .refit import Refit
from .signature import PlanSignature

_CONTEXTS = 16
"""The most execution contexts, one for each set of input shapes."""


class TensorRTEngine:
    """A deserialised plan with an execution context for each set of shapes that came up.

    The shapes of a context never change, so that a CUDA graph captured from one of its calls stays valid.

    Args:
        engine, runtime: TensorRT's own; the runtime is to outlive the engine.
        outputs: names of the results.

    Raises:
        IncompatibleEngine: the plan has other inputs than its signature says, or cannot take the model's weights.
    """

    def __init__(
        self,
        library: Library,
        engine: Any,
        runtime: Any,
        signature: PlanSignature,
        profiles: tuple[ShapeProfile, ...],
        outputs: tuple[str, ...],
        device: torch.device,
    ) -> None:
        self._library = library
        self._engine: Any = engine
        self._runtime: Any = runtime
        self._signature = signature
        self._profiles = profiles
        self._outputs = {name: library.torch_dtype(engine.get_tensor_dtype(name)) for name in outputs}
        self._device = device
        self._contexts: dict[tuple[tuple[str, Shape], ...], _Context] = {}
        self._memory: torch.Tensor | None = None
        self._refit = Refit(library, engine, signature.weights, device) if signature.weights else None
        self._has_weights = False
        self._generation = 0
        _check_inputs(library, engine, signature)

    @property
    def profile(self) -> ShapeProfile:
        return self._profiles[0]

    @property
    def device_bytes(self) -> int:
        """Weights, and what the contexts compute in."""
        return self._signature.weight_bytes + (0 if self._memory is None else self._memory.nbytes)

    @property
    def generation(self) -> int:
        return self._generation

    @property
    def copies_weights(self) -> bool:
        return self._refit is not None

    def __call__(self, **tensors: torch.Tensor) -> Tensors:
        if self._engine is None:
            raise IncompatibleEngine("The engine was closed; run the workflow again to load it")
        if not self._has_weights:
            raise IncompatibleEngine("The engine has no weights; call update_weights() first")
        self._library.log.clear()  # what it said earlier is no reason for what fails below
        with on_device(self._device):
            return self._run(tensors)

    def _run(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        context = self._context({name: tuple(tensor.shape) for name, tensor in tensors.items()})
        inputs = {name: self._checked(name, tensors[name]) for name in self._signature.inputs}
        results = {
            name: torch.empty(context.shape_of(name), dtype=dtype, device=self._device)
            for name, dtype in self._outputs.items()
        }
        with side_stream(self._device) as stream:
            context.run({**inputs, **results}, stream)
        return results

    def update_weights(self, weights: Mapping[str, torch.Tensor], version: Hashable = None) -> None:
        """Refit the weights that changed; where they are embedded, check that these are the same.

        Raises:
            IncompatibleEngine: the weights cannot be put in, or differ from the embedded ones.
        """
        if self._engine is None:
            raise IncompatibleEngine("The engine was closed; run the workflow again to load it")
        self._has_weights = False
        with on_device(self._device):
            if self._refit is None:
                _check_baked(self._signature.baked, weights)
            elif self._refit.update(weights):
                self._generation += 1
        self._has_weights = True

    def release_weights(self) -> None:
        """The engine keeps its copies: the next model may have the same weights."""
        self._has_weights = False

    def close(self) -> None:
        if self._engine is not None and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # what still runs must keep its memory
        self._contexts.clear()  # before the engine, and that before its runtime
        self._memory = None
        self._refit = None
        self._engine = None
        self._runtime = None
        self._has_weights = False

    def _context(self, shapes: dict[str, Shape]) -> _Context:
        key = tuple(sorted(shapes.items()))
        if key not in self._contexts:
            profile = self._profile_of(shapes)
            self._drop_surplus()
            self._contexts[key] = _Context(self._library, self._engine, profile, shapes, self._room())
        return self._contexts[key]

    def _drop_surplus(self) -> None:
        """Drop all contexts at once: captured CUDA graphs may use any of them, and `generation` voids all."""
        if len(self._contexts) >= _CONTEXTS:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._contexts.clear()
            self._generation += 1

    def _profile_of(self, shapes: Mapping[str, Shape]) -> int:
        index = profile_for(self._profiles, shapes)
        if index is None:
            reason = self.profile.why_not(shapes) or "its shapes do not fit"
            raise ShapeOutsideProfile(f"{reason[0].upper()}{reason[1:]}; your model runs this call without Slipstream")
        return index

    def _room(self) -> torch.Tensor:
        """The memory that all contexts share, enough for the largest shapes, so that its address never changes."""
        if self._memory is None:
            wanted = (self._library.needed_bytes(self._engine, index) for index in range(len(self._profiles)))
            with torch.inference_mode(False):  # it outlives a host's inference mode
                self._memory = torch.empty(max(1, *wanted), dtype=torch.uint8, device=self._device)
        return self._memory

    def _checked(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        wanted = self._signature.inputs[name]
        if tensor.dtype != wanted or tensor.device != self._device:
            raise ShapeOutsideProfile(
                f"{name} is {tensor.dtype} on {tensor.device}, the engine takes {wanted} on {self._device}"
            )
        return tensor.detach().contiguous()


class _Context:
    """An execution context for inputs of these shapes, in memory from torch."""

    def __init__(
        self, library: Library, engine: Any, profile: int, shapes: Mapping[str, Shape], memory: torch.Tensor
    ) -> None:
        self._library = library
        self._memory = memory  # kept alive
        self._context: Any = library.new_context(engine)
        if self._context is None:
            raise IncompatibleEngine(f"TensorRT could not start its engine: {library.log.said()}")
        library.lend_memory(self._context, memory)
        if self._context.active_optimization_profile != profile:
            stream = current_stream(memory.device)
            self._must(self._context.set_optimization_profile_async(profile, stream.cuda_stream), "choose the profile")
            stream.synchronize()
        for name, shape in shapes.items():
            self._must(self._context.set_input_shape(name, shape), f"take {name} of {list(shape)}")

    def shape_of(self, output: str) -> Shape:
        return tuple(self._context.get_tensor_shape(output))

    def run(self, tensors: Mapping[str, torch.Tensor], stream: Stream) -> None:
        """Enqueue one call on `stream`.

        Args:
            tensors: inputs and results.
        """
        for name, tensor in tensors.items():
            self._must(self._context.set_tensor_address(name, tensor.data_ptr()), f"take the address of {name}")
        self._must(self._context.execute_async_v3(stream.cuda_stream), "run its engine")

    def _must(self, answer: Any, what: str) -> None:
        if not answer:
            raise RuntimeError(f"TensorRT could not {what}: {self._library.log.said()}")


def _check_baked(baked: Mapping[str, int], weights: Mapping[str, torch.Tensor]) -> None:
    """Compare by value, since hosts change weights in place without telling anybody.

    Raises:
        IncompatibleEngine: a weight differs from the embedded one, or is missing.
    """
    names = [name for name in baked if name in weights]
    found = dict(zip(names, fingerprints([weights[name] for name in names]), strict=True))
    if changed := [name for name in baked if found.get(name) != baked[name]]:
        raise IncompatibleEngine(
            f"The model's weights differ from those that are baked into the engine ({changed[0]!r} and "
            f"{len(changed) - 1} more); switch bake off in the node, or run Build Engine again"
        )


def _check_inputs(library: Library, engine: Any, signature: PlanSignature) -> None:
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    found = {name for name in names if engine.get_tensor_mode(name) == library.trt.TensorIOMode.INPUT}
    if found != set(signature.inputs):
        raise IncompatibleEngine(
            f"The plan takes {sorted(found)}, its signature says {sorted(signature.inputs)}; build the engine again"
        )
