"""What the compiler is given: a program, and all that compiled code takes for granted about it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from slipstream.compile_backend import AOTInductorBackend
from slipstream.compile_backend.layouts import TensorLayout
from slipstream.compile_backend.program import (
    CONSTANTS,
    PROGRAM,
    SIGNATURE,
    ProgramSignature,
    export_program,
    load_constants,
    save_program,
)
from slipstream.core.errors import UnsupportedModel
from slipstream.core.placeholder import placeholder_of
from slipstream.core.progress import ignore_progress
from slipstream.core.protocols import BuildJob
from slipstream.core.shapes import Shape, ShapeProfile, ShapeRange
from slipstream.tests.unit.compile_backend.support import (
    CPU,
    SHAPES,
    SmallArchitecture,
    SmallModel,
    make_inputs,
    make_job,
    make_spec,
    make_weights,
    used_names,
)

BACKEND = AOTInductorBackend()
X: dict[str, Shape] = {"x": (2, 4)}


def export_model(build: Callable[[], nn.Module], folder: Path, shapes: dict[str, Shape] = X) -> ProgramSignature:
    """As a build does it, with the program kept."""
    job = make_job(BACKEND, folder, build=build, shapes=shapes)
    program, signature = export_program(job, ignore_progress)
    save_program(program, folder)
    assert signature == ProgramSignature.read(folder)
    return signature


# ------------------------------------------------------------------------------------------------ placeholders


class Deep(nn.Module):
    """Thirty layers of 4 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(30)])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.layers(x),)


def test_a_large_model_is_exported_in_the_memory_of_its_largest_layer(tmp_path: Path) -> None:
    module = placeholder_of(Deep, torch.float32, CPU)
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in module.parameters()
    }
    assert sum(storages.values()) < 5 * 2**20
    signature = export_model(Deep, tmp_path, {"x": (2, 1024)})
    assert len(signature.weights) == 60
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 6 * 2**20


def test_hollow_weights_lie_at_addresses_of_their_own() -> None:
    """Compilers merge what lies at one address."""
    module = placeholder_of(SmallModel, torch.float32, CPU)
    named = [*module.named_parameters(), *module.named_buffers()]
    assert len({tensor.data_ptr() for _, tensor in named}) == len(named) == len(make_weights())
    assert all(tensor.is_contiguous() for _, tensor in named)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_hollow_models_have_the_dtype_that_is_built_for(dtype: torch.dtype) -> None:
    assert {tensor.dtype for tensor in placeholder_of(SmallModel, dtype, CPU).state_dict().values()} == {dtype}


# --------------------------------------------------------------------------------------------- signature


def test_the_signature_names_all_that_the_program_reads(tmp_path: Path) -> None:
    signature = export_model(SmallModel, tmp_path, SHAPES)
    assert list(signature.inputs) == list(SHAPES)
    assert set(signature.weights) == set(used_names())
    assert len(signature.constants) == 1 and signature.nodes > 10
    weights = make_weights()
    assert all(signature.weights[name] == TensorLayout.of(weights[name]) for name in used_names())
    inputs = make_inputs()
    assert all(signature.inputs[name] == TensorLayout.of(inputs[name]) for name in inputs)


def test_the_program_itself_is_written_only_for_those_who_need_it(tmp_path: Path) -> None:
    program, _ = export_program(make_job(BACKEND, tmp_path), ignore_progress)
    assert {path.name for path in tmp_path.iterdir()} == {SIGNATURE, CONSTANTS}
    save_program(program, tmp_path)
    assert (tmp_path / PROGRAM).stat().st_size > 0


def test_a_signature_survives_the_disk(tmp_path: Path) -> None:
    layout = TensorLayout((2, 3), (1, 2), torch.bfloat16)
    signature = ProgramSignature({"x": layout}, {"w.0": layout}, ("c",), 7)
    signature.save(tmp_path)
    assert ProgramSignature.read(tmp_path) == signature


def test_exporting_leaves_torch_as_it_was(tmp_path: Path) -> None:
    before = torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads()
    export_model(SmallModel, tmp_path, SHAPES)
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
    signature = export_model(Constants, tmp_path)
    constants = load_constants(tmp_path, CPU)
    assert set(signature.weights) == {"weight"}
    assert set(constants) == set(signature.constants) and len(constants) == 4
    assert torch.equal(constants["turned"], torch.arange(12.0).reshape(3, 4).t())
    made = next(tensor for name, tensor in constants.items() if name.startswith("lifted"))
    assert torch.equal(made, torch.tensor([1.0, 2.0, 3.0, 4.0]))


def test_constants_are_known_by_their_names_in_the_program(tmp_path: Path) -> None:
    signature = export_model(Constants, tmp_path)
    module = torch.export.load(tmp_path / PROGRAM).module()
    assert {name for name, _ in module.named_buffers()} == set(signature.constants)
    module.weight.data = torch.ones(4)
    x = torch.rand(X["x"])
    assert torch.equal(module(x=x)[0], Constants()(x)[0])


def test_constants_that_share_memory_are_told_apart(tmp_path: Path) -> None:
    """Where a compiler sees one address twice, it keeps one name."""
    export_model(Constants, tmp_path)
    constants = torch.export.load(tmp_path / PROGRAM).constants
    assert len({tensor.data_ptr() for tensor in constants.values()}) == len(constants) == 4


def test_no_constants(tmp_path: Path) -> None:
    signature = export_model(lambda: nn.Sequential(nn.Linear(4, 4)), tmp_path, {"input": (2, 4)})
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
        export_model(kind, tmp_path)
    assert "\n" not in str(caught.value) and not str(caught.value).endswith(": ")
    assert list(tmp_path.iterdir()) == []


def test_only_exact_shapes(tmp_path: Path) -> None:
    profile = ShapeProfile({"x": (ShapeRange(1, 2, 4), ShapeRange.exactly(4))})
    spec = make_spec(BACKEND, profile=profile)
    assert BACKEND.why_unsupported(spec) == "compiled engines are made for one exact shape"
    with pytest.raises(UnsupportedModel, match="one exact shape"):
        export_program(BuildJob(tmp_path, spec, SmallArchitecture(), CPU, BACKEND.environment(CPU)), ignore_progress)
