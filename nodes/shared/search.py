"""Words by which the page's search finds a node."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

FASTER = ["speed", "faster", "speed up", "optimize", "performance"]
ENGINES = [*FASTER, "tensorrt", "trt", "compile", "torch compile", "engine", "accelerate", "aot", "inductor"]
SKIPPING = [*FASTER, "skip steps", "fewer steps", "step cache", "teacache", "easycache", "deepcache"]
COMPARING = ["psnr", "ssim", "difference", "diff", "compare", "a/b", "before after", "slider"]


def found_by(words: list[str]) -> dict[str, Any]:
    """Arguments of a schema; none for older ComfyUIs, whose search knows names alone."""
    known = getattr(io.Schema, "__dataclass_fields__", {})
    return {"search_aliases": words} if "search_aliases" in known else {}
