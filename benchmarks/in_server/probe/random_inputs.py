"""Random prompts, texts, latents and hints, so that pictures need no text encoder, and nothing needs a picture."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from comfy_api.latest import io

_CATEGORY = "slipstream/benchmark"
_SHAPES = 12
_WORDS = (
    "the", "house", "tree", "river", "light", "dark", "red", "blue", "green", "old", "young", "small", "large", "stone",
    "water", "sky", "city", "forest", "mountain", "garden", "street", "window", "morning", "night", "summer", "winter",
)  # fmt: skip
"""Each is one token of T5's."""


def schema(name: str, title: str, output: io.Output, *whole_numbers: str, links: Sequence[io.Input] = ()) -> io.Schema:
    """Return what describes a node with one output, whose inputs are links and whole numbers."""
    inputs = [io.Int.Input(each, default=0, min=0, max=1 << 31) for each in whole_numbers]
    return io.Schema(
        node_id=f"SlipstreamBenchmark{name}",
        display_name=f"{title} (benchmark)",
        category=_CATEGORY,
        inputs=[*links, *inputs],
        outputs=[output],
    )


class RandomPrompt(io.ComfyNode):  # type: ignore[misc]
    """A conditioning of a text encoder's shape, drawn from a seed."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Describe the node; another `nonce` makes ComfyUI sample again with the same prompt."""
        return schema("Prompt", "Random Prompt", io.Conditioning.Output(), "seed", "nonce", "tokens", "width", "pooled")

    @classmethod
    def execute(cls, seed: int, nonce: int, tokens: int, width: int, pooled: int) -> io.NodeOutput:
        """Return a text [1, tokens, width], with a pooled text [1, pooled] where `pooled` is not 0."""
        generator = torch.Generator().manual_seed(seed)
        text = torch.randn(1, tokens, width, generator=generator)
        extra = {"pooled_output": torch.randn(1, pooled, generator=generator)} if pooled else {}
        return io.NodeOutput([[text, extra]])


class RandomText(io.ComfyNode):  # type: ignore[misc]
    """A text for a text encoder that is timed by itself, drawn from a seed."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Describe the node; another `nonce` makes ComfyUI encode the same text again."""
        return schema("Text", "Random Text", io.String.Output(), "seed", "nonce", "tokens")

    @classmethod
    def execute(cls, seed: int, nonce: int, tokens: int) -> io.NodeOutput:
        """Return a text of so many tokens, the one that ends it included."""
        return io.NodeOutput(" ".join(random.Random(seed).choices(_WORDS, k=tokens - 1)))


class RandomLatent(io.ComfyNode):  # type: ignore[misc]
    """A latent of random numbers, for a decoder that is timed by itself."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Describe the node; another `nonce` makes ComfyUI decode the same latent again."""
        return schema("Latent", "Random Latent", io.Latent.Output(), "seed", "nonce", "size", "batch", "channels")

    @classmethod
    def execute(cls, seed: int, nonce: int, size: int, batch: int, channels: int) -> io.NodeOutput:
        """Return a latent [batch, channels, size / 8, size / 8] of standard normal numbers."""
        generator = torch.Generator().manual_seed(seed)
        return io.NodeOutput({"samples": torch.randn(batch, channels, size // 8, size // 8, generator=generator)})


class RandomEmbedding(io.ComfyNode):  # type: ignore[misc]
    """A picture's embedding as IP-Adapters take it, drawn from a seed."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Describe the node."""
        return schema("Embedding", "Random Embedding", io.Custom("EMBEDS").Output(), "seed")

    @classmethod
    def execute(cls, seed: int) -> io.NodeOutput:
        """Return an embedding [1, 1024]."""
        return io.NodeOutput(torch.randn(1, 1024, generator=torch.Generator().manual_seed(seed)))


class Edges(io.ComfyNode):  # type: ignore[misc]
    """A picture of edges, white on black, for ControlNets."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Describe the node."""
        return schema("Edges", "Edges", io.Image.Output(), "size")

    @classmethod
    def execute(cls, size: int) -> io.NodeOutput:
        """Return a picture [1, size, size, 3] of rectangles, always the same for a size."""
        generator = torch.Generator().manual_seed(0)
        picture = torch.zeros(1, size, size, 3)
        for _ in range(_SHAPES):
            left, top, right, bottom = (torch.rand(4, generator=generator) * size).long().tolist()
            (left, right), (top, bottom) = sorted((left, right)), sorted((top, bottom))
            picture[:, top : bottom + 1, [left, right]] = 1
            picture[:, [top, bottom], left : right + 1] = 1
        return io.NodeOutput(picture)


class Blank(io.ComfyNode):  # type: ignore[misc]
    """A picture of nothing, to be saved where none is decoded: what is saved says who computed what it needs."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Describe the node, which runs behind the one that encodes a text or samples."""
        return schema("Blank", "Blank", io.Image.Output(), links=[io.AnyType.Input("behind")])

    @classmethod
    def execute(cls, behind: object) -> io.NodeOutput:
        """Return a picture [1, 8, 8, 3]."""
        return io.NodeOutput(torch.zeros(1, 8, 8, 3))
