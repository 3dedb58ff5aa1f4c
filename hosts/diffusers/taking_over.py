"""Getting between a pipeline and what it calls, for the length of a `with` block."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...core.errors import UnsupportedModel

Call = Callable[..., Any]
Instead = Callable[[Call, tuple[Any, ...], dict[str, Any]], Any]

_MARK = "slipstream_step_skip"


@contextmanager
def called_instead(owner: Any, name: str, instead: Instead) -> Iterator[None]:
    """Inside, a call of `owner.name` is a call of `instead`, which is given the original.

    A module stays where it is, with its type, its attributes and its `forward`, which offloading replaces as it likes.

    Raises:
        UnsupportedModel: two such blocks would lie within each other.
    """
    holder, place, original = owner, name, getattr(owner, name)
    if isinstance(original, torch.nn.Module):
        # Where `module.compile()` puts what is to be called: outside of hooks and of `forward`.
        holder, place = original, "_compiled_call_impl"
        original = vars(holder).get(place) or holder._call_impl
    if hasattr(original, _MARK):
        raise UnsupportedModel("Steps of this pipeline are skipped already. Leave one of the two blocks out.")
    with _held(holder, place, _wrapped(original, instead)):
        yield


@contextmanager
def _held(holder: Any, place: str, value: Any) -> Iterator[None]:
    """`value` as an attribute of its own; what somebody else puts there meanwhile stays."""
    before = {name: held for name, held in vars(holder).items() if name == place}
    object.__setattr__(holder, place, value)  # a compiled module's own would pass it on
    try:
        yield
    finally:
        if vars(holder).get(place) is value:
            del vars(holder)[place]
            vars(holder).update(before)


def _wrapped(original: Call, instead: Instead) -> Call:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return instead(original, args, kwargs)

    setattr(call, _MARK, True)
    return call


@contextmanager
def stepped_instead(scheduler: Any, instead: Instead) -> Iterator[None]:
    """Inside, a call of `scheduler.step` is a call of `instead`; copies of the scheduler are left alone."""
    kind = type(scheduler)

    @functools.wraps(kind.step)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        original = functools.partial(kind.step, self)
        return instead(original, args, kwargs) if self is scheduler else original(*args, **kwargs)

    # By its class: pipelines copy a scheduler with all that it holds, and a method that it held would be the first's.
    scheduler.__class__ = type(kind.__name__, (kind,), {"step": step, "__module__": kind.__module__})
    try:
        yield
    finally:
        scheduler.__class__ = kind
