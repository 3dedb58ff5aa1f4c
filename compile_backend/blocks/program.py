"""Export of a block to a program that takes its weights as arguments."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from ...core.dtypes import dtype_name, dtype_named
from ...core.errors import UnsupportedModel, first_line
from ...core.placeholder import views_of_one_buffer
from ...core.protocols import Architecture, BuildJob, Tensors
from ..layouts import MANY_CHANNELS
from ..rewrites.graph import written_memory
from .call_form import Form, put_together
from .ggml_types import TYPES
from .norms import NormsByRows
from .sizes import Sizes

SIGNATURE = "signature.json"

LARGEST = 1 << 17
"""Of an axis that is left open: beyond it an index might need more than 32 bits."""


class BlockArchitecture(Architecture, Protocol):
    """A kind of block, for one form of its calls.

    Attributes:
        form: of the call.
        example: shapes of the form's tensors in the call that is traced, by their names.
        open_axes: those axes of each tensor whose size the program leaves open.
        stored: those weights that the program casts itself, by their names.
        larger: the same kind and form, called with more than one of what there is one of in the example, such as
            pictures of a batch, as far as that may be; the likeliest first.
    """

    @property
    def form(self) -> Form: ...

    @property
    def example(self) -> Mapping[str, tuple[int, ...]]: ...

    @property
    def open_axes(self) -> Mapping[str, tuple[int, ...]]: ...

    @property
    def stored(self) -> Mapping[str, Stored]: ...

    @property
    def larger(self) -> Sequence[BlockArchitecture]: ...


SCALE = "@scale"
"""Behind a weight's name: the number by which what is stored of it is multiplied."""


