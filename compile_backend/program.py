"""Export of a model to the program that is compiled, with the signature that the engine checks."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..core.dtypes import input_dtypes
from ..core.errors import UnsupportedModel, first_line
from ..core.progress import Progress, ProgressCallback
from ..core.protocols import BuildJob, Tensors
from ..core.spec import EngineSpec
from .layouts import TensorLayout, as_features, use_channels_last
from .rewrites import Rewritten, rewrite
from .rewrites.derived_weights import DerivedWeight

PROGRAM = "program.pt2"
SIGNATURE = "signature.json"
CONSTANTS = "constants.safetensors"


@dataclass(frozen=True)
class ProgramSignature:
    """Inputs and weights of a program.

    Attributes:
        inputs: in the order in which the program takes them.
        weights: those that the program reads, by state-dict name.
        constants: tensors that the model's code created; they are stored in the artifact.
        nodes: size of the graph, for time estimates.
        derived: how those of `weights` are computed that the host does not have.
        eight_bits: number of layers that compute in eight bits.
        as_it_is: see `Rewritten`.
    """

    inputs: Mapping[str, TensorLayout]
    weights: Mapping[str, TensorLayout]
    constants: tuple[str, ...]
    nodes: int
    derived: Mapping[str, DerivedWeight] = field(default_factory=dict)
    eight_bits: int = 0
    as_it_is: str = ""

    @property
    def details(self) -> dict[str, Any]:
        """For the manifest."""
        found = {"nodes": self.nodes, "eight_bits": self.eight_bits, "compiled_as_it_is": self.as_it_is}
        return {name: value for name, value in found.items() if value}

    def save(self, directory: Path) -> None:
        data = {
            "inputs": {name: layout.to_json() for name, layout in self.inputs.items()},
            "weights": {name: layout.to_json() for name, layout in self.weights.items()},
            "constants": self.constants,
            "nodes": self.nodes,
            "derived": {name: weight.to_json() for name, weight in self.derived.items()},
            "eight_bits": self.eight_bits,
        }
        (directory / SIGNATURE).write_text(json.dumps(data), encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> ProgramSignature:
        data = json.loads((directory / SIGNATURE).read_text(encoding="utf-8"))
        return cls(
            {name: TensorLayout.from_json(layout) for name, layout in data["inputs"].items()},
            {name: TensorLayout.from_json(layout) for name, layout in data["weights"].items()},
            tuple(data["constants"]),
            data["nodes"],
            {name: DerivedWeight.from_json(weight) for name, weight in data["derived"].items()},
            data["eight_bits"],
        )


def export_program(job: BuildJob, progress: ProgressCallback) -> tuple[torch.export.ExportedProgram, ProgramSignature]:
    """Trace the job's model, and write signature and constants into its folder.

    Raises:
        UnsupportedModel: torch.export cannot trace it, or the profile is not static.
    """
    spec = job.spec
    if not spec.is_static:
        raise UnsupportedModel(f"Compiled engines are made for one exact shape, asked was {spec.profile}")
    progress(Progress("export", None, "tracing the model"))
    example = job.architecture.random_inputs(spec.profile.opt, input_dtypes(spec), job.device, seed=0)
    placeholder = job.architecture.placeholder(spec.precision, job.device)
    if job.device.type == "cuda":
        use_channels_last(placeholder)
        example = {name: as_features(tensor) for name, tensor in example.items()}
    traced = _trace(spec, placeholder, example)
    constants = {*traced.graph_signature.inputs_to_lifted_tensor_constants.values()}
    rewritten = rewrite(traced, spec, example, job.device)
    program = rewritten.program
    signature = _signature_of(rewritten, example, constants)
    _name_constants(program)
    _save_constants(program, signature.constants, job.directory)
    signature.save(job.directory)
    progress(Progress("compile", None, f"compiling {signature.nodes} operations", signature.nodes))
    return program, signature


def save_program(program: torch.export.ExportedProgram, directory: Path) -> None:
    """Write the program itself, for backends that compile it again at load."""
    with warnings.catch_warnings():
        # The placeholder's tensors are views of one buffer on purpose.
        warnings.filterwarnings("ignore", message="No complete tensor found")
        torch.export.save(program, directory / PROGRAM)


def _trace(spec: EngineSpec, module: torch.nn.Module, example: Tensors) -> torch.export.ExportedProgram:
    try:
        with torch.no_grad():
            return torch.export.export(module, (), dict(example), strict=False)
    except Exception as error:  # torch.export raises whatever the model's code and its own passes raise
        raise UnsupportedModel(f"torch.export cannot trace {spec.describe()}: {first_line(error)}") from error


def _name_constants(program: torch.export.ExportedProgram) -> None:
    """Turn constants into buffers, whose names reach the package, in memory of their own: aliases would be merged."""
    from torch.export.graph_signature import InputKind

    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.CONSTANT_TENSOR and spec.target is not None:
            spec.kind, spec.persistent = InputKind.BUFFER, False
            program.constants[spec.target] = program.constants[spec.target].clone(memory_format=torch.contiguous_format)


def _signature_of(rewritten: Rewritten, example: Tensors, constants: AbstractSet[str]) -> ProgramSignature:
    program = rewritten.program
    graph = program.graph_signature
    used = {node.name for node in program.graph.nodes if node.op == "placeholder" and node.users}
    lifted = graph.inputs_to_lifted_tensor_constants
    named = {**graph.inputs_to_parameters, **graph.inputs_to_buffers}
    own = {*lifted.values(), *constants}
    read = [target for name, target in {**named, **lifted}.items() if name in used]
    return ProgramSignature(
        inputs={name: TensorLayout.of(tensor) for name, tensor in example.items()},
        weights={target: TensorLayout.of(_state(program, target)) for target in read if target not in own},
        constants=tuple(target for target in read if target in own),
        nodes=len(program.graph.nodes),
        derived={name: weight for name, weight in rewritten.derived.items() if name in read},
        eight_bits=rewritten.eight_bits,
        as_it_is=rewritten.as_it_is,
    )


def _state(program: torch.export.ExportedProgram, name: str) -> torch.Tensor:
    # Non-persistent buffers are kept among the constants.
    found: torch.Tensor = program.state_dict[name] if name in program.state_dict else program.constants[name]
    return found


def _save_constants(program: torch.export.ExportedProgram, names: tuple[str, ...], directory: Path) -> None:
    from safetensors.torch import save_file

    save_file({name: program.constants[name].cpu() for name in names}, directory / CONSTANTS)


def load_constants(directory: Path, device: torch.device) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(directory / CONSTANTS, device=str(device))
