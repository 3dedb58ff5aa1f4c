"""Attention that a traced block calls out, and what its caller makes of it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from slipstream.compile_backend.blocks.attention_out import (
    AttentionFailed,
    attention_by,
    call_out,
    calls_attention_out,
)
from slipstream.compile_backend.rewrites.traced_module import module_of
from slipstream.core.errors import UnsupportedModel

HEADS = 4


class Block(torch.nn.Module):
    """Calls attention twice: with a mask by name, and with one by place."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = torch.cat([x, 2 * x, 3 * x], -1).chunk(3, -1)
        shape = [x.shape[0], x.shape[1], x.shape[2]]
        first = call_out(shape, (q, k, v, HEADS), {"attn_precision": torch.float32, "mask": mask, "scale": 0.5})
        return x + first + call_out(shape, (first, k, v, HEADS, mask), {"skip_reshape": False})


def traced() -> torch.export.ExportedProgram:
    axis = torch.export.Dim.AUTO(min=2, max=64)  # type: ignore[attr-defined,operator,unused-ignore]
    shapes = ({0: axis, 1: axis}, {0: axis})
    return torch.export.export(Block(), (torch.randn(2, 6, 8), torch.randn(6)), dynamic_shapes=shapes, strict=False)


@pytest.fixture(scope="module")
def block() -> Any:
    return module_of(traced())


X, MASK = torch.randn(3, 5, 8), torch.randn(5)


def tripled(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return 3 * q


def test_each_call_reaches_the_caller_with_its_own_arguments(block: Any) -> None:
    calls: list[Any] = []

    def attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append((args, kwargs))
        return 3 * args[0]

    with attention_by(attention):
        found = block(X, MASK)
    torch.testing.assert_close(found, X + 3 * X + 9 * X)
    (one, more), (two, rest) = calls
    assert [len(one), len(two)] == [4, 5] and one[3] == two[3] == HEADS
    assert more.keys() == {"attn_precision", "mask", "scale"} and rest == {"skip_reshape": False}
    assert more["attn_precision"] is torch.float32 and more["scale"] == 0.5
    torch.testing.assert_close(one[:3], (X, 2 * X, 3 * X))
    torch.testing.assert_close(two[0], 3 * X)
    assert torch.equal(more["mask"], MASK) and torch.equal(two[4], MASK)


def test_a_program_says_whether_it_calls_out() -> None:
    assert calls_attention_out(traced())
    assert not calls_attention_out(torch.export.export(torch.nn.Linear(2, 2), (X[0, :, :2],), strict=False))


def test_what_is_handed_back_is_memory_of_its_own(block: Any) -> None:
    with attention_by(lambda q, k, v, *args, **kwargs: v):
        found = block(X, MASK)
    torch.testing.assert_close(found, X + 3 * X + 3 * X)
    with attention_by(lambda q, k, v, *args, **kwargs: v.transpose(1, 2).contiguous().transpose(1, 2)):
        torch.testing.assert_close(block(X, MASK), found)


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), torch.OutOfMemoryError("full")])
def test_what_the_caller_raises_is_raised_once_the_block_has_ended(block: Any, error: BaseException) -> None:
    calls: list[int] = []

    def attention(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        raise error

    ended = False
    with pytest.raises(AttentionFailed) as raised, attention_by(attention):
        block(X, MASK)
        ended = True
    assert ended and raised.value.error is error and len(calls) == 1
    with attention_by(tripled):
        torch.testing.assert_close(block(X, MASK), 13 * X)


@pytest.mark.parametrize(
    "odd",
    [lambda q: q.double(), lambda q: q[:, :2], lambda q: q.as_subclass(torch.nn.Buffer), lambda q: None],
    ids=["dtype", "shape", "kind", "nothing"],
)
def test_a_result_of_another_kind_is_refused(block: Any, odd: Any) -> None:
    with pytest.raises(AttentionFailed) as raised, attention_by(lambda q, *args, **kwargs: odd(q)):
        block(X, MASK)
    assert isinstance(raised.value.error, UnsupportedModel) and "another node's attention gives" in str(raised.value)


def test_callers_within_callers_and_in_other_threads_have_their_own(block: Any) -> None:
    found: dict[str, torch.Tensor] = {}
    both = threading.Barrier(2, timeout=20)

    def run(name: str, factor: float) -> None:
        def attention(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            both.wait()
            with attention_by(lambda q, *args, **kwargs: 0 * q):
                assert torch.equal(block(X, MASK), X)
            return factor * q

        with attention_by(attention):
            found[name] = block(X, MASK)

    threads = [threading.Thread(target=run, args=args) for args in (("one", 1.0), ("two", 2.0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    torch.testing.assert_close(found["one"], X + X + X)
    torch.testing.assert_close(found["two"], X + 2 * X + 4 * X)


def test_a_block_without_a_caller_says_so(block: Any) -> None:
    with pytest.raises(RuntimeError, match="attention_by"):
        block(X, MASK)


def test_arguments_that_cannot_be_handed_over_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="cannot be called out"):
        call_out([1], (X,), {"bias": object()})
