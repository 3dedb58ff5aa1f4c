"""Kernels are launched by torch's launcher where it can, and by triton's, which is compiled for them, where not."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.compile_backend.inductor.launchers import launched_by_torch

GPU = torch.device("cuda", 0)
METADATA = {
    "num_warps": 4, "shared": 128, "num_ctas": 1, "global_scratch_size": 0, "profile_scratch_size": 0,
    "launch_cooperative_grid": False, "launch_pdl": False,
}  # fmt: skip
SOURCE = SimpleNamespace(
    fn=SimpleNamespace(arg_names=["in_ptr0", "out_ptr0", "xnumel", "one", "XBLOCK"]),
    signature={"in_ptr0": "*fp16", "out_ptr0": "*fp16", "xnumel": "i32", "one": "i32", "XBLOCK": "constexpr"},
    constants={(3,): 1, (4,): 64},
)
FOR_TRITON = "function", "packed", None, None, None
"""What torch's compiler gives a launcher of triton's behind the stream, before the arguments."""


class Launchers:
    """A driver of triton's, and torch's launcher."""

    def __init__(self) -> None:
        self.compiled = 0
        self.by_triton: list[tuple[Any, ...]] = []
        self.by_torch: list[tuple[Any, ...]] = []

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        self.compiled += 1
        return lambda *args: self.by_triton.append(args)

    def _launch_kernel(self, *args: Any) -> None:
        self.by_torch.append(args)


@pytest.fixture
def launchers(monkeypatch: pytest.MonkeyPatch) -> Launchers:
    pytest.importorskip("torch._inductor.runtime.static_triton_launcher")  # as it is with or without triton
    made = Launchers()
    runtime = ModuleType("triton.runtime")
    runtime.driver = SimpleNamespace(active=made)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    monkeypatch.setitem(sys.modules, "triton.runtime", runtime)
    monkeypatch.setattr(torch._C, "_StaticCudaLauncher", made, raising=False)
    return made


def launch(launchers: Launchers, **others: Any) -> None:
    with launched_by_torch(GPU):
        made = launchers.launcher_cls(SOURCE, SimpleNamespace(**{**METADATA, **others}))
        made(8, 1, 1, "stream", *FOR_TRITON, "input", "output", 512, 1, 64)


def test_torch_launches_without_constants_and_with_the_scratch_memory_that_kernels_expect(launchers: Launchers) -> None:
    launch(launchers)
    given = "input", "output", 512, None, None
    assert launchers.by_torch == [("function", 8, 1, 1, 4, 128, "OOiOO", given, "stream")]
    assert not launchers.compiled
    assert launchers.launcher_cls.__func__ is Launchers.launcher_cls  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "others",
    [{"num_ctas": 2}, {"global_scratch_size": 64}, {"launch_cooperative_grid": True}, {"launch_pdl": True}],
    ids=str,
)
def test_what_torch_does_not_launch_triton_does(others: Mapping[str, Any], launchers: Launchers) -> None:
    launch(launchers, **others)
    assert launchers.by_triton == [(8, 1, 1, "stream", *FOR_TRITON, "input", "output", 512, 1, 64)]
    assert launchers.compiled == 1 and not launchers.by_torch


def test_so_it_is_with_another_torch(launchers: Launchers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_StaticCudaLauncher")
    launch(launchers)
    assert launchers.compiled == len(launchers.by_triton) == 1


def test_a_cpu_is_left_alone(launchers: Launchers) -> None:
    before = launchers.launcher_cls
    with launched_by_torch(torch.device("cpu")):
        assert launchers.launcher_cls == before
