"""What ControlNets and T2I adapters add inside of a diffusion model, as inputs of an engine.

ComfyUI hands over `{"input": [...], "middle": [...], "output": [...]}`; each class of models takes from its lists in an
order of its own, and an entry may be None. A residual's name holds its place and the length of its list, so that the
very lists can be made again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from ..core.protocols import Tensors

Control = dict[str, list[Any]]

_KINDS = ("input", "middle", "output")
_NAME = re.compile(r"control_(\w+)_(\d+)_of_(\d+)")


def kinds_of(control: Mapping[str, Any] | None) -> set[str]:
    """Which kinds a ControlNet gives, without reading the tensors, which may not be computed yet."""
    lists = {kind: entries for kind, entries in (control or {}).items() if isinstance(entries, (list, tuple))}
    return {kind for kind, entries in lists.items() if any(tensor is not None for tensor in entries)}


def residuals_of(control: Mapping[str, Any] | None, x: torch.Tensor) -> Tensors | str:
    """The residuals of a call by name, or why engines cannot take them.

    Args:
        x: the call's latents [N, ...]; residuals of one sample are meant for all, and all are wanted in its dtype.
    """
    found: Tensors = {}
    made: dict[int, torch.Tensor] = {}  # ComfyUI's lists hold the same residual for several blocks
    for kind, entries in (control or {}).items():
        if kind not in _KINDS or not isinstance(entries, (list, tuple)):
            return f"the ControlNet gives {kind!r}, which engines do not take"
        for place, tensor in enumerate(entries):
            if tensor is None:
                continue
            if not torch.is_tensor(tensor) or tensor.shape[0] not in (1, x.shape[0]):
                return "the ControlNet gives residuals of another form than this model's batch"
            if id(tensor) not in made:
                made[id(tensor)] = tensor.expand(x.shape[0], *tensor.shape[1:]).to(x.dtype)
            found[f"control_{kind}_{place}_of_{len(entries)}"] = made[id(tensor)]
    return found


def control_of(inputs: Tensors) -> tuple[Control | None, Tensors]:
    """The inverse of `residuals_of`: fresh lists, None without residuals; and the other inputs."""
    control: Control = {kind: [] for kind in _KINDS}
    rest: Tensors = {}
    for name, tensor in inputs.items():
        if (match := _NAME.fullmatch(name)) is None:
            rest[name] = tensor
            continue
        entries = control[match[1]]
        entries += [None] * (int(match[3]) - len(entries))
        entries[int(match[2])] = tensor
    return (control if len(rest) < len(inputs) else None), rest
