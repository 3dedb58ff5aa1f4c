"""ComfyUI's SageAttention for one variant: the function that `--use-sage-attention` chooses, by a call's own option."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

PACKAGE = "sageattention"


def why_not(device: torch.device) -> str | None:
    """Why it cannot be switched on here; None where it can."""
    if device.type != "cuda":
        return "SageAttention computes on CUDA GPUs"
    if importlib.util.find_spec(PACKAGE) is None:
        return f"{PACKAGE} is not installed"
    if _attention() is None:
        return f"this ComfyUI does not take the {PACKAGE} that is installed"
    return None


def _attention() -> Any:
    from comfy.ldm.modules import attention

    find = getattr(attention, "get_attention_function", None)
    return None if find is None else find("sage", default=None)


def override(chosen: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """For ComfyUI's `transformer_options`: instead of the attention that it chose."""
    found: torch.Tensor = _attention()(*args, **kwargs)
    return found


@contextmanager
def counted() -> Iterator[list[bool]]:
    """One entry for each time that the package is asked: whether it answered. Where it fails, ComfyUI has torch's
    attention answer, and only its log tells."""
    from comfy.ldm.modules import attention

    answers: list[bool] = []
    asked = attention.sageattn

    def ask(*args: Any, **kwargs: Any) -> Any:
        answers.append(False)
        found = asked(*args, **kwargs)
        answers[-1] = True
        return found

    attention.sageattn = ask
    try:
        yield answers
    finally:
        attention.sageattn = asked
