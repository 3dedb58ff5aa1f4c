"""Attention as a call out of a package: whoever calls the package computes it, in the midst of it.

The package has an operator of ours where the block calls its attention. It hands over the tensors of that call, in
their places among its other arguments. Nothing is raised through compiled code: what fails in such a call is raised
once the package has returned.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import lru_cache, partial
from typing import Any

import torch

from ...core.errors import UnsupportedModel
from ...core.protocols import HandOut
from .call_form import Form, put_together, taken_apart

Attention = Callable[..., Any]
"""Given the arguments that the block gives its attention, what that gives."""

_NAMESPACE, _NAME = "slipstream", "attention_out"
_SCHEMA = f"{_NAME}(Tensor[] tensors, SymInt[] shape, str call) -> Tensor"

_CALLER = "_slipstream_attention_out"
"""Of a thread: who computes attention there. It lies at the thread, where another copy of this pack, whose operator the
process may have, finds it too."""


class AttentionFailed(Exception):
    """Raised in the place of what was raised where attention was computed.

    Attributes:
        error: what that was; an `UnsupportedModel` where the result is none that the package can go on with.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class _Caller:
    def __init__(self, compute: HandOut) -> None:
        self.compute = compute
        self.error: BaseException | None = None


def attention_by(attention: Attention) -> AbstractContextManager[None]:
    """Meanwhile `attention` computes the attention of packages that this thread calls.

    Raises:
        AttentionFailed: it raised something, or gave what a package cannot go on with; it was not called again.
    """
    return handed_out_to(partial(attended, attention))


def attended(attention: Attention, tensors: Sequence[torch.Tensor], shape: torch.Size, call: str) -> torch.Tensor:
    """What `attention` gives where a package has handed its call out.

    Raises:
        AttentionFailed: see `attention_by`.
    """
    try:
        arguments = put_together(_form_of(call), tensors)
        args = [arguments.pop(str(place)) for place in range(sum(name.isdigit() for name in arguments))]
        return _fitting(attention(*args, **arguments), tensors, shape)
    except BaseException as error:
        raise AttentionFailed(error) from error


@contextmanager
def handed_out_to(compute: HandOut) -> Iterator[None]:
    """The same, with a function that is given calls of attention as packages have them.

    Raises:
        BaseException: what it raised; it was not called again.
    """
    here = vars(threading.current_thread())
    outer, caller = here.get(_CALLER), _Caller(compute)
    here[_CALLER] = caller
    try:
        yield
    finally:
        here[_CALLER] = outer
    if caller.error is not None:
        raise caller.error


def call_out(shape: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """To be traced in the place of a call of attention, whose first argument, given by place, is a tensor.

    Args:
        shape: of the result, which is contiguous and of the first argument's dtype; its sizes may be open.
        args, kwargs: of the call: tensors, numbers, texts and dtypes.

    Raises:
        UnsupportedModel: another kind of value is among the arguments.
    """
    places = {str(place): value for place, value in enumerate(args)}
    try:
        form, tensors = taken_apart({**places, **kwargs})
    except TypeError as error:
        raise UnsupportedModel(f"attention is called in a way that cannot be called out: {error}") from error
    operator = getattr(torch.ops.slipstream, _NAME)
    result: torch.Tensor = operator(tensors, [*shape], json.dumps(form))
    return result


@lru_cache(maxsize=1024)
def _form_of(call: str) -> Form:
    form: Form = json.loads(call)
    return form


def _computed(tensors: Sequence[torch.Tensor], shape: Sequence[int], call: str) -> torch.Tensor:
    """The operator, on any device."""
    wanted = tensors[0]
    caller = vars(threading.current_thread()).get(_CALLER)
    if caller is None:
        raise RuntimeError("A package whose attention is called out was called without attention_by()")
    if caller.error is None:
        try:
            found: torch.Tensor = caller.compute(tensors, torch.Size(shape), call)
            return found
        except BaseException as error:
            caller.error = error
    return torch.zeros(
        shape, dtype=wanted.dtype, device=wanted.device
    )  # the package runs to its end, and what it gives is thrown away


def _fitting(found: Any, tensors: Sequence[torch.Tensor], shape: torch.Size) -> torch.Tensor:
    """A result as compiled code expects it: contiguous, and in memory of its own.

    Raises:
        UnsupportedModel: it is another kind of tensor than the attention of ComfyUI gives.
    """
    wanted = tensors[0]
    if type(found) is not torch.Tensor:
        raise UnsupportedModel(f"another node's attention gives {type(found).__name__}, not a plain tensor")
    if (found.shape, found.dtype, found.device) != (shape, wanted.dtype, wanted.device):
        raise UnsupportedModel(
            f"another node's attention gives {[*found.shape]} in {found.dtype}, not {[*shape]} in {wanted.dtype}"
        )
    result: torch.Tensor = found.contiguous()
    taken = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    return result.clone() if result.untyped_storage().data_ptr() in taken else result


def _as_meta(tensors: Sequence[torch.Tensor], shape: Sequence[Any], call: str) -> torch.Tensor:
    return torch.empty(shape, dtype=tensors[0].dtype, device=tensors[0].device)


def calls_attention_out(program: torch.export.ExportedProgram) -> bool:
    """Whether a traced program has attention that is called out."""
    operator = getattr(torch.ops.slipstream, _NAME).default
    return any(node.target is operator for node in program.graph.nodes)


_AS_TRACED: Any = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)  # older ones lack it
_library = torch.library.Library(_NAMESPACE, "FRAGMENT")
with suppress(RuntimeError):  # another copy of this pack in the process has brought it
    _library.define(_SCHEMA, tags=(_AS_TRACED,))
    _library.impl(_NAME, _computed, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_NAMESPACE}::{_NAME}", _as_meta, lib=_library)
