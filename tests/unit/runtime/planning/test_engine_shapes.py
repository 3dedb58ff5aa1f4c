"""Which shapes an engine is made for, by what the user chose and what a call has."""

from __future__ import annotations

import pytest

from slipstream.core.shapes import ShapeProfile, Shapes
from slipstream.runtime.planning.engine_shapes import profiles_wanted
from slipstream.runtime.settings.model_settings import Settings, ShapeChoice, parse_resolutions

RANGE, PROFILES = ShapeChoice.RANGE, ShapeChoice.PROFILES


def settings(choice: ShapeChoice, resolutions: str = "768x512, 512x512, 512x1024", **others: int) -> Settings:
    return Settings(resolutions=parse_resolutions(resolutions), shapes=choice, **others)


def call(width: int = 512, height: int = 512, batch: int = 2, tokens: int = 77) -> dict[str, tuple[int, ...]]:
    """As SDXL gets it."""
    return {
        "x": (batch, 4, height // 8, width // 8),
        "timesteps": (batch,),
        "context": (batch, tokens, 2048),
        "y": (batch, 2816),
    }


def is_static(shapes: Shapes, chosen: Settings) -> bool:
    return profiles_wanted(shapes, chosen) == (ShapeProfile.static(shapes),)


def test_by_default_each_call_has_an_engine_of_its_own() -> None:
    assert is_static(call(), Settings())
    assert is_static(call(), settings(ShapeChoice.EACH))
    assert is_static(call(), Settings(shapes=RANGE)), "without a list there is no range"


def test_a_range_spans_the_list_and_is_tuned_for_its_first() -> None:
    (profile,) = profiles_wanted(call(), settings(RANGE, max_batch=4, max_tokens=154))
    smallest = {"x": (1, 4, 64, 64), "timesteps": (1,), "context": (1, 77, 2048), "y": (1, 2816)}
    largest = {"x": (4, 4, 128, 96), "timesteps": (4,), "context": (4, 154, 2048), "y": (4, 2816)}
    tuned = {"x": (4, 4, 64, 96), "timesteps": (4,), "context": (4, 77, 2048), "y": (4, 2816)}
    assert profile.corners() == [tuned, smallest, largest]


def test_a_profile_for_each_size_of_the_list() -> None:
    profiles = profiles_wanted(call(), settings(PROFILES, max_tokens=154))
    assert [profile.opt["x"] for profile in profiles] == [(2, 4, 64, 64), (2, 4, 64, 96), (2, 4, 128, 64)]
    for profile in profiles:
        smallest, largest = profile.corners()[1:]
        assert (smallest["x"][0], largest["x"][0]) == (1, 2)
        assert smallest["x"][1:] == largest["x"][1:]
        assert (smallest["context"], largest["context"]) == ((1, 77, 2048), (2, 154, 2048))


@pytest.mark.parametrize("choice", [RANGE, PROFILES])
def test_all_calls_within_lead_to_the_same_engine(choice: ShapeChoice) -> None:
    within = [
        call(),
        call(768, 512),
        call(512, 1024),
        call(batch=1),
        call(tokens=154),
        call(tokens=231),
        call(tokens=80),
    ]
    wanted = {profiles_wanted(shapes, settings(choice)) for shapes in within}
    assert len(wanted) == 1 and not any(profile.is_static for profile in wanted.pop())


def test_the_order_of_the_list_makes_no_other_engine_of_profiles() -> None:
    one, other = settings(PROFILES, "512x512, 768x512, 512x768"), settings(PROFILES, "512x768 768x512 512x512 512x768")
    assert profiles_wanted(call(), one) == profiles_wanted(call(), other)


def test_sizes_between_the_listed_ones_belong_to_the_range_only() -> None:
    assert not is_static(call(640, 768), settings(RANGE))
    assert is_static(call(640, 768), settings(PROFILES))


@pytest.mark.parametrize("choice", [RANGE, PROFILES])
@pytest.mark.parametrize(
    "shapes",
    [call(1024, 1024), call(256, 256), call(tokens=308), call(tokens=76)],
    ids=["larger", "smaller", "longer", "shorter"],
)
def test_what_lies_outside_has_an_engine_of_its_own(choice: ShapeChoice, shapes: Shapes) -> None:
    assert is_static(shapes, settings(choice))


@pytest.mark.parametrize("choice", [RANGE, PROFILES])
def test_a_larger_batch_is_for_the_same_engine(choice: ShapeChoice) -> None:
    chosen = settings(choice, max_batch=2)
    assert profiles_wanted(call(batch=7), chosen) == profiles_wanted(call(), chosen)


@pytest.mark.parametrize(
    "shapes",
    [
        {"x": (1, 16, 5, 64, 64), "timesteps": (1,), "context": (1, 77, 64)},
        {**call(), "guidance": (2,)},
        {**call(), "timesteps": ()},
        {**call(), "context": (1, 77, 2048)},
        {"z": (1, 4, 64, 64)},
        {"timesteps": (2,)},
    ],
    ids=["video", "another input", "no batch", "batches differ", "a decoder", "no latent"],
)
def test_calls_of_other_kinds_have_engines_of_their_own(shapes: Shapes) -> None:
    assert is_static(shapes, settings(RANGE))


def test_models_with_other_constant_axes_have_other_engines() -> None:
    other = {**call(), "x": (2, 9, 64, 64)}
    assert profiles_wanted(other, settings(RANGE)) != profiles_wanted(call(), settings(RANGE))
    without_text = {name: shape for name, shape in call().items() if name != "context"}
    assert profiles_wanted(without_text, settings(RANGE))[0].accepts(without_text)
