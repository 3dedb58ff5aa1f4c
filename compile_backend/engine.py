"""A compiled callable behind the `Engine` interface: it checks everything that the compiled code takes for granted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from ..core.errors import IncompatibleEngine, ShapeOutsideProfile
from ..core.protocols import Tensors
from ..core.shapes import ShapeProfile
from .derived import DerivedWeight
from .layouts import LaidOutWeights, TensorLayout, laid_out
from .program import ProgramSignature

Run = Callable[[Tensors], Sequence[torch.Tensor]]
Supply = Callable[[dict[str, torch.Tensor]], None]


class CompiledEngine:
    """An engine whose weights are the host's own tensors.

    Args:
        run: the compiled callable; takes the inputs by name in the program's order, returns fresh tensors.
        supply: hands the complete set of weights to the compiled code, which keeps their addresses, not copies.
        constants: weights that come with the artifact.
        device_bytes: device memory beside the weights.
        drop: makes the compiled code let go of the weights that it was supplied with.
    """

    def __init__(
        self,
        signature: ProgramSignature,
        profile: ShapeProfile,
        outputs: tuple[str, ...],
        device: torch.device,
        run: Run,
        supply: Supply,
        constants: Mapping[str, torch.Tensor],
        device_bytes: int = 0,
        drop: Callable[[], None] = lambda: None,
    ) -> None:
        self._signature = signature
        self._profile = profile
        self._outputs = outputs
        self._device = device
        self._run: Run | None = run
        self._supply: Supply | None = supply
        self._drop = drop
        self._constants = dict(constants)
        self._own_bytes = device_bytes
        self._weights: dict[str, torch.Tensor] = {}
        self._laid_out = LaidOutWeights()
        self._addresses: tuple[int, ...] = ()
        self._generation = 0

    @property
    def profile(self) -> ShapeProfile:
        return self._profile

    @property
    def device_bytes(self) -> int:
        return self._own_bytes + self._laid_out.bytes

    @property
    def generation(self) -> int:
        return self._generation

    @property
    def copies_weights(self) -> bool:
        return False

    def __call__(self, **tensors: torch.Tensor) -> Tensors:
        if self._run is None:
            raise IncompatibleEngine("The engine was closed; run the workflow again to load it")
        if not self._weights and self._signature.weights:
            raise IncompatibleEngine("The engine has no weights; call update_weights() first")
        with torch.no_grad():
            results = self._run(self._checked(tensors))
        return dict(zip(self._outputs, results, strict=True))

    def update_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        if self._supply is None:
            raise IncompatibleEngine("The engine was closed; run the workflow again to load it")
        self.release_weights()  # what fails below leaves neither old weights nor addresses that nobody keeps alive
        fitted = {name: self._fitted(name, wanted, weights) for name, wanted in self._signature.weights.items()}
        self._supply({**self._constants, **fitted})
        self._weights = fitted
        addresses = tuple(tensor.data_ptr() for tensor in fitted.values())
        self._generation += addresses != self._addresses
        self._addresses = addresses

    def release_weights(self) -> None:
        if self._weights:
            self._drop()
        self._weights = {}

    def close(self) -> None:
        self.release_weights()
        self._laid_out.clear()
        self._run = self._supply = None
        self._drop = lambda: None

    def _fitted(self, name: str, wanted: TensorLayout, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if (derived := self._signature.derived.get(name)) is not None:
            sources = [self._on_device(source, weights.get(source)) for source in derived.sources]
            return self._made(name, derived, sources, wanted)
        tensor = self._on_device(name, weights.get(name))
        if tensor.shape != wanted.shape or tensor.dtype != wanted.dtype:
            found = TensorLayout.of(tensor)
            raise IncompatibleEngine(f"Weight {name!r} is {found}, the engine needs {wanted}; build the engine again")
        return self._laid_out.of(name, tensor, wanted)

    def _made(
        self, name: str, derived: DerivedWeight, sources: Sequence[torch.Tensor], wanted: TensorLayout
    ) -> torch.Tensor:
        try:
            return self._laid_out.made(name, derived, sources, wanted, self._device)
        except ValueError as error:
            raise IncompatibleEngine(f"Weight {error}; build the engine again") from error

    def _on_device(self, name: str, tensor: torch.Tensor | None) -> torch.Tensor:
        if tensor is None:
            raise IncompatibleEngine(f"The model has no weight {name!r} that the engine needs; build the engine again")
        if tensor.device != self._device:
            raise IncompatibleEngine(f"Weight {name!r} lies on {tensor.device}, the engine runs on {self._device}")
        # Hundreds each time, and those of the hosts are plain already.
        return tensor if type(tensor) is torch.Tensor and not tensor.requires_grad else tensor.detach()

    def _checked(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        if reason := self._profile.why_not({name: tuple(tensor.shape) for name, tensor in tensors.items()}):
            raise ShapeOutsideProfile(f"{reason[0].upper()}{reason[1:]}; the plain model is used for this call")
        return {
            name: self._checked_input(name, tensors[name], layout) for name, layout in self._signature.inputs.items()
        }

    def _checked_input(self, name: str, tensor: torch.Tensor, wanted: TensorLayout) -> torch.Tensor:
        if tensor.dtype != wanted.dtype or tensor.device != self._device:
            raise ShapeOutsideProfile(
                f"{name} is {tensor.dtype} on {tensor.device}, the engine takes {wanted.dtype} on {self._device}"
            )
        return laid_out(tensor, wanted)
