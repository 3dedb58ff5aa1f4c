"""Prompts for ComfyUI's API, written as Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Output:
    """One output of a node, to be given to another node's input."""

    node: str
    index: int


@dataclass(frozen=True)
class Node:
    """A node of a graph; given as an input it stands for its first output."""

    id: str

    def out(self, index: int) -> Output:
        """Return an output by its place."""
        return Output(self.id, index)


class Graph:
    """A prompt that grows node by node."""

    def __init__(self) -> None:
        self.prompt: dict[str, dict[str, Any]] = {}

    def add(self, class_type: str, **inputs: Any) -> Node:
        """Add a node; its inputs are plain values, nodes (their first output) or outputs."""
        node = Node(str(len(self.prompt) + 1))
        self.prompt[node.id] = {
            "class_type": class_type,
            "inputs": {name: _reference(value) for name, value in inputs.items()},
        }
        return node

    def conditioning(self, seed: int = 1, tokens: int = 77, dim: int = 768, pooled: int = 0) -> Node:
        """Add a random prompt of a text encoder's shape; `pooled` is 1280 for SDXL, else 0."""
        return self.add("SlipstreamTestConditioning", seed=seed, tokens=tokens, dim=dim, pooled=pooled)

    def sample(
        self,
        model: Node | Output,
        *,
        dim: int = 768,
        pooled: int = 0,
        size: int = 64,
        batch: int = 1,
        positive: Node | Output | None = None,
        negative: Node | Output | None = None,
        latent: Node | Output | None = None,
        **sampler: Any,
    ) -> Node:
        """Add a KSampler with random prompts and an empty latent of `size` pixels, unless these are given."""
        settings: dict[str, Any] = {
            "seed": 7, "steps": 3, "cfg": 7.0, "sampler_name": "euler", "scheduler": "normal", "denoise": 1.0,
        }  # fmt: skip
        return self.add(
            "KSampler",
            model=model,
            positive=positive or self.conditioning(1, dim=dim, pooled=pooled),
            negative=negative or self.conditioning(2, dim=dim, pooled=pooled),
            latent_image=latent or self.add("EmptyLatentImage", width=size, height=size, batch_size=batch),
            **(settings | sampler),
        )

    def save(self, samples: Node | Output, vae: Node | Output | None = None) -> None:
        """Save a sampler's result: its latent in full precision and, where a VAE is given, the picture."""
        self.add("SaveLatent", samples=samples, filename_prefix="latent")
        if vae is not None:
            self.add("SaveImage", images=self.add("VAEDecode", samples=samples, vae=vae), filename_prefix="image")


def _reference(value: Any) -> Any:
    if isinstance(value, Node):
        return [value.id, 0]
    if isinstance(value, Output):
        return [value.node, value.index]
    return value
