"""ComfyUI may capture single layers in the midst of a network's call, as it does where a text encoder writes a text."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from slipstream.hosts.comfy.block_calls import block_calls
from slipstream.runtime.provider import EngineProvider
from slipstream.tests.comfyui.blocks.test_block_calls import accelerated, patched, share_of
from slipstream.tests.comfyui.blocks.test_graphed_network import HostGraphs, graphs  # noqa: F401
from slipstream.tests.comfyui.support.models import tiny
from slipstream.tests.tensors import distance

STEPS = 9


class Captures:
    """Those that begin in the midst of a network's calls.

    Attributes:
        after: so many calls of the network.
    """

    def __init__(self) -> None:
        self.after = 0
        self._calls = 0

    def begin(self, after: int) -> None:
        self.after, self._calls = after, 0

    def __call__(self, device: torch.device) -> bool:
        is_outside = sys._getframe(1).f_code.co_name == "_why_not"
        self._calls += is_outside
        return not is_outside and self._calls > self.after


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Captures:
    made = Captures()
    monkeypatch.setattr(block_calls, "is_capturing", made)
    return made


def test_nothing_is_asked_for_or_compared_in_them(shared_provider: EngineProvider, captures: Captures) -> None:
    model = tiny.model()
    fast, module = accelerated(shared_provider, model)
    before = shared_provider.blocks.backend.calls
    wanted = tiny.sample(model, steps=STEPS)
    assert distance(tiny.sample(fast, steps=STEPS), wanted) < 1e-5
    assert shared_provider.blocks.backend.calls == before and module.status.block_calls == 0
    assert "being captured" in str(module.status.to_json())


@pytest.mark.parametrize("graphs_may_be_had", [False, True])
def test_engines_that_served_before_compute_in_them_and_have_no_graphs(
    graphs_may_be_had: bool, shared_provider: EngineProvider, captures: Captures, request: pytest.FixtureRequest
) -> None:
    made: HostGraphs | None = request.getfixturevalue("graphs") if graphs_may_be_had else None
    model = tiny.model()
    fast, module = accelerated(shared_provider, model)

    def sampled(patcher: Any, after: int) -> torch.Tensor:
        captures.begin(after)
        return tiny.sample(patched(patcher, "skips"), steps=STEPS)

    wanted = sampled(model, 99)
    for _ in range(3):
        sampled(fast, 99)
    replays, calls = made.parts.replays if made else 0, shared_provider.blocks.backend.calls
    assert distance(sampled(fast, 4), wanted) < 1e-5
    on_engines, total = share_of(module)
    # What lay in a group's graph before was not called by itself in this picture: it computes itself.
    assert on_engines == total if made is None else 0 < on_engines < total
    assert shared_provider.blocks.backend.calls - calls >= (STEPS - 4) * on_engines
    if made is not None:
        assert 0 < made.parts.replays - replays < STEPS * total / 2
