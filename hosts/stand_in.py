"""A network whose calls are led elsewhere while its host goes on seeing it where it was.

The network's own modules stay where they are: LoRA, offloading and saving keep working, whatever happens.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Plain = Callable[..., torch.Tensor]
Compute = Callable[[Any, Plain, tuple[Any, ...], dict[str, Any]], torch.Tensor]
"""Given the module that is called, a way to call it as it is, and the call's arguments."""

_NAME = "diffusion_model"


def undisturbed(plain: Plain, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """What `plain` gives for copies of the dicts and lists in its arguments: models take a ControlNet's from them."""
    return plain(*copied(list(args)), **copied(kwargs))


def copied(value: Any, with_tensors: bool = False) -> Any:
    """Return copies of nested dicts and lists, and of the tensors in them if asked; everything else as it is."""
    if isinstance(value, dict):
        return {name: copied(entry, with_tensors) for name, entry in value.items()}
    if isinstance(value, list):
        return [copied(entry, with_tensors) for entry in value]
    return _copy_of(value) if with_tensors and isinstance(value, torch.Tensor) else value


def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A plain one on the CPU is copied in this thread: to wake torch's others can take as long as half a step."""
    if not _is_plain(tensor):
        return tensor.clone()
    copy = torch.empty_like(tensor)
    ctypes.memmove(copy.data_ptr(), tensor.data_ptr(), tensor.nbytes)
    return copy


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its values are the bytes that lie at its address, one after another."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return False
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg() or tensor.requires_grad)


@contextmanager
def stand_in(model: torch.nn.Module, compute: Compute) -> Iterator[None]:
    """Let `model.diffusion_model` be a stand-in: an attribute of the instance, which hides the submodule.

    While the stand-in is called, the submodule is back: whoever looks meanwhile, at its weights say, finds it.
    """
    module: Any = model.diffusion_model
    attributes = vars(model)

    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        del attributes[_NAME]
        try:
            return compute(module, module, args, kwargs)
        finally:
            attributes[_NAME] = standing

    standing = _StandIn(module, call)
    attributes[_NAME] = standing
    try:
        yield
    finally:
        del attributes[_NAME]


class _StandIn:
    """A module whose calls are led elsewhere; in all else it is the module."""

    def __init__(self, module: Any, call: Plain) -> None:
        self._module = module
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
