"""The step's sigmas, which other nodes ask the GPU for in each block, as numbers that the host waits for once.

IP-Adapter, InstantID, T-GATE and others compare the sigma with their first and last one wherever they compute. Each
time the host waits until the GPU has done all that it was given, and then the GPU waits for the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ....core.streams import is_capturing

_SIGMAS = "sigmas"
"""In `transformer_options`."""

_Function = Callable[..., Any]
_T = torch.Tensor

_ASKING: frozenset[_Function] = frozenset(
    (_T.cpu, _T.item, _T.tolist, _T.__bool__, _T.__float__, _T.__int__, _T.__index__, _T.__format__)
)
"""What makes the host wait."""
_ON_THE_WAY: frozenset[_Function] = frozenset(
    (_T.detach, _T.__getitem__, _T.max, _T.min, _T.lt, _T.le, _T.gt, _T.ge, _T.eq, _T.ne)
)
"""What is computed before that, exactly alike on any device."""


class AskedOnce(torch.Tensor):
    """A tensor whose numbers the host waits for once, however often and in whatever way it asks.

    In all else it is the tensor that it was made of, whose memory it shares: other functions give what they give for
    that one, and the numbers are asked for anew behind them, since they may have been written to. While a CUDA graph
    is captured nothing is known, and asking fails as it does without this.
    """

    _tensor: torch.Tensor
    _numbers: _Numbers
    _steps: tuple[tuple[_Function, Sequence[Any]], ...] | None
    """What makes its numbers of those that are asked for; None: it was written to, maybe."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> AskedOnce:
        """Return one that stands for a tensor of any shape, dtype and device, until that is written to."""
        return cls._made(tensor, _Numbers(tensor), ())

    @classmethod
    def _made(cls, tensor: torch.Tensor, numbers: _Numbers, steps: tuple[tuple[_Function, Sequence[Any]], ...]) -> Any:
        made = tensor.as_subclass(cls)
        made._tensor, made._numbers, made._steps = tensor, numbers, steps
        return made

    @classmethod
    def __torch_function__(
        cls, function: _Function, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See torch's protocol for subclasses."""
        first, *others = args or (None,)
        if isinstance(first, cls) and first._steps is not None and not kwargs and _are_known(function, others):
            if function in _ON_THE_WAY:
                found = function(first._tensor, *others)
                return cls._made(found, first._numbers, (*first._steps, (function, others)))
            return first._asked(function, others)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*map(_as_it_was, args), **{name: _as_it_was(each) for name, each in (kwargs or {}).items()})

    def _asked(self, function: _Function, others: Sequence[Any]) -> Any:
        if is_capturing(self._tensor.device):
            return function(self._tensor, *others)
        found = self._numbers.found
        for step, further in self._steps or ():
            found = step(found, *further)
        return found.clone() if function in (_T.cpu, _T.to) else function(found, *others)


def _are_known(function: _Function, others: Sequence[Any]) -> bool:
    if function is _T.to:
        return len(others) == 1 and isinstance(others[0], str | torch.device) and torch.device(others[0]).type == "cpu"
    return function in _ASKING or (function in _ON_THE_WAY and all(isinstance(each, int | float) for each in others))


def _as_it_was(given: Any) -> Any:
    """What a function is given that may write to it, or keep it."""
    if isinstance(given, list | tuple) and any(isinstance(each, AskedOnce) for each in given):
        return type(given)(map(_as_it_was, given))
    if not isinstance(given, AskedOnce):
        return given
    given._numbers.forget()
    if given._steps:
        given._steps = None
    return given._tensor


class _Numbers:
    """Of a tensor, on the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._found: torch.Tensor | None = None

    @property
    def found(self) -> torch.Tensor:
        """A copy; for this the host waits for the GPU, if it has not yet."""
        if self._found is None:
            self._found = self._tensor.to("cpu", copy=True)
        return self._found

    def forget(self) -> None:
        """Ask anew."""
        self._found = None


@contextmanager
def sigmas_asked_once(options: dict[str, Any]) -> Iterator[None]:
    """Meanwhile the sigmas of one call of a model, in its `transformer_options`, are `AskedOnce`."""
    sigmas = options.get(_SIGMAS)
    if type(sigmas) is not torch.Tensor:
        yield
        return
    standing = options[_SIGMAS] = AskedOnce.of(sigmas)
    try:
        yield
    finally:
        if options.get(_SIGMAS) is standing:
            options[_SIGMAS] = sigmas
