"""A call's arguments taken apart: its tensors, and the form, which is everything else about them.

Two calls of equal form differ in the values and shapes of their tensors alone. A form is hashable, and made of tuples,
texts and numbers alone, so that it can be written into a build job.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ...core.dtypes import dtype_name, dtype_named

TENSOR = "tensor"
_VALUE, _LIST, _TUPLE, _DATA = "value", "list", "tuple", "data"
_DTYPE = "dtype"
_PLAIN = frozenset((type(None), bool, int, float, str))
_HOST = "comfy."
"""Where data classes may come from: a job's file can name no others."""

Form = tuple[tuple[str, Any], ...]
"""Name of an argument → how its value is made of tensors; in the order of names."""


def taken_apart(arguments: Mapping[str, Any]) -> tuple[Form, list[torch.Tensor]]:
    """The form of a call, and its tensors in the form's order.

    Raises:
        TypeError: an argument is made of anything but tensors, numbers, texts, dtypes, lists, tuples and ComfyUI's data
            classes of these.
    """
    tensors: list[torch.Tensor] = []
    return tuple((name, _form_of(arguments[name], tensors)) for name in sorted(arguments)), tensors


def put_together(form: Form, tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
    """The inverse of `taken_apart`.

    Raises:
        TypeError: the form names something else than a data class of ComfyUI's.
        ImportError, AttributeError: ComfyUI has no such class here.
    """
    left = iter(tensors)
    return {name: _value_of(node, left) for name, node in form}


def tensor_names(form: Form) -> list[str]:
    """A name for each tensor of a form, such as "vec.0.shift", in the form's order."""
    return [name for argument, node in form for name in _names_in(node, argument)]


def say_form(form: Form) -> str:
    """A text that is equal for equal forms, in any process."""
    return ", ".join(f"{name}={_say(node)}" for name, node in form)


def _form_of(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return TENSOR
    kind = type(value)
    if kind in _PLAIN:
        return _VALUE, kind.__name__, value  # with its type, since 1 equals True
    if kind is torch.dtype:
        return _DTYPE, dtype_name(value)
    if kind in (list, tuple):
        return _LIST if kind is list else _TUPLE, tuple(_form_of(each, tensors) for each in value)
    if dataclasses.is_dataclass(kind) and kind.__module__.startswith(_HOST) and "<" not in kind.__qualname__:
        names = [field.name for field in dataclasses.fields(kind)]
        return (
            _DATA,
            f"{kind.__module__}:{kind.__qualname__}",
            tuple((name, _form_of(getattr(value, name), tensors)) for name in names),
        )
    raise TypeError(f"a {kind.__name__} is among the arguments")


def _value_of(node: Any, left: Iterator[torch.Tensor]) -> Any:
    if node == TENSOR:
        return next(left)
    kind, *rest = node
    if kind == _VALUE:
        return rest[1]
    if kind == _DTYPE:
        return dtype_named(rest[0])
    if kind == _DATA:
        return _data_class(rest[0])(**{name: _value_of(each, left) for name, each in rest[1]})
    found = [_value_of(each, left) for each in rest[0]]
    return found if kind == _LIST else tuple(found)


def _data_class(name: str) -> type[Any]:
    module, _, inner = name.partition(":")
    found: Any = None
    if module.startswith(_HOST):
        found = functools.reduce(getattr, inner.split("."), importlib.import_module(module))
    if not isinstance(found, type) or not dataclasses.is_dataclass(found) or found.__module__ != module:
        raise TypeError(f"{name!r} is no data class that a block may be called with")
    return found


def _names_in(node: Any, name: str) -> Iterator[str]:
    if node == TENSOR:
        yield name
    elif node[0] in (_LIST, _TUPLE):
        for place, each in enumerate(node[1]):
            yield from _names_in(each, f"{name}.{place}")
    elif node[0] == _DATA:
        for own, each in node[2]:
            yield from _names_in(each, f"{name}.{own}")


def _say(node: Any) -> str:
    if node == TENSOR:
        return TENSOR
    if node[0] == _VALUE:
        return repr(node[2])
    if node[0] == _DTYPE:
        return f"torch.{node[1]}"
    if node[0] == _DATA:
        own = ", ".join(f"{name}={_say(each)}" for name, each in node[2])
        return f"{node[1]}({own})"
    return f"{node[0]}({', '.join(map(_say, node[1]))})"
