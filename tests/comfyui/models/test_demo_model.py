"""The demo model inside ComfyUI equals the one in diffusers."""

from __future__ import annotations

import asyncio

import numpy
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from slipstream.demo import model as demo  # noqa: E402
from slipstream.demo import scenes  # noqa: E402
from slipstream.demo.canny import canny  # noqa: E402

PROMPT = "a red circle left of a yellow square on a blue background"


@pytest.fixture(scope="module")
def host():
    from slipstream.hosts.comfy.models import demo_model

    return demo_model


@pytest.fixture(scope="module")
def inputs():
    generator = torch.Generator().manual_seed(3)
    context = demo.load_text_encoder().encode([PROMPT, ""])
    return torch.randn(2, 4, 24, 32, generator=generator), torch.tensor([20, 850]), context


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_the_unet_is_the_same(host, inputs):
    latents, times, context = inputs
    patcher = host.load_demo_model()
    with torch.no_grad():
        inside = patcher.model.diffusion_model.float()(latents, times, context=context)
        outside = demo.load_unet()(latents, times, context, return_dict=False)[0]
    assert outside.std() > 0.1
    close(inside, outside)


def test_the_unet_is_the_same_under_the_controlnet(host, inputs):
    latents, times, context = inputs
    hint = canny(scenes.draw(scenes.sample(2, 4), 192, 256)).float().expand(-1, 3, -1, -1)
    control = host.load_demo_controlnet()
    with torch.no_grad():
        inside = control.control_model.float()(latents, hint, times, context)
        down, mid = demo.load_controlnet()(latents, times, context, hint, return_dict=False)
    assert max(part.abs().max() for part in down) > 0.01
    for ours, theirs in zip(inside["output"], down, strict=True):
        close(ours, theirs)
    close(inside["middle"][0], mid)

    patcher = host.load_demo_model()
    handed = {"output": list(inside["output"]), "middle": list(inside["middle"])}
    with torch.no_grad():
        controlled = patcher.model.diffusion_model.float()(latents, times, context=context, control=handed)
        outside = demo.load_unet()(
            latents,
            times,
            context,
            down_block_additional_residuals=down,
            mid_block_additional_residual=mid,
            return_dict=False,
        )[0]
    close(controlled, outside)


def test_the_autoencoder_is_the_same(host):
    vae, outside = host.load_demo_vae(), demo.load_vae()
    inside = vae.first_stage_model.float()
    picture = scenes.draw(scenes.sample(1, 6), 128, 96) * 2 - 1
    with torch.no_grad():
        mean = outside.encode(picture).latent_dist.mode()
        decoded = outside.decode(mean, return_dict=False)[0]
        close(inside.quant_conv(inside.encoder(picture)).chunk(2, 1)[0], mean)
        close(inside.decode(mean), decoded)
    assert (decoded - picture).abs().mean() < 0.1
    shown = vae.decode(mean)
    assert shown.shape == (1, 128, 96, 3)
    torch.testing.assert_close(shown, (decoded / 2 + 0.5).clamp(0, 1).movedim(1, -1), rtol=0, atol=1e-4)


def test_a_prompt_becomes_conditioning(host):
    ((context, extra),) = host.encode_demo_prompt(PROMPT)
    assert context.shape == (1, 77, 64) and extra == {}
    close(context, demo.load_text_encoder().encode(PROMPT))
    assert host.encode_demo_prompt("red " * 80)[0][0].shape == (1, 154, 64)
    with pytest.raises(ValueError, match="'cat'"):
        host.encode_demo_prompt("a red cat")


def test_comfyuis_sampler_draws_what_diffusers_draws(host):
    from comfy.samplers import KSampler

    from slipstream.demo.pipeline import Pipeline

    noise = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(0))
    patcher = host.load_demo_model()
    sampler = KSampler(patcher, steps=6, device=patcher.load_device, sampler="ddim", scheduler="ddim_uniform")
    positive, negative = host.encode_demo_prompt(PROMPT), host.encode_demo_prompt("")
    latents = sampler.sample(
        noise, positive, negative, cfg=5.0, latent_image=torch.zeros(1, 4, 16, 16), disable_pbar=True, seed=0
    )
    inside = host.load_demo_vae().decode(latents)[0]
    outside = Pipeline.load()(PROMPT, height=128, width=128, steps=6, seed=0).pictures[0] / 255
    # other timesteps and another last step, so alike and not equal
    assert (inside - outside).abs().mean() < 0.08
    assert (inside - outside.flip(1)).abs().mean() > (inside - outside).abs().mean()


def test_the_nodes_give_what_they_promise(host):
    from slipstream.nodes.demo import SlipstreamDemoLoader, SlipstreamDemoPrompt

    schema = SlipstreamDemoLoader.define_schema()
    assert (schema.display_name, schema.category) == ("Demo Model (Slipstream)", "Slipstream/demo")
    assert [output.io_type for output in schema.outputs] == ["MODEL", "VAE", "CONTROL_NET"]
    loaded = SlipstreamDemoLoader.execute()
    assert len(loaded.result) == 3
    conditioning = SlipstreamDemoPrompt.execute(text=PROMPT).result[0]
    assert conditioning[0][0].shape == (1, 77, 64)


def test_the_pack_lists_the_nodes():
    from slipstream.nodes.extension import SlipstreamExtension

    nodes = asyncio.run(SlipstreamExtension().get_node_list())
    ids = {node.define_schema().node_id for node in nodes}
    assert {"SlipstreamDemoLoader", "SlipstreamDemoPrompt"} <= ids


def test_previews_have_the_pictures_colours(host):
    """Those of ComfyUI that need no other model are a linear map of the latent: blue is blue, as far as that can be."""
    import comfy.latent_formats
    from latent_preview import Latent2RGBPreviewer

    ours, stable_diffusions = host.load_demo_model().model.latent_format, comfy.latent_formats.SD15()
    shown = Latent2RGBPreviewer(ours.latent_rgb_factors, ours.latent_rgb_factors_bias)
    wrong = Latent2RGBPreviewer(stable_diffusions.latent_rgb_factors)
    vae, near, far = host.load_demo_vae(), [], []
    for seed in range(100, 108):  # none that the map was fitted on
        picture = scenes.example(seed).picture.movedim(0, -1)[None].float()
        latent = ours.process_in(vae.encode(picture))
        small = torch.nn.functional.avg_pool2d(picture.movedim(-1, 1), 8)[0].movedim(0, -1).flatten()
        for previewer, found in ((shown, near), (wrong, far)):
            seen = torch.from_numpy(numpy.array(previewer.decode_latent_to_preview(latent))).flatten() / 255.0
            found.append(torch.corrcoef(torch.stack([seen, small]))[0, 1].item())
    assert sum(near) / len(near) > 0.7 and max(far) < 0 < min(near)
