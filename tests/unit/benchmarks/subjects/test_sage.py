"""ComfyUI's SageAttention, as far as it can be told without the package."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest
import torch

from slipstream.benchmarks.subjects import sage

GPU = torch.device("cuda")


@pytest.fixture
def attention(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """ComfyUI's module of attentions, which took the package."""
    made = ModuleType("comfy.ldm.modules.attention")
    made.sageattn = lambda q: q + 1  # type: ignore[attr-defined]
    made.get_attention_function = lambda name, default: made.sageattn if name == "sage" else default  # type: ignore[attr-defined]
    modules = ModuleType("comfy.ldm.modules")
    modules.attention = made  # type: ignore[attr-defined]
    for name, module in (("comfy.ldm.modules", modules), ("comfy.ldm.modules.attention", made)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: package)
    return made


def test_where_it_cannot_be_had_it_is_said(attention: ModuleType, monkeypatch) -> None:
    assert sage.why_not(GPU) is None
    assert sage.why_not(torch.device("cpu")) == "SageAttention computes on CUDA GPUs"
    monkeypatch.setattr(attention, "get_attention_function", lambda name, default: default)
    assert sage.why_not(GPU) == "this ComfyUI does not take the sageattention that is installed"
    monkeypatch.delattr(attention, "get_attention_function")
    assert sage.why_not(GPU) == "this ComfyUI does not take the sageattention that is installed"
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    assert sage.why_not(GPU) == "sageattention is not installed"


def test_answers_are_counted_and_failures_are_none(attention: ModuleType) -> None:
    plain = attention.sageattn
    with sage.counted() as answers:
        assert attention.sageattn(1) == 2
        with pytest.raises(TypeError):
            attention.sageattn("a head of 160")
    assert answers == [True, False] and attention.sageattn is plain


def test_another_attention_is_not_asked(attention: ModuleType) -> None:
    def chosen(*_: object) -> None:
        raise AssertionError

    assert sage.override(chosen, 1) == 2
