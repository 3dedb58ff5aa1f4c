"""The inputs and weights of a plan, stored beside it in the artifact."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ..core.dtypes import dtype_name, dtype_named
from .surgery.weight_map import WeightMap, WeightSource

SIGNATURE = "signature.json"


@dataclass(frozen=True)
class PlanSignature:
    """What an engine has to know of its plan to call and refit it.

    Attributes:
        inputs: name -> dtype, in the order of the graph.
        weights: what the plan is refitted with; empty where the weights are baked in.
        baked: fingerprints of the weights that are baked in, by state-dict name; empty where they are not.
        weight_bytes: of all weights of the model.
        library: name and version of the TensorRT that made it.
        nodes: of the graph that was built, by which build times compare.
    """

    inputs: Mapping[str, torch.dtype]
    weights: WeightMap
    baked: Mapping[str, int]
    weight_bytes: int
    library: str
    nodes: int

    def save(self, directory: Path) -> None:
        data = {
            "inputs": {name: dtype_name(dtype) for name, dtype in self.inputs.items()},
            "weights": {name: source.to_json() for name, source in self.weights.items()},
            "baked": dict(self.baked),
            "weight_bytes": self.weight_bytes,
            "library": self.library,
            "nodes": self.nodes,
        }
        (directory / SIGNATURE).write_text(json.dumps(data), encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> PlanSignature:
        data = json.loads((directory / SIGNATURE).read_text(encoding="utf-8"))
        return cls(
            {name: dtype_named(dtype) for name, dtype in data["inputs"].items()},
            {name: WeightSource.from_json(source) for name, source in data["weights"].items()},
            data["baked"],
            data["weight_bytes"],
            data["library"],
            data["nodes"],
        )
