"""The trained demo model, through diffusers."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from slipstream.demo import evaluate, model, scenes  # noqa: E402
from slipstream.demo.canny import canny  # noqa: E402
from slipstream.demo.pipeline import Pipeline  # noqa: E402

pytestmark = [
    pytest.mark.diffusers,
    pytest.mark.skipif(not (model.WEIGHTS / "unet.safetensors").is_file(), reason="the demo model is not trained"),
]

PROMPT = "a red circle left of a yellow square on a blue background"


@pytest.fixture(scope="module")
def pipeline():
    return Pipeline.load()


def test_weights_are_complete_small_and_finite():
    from safetensors.torch import load_file

    files = {file.stem: file for file in model.WEIGHTS.glob("*.safetensors")}
    assert files.keys() == {*model.BUILDERS, "night"}
    assert sum(file.stat().st_size for file in files.values()) < 8_000_000
    for name, build in model.BUILDERS.items():
        weights = model.read_weights(name)
        assert all(tensor.dtype == torch.float16 and tensor.isfinite().all() for tensor in weights.values())
        assert {key: tensor.shape for key, tensor in weights.items()} == {
            key: tensor.shape for key, tensor in build().state_dict().items()
        }
    assert not load_file(files["controlnet"]).keys() & set(model.SHARED)


def test_stored_weights_are_within_half_a_step_of_what_they_were():
    weights = {
        "conv": torch.randn(6, 3, 3, 3),
        "linear": torch.randn(5, 7),
        "bias": torch.randn(4),
        "zero": torch.zeros(2, 2),
    }
    stored = model.packed(weights)
    assert {stored[name].dtype for name in ("conv", "linear", "zero")} == {torch.int8}
    back = model.unpacked(stored)
    assert back.keys() == weights.keys()
    torch.testing.assert_close(back["bias"], weights["bias"].half())
    for name in ("conv", "linear", "zero"):
        largest = weights[name].flatten(1).abs().amax(1).reshape(-1, *[1] * (weights[name].ndim - 1))
        assert ((back[name].float() - weights[name]).abs() <= 0.51 * largest / 127 + 1e-3 * largest).all()


def test_the_training_record_covers_every_stage():
    record = json.loads((model.WEIGHTS / "training.json").read_text())
    assert record.keys() == {"vae", "unet", "controlnet"}
    for stage in record.values():
        assert stage["steps"] > 1000 and stage["figures"] and len(stage["loss_curve"]) > 20


def test_pictures_survive_the_autoencoder(pipeline):
    assert evaluate.reconstruction_psnr(pipeline, count=8) > 26


def test_latents_have_the_scale_that_sd1_expects(pipeline):
    pictures = scenes.draw(scenes.sample(16, 77)) * 2 - 1
    latents = pipeline.vae.encode(pictures).latent_dist.mode() * model.LATENT_SCALE
    assert latents.std((0, 2, 3)).sub(1).abs().max() < 0.35
    assert latents.mean((0, 2, 3)).abs().max() < 0.4


@pytest.mark.slow
def test_the_denoiser_beats_knowing_nothing(pipeline):
    assert evaluate.denoising_loss(pipeline, count=32) < 0.03  # predicting zero noise gives 1


@pytest.mark.slow
def test_pictures_show_what_the_caption_says(pipeline):
    figures = evaluate.caption_accuracy(pipeline, count=8, steps=12)
    sampled, chance = figures["sampled"], figures["chance"]
    assert figures["drawn"]["all"] == 1
    assert sampled["object_colours"] >= 0.8 and sampled["object_colours"] > chance["object_colours"] + 0.2
    assert sampled["backdrop_colour"] >= 0.75 and sampled["backdrop_colour"] > chance["backdrop_colour"] + 0.3


@pytest.mark.slow
def test_the_controlnet_draws_along_the_edges(pipeline):
    some = scenes.sample(4, 123)
    hint = canny(scenes.draw(some))

    def f1(**options):
        pictures = pipeline(scenes.captions(some), steps=8, **options).pictures.permute(0, 3, 1, 2) / 255
        return evaluate.edge_f1(canny(pictures), hint)

    assert f1(hint=hint) > f1() + 0.1


def test_sampling_is_repeatable_and_seeded(pipeline):
    options = {"steps": 2, "height": 64, "width": 64}
    first, again = pipeline(PROMPT, **options), pipeline(PROMPT, **options)
    assert torch.equal(first.pictures, again.pictures)
    assert not torch.equal(first.pictures, pipeline(PROMPT, seed=1, **options).pictures)


@pytest.mark.parametrize("size", [(128, 128), (64, 192), (512, 512)])
def test_other_sizes_run(pipeline, size):
    result = pipeline(PROMPT, height=size[0], width=size[1], steps=1)
    assert result.pictures.shape == (1, *size, 3) and result.pictures.dtype == torch.uint8
    assert result.images()[0].size == size[::-1]


@pytest.mark.parametrize("scheduler", ["ddim", "euler"])
def test_any_callable_may_stand_for_the_unet(pipeline, scheduler):
    shapes, steps = [], []

    def unet(latents, time, **options):
        shapes.append((latents.shape, options["encoder_hidden_states"].shape))
        return pipeline.unet(latents, time, **options)

    wrapped = Pipeline(unet, pipeline.text, pipeline.vae, pipeline.controlnet)
    options = {"steps": 3, "height": 64, "width": 64, "scheduler": scheduler}
    result = wrapped(PROMPT, callback=lambda step, of, latents: steps.append((step, of)), **options)
    assert shapes == [((2, 4, 8, 8), (2, 77, 64))] * 3  # both halves of the guidance in one batch
    assert steps == [(0, 3), (1, 3), (2, 3)]
    torch.testing.assert_close(result.latents, pipeline(PROMPT, **options).latents)


def test_without_guidance_there_is_no_second_half(pipeline):
    batches = []

    def unet(latents, time, **options):
        batches.append(len(latents))
        return pipeline.unet(latents, time, **options)

    Pipeline(unet, pipeline.text, pipeline.vae)([PROMPT, ""], steps=1, cfg=1, height=64, width=64)
    assert batches == [2]


def test_a_hint_without_a_controlnet_is_an_error(pipeline):
    plain = Pipeline(pipeline.unet, pipeline.text, pipeline.vae)
    with pytest.raises(ValueError, match="ControlNet"):
        plain(PROMPT, hint=torch.zeros(1, 1, 64, 64), height=64, width=64)
