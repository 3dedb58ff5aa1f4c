"""Which of the host's classes of layers a layer computes as, where another pack stores its weights in its own way."""

from __future__ import annotations

from itertools import takewhile

_DEQUANTISES = "GGMLLayer"
"""A base of the layers of packs that load GGUF: their weights are made anew at each call, by `cast_bias_weight` of the
layer itself; with them it computes what the host's layer does."""

_CALLS = "forward", "__call__"


def dequantises(kind: type) -> bool:
    """Whether layers of a class make their weights anew at each call, by a method of their own."""
    return any(base.__name__ == _DEQUANTISES for base in kind.__mro__)


def computing_class(kind: type) -> type:
    """The host's class that a class of layers computes as: itself, but where it only stores weights otherwise."""
    if not dequantises(kind):
        return kind
    found = next((base for base in kind.__mro__[1:] if base.__name__ == kind.__name__), kind)
    does_more = any(name in vars(base) for base in _before(found, kind) for name in _CALLS)
    return kind if does_more else found


def storing_classes(kind: type) -> list[type]:
    """Those of a class of layers and its bases by which it stores its weights otherwise than the host's."""
    return _before(computing_class(kind), kind)


def _before(base: type, kind: type) -> list[type]:
    return [*takewhile(lambda each: each is not base, kind.__mro__)]
