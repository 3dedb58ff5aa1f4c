"""Nodes that only the tests use, because no text encoder is small enough to be made for them."""

from __future__ import annotations

import os
import time
from typing import Any

import comfy.model_management
import torch

from .failures import allow_failures
from .quick_builds import use_quick_builds


class Conditioning:
    """A random prompt with the shapes that a text encoder would give."""

    CATEGORY = "slipstream/testing"
    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "encode"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """Declare the node's inputs."""
        number = {"default": 0, "min": 0, "max": 1 << 31}
        return {
            "required": {
                "seed": ("INT", number),
                "tokens": ("INT", {**number, "default": 77, "min": 1}),
                "dim": ("INT", {**number, "default": 768, "min": 1}),
                "pooled": ("INT", number),
            }
        }

    def encode(self, seed: int, tokens: int, dim: int, pooled: int) -> tuple[list[Any]]:
        """Draw the prompt from the seed."""
        generator = torch.Generator().manual_seed(seed)
        extras = {"pooled_output": torch.randn(1, pooled, generator=generator) if pooled else None}
        return ([[torch.randn(1, tokens, dim, generator=generator), extras]],)


class Sleep:
    """Keeps ComfyUI's queue busy for a while; can be interrupted."""

    CATEGORY = "slipstream/testing"
    RETURN_TYPES = ()
    FUNCTION = "sleep"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """Declare the node's inputs."""
        return {"required": {"seconds": ("FLOAT", {"default": 1.0, "min": 0.0, "max": 600.0})}}

    @classmethod
    def IS_CHANGED(cls, seconds: float) -> float:
        """Run every time."""
        return time.monotonic()

    def sleep(self, seconds: float) -> tuple[()]:
        """Wait, looking for an interrupt."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            comfy.model_management.throw_exception_if_processing_interrupted()
            time.sleep(0.02)
        return ()


NODE_CLASS_MAPPINGS = {"SlipstreamTestConditioning": Conditioning, "SlipstreamTestSleep": Sleep}

allow_failures()
if _seconds := os.environ.get("SLIPSTREAM_TEST_BUILD_SECONDS"):
    use_quick_builds(float(_seconds))
