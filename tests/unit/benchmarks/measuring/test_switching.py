"""Changes between two kinds of pictures: in which order they are painted, and what is counted as what."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from slipstream.benchmarks.measuring.measure import Challenge
from slipstream.benchmarks.measuring.switching import Switch, sides_of
from slipstream.benchmarks.pages.switch_page import section, switches
from slipstream.benchmarks.subjects.models import Model, _Judge
from slipstream.benchmarks.subjects.rows import OF_SWITCHED, complete
from slipstream.benchmarks.subjects.setup import Ready
from slipstream.benchmarks.subjects.subject import Example
from slipstream.benchmarks.subjects.variants import Variant
from slipstream.core.spec import Precision
from slipstream.tests.unit.benchmarks.support import row

SHAPES = {"x": (2, 4, 64, 64), "timesteps": (2,), "context": (2, 77, 768)}


class Timed(Model):
    """A model whose calls take the time that the engine below says."""

    def milliseconds(self, compute: Any) -> float:
        before = Engine.clock
        compute()
        return Engine.clock - before


class Engine:
    """Beginning a picture takes 1 ms, 10 ms more after one of the other kind; a call takes 100 ms."""

    clock = 0.0

    def __init__(self) -> None:
        self.painted: list[str] = []
        self.calls = 0
        self.offset = 0.0

    @contextmanager
    def picture(self) -> Iterator[Any]:
        Engine.clock += 1
        self.painted.append("")
        yield self.call

    def call(self, taken: tuple[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        kind, tensor = taken
        if not self.painted[-1]:
            self.painted[-1] = kind
            Engine.clock += 10 if self.painted[-2:-1] not in ([], [kind]) else 0
        Engine.clock += 100
        self.calls += 1
        return {"out": tensor + self.offset}


def switch_of(engine: Engine, **more: Any) -> Switch:
    model = Timed(None, torch.nn.Identity(), lambda module, inputs: inputs, SHAPES)  # type: ignore[arg-type]
    sides = sides_of(model, Variant.of("slipstream:compiled+switch-batch"))
    examples = [
        [Example((kind, torch.ones(2) * number), {"out": torch.ones(2) * number}) for number in range(1, 5)]
        for kind in ("own", "other")
    ]
    challenges = [Challenge(each, _Judge(), 1) for each in examples]
    ready = Ready(engine.call, Precision.FP16, picture=engine.picture, engine_calls=lambda: engine.calls, **more)
    return Switch(ready, sides, challenges)


def test_two_pictures_of_a_kind_then_two_of_the_other() -> None:
    engine = Engine()
    switch = switch_of(engine)
    switch.warm_up(1)
    switch.take_turns(3)
    switch.check()
    assert engine.painted == ["own", "own", "other", "other"] * 4 + ["own", "other"]
    found = switch.row()
    for figures in (found, found["other"]):
        assert figures["samples"] == [111, 111, 111], "what begins a picture belongs to its first call"
        assert (figures["ms"], figures["again_ms"], figures["steady_ms"]) == (111, 101, 100)
    assert found["other"]["shapes"]["x"] == [4, 4, 64, 64] and found["failed"] is None
    assert found["engine_calls"] == engine.calls == 16 * Model.sets + 2 * 4
    assert tuple(complete({"variant": "a", "case": "b", **found}))[-3:] == OF_SWITCHED


def test_a_wrong_result_at_either_kind_fails_the_row() -> None:
    engine = Engine()
    switch = switch_of(engine)
    switch.take_turns(1)
    engine.offset = 1.0
    switch.check()
    assert "differs from fp32 by 1.0e+00" in switch.row()["failed"]


def test_calls_that_went_elsewhere_fail_the_row() -> None:
    engine = Engine()
    switch = switch_of(engine, reasons=lambda: "no memory")
    switch.take_turns(1)
    engine.calls -= 1
    assert switch.row()["failed"] == "the engine served 11 of 12 calls: no memory"


@pytest.mark.parametrize(
    ("change", "shapes"),
    [
        ("switch-size", {"x": (2, 4, 64, 96), "timesteps": (2,), "context": (2, 77, 768)}),
        ("switch-batch", {"x": (4, 4, 64, 64), "timesteps": (4,), "context": (4, 77, 768)}),
    ],
)
def test_what_pictures_differ_in(change: str, shapes: dict[str, tuple[int, ...]]) -> None:
    model = Model(None, torch.nn.Identity(), lambda module, inputs: inputs, SHAPES)  # type: ignore[arg-type]
    own, other = sides_of(model, Variant.of(f"eager+{change}"))
    assert own is model and other.shapes == shapes
    assert sides_of(model, Variant.of("eager")) == [model]


# The page's part


def switched(variant: str, ms: float = 6.5, **fields: Any) -> dict[str, Any]:
    size = {"x": [4, 4, 64, 64]} if variant.endswith("batch") else {"x": [2, 4, 64, 96]}
    other = {"shapes": size, "ms": 9.0, "again_ms": 8.5, "steady_ms": 8.25}
    return row(variant, ms, **{"again_ms": 6.25, "steady_ms": 6.0, "other": other, "run": "switched", **fields})


def test_a_change_has_a_line_each_way() -> None:
    rows = [switched("slipstream:compiled+switch-size"), switched("slipstream:compiled+switch-batch")]
    text = section(switches(rows), ["torch 2.11.0."] * 2)
    head = "| sd15-512-b2 | `slipstream:compiled+switch-"
    assert f"{head}size` | 768×512 → 512×512 | 6.50 | 6.25 | 6.00 | +0.50 |" in text
    assert f"{head}size` | 512×512 → 768×512 | 9.00 | 8.50 | 8.25 | +0.75 |" in text
    assert f"{head}batch` | batch 4 → batch 2 | 6.50 | 6.25 | 6.00 | +0.50 |" in text
    assert text.count("torch 2.11.0.") == 1 and "- `slipstream:compiled+switch-batch`: " in text


def test_the_last_row_of_a_change_counts_and_a_failed_one_has_a_reason() -> None:
    before, after = switched("eager+switch-size", 7.0), switched("eager+switch-size", 5.0)
    failed = row("slipstream:compiled+switch-size", None, failed="<no> memory")
    found = switches([before, row("eager"), after, failed])
    assert [each["ms"] for each in found] == [5.0, None]
    text = section(found, ["a", "a"])
    assert (
        "slipstream:compiled+switch-size`: &lt;no> memory" in text
        and "| `slipstream:compiled+switch-size` |" not in text
    )
    assert section(switches([row("eager")]), []) == ""
