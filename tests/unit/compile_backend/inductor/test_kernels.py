"""Compiled code calls the attention kernel that is fastest on the chip."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend

from slipstream.compile_backend.inductor import kernels
from slipstream.compile_backend.inductor.kernels import fastest_attention


def order() -> list[int]:
    return torch._C._get_sdp_priority_order()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("capability", "leads"), [((9, 0), True), ((10, 0), True), ((8, 9), False), ((7, 5), False)])
def test_cudnn_leads_from_hopper_on(capability: tuple[int, int], leads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    before = order()
    with fastest_attention(torch.device("cuda", 0)):
        if leads:
            assert order()[0] == int(SDPBackend.CUDNN_ATTENTION)
        else:
            assert order() == before
    assert order() == before


def test_a_cpu_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_CUDNN_LEADS_FROM", (0, 0))
    before = order()
    with fastest_attention(torch.device("cpu")):
        assert order() == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_the_chips_fastest_is_chosen() -> None:
    device = torch.device("cuda", 0)
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("known for Hopper alone")
    query = torch.randn(2, 8, 1024, 64, device=device, dtype=torch.float16)
    with fastest_attention(device):
        assert torch._fused_sdp_choice(query, query, query) == int(SDPBackend.CUDNN_ATTENTION)
