"""The harness itself: stock nodes on random-weight files, in a server and in this process."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch

from slipstream.tests.comfyui.support.client import PromptRejected
from slipstream.tests.comfyui.support.graph import Graph

SHAPES = {"sd15": (768, 0), "sd2": (1024, 0), "sdxl": (2048, 1280)}


def stock_graph(model_files, family="sd15", **sampler):
    dim, pooled = SHAPES[family]
    graph = Graph()
    loader = graph.add("CheckpointLoaderSimple", ckpt_name=model_files.checkpoint(family))
    graph.save(graph.sample(loader, dim=dim, pooled=pooled, **sampler), loader.out(2))
    return graph


def is_picture(image):
    return bool(np.isfinite(image).all()) and 0.05 < image.mean() < 0.95 and image.std() > 0.05


@pytest.mark.parametrize("family", SHAPES)
def test_stock_nodes_make_a_picture(client, model_files, family):
    run = client.run(stock_graph(model_files, family))
    assert run.ok, run.error
    (image,), (latent,) = run.images(), run.latents()
    assert image.shape == (64, 64, 3) and is_picture(image)
    assert latent.shape == (1, 4, 8, 8) and 0.3 < latent.std() < 40


def test_previews_and_progress_arrive(client, model_files):
    run = client.run(stock_graph(model_files, seed=11, steps=4))
    assert run.ok
    client.wait_for_event("progress", value=4, max=4)
    assert len(client.previews) >= 3


def test_lora_and_controlnet_change_the_picture(client, model_files):
    def latent(lora, control):
        graph = Graph()
        model = graph.add("CheckpointLoaderSimple", ckpt_name=model_files.checkpoint())
        positive = graph.conditioning(1)
        if lora:
            model = graph.add("LoraLoaderModelOnly", model=model, lora_name=model_files.lora(), strength_model=1.0)
        if control:
            net = graph.add("ControlNetLoader", control_net_name=model_files.controlnet())
            hint = graph.add("EmptyImage", width=64, height=64, batch_size=1, color=0x40A0F0)
            positive = graph.add("ControlNetApply", conditioning=positive, control_net=net, image=hint, strength=1.0)
        graph.save(graph.sample(model, positive=positive))
        run = client.run(graph)
        assert run.ok, run.error
        return run.latents()[0]

    plain = latent(False, False)
    for changed in (latent(True, False), latent(False, True)):
        assert np.isfinite(changed).all()
        assert 0.05 < np.linalg.norm(changed - plain) / np.linalg.norm(plain) < 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
def test_unet_and_vae_files_load(client, model_files, dtype):
    graph = Graph()
    model = graph.add("UNETLoader", unet_name=model_files.unet(dtype=dtype), weight_dtype="default")
    vae = graph.add("VAELoader", vae_name=model_files.vae())
    graph.save(graph.sample(model), vae)
    run = client.run(graph)
    assert run.ok, run.error
    assert is_picture(run.images()[0])


def test_interrupt_ends_sampling(client, model_files):
    prompt = client.queue(stock_graph(model_files, seed=12, steps=2000))
    client.wait_for_event("progress", value=2, max=2000)
    client.interrupt()
    run = client.wait(prompt, timeout=30)
    assert run.interrupted and not run.ok


def test_bad_prompts_are_reported(client):
    graph = Graph()
    graph.add("CheckpointLoaderSimple", ckpt_name="absent.safetensors")
    with pytest.raises(PromptRejected, match="absent.safetensors|no_outputs"):
        client.run(graph)


def test_slipstream_loads_under_another_name_and_after_a_restart(start_comfy, model_files):
    folder = "ComfyUI-Slipstream-main"
    server = start_comfy(pack_folder=folder)
    before = server.pid
    server.restart()
    assert server.pid != before
    with server.client() as client:
        nodes = client.get("/object_info").values()
        assert [node["name"] for node in nodes if node["python_module"] == f"custom_nodes.{folder}"]
        assert client.run(stock_graph(model_files)).ok
    assert "could not load its nodes" not in server.log()


@pytest.mark.parametrize("family", SHAPES)
def test_tiny_models_sample_in_process(family):
    from slipstream.tests.comfyui.support.models import tiny

    latent = tiny.sample(tiny.model(family), family)
    assert latent.shape == (1, 4, 8, 8)
    assert torch.isfinite(latent).all() and 0.3 < float(latent.std()) < 40


def test_tiny_v_prediction_samples_in_process():
    from slipstream.tests.comfyui.support.models import tiny

    latent = tiny.sample(tiny.model("sd2", v_prediction=True), "sd2")
    assert torch.isfinite(latent).all() and float(latent.std()) > 0.1


def test_tiny_controlnet_changes_the_sample():
    from slipstream.tests.comfyui.support.models import tiny

    patcher = tiny.model()
    control = tiny.controlnet().set_cond_hint(torch.rand(1, 3, 64, 64), 1.0, (0.0, 1.0))
    hinted = tiny.conditioning(seed=1, control=control, control_apply_to_uncond=True)
    plain, controlled = tiny.sample(patcher), tiny.sample(patcher, positive=hinted)
    assert torch.isfinite(controlled).all()
    assert float((plain - controlled).norm() / plain.norm()) > 0.02


def test_comfyui_is_the_checkout_and_not_our_nodes(comfyui_dir, comfyui_version):
    import comfy.ops

    import nodes

    assert nodes.__file__ == str(comfyui_dir / "nodes.py")
    assert inspect.getfile(comfy.ops).startswith(str(comfyui_dir))
    assert comfyui_version >= (0, 3, 64)
