"""ComfyUI's `--fast`, for one variant and not for its neighbours."""

from __future__ import annotations

import enum
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from slipstream.benchmarks.subjects import fast_options


class Feature(enum.Enum):
    Fp16Accumulation = "fp16_accumulation"
    Fp8MatrixMultiplication = "fp8_matrix_mult"
    AutoTune = "autotune"


@pytest.fixture
def comfy(monkeypatch) -> SimpleNamespace:
    """ComfyUI's options, as far as these need them."""
    package, module = ModuleType("comfy"), ModuleType("comfy.cli_args")
    made = SimpleNamespace(PerformanceFeature=Feature, args=SimpleNamespace(fast={Feature.Fp8MatrixMultiplication}))
    vars(module).update(vars(made))
    package.cli_args = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "comfy", package)
    monkeypatch.setitem(sys.modules, "comfy.cli_args", module)
    made.module = module
    return made


def switches() -> tuple[bool, bool, bool]:
    cudnn, products = torch.backends.cudnn, torch.backends.cuda.matmul
    return cudnn.benchmark, cudnn.allow_tf32, products.allow_fp16_accumulation


def test_what_was_switched_on_is_put_back(comfy: SimpleNamespace) -> None:
    before, chosen = switches(), set(comfy.args.fast)
    with pytest.raises(RuntimeError, match="in between"), fast_options.switched_on():
        benchmark, tf32, accumulates = switches()
        assert benchmark and accumulates
        assert tf32 != before[1], "else cuDNN's choices would be those of the plain model"
        assert comfy.args.fast == set(Feature)
        raise RuntimeError("in between")
    assert switches() == before and comfy.args.fast == chosen


def test_without_the_options_it_is_said(comfy: SimpleNamespace, monkeypatch) -> None:
    gpu = torch.device("cuda")
    assert fast_options.why_not(gpu) is None
    assert fast_options.why_not(torch.device("cpu")) == "ComfyUI's --fast options are about CUDA GPUs"
    older = enum.Enum("older", {"Fp16Accumulation": "fp16_accumulation"})
    monkeypatch.setattr(comfy.module, "PerformanceFeature", older)
    assert fast_options.why_not(gpu) == "this ComfyUI has no --fast autotune"
    monkeypatch.delattr(comfy.module, "PerformanceFeature")
    assert fast_options.why_not(gpu) == "this ComfyUI has no --fast autotune"
