"""Exports a module as an ONNX graph whose weights are references to a file."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..core.dtypes import input_dtypes
from ..core.errors import UnsupportedModel, first_line
from ..core.protocols import BuildJob, Tensors
from ..core.shapes import UNET_AXES, Shape
from ..core.spec import EngineSpec
from .surgery.weight_map import WeightMap, WeightSource

if TYPE_CHECKING:
    import onnx

WEIGHTS = "weights.bin"
"""Where the graph's initializers lie, beside it."""

_ALIGNED = 64
"""Bytes: where a weight begins in its file is a multiple."""

_WRAPPER = "module."


@dataclass(frozen=True)
class ExportedGraph:
    """An ONNX graph whose weights are references.

    Attributes:
        model: its weights are references to the file `WEIGHTS`, which `save_graph` writes.
        weights: initializer name -> the weight of the model that it holds.
        weight_bytes: size of all of them.
    """

    model: onnx.ModelProto
    weights: WeightMap
    weight_bytes: int


def export_graph(job: BuildJob, opset: int) -> ExportedGraph:
    """Trace the job's model on the CPU, as a placeholder module and without running it.

    Args:
        opset: version of the ONNX operators. From 23 on attention is one operator, from 21 on GroupNorm.

    Raises:
        UnsupportedModel: torch cannot trace it, or it has no form in ONNX.
    """
    spec, cpu = job.spec, torch.device("cpu")
    example = job.architecture.random_inputs(_example_shapes(spec), input_dtypes(spec), cpu, seed=0)
    module = _Positional(job.architecture.placeholder(spec.precision, cpu), tuple(example))
    try:
        with _quietly(), torch.no_grad():
            program = torch.export.export(
                module, tuple(example.values()), dynamic_shapes=_dynamic_axes(spec, example), strict=False
            )
            exported = torch.onnx.export(
                program,
                dynamo=True,
                opset_version=opset,
                optimize=False,  # which would rename the weights
                input_names=list(example),
                output_names=list(job.architecture.outputs),
                verbose=False,
            )
    except Exception as error:  # both raise whatever the model's code and their own passes raise
        raise UnsupportedModel(
            f"{spec.describe()} cannot be exported to ONNX: {first_line(error)}. Choose backend compiled"
        ) from error
    assert exported is not None
    return _without_weights(exported.model, module)


class _Positional(torch.nn.Module):
    """Takes the inputs by position: torch.export does not support dynamic axes of `**kwargs`."""

    def __init__(self, module: torch.nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.module = module
        self._names = names

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.module(**dict(zip(self._names, inputs, strict=True)))


def axis_name(tensor: str, axis: int) -> str | None:
    """E.g. "height"; the first axis of every input is the batch."""
    if axis == 0:
        return "batch"
    names = UNET_AXES.get(tensor, ())
    return names[axis] if axis < len(names) else None


def open_axes(spec: EngineSpec) -> dict[str, tuple[int, ...]]:
    """Input name -> axes of which the spec's profiles want more than one size.

    Raises:
        UnsupportedModel: an axis that has to be fixed is among them.
    """
    found: dict[str, tuple[int, ...]] = {}
    for name, axes in spec.profile.inputs.items():
        ranges = [[profile.inputs[name][axis] for profile in spec.profiles] for axis in range(len(axes))]
        sizes = [{end for size in taken for end in (size.min, size.max)} for taken in ranges]
        found[name] = tuple(axis for axis, taken in enumerate(sizes) if len(taken) > 1)
        if fixed := [axis for axis in found[name] if axis_name(name, axis) is None]:
            raise UnsupportedModel(f"Engines for a range of sizes cannot vary axis {fixed[0]} of {name}")
    return found


def _example_shapes(spec: EngineSpec) -> dict[str, Shape]:
    """The tuned shapes; open axes of one input differ from each other, so that no two are taken for one."""
    shapes = dict(spec.profile.opt)
    axes = open_axes(spec)
    if 2 in axes.get("x", ()) and 3 in axes["x"] and shapes["x"][2] == shapes["x"][3]:
        batch, channels, height, width = shapes["x"]
        shapes["x"] = (batch, channels, height, width + 8)
    if any(0 in open_of for open_of in axes.values()) and shapes["x"][0] == 1:
        shapes = {name: (2, *shape[1:]) for name, shape in shapes.items()}  # torch takes a size of 1 for fixed
    return shapes


def _dynamic_axes(spec: EngineSpec, example: Tensors) -> Any:
    axes = open_axes(spec)
    if not any(axes.values()):
        return None
    return (tuple(dict.fromkeys(axes[name], torch.export.Dim.DYNAMIC) for name in example),)


def _without_weights(model: Any, module: torch.nn.Module) -> ExportedGraph:
    import onnx_ir
    from onnx_ir import serde

    state = dict([*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)])
    weights: WeightMap = {}
    for name, value in model.graph.initializers.items():
        if name not in state:
            continue  # a constant of the model's code, which stays in the graph
        tensor = value.const_value
        weights[name] = WeightSource(name.removeprefix(_WRAPPER))
        value.const_value = onnx_ir.ExternalTensor(
            WEIGHTS, 0, tensor.nbytes, tensor.dtype, shape=tensor.shape, name=name, base_dir=""
        )
    proto = serde.serialize_model(model)
    _name_axes(proto)
    return ExportedGraph(proto, weights, bytes_of_weights(proto, weights))


