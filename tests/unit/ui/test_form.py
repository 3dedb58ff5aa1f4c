"""The build form's answers."""

from __future__ import annotations

import dataclasses

import pytest

from slipstream.core.spec import Optimize, Precision, Quantised, Role
from slipstream.runtime.settings.model_settings import BackendChoice, Resolution, ShapeChoice, parse_resolutions
from slipstream.ui.form import PRESETS, Answers

FILLED = Answers(
    "demo", "unet", "512x512, 768x512", 2.0, "fp16", "auto", "balanced", "one for a range", 4.0, 77.0, 154.0, False
)  # fmt: skip


def test_an_order() -> None:
    wanted = FILLED.wanted()
    assert (wanted.model, wanted.role, wanted.batch, wanted.tokens) == ("demo", Role.UNET, 2, 77)
    settings = wanted.settings
    assert settings.resolutions == (Resolution(512, 512), Resolution(768, 512))
    assert settings.precision is Precision.FP16 and settings.backend is BackendChoice.AUTO
    assert settings.shapes is ShapeChoice.RANGE and settings.optimize is Optimize.BALANCED
    assert (settings.max_batch, settings.max_tokens, settings.bake) == (4, 154, False)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"model": None}, "Choose a model"),
        ({"resolutions": ""}, "at least one resolution"),
        ({"resolutions": "auto"}, "at least one resolution"),
        ({"resolutions": "500x500"}, "multiples of 8"),
        ({"resolutions": "big"}, "no resolution"),
        ({"precision": "fp4"}, "fp4"),
    ],
)
def test_what_does_not_do(changed: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        dataclasses.replace(FILLED, **changed).wanted()


def test_an_order_in_eight_bits() -> None:
    assert dataclasses.replace(FILLED, precision="int8").wanted().settings.precision is Quantised.INT8


def test_presets_are_resolutions() -> None:
    assert all(parse_resolutions(text) for text in PRESETS.values())
