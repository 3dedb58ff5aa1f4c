"""A graph must never be replayed on weights that are gone. (What graphs compute is tested on a GPU.)"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slipstream.core.errors import IncompatibleEngine
from slipstream.core.shapes import ShapeProfile
from slipstream.runtime.loaded.cuda_graphs import GraphedEngine, _call_of


class Engine:
    """Says itself that it has no weights."""

    profile = ShapeProfile.static({"x": (1,)})
    device_bytes = 0
    generation = 1

    def __init__(self) -> None:
        self.broken = False

    def __call__(self, **tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        raise IncompatibleEngine("no weights")

    def update_weights(self, weights: dict[str, torch.Tensor], version: object = None) -> None:
        if self.broken:
            raise IncompatibleEngine("a weight is missing")

    def release_weights(self) -> None: ...

    def close(self) -> None: ...


class Graph:
    """As captured with weights that lay where the engine's generation says."""

    generation = 1

    bytes = 0

    def replay(self, tensors: dict[str, torch.Tensor], outside: object = None) -> dict[str, Any]:
        return {"out": "replayed"}

    def close(self) -> None: ...


@pytest.fixture
def captured() -> GraphedEngine:
    engine = GraphedEngine(Engine(), torch.device("cuda", 0))
    engine._graphs._graphs[_call_of({"x": torch.zeros(1)})] = Graph()  # type: ignore[assignment]
    engine.update_weights({})
    assert engine(x=torch.zeros(1)) == {"out": "replayed"}
    return engine


def test_released_weights(captured: GraphedEngine) -> None:
    captured.release_weights()
    with pytest.raises(IncompatibleEngine, match="no weights"):
        captured(x=torch.zeros(1))
    captured.update_weights({})
    assert captured(x=torch.zeros(1)) == {"out": "replayed"}


def test_weights_that_were_refused(captured: GraphedEngine) -> None:
    captured._engine.broken = True  # type: ignore[attr-defined]
    with pytest.raises(IncompatibleEngine, match="missing"):
        captured.update_weights({})
    with pytest.raises(IncompatibleEngine, match="no weights"):
        captured(x=torch.zeros(1))


def test_a_closed_engine(captured: GraphedEngine) -> None:
    captured.close()
    with pytest.raises(IncompatibleEngine):
        captured(x=torch.zeros(1))
