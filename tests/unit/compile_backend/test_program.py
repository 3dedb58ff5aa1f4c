"""What the host writes for the worker: a program, and all that compiled code takes for granted about it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from slipstream.compile_backend import AOTInductorBackend
from slipstream.compile_backend.program import (
    CONSTANTS,
    PROGRAM,
    SIGNATURE,
    ProgramSignature,
    TensorLayout,
    export_program,
    load_constants,
)
from slipstream.core.errors import UnsupportedModel
from slipstream.core.protocols import Tensors
from slipstream.core.shapes import ShapeProfile, ShapeRange
from slipstream.core.skeleton import hollow
from slipstream.tests.unit.compile_backend.support import (
    CPU,
    SHAPES,
    SmallModel,
    export,
    make_inputs,
    make_spec,
    make_weights,
    used_names,
)

BACKEND = AOTInductorBackend()
X = {"x": torch.ones(2, 4)}


def export_module(module: nn.Module, folder: Path, example: Tensors = X) -> ProgramSignature:
    profile = ShapeProfile.static({name: tuple(tensor.shape) for name, tensor in example.items()})
    return export_program(make_spec(BACKEND, profile=profile), module.eval(), example, folder)


# ------------------------------------------------------------------------------------------------ hollow


class Deep(nn.Module):
    """Thirty layers of 4 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(30)])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.layers(x),)


def test_a_large_model_is_exported_in_the_memory_of_its_largest_layer(tmp_path: Path) -> None:
    module = hollow(Deep, torch.float32, CPU)
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in module.parameters()
    }
    assert sum(storages.values()) < 5 * 2**20
    signature = export_module(module, tmp_path, {"x": torch.ones(2, 1024)})
    assert len(signature.weights) == 60
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 6 * 2**20


def test_hollow_weights_lie_at_addresses_of_their_own() -> None:
    """Compilers merge what lies at one address."""
    module = hollow(SmallModel, torch.float32, CPU)
    named = [*module.named_parameters(), *module.named_buffers()]
    assert len({tensor.data_ptr() for _, tensor in named}) == len(named) == len(make_weights())
    assert all(tensor.is_contiguous() for _, tensor in named)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_hollow_models_have_the_dtype_that_is_built_for(dtype: torch.dtype) -> None:
    assert {tensor.dtype for tensor in hollow(SmallModel, dtype, CPU).state_dict().values()} == {dtype}


# --------------------------------------------------------------------------------------------- signature


def test_the_signature_names_all_that_the_program_reads(tmp_path: Path) -> None:
    export(BACKEND, tmp_path)
    signature = ProgramSignature.read(tmp_path)
    assert list(signature.inputs) == list(SHAPES)
    assert set(signature.weights) == set(used_names())
    assert len(signature.constants) == 1 and signature.nodes > 10
    weights = make_weights()
    assert all(signature.weights[name] == TensorLayout.of(weights[name]) for name in used_names())
    inputs = make_inputs()
    assert all(signature.inputs[name] == TensorLayout.of(inputs[name]) for name in inputs)


def test_the_job_is_plain_data(tmp_path: Path) -> None:
    job = export(BACKEND, tmp_path)
    assert json.loads(json.dumps(dict(job.options))) == job.options
    assert job.options["nodes"] == ProgramSignature.read(tmp_path).nodes
    assert {PROGRAM, SIGNATURE, CONSTANTS} <= {path.name for path in tmp_path.iterdir()}


def test_a_signature_survives_the_disk(tmp_path: Path) -> None:
    layout = TensorLayout((2, 3), (1, 2), torch.bfloat16)
    signature = ProgramSignature({"x": layout}, {"w.0": layout}, ("c",), 7)
    signature.save(tmp_path)
    assert ProgramSignature.read(tmp_path) == signature


def test_exporting_leaves_torch_as_it_was(tmp_path: Path) -> None:
    before = torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads()
    export(BACKEND, tmp_path)
    assert before == (
        torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads()
    )  # fmt: skip


# --------------------------------------------------------------------------------------------- constants


class Constants(nn.Module):
    """One made in the code, one beside the parameters, a view of it, and a transposed one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        with torch.device("cpu"):
            self.plain = torch.arange(4.0)
            self.view = self.plain[:4]
            self.turned = torch.arange(12.0).reshape(3, 4).t()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        made = torch.tensor([1.0, 2.0, 3.0, 4.0])
        return (x * self.weight * made + self.plain + 2 * self.view + self.turned.sum(1),)


def test_constants_come_with_the_artifact(tmp_path: Path) -> None:
    signature = export_module(hollow(Constants, torch.float32, CPU), tmp_path)
    constants = load_constants(tmp_path, CPU)
    assert set(signature.weights) == {"weight"}
    assert set(constants) == set(signature.constants) and len(constants) == 4
    assert torch.equal(constants["turned"], torch.arange(12.0).reshape(3, 4).t())
    made = next(tensor for name, tensor in constants.items() if name.startswith("lifted"))
    assert torch.equal(made, torch.tensor([1.0, 2.0, 3.0, 4.0]))


def test_constants_are_known_by_their_names_in_the_program(tmp_path: Path) -> None:
    signature = export_module(hollow(Constants, torch.float32, CPU), tmp_path)
    module = torch.export.load(tmp_path / PROGRAM).module()
    assert {name for name, _ in module.named_buffers()} == set(signature.constants)
    module.weight.data = torch.ones(4)
    assert torch.equal(module(x=X["x"])[0], Constants()(X["x"])[0])


def test_constants_that_share_memory_are_told_apart(tmp_path: Path) -> None:
    """Where a compiler sees one address twice, it keeps one name."""
    export_module(hollow(Constants, torch.float32, CPU), tmp_path)
    constants = torch.export.load(tmp_path / PROGRAM).constants
    assert len({tensor.data_ptr() for tensor in constants.values()}) == len(constants) == 4


def test_no_constants(tmp_path: Path) -> None:
    signature = export_module(nn.Sequential(nn.Linear(4, 4)), tmp_path, {"input": torch.ones(2, 4)})
    assert signature.constants == () and load_constants(tmp_path, CPU) == {}


# -------------------------------------------------------------------------------------------- unsupported


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x if x.sum() > 0 else -x,)


class Broken(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        raise ValueError()


class Numpy(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.from_numpy(x.numpy() * 2),)


@pytest.mark.parametrize("kind", [Branches, Broken, Numpy])
def test_a_model_that_cannot_be_traced(tmp_path: Path, kind: type[nn.Module]) -> None:
    with pytest.raises(UnsupportedModel, match="torch.export cannot trace Small unet fp32") as caught:
        export_module(kind(), tmp_path)
    assert "\n" not in str(caught.value) and not str(caught.value).endswith(": ")
    assert list(tmp_path.iterdir()) == []


def test_only_exact_shapes(tmp_path: Path) -> None:
    profile = ShapeProfile({"x": (ShapeRange(1, 2, 4), ShapeRange.exactly(4))})
    spec = make_spec(BACKEND, profile=profile)
    assert BACKEND.why_unsupported(spec) == "compiled engines are made for one exact shape"
    with pytest.raises(UnsupportedModel, match="one exact shape"):
        export_program(spec, nn.Linear(4, 4), X, tmp_path)
