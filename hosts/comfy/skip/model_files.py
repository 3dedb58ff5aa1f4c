"""The files that a sampling run's model was made of, as far as ComfyUI tells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..process.running_prompts import running_prompts

_ENDINGS = (".safetensors", ".sft", ".ckpt", ".pt", ".pth", ".bin", ".gguf")
_LEADS = ("model", "lora", "guider", "pipe", "unet")
"""Of names of inputs through which a model comes to a sampler."""


def model_files(patcher: Any) -> list[str]:
    """Names of the checkpoint that `patcher` was loaded from, and of the files on the way to the node that samples now.

    Those of LoRAs are not in the model: their weights are, without a name.
    """
    loader = getattr(patcher, "cached_patcher_init", None)  # since ComfyUI 0.16
    loaded = [each for each in (loader and loader[1] or ()) if isinstance(each, str)]
    return [*loaded, *(name for prompt in running_prompts() for name in files_before(prompt.nodes, _sampling_node()))]


def files_before(nodes: Mapping[str, Any], node_id: str | None) -> Iterator[str]:
    """Files that are named in a node of a prompt, or in those that its model comes through."""
    seen, open_ids = set(), [] if node_id is None else [node_id]
    while open_ids:
        node = nodes.get(open_ids.pop())
        if not isinstance(node, Mapping) or id(node) in seen:
            continue
        seen.add(id(node))
        for name, value in node.get("inputs", {}).items():
            if isinstance(value, str) and value.lower().endswith(_ENDINGS):
                yield value
            elif isinstance(value, list) and value and any(part in name for part in _LEADS):
                open_ids.append(str(value[0]))


def _sampling_node() -> str | None:
    try:
        from comfy_execution.utils import get_executing_context
    except ImportError:
        return None
    context = get_executing_context()
    return None if context is None else str(context.node_id)
