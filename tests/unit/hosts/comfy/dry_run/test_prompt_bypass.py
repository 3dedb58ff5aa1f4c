"""What a dry run passes by, since it saves pictures, and what it refuses."""

from __future__ import annotations

import pytest

from slipstream.tests.unit.hosts.comfy.dry_run.test_build_prompt import (
    Prompt,
    ends,
    kept,
    node,
    run,
    steps,
    text_to_image,
)


def two_passes(between: str, key: str, index: int = 0) -> Prompt:
    """A sampler, whose latent goes through a node to the next sampler."""
    prompt = text_to_image()
    prompt["9"] = node(between, **{key: ["5", 0]})
    prompt["10"] = node("KSampler", model=["4", 0], latent_image=["9", index], cfg=7.0)
    return prompt


def with_pictures(between: str, index: int = 0, **inputs: list[object]) -> Prompt:
    """Sampler, decoder, a node, encoder, sampler."""
    prompt = text_to_image()
    prompt["9"] = node(between, **(inputs or {"images": ["6", 0]}))
    prompt["10"] = node("VaeEncode", pixels=["9", index], vae=["1", 2])
    prompt["11"] = node("KSampler", model=["4", 0], latent_image=["10", 0], cfg=7.0)
    return prompt


# -------------------------------------------------------------------------------------- what saves pictures


@pytest.mark.parametrize("saver", ["SaveLatent", "SaveAny"])
def test_what_saves_on_the_way_is_led_around(saver: str) -> None:
    made = run(two_passes(saver, "samples"))
    assert "9" not in made.prompt and made.prompt["10"]["inputs"]["latent_image"] == ["5", 0]
    assert ends(made) == [["5", 0], ["10", 0]]


def test_savers_in_a_row_and_before_all_sampling() -> None:
    prompt = with_pictures("SaveImage", images=["12", 0])
    prompt["12"] = node("SaveImage", images=["13", 0])
    prompt["13"] = node("LoadImage", image="a.png")
    made = run(prompt)
    assert not {"9", "12"} & kept(made) and made.prompt["10"]["inputs"]["pixels"] == ["13", 0]
    prompt["12"]["inputs"]["images"] = ["9", 0]
    assert len(ends(run(prompt))) == 2, "a loop of links ends"


@pytest.mark.parametrize(
    "prompt",
    [
        two_passes("SaveImage", "samples"),  # nothing that goes in is what comes out
        with_pictures("SaveImage", images=["6", 0], over=["12", 0]) | {"12": node("LoadImage", image="a.png")},
    ],
    ids=["another type", "two pictures"],
)
def test_a_saver_that_cannot_be_led_around_is_refused(prompt: Prompt) -> None:
    with pytest.raises(ValueError, match="Node 9 .SaveImage. may save what it is given, .* bypass it"):
        run(prompt)


def test_what_shows_the_picture_that_it_composes_is_no_saver() -> None:
    made = run(with_pictures("ShowComposition", image=["12", 0]) | {"12": node("LoadImage", image="a.png")})
    assert made.prompt["10"]["inputs"]["pixels"] == ["9", 0], "its picture may have another size"
    with pytest.raises(ValueError, match="ShowComposition. may save"):
        run(with_pictures("ShowComposition"))


def test_a_saver_that_also_tells_its_file_name_is_led_around() -> None:
    assert "9" not in run(with_pictures("SaveFile")).prompt


def test_a_file_name_on_the_way_is_refused_only_behind_a_sampler() -> None:
    prompt = text_to_image()
    prompt["9"] = node("SaveFile", images=["6", 0])
    prompt["10"] = node("Encode", clip=["1", 1], text=["9", 1])
    prompt["11"] = node("KSampler", model=["4", 0], positive=["10", 0], latent_image=["3", 0], cfg=7.0)
    with pytest.raises(ValueError, match="may save"):
        run(prompt)
    prompt["9"]["inputs"]["images"] = ["12", 0]
    prompt["12"] = node("LoadImage", image="a.png")
    assert "9" in kept(run(prompt)), "it runs as in any run of the workflow"


def test_numbers_and_texts_may_be_changed_on_the_way() -> None:
    prompt = text_to_image()
    prompt["9"] = node("Number", number=["10", 0])
    prompt["10"] = node("Number", number=512)
    prompt["3"]["inputs"]["width"] = ["9", 0]
    made = run(prompt)
    assert {"9", "10"} <= kept(made) and made.prompt["3"]["inputs"]["width"] == ["9", 0]


def test_samplers_that_show_what_they_make_sample() -> None:
    prompt = text_to_image()
    prompt["5"] = node("ShowSampler", model=["4", 0], latent=["3", 0])
    prompt["6"]["inputs"]["samples"] = ["5", 1]
    prompt["9"] = node("ToPipe", model=["4", 0])
    prompt["10"] = node("ShowPipeSampler", pipe=["9", 0], latent=["5", 1])
    made = run(prompt)
    assert ends(made) == [["5", 1], ["10", 1]] and steps(made) == {"slipstream-step-1": ["4", 0]}
    assert made.prompt["10"]["inputs"]["latent"] == ["5", 1]


def test_our_own_nodes_save_nothing() -> None:
    prompt = text_to_image()
    prompt["9"] = node("Encode", clip=["1", 1], text=["8", 0])
    prompt["10"] = node("KSampler", model=["4", 0], positive=["9", 0], latent_image=["3", 0], cfg=7.0)
    assert "8" in kept(run(prompt))


# -------------------------------------------------------------------------------------- what costs money


def test_a_service_is_not_sent_a_picture_of_one_step() -> None:
    with pytest.raises(ValueError, match="Node 9 .PaidUpscale. costs money"):
        run(with_pictures("PaidUpscale"))


def test_a_service_before_all_sampling_is_asked_as_ever() -> None:
    prompt = with_pictures("PaidUpscale", image=["12", 0]) | {"12": node("LoadImage", image="a.png")}
    assert "9" in kept(run(prompt))


def test_a_service_that_nothing_needs_is_left_out() -> None:
    prompt = text_to_image()
    prompt["9"] = node("PaidUpscale", images=["6", 0])
    assert "9" not in kept(run(prompt))