@dataclass(frozen=True)
class Stored:
    """A weight that is handed over in another form than the block computes with.

    Attributes:
        dtype: that it is stored in.
        is_scaled: whether a number in fp32 follows it, by which it is multiplied once it is cast.
        is_cast: whether the program casts it before the block's code sees it; else that does it in a way of its own.
        ggml: the key of `TYPES` by which the program reads its bytes; empty: it is stored as numbers.
    """

    dtype: torch.dtype
    is_scaled: bool = False
    is_cast: bool = True
    ggml: str = ""

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of what is stored of a weight of some shape.

        Raises:
            UnsupportedModel: such a weight is not stored so.
        """
        if not self.ggml:
            return shape
        if (found := TYPES[self.ggml].stored_shape(shape)) is None:
            raise UnsupportedModel(f"a weight of shape {list(shape)} cannot lie in {self.ggml}")
        return found


@dataclass(frozen=True)
class BlockSignature:
    """Inputs, weights and outputs of a block's program.

    Attributes:
        dtypes: of the inputs.
        channels_last: which inputs lie so.
        sizes: of the inputs.
        weights: name, shape and dtype of each, in the order in which they follow the inputs.
        outputs: of each entry of the tuple or list that the block returns, whether it is a tensor, not None, or the
            place of the input that it hands on; None where the block returns one tensor by itself.
        is_list: whether it is a list.
        nodes: size of the graph.
    """

    dtypes: tuple[torch.dtype, ...]
    channels_last: tuple[bool, ...]
    sizes: Sizes
    weights: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    outputs: tuple[bool | int, ...] | None
    is_list: bool
    nodes: int

    def save(self, directory: Path) -> None:
        data = {
            "dtypes": [dtype_name(dtype) for dtype in self.dtypes],
            "channels_last": self.channels_last,
            "sizes": self.sizes.to_json(),
            "weights": [(name, shape, dtype_name(dtype)) for name, shape, dtype in self.weights],
            "outputs": self.outputs,
            "is_list": self.is_list,
            "nodes": self.nodes,
        }
        (directory / SIGNATURE).write_text(json.dumps(data), encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> BlockSignature:
        data = json.loads((directory / SIGNATURE).read_text(encoding="utf-8"))
        weights = ((name, tuple(shape), dtype_named(dtype)) for name, shape, dtype in data["weights"])
        return cls(
            tuple(map(dtype_named, data["dtypes"])),
            tuple(data["channels_last"]),
            Sizes.from_json(data["sizes"]),
            tuple(weights),
            None if data["outputs"] is None else tuple(data["outputs"]),
            data["is_list"],
            data["nodes"],
        )


def export_block(job: BuildJob, architecture: BlockArchitecture) -> tuple[torch.export.ExportedProgram, BlockSignature]:
    """Trace the job's block.

    Raises:
        UnsupportedModel: torch.export cannot trace it.
    """
    block = architecture.placeholder(job.spec.precision, job.device)
    own = {**dict(block.named_parameters()), **dict(block.named_buffers())}
    inputs = [as_laid_out(tensor) for tensor in _example(job, architecture).values()]
    unread: Set[str] = set()
    while True:
        own = {name: tensor for name, tensor in own.items() if name not in unread}
        stored = {name: form for name, form in architecture.stored.items() if name in own}
        weights = _as_stored(own, stored, job.device)
        traced = _Traced(block, own, stored, architecture.form, is_on_gpu=job.device.type == "cuda")
        program = _export(job, traced, inputs, [*weights.values()], architecture)
        if not (unread := own.keys() & _unread(program, weights)):  # those of layers that are called out as a whole
            break
    if written := _written(program, len(inputs)):
        # What the block writes into is the caller's: it is left as it is, and the result is a fresh tensor.
        traced.copied = written
        program = _export(job, traced, inputs, [*weights.values()], architecture)
        if _written(program, len(inputs)):
            raise UnsupportedModel("the block writes into its inputs")
    found = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]
    named = len(program.graph_signature.user_inputs)
    given = found[len(found) - named :][: len(inputs)]
    signature = BlockSignature(
        dtypes=tuple(tensor.dtype for tensor in inputs),
        channels_last=tuple(map(lies_channels_last, inputs)),
        sizes=Sizes.of(program, given),
        weights=tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in weights.items()),
        outputs=traced.returned.outputs,
        is_list=traced.returned.is_list,
        nodes=len(program.graph.nodes),
    )
    return program, signature


@dataclass
class _Returned:
    """How a block returned its outputs, see `BlockSignature`. Apart, since torch sets attributes back after a trace."""

    outputs: tuple[bool | int, ...] | None = None
    is_list: bool = False


class _Traced(torch.nn.Module):
    """A block as it is traced: inputs and weights are arguments.

    Args:
        own: the block's weights, by name.
        stored: which of them the arguments have in another form.

    Attributes:
        copied: which inputs are copied first, since the block writes into them.
        returned: what it returned when it was called last.
    """

    def __init__(
        self,
        block: torch.nn.Module,
        own: Mapping[str, torch.Tensor],
        stored: Mapping[str, Stored],
        form: Form,
        is_on_gpu: bool,
    ) -> None:
        super().__init__()
        self.__dict__["block"] = block  # not as a part: its weights are arguments
        self._weights = [(name, tensor.dtype, stored.get(name)) for name, tensor in own.items()]
        self._form, self._is_on_gpu = form, is_on_gpu
        self.copied: frozenset[int] = frozenset()
        self.returned = _Returned()

    def forward(self, inputs: list[torch.Tensor], weights: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        given = [tensor.clone() if place in self.copied else tensor for place, tensor in enumerate(inputs)]
        left = iter(weights)
        named = {name: _cast(left, dtype, stored) for name, dtype, stored in self._weights}
        if self._is_on_gpu:
            named = {name: _as_convolutions_want(tensor) for name, tensor in named.items()}
        arguments = put_together(self._form, given)
        with NormsByRows() if self._is_on_gpu else nullcontext():
            result = torch.func.functional_call(self.__dict__["block"], named, (), arguments)
        if isinstance(result, torch.Tensor):
            return (as_laid_out(result),)
        if not isinstance(result, (tuple, list)) or any(not isinstance(each, _RETURNED) for each in result):
            raise UnsupportedModel(f"the block returns a {type(result).__name__}")
        places = {id(tensor): place for place, tensor in enumerate(inputs)}
        self.returned.outputs = tuple(places.get(id(each), each is not None) for each in result)
        self.returned.is_list = isinstance(result, list)
        return tuple(as_laid_out(each) for each in result if each is not None and id(each) not in places)


_RETURNED = torch.Tensor, type(None)


def _cast(left: Iterator[torch.Tensor], dtype: torch.dtype, stored: Stored | None) -> torch.Tensor:
    """The next weight as the block computes with it; rounded as ComfyUI rounds it."""
    weight = next(left)
    if stored is None or not stored.is_cast:
        return weight
    if stored.ggml:
        return TYPES[stored.ggml].dequantised(weight, dtype)
    weight = weight.to(dtype)
    return weight * next(left).to(dtype) if stored.is_scaled else weight


def _as_stored(
    own: Mapping[str, torch.Tensor], stored: Mapping[str, Stored], device: torch.device
) -> dict[str, torch.Tensor]:
    """A block's weights as its program is given them."""
    views: dict[str, torch.Tensor] = {}
    for dtype in {form.dtype for form in stored.values()}:
        names = [name for name, form in stored.items() if form.dtype == dtype]
        shapes = [stored[name].shape_of(tuple(own[name].shape)) for name in names]
        views.update(zip(names, views_of_one_buffer(shapes, dtype, device), strict=True))
    given: dict[str, torch.Tensor] = {}
    for name, tensor in own.items():
        given[name] = views.get(name, tensor)
        if name in stored and stored[name].is_scaled:
            given[name + SCALE] = torch.ones((), dtype=torch.float32, device=device)
    return given


