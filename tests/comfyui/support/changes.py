"""What other nodes do to a model: each takes a `ModelPatcher` and returns a changed clone."""

from __future__ import annotations

from typing import Any

Patcher = Any


def attention_override(patcher: Patcher) -> Patcher:
    clone = patcher.clone()
    clone.model_options["transformer_options"]["optimized_attention_override"] = lambda chosen, *args, **kwargs: (
        chosen(*args, **kwargs) * 0.5
    )
    return clone


def compiled_elsewhere(patcher: Patcher) -> Patcher:
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    clone = patcher.clone()
    set_torch_compile_wrapper(clone, backend="eager")
    return clone
