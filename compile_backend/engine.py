"""A compiled callable as an `Engine`, which checks all that compiled code assumes: shapes, strides, dtypes, devices."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

import torch

from ..core.errors import IncompatibleEngine, ShapeOutsideProfile
from ..core.protocols import Tensors
from ..core.shapes import ShapeProfile
from .layouts import LaidOutWeights, TensorLayout, laid_out, places_of
from .program import ProgramSignature
from .rewrites.derived_weights import DerivedWeight

Run = Callable[[Tensors], Sequence[torch.Tensor]]
Supply = Callable[[dict[str, torch.Tensor]], None]


class CompiledEngine:
    """An engine whose weights are the host's own tensors.

    Args:
        run: the compiled callable; takes the inputs by name in the program's order, returns fresh tensors.
        supply: hands the complete set of weights to the compiled code, which keeps their addresses, not copies.
        constants: weights that come with the artifact.
        device_bytes: device memory beside the weights.
        drop: makes the compiled code release the weights that it was supplied with; None where it only holds their
            addresses.
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
        drop: Callable[[], None] | None = None,
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
        self._weights: object | None = None
        """Keeps what the compiled code reads alive."""
        self._version: Hashable = None
        self._read: list[str] = []
        self._laid_out = LaidOutWeights()
        self._sources = _sources_of(signature)
        self._places: Hashable = None
        self._is_supplied = False
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
        if self._weights is None and self._signature.weights:
            raise IncompatibleEngine("The engine has no weights; call update_weights() first")
        with torch.no_grad():
            results = self._run(self._checked(tensors))
        return dict(zip(self._outputs, results, strict=True))

    def update_weights(self, weights: Mapping[str, torch.Tensor], version: Hashable = None) -> None:
        if self._supply is None:
            raise IncompatibleEngine("The engine was closed; run the workflow again to load it")
        if version is not None and version == self._version:
            self._weights = weights
            return
        self.release_weights()  # what fails below leaves neither old weights nor addresses that nobody keeps alive
        self._version = None
        found = self._found(weights)
        places = places_of(found.values())
        if places != self._places or not self._laid_out.are_sources_alive:
            self._places = None
            self._bind({name: self._detached(name, tensor) for name, tensor in found.items()})
            self._places = places
        self._laid_out.write(found)
        self._weights = [found[name].detach() for name in self._read]  # a parameter may get other memory any time
        self._version = version

    def _found(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        try:
            return {name: weights[name] for name in self._sources}
        except KeyError as missing:
            raise IncompatibleEngine(
                f"The model has no weight {missing} that the engine needs; build the engine again"
            ) from None

    def _bind(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Supply `weights` to the compiled code, as copies where it needs other strides."""
        assert self._supply is not None
        fitted = {name: self._fitted(name, wanted, weights) for name, wanted in self._signature.weights.items()}
        self._read = [name for name in fitted if name in weights and not self._laid_out.copies(name)]
        self._is_supplied = True
        self._supply({**self._constants, **fitted})
        addresses = tuple(tensor.data_ptr() for tensor in fitted.values())
        self._generation += addresses != self._addresses
        self._addresses = addresses

    def release_weights(self) -> None:
        if self._is_supplied and self._drop is not None:
            self._drop()
            self._is_supplied, self._places, self._version = False, None, None
        self._weights = None

    def close(self) -> None:
        self.release_weights()
        self._laid_out.clear()
        self._run = self._supply = None
        self._drop, self._places, self._version = None, None, None

    def _fitted(self, name: str, wanted: TensorLayout, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if (derived := self._signature.derived.get(name)) is not None:
            return self._made(name, derived, [weights[source] for source in derived.sources], wanted)
        tensor = weights[name]
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

    def _detached(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device != self._device:
            raise IncompatibleEngine(f"Weight {name!r} lies on {tensor.device}, the engine runs on {self._device}")
        return tensor.detach()

    def _checked(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        if reason := self._profile.why_not({name: tuple(tensor.shape) for name, tensor in tensors.items()}):
            raise ShapeOutsideProfile(f"{reason[0].upper()}{reason[1:]}; your model runs this call without Slipstream")
        return {
            name: self._checked_input(name, tensors[name], layout) for name, layout in self._signature.inputs.items()
        }

    def _checked_input(self, name: str, tensor: torch.Tensor, wanted: TensorLayout) -> torch.Tensor:
        if tensor.dtype != wanted.dtype or tensor.device != self._device:
            raise ShapeOutsideProfile(
                f"{name} is {tensor.dtype} on {tensor.device}, the engine takes {wanted.dtype} on {self._device}"
            )
        return laid_out(tensor, wanted)


def _sources_of(signature: ProgramSignature) -> tuple[str, ...]:
    """Names of the host's weights that an engine needs, those of derived weights included."""
    derived = [source for weight in signature.derived.values() for source in weight.sources]
    return tuple(dict.fromkeys([name for name in signature.weights if name not in signature.derived] + derived))
