"""What a user types into the node's fields."""

from __future__ import annotations

import pytest

from slipstream.core.spec import Optimize, Precision, Quantised, Role
from slipstream.runtime.settings.model_settings import (
    PRECISIONS,
    BackendChoice,
    BuildPolicy,
    ByBlocks,
    Levers,
    Resolution,
    Settings,
    ShapeChoice,
    parse_resolutions,
    precision_named,
    word_of,
)

WORDS = {"backend": "compiled", "precision": "bf16", "optimize": "fast build", "build": "first use"}
SHAPES = {"x": (2, 4, 96, 64), "timesteps": (2,)}


@pytest.mark.parametrize("text", ["", "  ", "auto", "Auto", " automatic\n"])
def test_no_list_means_every_resolution(text: str) -> None:
    assert parse_resolutions(text) == ()


@pytest.mark.parametrize(
    "text",
    [
        "512x768, 1024x1024",
        "512x768,1024x1024",
        "512X768;1024×1024",
        " 512*768\n1024x1024 ",
        "512x768,,1024x1024,",
        "512 x 768, 1024 × 1024",
    ],
)
def test_lists_as_people_write_them(text: str) -> None:
    assert parse_resolutions(text) == (Resolution(512, 768), Resolution(1024, 1024))


@pytest.mark.parametrize(
    "text",
    ["512", "x512", "512x", "512x512x4", "512-512", "-512x512", "512.0x512", "1e3x512", "auto, 512x512", "axb"],
)
def test_what_is_no_resolution_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="is no resolution; write"):
        parse_resolutions(text)


@pytest.mark.parametrize("text", ["510x512", "512x4", "0x512", "512x0", "512x512, 7x8"])
def test_sizes_that_no_latent_has(text: str) -> None:
    with pytest.raises(ValueError, match="multiples of 8"):
        parse_resolutions(text)


def test_a_number_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="is no resolution"):
        parse_resolutions("512x" + "8" * 5000)


def test_the_size_of_a_latent_is_width_by_height() -> None:
    assert Resolution.of_call({"timesteps": (2,), "x": (2, 4, 96, 64)}) == Resolution(width=512, height=768)
    assert Resolution.of_call({"z": (1, 4, 96, 64)}) == Resolution(width=512, height=768)
    assert str(Resolution(512, 768)) == "512×768"
    assert parse_resolutions(str(Resolution(512, 768))) == (Resolution(512, 768),)


def test_the_size_of_a_picture_is_its_own() -> None:
    pixels = {"pixels": (1, 3, 768, 512)}
    assert Resolution.of_call(pixels) == Resolution(width=512, height=768)
    assert Settings(resolutions=parse_resolutions("512x768")).why_not_wanted(pixels) is None
    assert Settings(resolutions=parse_resolutions("768x512")).why_not_wanted(pixels) is not None


def test_everything_is_wanted_by_default() -> None:
    assert Settings().why_not_wanted(SHAPES) is None


def test_only_listed_resolutions_are_wanted() -> None:
    assert Settings(resolutions=parse_resolutions("512x768")).why_not_wanted(SHAPES) is None
    reason = Settings(resolutions=parse_resolutions("768x512, 64x64")).why_not_wanted(SHAPES)
    assert reason is not None and "512×768 is not in" in reason and "768×512, 64×64" in reason


def test_off_wants_nothing() -> None:
    reason = Settings(backend=BackendChoice.OFF, precision=Precision.FP16).why_not_wanted(SHAPES)
    assert reason is not None and "switched off" in reason


def test_what_is_chosen_in_words() -> None:
    chosen = Settings.of_text(**WORDS, resolutions="512x768")
    assert chosen == Settings(
        BackendChoice.COMPILED,
        Precision.BF16,
        Optimize.FAST_BUILD,
        BuildPolicy.FIRST_USE,
        (Resolution(512, 768),),
    )
    assert Settings.of_text() == Settings()


@pytest.mark.parametrize("name", WORDS)
def test_words_that_are_not_offered(name: str) -> None:
    """Older ComfyUIs pass on what no widget offers."""
    with pytest.raises(ValueError, match="'faster' is not offered here; choose one of: "):
        Settings.of_text(**{**WORDS, name: "faster"})


def test_every_word_for_a_precision_is_understood() -> None:
    assert PRECISIONS == ("auto", "fp32", "fp16", "bf16", "fp8", "int8")
    assert [word_of(precision_named(word)) for word in PRECISIONS] == list(PRECISIONS)
    chosen = [Settings.of_text(precision=word).precision for word in PRECISIONS]
    assert chosen == [None, Precision.FP32, Precision.FP16, Precision.BF16, Quantised.FP8, Quantised.INT8]


@pytest.mark.parametrize("word", ["fp4", "FP8", "", None, 8, [], {}])
def test_what_is_no_precision(word: object) -> None:
    with pytest.raises(ValueError, match="not offered here; choose one of: auto, fp32, fp16, bf16, fp8, int8"):
        precision_named(word)


@pytest.mark.parametrize("host", list(Precision))
def test_what_engines_compute_in(host: Precision) -> None:
    for word in ("auto", "fp8", "int8"):
        assert Settings.of_text(precision=word).compute_precision(host) is host
    assert Settings.of_text(precision="bf16").compute_precision(host) is Precision.BF16
    assert Settings(precision=Quantised.FP8, compute=Precision.BF16).compute_precision(host) is Precision.BF16


