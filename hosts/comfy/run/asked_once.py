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

_Steps = tuple[tuple[_Function, Sequence[Any]], ...]

_COPYING: frozenset[_Function] = frozenset((_T.cpu, _T.to))
_ASKING: frozenset[_Function] = _COPYING.union(
    (_T.item, _T.tolist, _T.__bool__, _T.__float__, _T.__int__, _T.__index__, _T.__format__)
)
"""What makes the host wait."""
_ON_THE_WAY: frozenset[_Function] = frozenset(
    (_T.detach, _T.__getitem__, _T.max, _T.min, _T.lt, _T.le, _T.gt, _T.ge, _T.eq, _T.ne)
)
"""What is computed before that, exactly alike on any device."""
_KNOWN = _ASKING | _ON_THE_WAY


class AskedOnce(torch.Tensor):
    """A tensor whose numbers the host waits for once, however often and in whatever way it asks.

    In all else it is the tensor that it was made of, whose memory it shares: other functions give what they give for
    that one, and the numbers are asked for anew behind them, since they may have been written to. While a CUDA graph
    is captured nothing is known, and asking fails as it does without this.
    """

    _tensor: torch.Tensor
    _numbers: _Numbers
    _steps: _Steps | None
    """What makes its numbers of those that are asked for; None: it was written to, maybe."""

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
        if not kwargs and function in _KNOWN and isinstance(first := args[0], cls) and first._steps is not None:
            others = args[1:]
            if function in _ASKING:
                if function is not _T.to or _is_cpu(*others):
                    return first._asked(function, others)
            elif not others or (len(others) == 1 and isinstance(others[0], (int, float))):
                steps = (*first._steps, (function, others))
                return cls._made(function(first._tensor, *others), first._numbers, steps)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*map(_as_it_was, args), **{name: _as_it_was(each) for name, each in (kwargs or {}).items()})

    def _asked(self, function: _Function, others: Sequence[Any]) -> Any:
        if is_capturing(self._tensor.device):
            return function(self._tensor, *others)
        found = self._numbers.found
        for step, further in self._steps or ():
            found = step(found, *further)
        return found.clone() if function in _COPYING else function(found, *others)


def _is_cpu(place: Any, *others: Any) -> bool:
    return not others and isinstance(place, str | torch.device) and torch.device(place).type == "cpu"


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
