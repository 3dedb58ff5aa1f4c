"""Which vector instructions builds use, and where what torch tried is kept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch._inductor import cpu_vec_isa

from slipstream.compile_backend.cpp.vector_instructions import vector_instructions

CPU = torch.device("cpu")


def test_none_are_tried_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def check_build(isa: object, code: str) -> bool:
        raise AssertionError("a library is compiled to find out what a GPU's package does not need")

    before = cpu_vec_isa.pick_vec_isa()
    monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", check_build)
    with vector_instructions(torch.device("cuda"), None):
        assert cpu_vec_isa.pick_vec_isa() is cpu_vec_isa.invalid_vec_isa
    monkeypatch.undo()
    assert cpu_vec_isa.pick_vec_isa() == before


@pytest.mark.skipif(not cpu_vec_isa.valid_vec_isa_list(), reason="this processor or compiler has none")
def test_the_next_build_finds_what_was_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "of_a_build"))
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    type(cpu_vec_isa.valid_vec_isa_list()[0])._VecISA__bool__impl.cache_clear()
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    with vector_instructions(CPU, tmp_path / "keep"):
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "of_a_build")
        assert cpu_vec_isa.pick_vec_isa() is not cpu_vec_isa.invalid_vec_isa
    assert list((tmp_path / "keep" / "vector_instructions").rglob("*.so"))
    assert not list((tmp_path / "of_a_build").rglob("*.so"))
