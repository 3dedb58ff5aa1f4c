"""The step's sigmas, which other nodes ask the GPU for in each block, as numbers that the host waits for once.

IP-Adapter, InstantID, T-GATE and others compare the sigma with their first and last one wherever they compute. Each
time the host waits until the GPU has done all that it was given, and then the GPU waits for the host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ....core.streams import is_capturing

_SIGMAS = "sigmas"
"""In `transformer_options`."""

_Function = Callable[..., Any]
_T = torch.Tensor
_Steps = tuple[tuple[_Function, Sequence[Any]], ...]

_ASKING: frozenset[_Function] = frozenset(
    (_T.cpu, _T.item, _T.tolist, _T.__bool__, _T.__float__, _T.__int__, _T.__index__, _T.__format__)
)
"""What makes the host wait; and `to`, where it leads to the CPU."""
_WITH_A_NUMBER: frozenset[_Function] = frozenset((_T.__getitem__, _T.lt, _T.le, _T.gt, _T.ge, _T.eq, _T.ne))
_WITHOUT_NUMBER: frozenset[_Function] = frozenset((_T.detach, _T.max, _T.min))
"""What is computed on the way there, exactly alike on any device, with one number besides and with none."""
_OF_ITS_FORM: frozenset[_Function] = frozenset(
    getattr(_T, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cuda", "layout", "requires_grad")
) | {_T.dim, _T.size, _T.numel, _T.__len__, _T.is_floating_point, _T.element_size, _T.stride}
"""What nothing can be written by."""


class AskedOnce(torch.Tensor):
    """A tensor whose numbers the host waits for once, however often and in whatever way it asks.

    In all else it is the tensor that it was made of, whose memory it shares: other functions give what they give for
    that one, and behind them each question is the tensor's own again, since it may have been written to. So it is while
    a CUDA graph is captured, where asking fails.
    """

    _tensor: torch.Tensor
    _numbers: _Numbers
    _steps: _Steps
    """What makes its numbers of those that are asked for."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> AskedOnce:
        """Return one that stands for a tensor of any shape, dtype and device, until that is written to."""
        return cls._made(tensor, _Numbers(tensor), ())

    @classmethod
    def _made(cls, tensor: torch.Tensor, numbers: _Numbers, steps: _Steps) -> AskedOnce:
        made = tensor.as_subclass(cls)
        made._tensor, made._numbers, made._steps = tensor, numbers, steps
        return made

    @classmethod
    def __torch_function__(
        cls, function: _Function, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See torch's protocol for subclasses."""
        first, *others = args or (None,)
        if isinstance(first, cls) and not kwargs:
            if function in _OF_ITS_FORM:
                return function(first._tensor, *others)
            if first._numbers.are_known:
                if function in _ASKING or (function is _T.to and _are_the_cpu(others)):
                    return first._asked(function, others)
                if _is_on_the_way(function, others):
                    steps = (*first._steps, (function, others))
                    return cls._made(function(first._tensor, *others), first._numbers, steps)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*map(_as_it_was, args), **{name: _as_it_was(each) for name, each in (kwargs or {}).items()})

    def forget(self) -> None:
        """Have each question, of what was made of this one too, be that tensor's own from here on."""
        self._numbers.are_known = False

    def _asked(self, function: _Function, others: Sequence[Any]) -> Any:
        if is_capturing(self._tensor.device):
            return function(self._tensor, *others)
        found = self._numbers.found
        for step, further in self._steps:
            found = step(found, *further)
        return found.clone() if function in (_T.cpu, _T.to) else function(found, *others)


def _is_on_the_way(function: _Function, others: Sequence[Any]) -> bool:
    if function in _WITH_A_NUMBER:
        return len(others) == 1 and isinstance(others[0], (int, float))
    return function in _WITHOUT_NUMBER and not others


def _are_the_cpu(places: Sequence[Any]) -> bool:
    is_one = len(places) == 1 and isinstance(places[0], (str, torch.device))
    return is_one and torch.device(places[0]).type == "cpu"


def _as_it_was(given: Any) -> Any:
    """What a function is given that may write to it, or keep it."""
    if type(given) in (list, tuple) and any(isinstance(each, AskedOnce) for each in given):
        return type(given)(map(_as_it_was, given))
    if not isinstance(given, AskedOnce):
        return given
    given.forget()
    return given._tensor


class _Numbers:
    """Of a tensor, on the host.

    Attributes:
        are_known: whether they may be asked for here.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.are_known = True
        self._tensor = tensor

    @functools.cached_property
    def found(self) -> torch.Tensor:
        """A copy, for which the host waits for the GPU."""
        return self._tensor.to("cpu", copy=True)


@contextmanager
def sigmas_asked_once(options: dict[str, Any]) -> Iterator[None]:
    """Meanwhile a call's sigmas, in its `transformer_options`, are `AskedOnce` where they lie on a GPU."""
    sigmas = options.get(_SIGMAS)
    if type(sigmas) is not torch.Tensor or not is_waited_for(sigmas.device):
        yield
        return
    standing = options[_SIGMAS] = AskedOnce.of(sigmas)
    try:
        yield
    finally:
        standing.forget()
        if options.get(_SIGMAS) is standing:
            options[_SIGMAS] = sigmas


def is_waited_for(device: torch.device) -> bool:
    """Whether the host waits for numbers that lie on a device."""
    return device.type != "cpu"
