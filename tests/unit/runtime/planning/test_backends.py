"""The chain of backends and the reasons why one was passed over."""

from __future__ import annotations

import pytest
import torch

from slipstream.compile_backend.blocks.backend import BlockBackend
from slipstream.compile_backend.blocks.triton_backend import TritonBlockBackend
from slipstream.core.errors import BackendUnavailable
from slipstream.core.protocols import Backend
from slipstream.runtime.planning.backends import backend_named, candidates, default_backends
from slipstream.runtime.settings.model_settings import BackendChoice
from slipstream.tests.fakes import CPU, NullBackend
from slipstream.trt_backend import TensorRTBackend


@pytest.fixture
def chain() -> list[Backend]:
    return [NullBackend("first"), NullBackend("second")]


def test_packages_come_before_tensorrt_and_that_before_torch_compile() -> None:
    assert [backend.name for backend in default_backends()] == ["aotinductor", "tensorrt", "torch.compile"]


@pytest.mark.parametrize(
    "backend", [*default_backends(), BlockBackend(), TritonBlockBackend()], ids=lambda backend: backend.name
)
def test_the_worker_finds_every_backend_by_name(backend: Backend) -> None:
    assert type(backend_named(backend.name)) is type(backend)


def test_an_unknown_backend() -> None:
    with pytest.raises(BackendUnavailable, match="no backend 'magic'"):
        backend_named("magic")


def test_the_best_comes_first(chain: list[Backend]) -> None:
    assert candidates(BackendChoice.AUTO, CPU, chain) == chain


def test_compiled_leaves_tensorrt_out(chain: list[Backend]) -> None:
    assert candidates(BackendChoice.COMPILED, CPU, [NullBackend("tensorrt"), *chain]) == chain


def test_tensorrt_means_nothing_else(chain: list[Backend]) -> None:
    wanted = NullBackend("tensorrt")
    assert candidates(BackendChoice.TENSORRT, CPU, [*chain, wanted]) == [wanted]


def test_what_cannot_run_is_passed_over(chain: list[Backend]) -> None:
    chain[0].unavailable = "it is broken"
    assert candidates(BackendChoice.COMPILED, CPU, chain) == [chain[1]]


def test_what_can_run_but_not_build_stays(chain: list[Backend]) -> None:
    """An engine may have been built before the compiler was removed."""
    chain[0].cannot_build = "no compiler"
    assert candidates(BackendChoice.AUTO, CPU, chain)[0] is chain[0]


def test_every_reason_is_given_where_nothing_works(chain: list[Backend]) -> None:
    chain[0].unavailable, chain[1].unavailable = "too old", "too new"
    with pytest.raises(BackendUnavailable, match="first: too old; second: too new"):
        candidates(BackendChoice.AUTO, CPU, chain)


def test_tensorrt_alone_says_what_to_choose_instead() -> None:
    with pytest.raises(BackendUnavailable, match="tensorrt: .*NVIDIA GPUs only.* To do without") as raised:
        candidates(BackendChoice.TENSORRT, CPU, default_backends())
    assert str(raised.value).count("choose backend auto or compiled") == 1


def test_switched_off_means_none(chain: list[Backend]) -> None:
    with pytest.raises(BackendUnavailable, match="^Acceleration is switched off, .* choose another backend"):
        candidates(BackendChoice.OFF, CPU, chain)


def test_what_is_chosen_already_is_not_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with a GPU that no TensorRT runs on."""
    told = "This GPU is too old"
    monkeypatch.setattr("slipstream.trt_backend.library._import", lambda name: None)
    monkeypatch.setattr("slipstream.trt_backend.backend.advice", lambda device: told)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (6, 1))
    broken = NullBackend("aotinductor")
    broken.unavailable = "it is broken"
    chain, gpu = [broken, TensorRTBackend()], torch.device("cuda", 0)
    with pytest.raises(BackendUnavailable, match=f"tensorrt: TensorRT is not installed. {told}$"):
        candidates(BackendChoice.AUTO, gpu, chain)
    with pytest.raises(BackendUnavailable, match=f"{told}. To do without TensorRT, choose backend auto or compiled$"):
        candidates(BackendChoice.TENSORRT, gpu, chain)


@pytest.mark.parametrize("kind", ["mps", "xpu", "meta"])
def test_other_devices_are_declined_with_their_name(kind: str) -> None:
    with pytest.raises(BackendUnavailable, match=f"aotinductor: .*not on {kind}; torch.compile: .*not on {kind}"):
        candidates(BackendChoice.COMPILED, torch.device(kind), default_backends())