def bytes_of_weights(model: onnx.ModelProto, weights: WeightMap) -> int:
    """The size of the weights that a graph's initializers refer to."""
    there = (tensor for tensor in model.graph.initializer if tensor.name in weights)
    return sum(int(_entry(tensor, "length").value) for tensor in there)


def _name_axes(model: onnx.ModelProto) -> None:
    """Give dynamic axes the names of `axis_name` in place of torch's generated ones."""
    known: dict[str, str] = {}
    for tensor in (*model.graph.input, *model.graph.output):
        for axis, dim in enumerate(tensor.type.tensor_type.shape.dim):
            if dim.dim_param:
                dim.dim_param = known.setdefault(dim.dim_param, axis_name(tensor.name, axis) or dim.dim_param)
    del model.graph.value_info[:]  # they use the old names, and the passes change shapes


def save_graph(
    model: onnx.ModelProto, weights: WeightMap, directory: Path, embedded: Mapping[str, torch.Tensor] | None = None
) -> Path:
    """Write a graph and what its initializers refer to.

    Args:
        embedded: the model's weights by state-dict name, read one by one. None writes zeros, to a file little larger
            than the largest weight.

    Raises:
        UnsupportedModel: a weight is missing among `embedded`, or has another size.
    """
    path = directory / "model.onnx"
    external = {tensor.name: tensor for tensor in model.graph.initializer if tensor.name in weights}
    if embedded is None:
        _write_zeros(external, directory / WEIGHTS)
    else:
        _write_weights(external, weights, directory / WEIGHTS, embedded)
    path.write_bytes(model.SerializeToString())
    return path


def _write_zeros(external: Mapping[str, onnx.TensorProto], path: Path) -> None:
    """Zeros, with overlapping weights that start at distinct offsets, by which TensorRT tells them apart."""
    end = 0
    for index, tensor in enumerate(external.values()):
        _entry(tensor, "offset").value = str(index * _ALIGNED)
        end = max(end, index * _ALIGNED + int(_entry(tensor, "length").value))
    with open(path, "wb") as file:
        file.truncate(end)


def _write_weights(
    external: Mapping[str, onnx.TensorProto], weights: WeightMap, path: Path, embedded: Mapping[str, torch.Tensor]
) -> None:
    with open(path, "wb") as file:
        for name, tensor in external.items():
            source = weights[name]
            if source.name not in embedded:
                raise UnsupportedModel(f"The model holds no weight {source.name!r}; build the engine again")
            data = source.laid_out(embedded[source.name]).reshape(-1).view(torch.uint8).numpy().tobytes()
            if len(data) != int(_entry(tensor, "length").value):
                raise UnsupportedModel(f"Weight {source.name!r} has another size or dtype than the traced model's")
            file.seek(-file.tell() % _ALIGNED, 1)
            _entry(tensor, "offset").value = str(file.tell())
            file.write(data)


def _entry(tensor: onnx.TensorProto, key: str) -> Any:
    for entry in tensor.external_data:
        if entry.key == key:
            return entry
    entry = tensor.external_data.add()
    entry.key = key
    return entry


@contextmanager
def _quietly() -> Iterator[None]:
    """Silence the exporter's warnings about weights that are views and operators without a name."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