def _as_convolutions_want(weight: torch.Tensor) -> torch.Tensor:
    """Weights of convolutions in channels last, as their inputs are; the copy is one of the program's own kernels."""
    if weight.ndim == 4 and weight.shape[-1] > 1:
        return weight.contiguous(memory_format=torch.channels_last)
    return weight


def _example(job: BuildJob, architecture: BlockArchitecture) -> Tensors:
    dtypes = {name: dtype_named(dtype) for name, dtype in job.spec.dtypes.items()}
    return architecture.random_inputs(architecture.example, dtypes, job.device, seed=0)


def _export(
    job: BuildJob,
    traced: _Traced,
    inputs: list[torch.Tensor],
    weights: list[torch.Tensor],
    architecture: BlockArchitecture,
) -> torch.export.ExportedProgram:
    axes = [architecture.open_axes.get(name, ()) for name in architecture.example]
    shapes = None
    if any(axes):
        opened = [dict.fromkeys(each, _open_axis()) for each in axes]
        shapes = {"inputs": opened, "weights": [None] * len(weights)}
    try:
        with torch.no_grad():
            return torch.export.export(traced, (inputs, weights), dynamic_shapes=shapes, strict=False)
    except UnsupportedModel:
        raise
    except Exception as error:  # torch.export raises whatever the block's code and its own passes raise
        raise UnsupportedModel(f"torch.export cannot trace {job.spec.describe()}: {first_line(error)}") from error


def _open_axis() -> Any:
    """Open as far as the block's code leaves it so: torch finds out by itself what depends on what."""
    return torch.export.Dim.AUTO(min=2, max=LARGEST)  # type: ignore[attr-defined,operator,unused-ignore]


def _unread(program: torch.export.ExportedProgram, weights: Mapping[str, Any]) -> set[str]:
    """The names of weights, which are a program's last arguments, that it does not read."""
    arguments = [node for node in program.graph.nodes if node.op == "placeholder"]
    last = arguments[len(arguments) - len(weights) :]
    return {name for name, node in zip(weights, last, strict=True) if not node.users}


def _written(program: torch.export.ExportedProgram, inputs: int) -> frozenset[int]:
    """Which inputs a program writes into.

    Raises:
        UnsupportedModel: it writes into its weights.
    """
    memory = written_memory(program.graph)
    names = {node.name for node in memory} | {*program.graph_signature.user_inputs_to_mutate.values()}
    given = program.graph_signature.user_inputs
    found = frozenset(place for place, name in enumerate(given) if name in names)
    if any(place >= inputs for place in found):
        raise UnsupportedModel("the block writes into its weights")
    return found


def as_laid_out(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as programs take and give it: contiguous, on a GPU features in channels last, as convolutions want."""
    if lies_channels_last(tensor):
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor.contiguous()


def lies_channels_last(tensor: torch.Tensor) -> bool:
    """Whether `as_laid_out` gives a tensor in channels last."""
    return tensor.device.type == "cuda" and tensor.ndim == 4 and tensor.shape[1] >= MANY_CHANNELS