def test_what_is_quantised() -> None:
    assert [Settings.of_text(precision=word).quantised for word in ("auto", "fp16", "fp8", "int8")] == [
        *(None, None),
        *(Quantised.FP8, Quantised.INT8),
    ]
    found = {role: Settings.of_text(precision="fp8").quantised_for(role) for role in Role}
    assert found == {
        **{Role.UNET: Quantised.FP8, Role.CONTROLNET: Quantised.FP8},
        **{Role.VAE_ENCODE: None, Role.VAE_DECODE: None, Role.TEXT_ENCODER: None, Role.BLOCK: None},
    }


def test_shapes_in_words() -> None:
    chosen = Settings.of_text(engines="one for a range", resolutions="512x512", max_batch=4, max_tokens=154)
    assert (chosen.shapes, chosen.max_batch, chosen.max_tokens) == (ShapeChoice.RANGE, 4, 154)
    assert Settings.of_text(engines="one with a profile per size").shapes is ShapeChoice.PROFILES
    with pytest.raises(ValueError, match="'dynamic' is not offered here; choose one of: one engine per size, one for"):
        Settings.of_text(engines="dynamic")


@pytest.mark.parametrize("tokens", [0, -77, 76, 78, 230])
def test_texts_that_no_call_has(tokens: int) -> None:
    with pytest.raises(ValueError, match=f"{tokens} tokens is not offered here; choose a multiple of 77: 77, 154"):
        Settings.of_text(max_tokens=tokens)


@pytest.mark.parametrize("batch", [0, -1])
def test_a_batch_of_nothing(batch: int) -> None:
    with pytest.raises(ValueError, match=f"max_batch is {batch}; choose"):
        Settings.of_text(max_batch=batch)


@pytest.mark.parametrize("choice", [ShapeChoice.RANGE, ShapeChoice.PROFILES])
def test_an_engine_for_several_sizes_needs_their_list(choice: ShapeChoice) -> None:
    reason = Settings(shapes=choice).why_not_wanted(SHAPES)
    assert reason is not None and choice.value in reason and "needs a list of resolutions" in reason


def test_a_range_wants_the_sizes_in_between() -> None:
    wanted = Settings(shapes=ShapeChoice.RANGE, resolutions=parse_resolutions("768x512, 256x1024"))
    assert wanted.why_not_wanted(SHAPES) is None  # 512×768
    for outside in ((2, 4, 96, 104), (2, 4, 63, 64), (2, 4, 129, 96), (2, 4, 64, 31)):
        reason = wanted.why_not_wanted({"x": outside})
        assert reason is not None and "outside of the node's range of resolutions (256×512…768×1024)" in reason
    each = Settings(shapes=ShapeChoice.PROFILES, resolutions=wanted.resolutions)
    assert "is not in the node's list" in str(each.why_not_wanted(SHAPES))


@pytest.mark.parametrize(
    ("settings", "role", "device", "runs"),
    [
        (Settings(), Role.UNET, "cuda", True),
        (Settings(), Role.UNET, "cpu", False),
        (Settings(policy=BuildPolicy.MANUAL), Role.UNET, "cuda", False),
        (Settings(policy=BuildPolicy.MANUAL, optimize=Optimize.BLOCKS), Role.UNET, "cuda", True),
        (Settings(policy=BuildPolicy.FIRST_USE), Role.UNET, "cuda", True),
        (Settings(), Role.VAE_DECODE, "cuda", False),
        (Settings(), Role.CONTROLNET, "cuda", False),
        (Settings(optimize=Optimize.BLOCKS), Role.VAE_DECODE, "cpu", True),
        (Settings(levers=Levers(by_blocks=ByBlocks.OFF)), Role.UNET, "cuda", False),
        (Settings(backend=BackendChoice.TENSORRT), Role.UNET, "cuda", False),
        (Settings(backend=BackendChoice.OFF), Role.UNET, "cuda", False),
        (Settings(precision=Quantised.FP8), Role.UNET, "cuda", False),
    ],
)
def test_where_blocks_run_on_engines(settings: Settings, role: Role, device: str, runs: bool) -> None:
    assert settings.runs_by_blocks(role, device) is runs


@pytest.mark.parametrize(
    ("policy", "wanted"),
    [
        (BuildPolicy.FIRST_USE, BuildPolicy.BACKGROUND),
        (BuildPolicy.BACKGROUND, BuildPolicy.BACKGROUND),
        (BuildPolicy.MANUAL, BuildPolicy.MANUAL),
    ],
)
def test_nobody_waits_for_blocks_that_only_stand_in(policy: BuildPolicy, wanted: BuildPolicy) -> None:
    found = Settings(policy=policy, optimize=Optimize.MAX).for_blocks
    assert (found.policy, found.optimize) == (wanted, Optimize.BALANCED)
    asked = Settings(policy=policy, optimize=Optimize.BLOCKS)
    assert asked.for_blocks is asked


def test_blocks_are_left_alone_where_the_environment_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_BLOCKS", "off")
    assert not Settings().runs_by_blocks(Role.UNET, "cuda")
    assert Settings(optimize=Optimize.BLOCKS).runs_by_blocks(Role.UNET, "cuda"), "somebody asked for them"
