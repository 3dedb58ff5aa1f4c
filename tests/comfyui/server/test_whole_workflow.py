"""A whole workflow in a running ComfyUI: LoRA, ControlNet and VAE accelerated together, on the demo model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from slipstream.tests.comfyui.support.cases import with_slow
from slipstream.tests.comfyui.support.client import ComfyClient, Run
from slipstream.tests.comfyui.support.graph import Graph, Node, Output

SIZE, STEPS = 128, 5
BUILDING = 900.0
"""Seconds that a first run may take: some workflows need six engines."""
PROMPT = "a red circle left of a yellow square on a blue background"
CHOICES = {"backend": "compiled", "precision": "auto", "optimize": "fast build", "build": "first use"}


@dataclass(frozen=True)
class Case:
    """
    Attributes:
        controls: strength, start and end of each ControlNet in the chain.
        start: what sampling starts from: "empty", "picture" (img2img) or "masked" (inpainting).
        tiled: whether the picture is decoded in tiles.
        calls: least calls of the engines for model, ControlNet and VAE.
    """

    calls: tuple[int, int, int]
    controls: tuple[tuple[float, float, float], ...] = ((0.9, 0.0, 1.0),)
    start: str = "empty"
    tiled: bool = False
    sampler: dict[str, Any] = field(default_factory=dict)


CASES = {
    "text to image": Case((STEPS, STEPS, 1)),
    "two ControlNets with overlapping ranges": Case((STEPS, STEPS, 1), ((0.8, 0.0, 0.7), (0.5, 0.3, 1.0))),
    "img2img": Case((STEPS, STEPS, 2), start="picture", sampler={"denoise": 0.6}),
    "inpainting mask": Case((STEPS, STEPS, 2), start="masked", sampler={"denoise": 0.8}),
    "tiled decode": Case((STEPS, STEPS, 5), tiled=True),
}


class Workflow:
    """The graph of a case, accelerated or plain."""

    def __init__(self, case: Case, lora: str, fast: bool, seed: int = 5) -> None:
        self.graph, self._case, self._fast = Graph(), case, fast
        add = self.graph.add
        demo = add("SlipstreamDemoLoader")
        self._plain_vae = demo.out(1)
        picture = self._picture(demo)  # by your model: what the ControlNet follows
        lora_model = add("LoraLoaderModelOnly", model=demo.out(0), lora_name=lora, strength_model=0.5)
        self.model = self._accelerated("Model", model=lora_model)
        self.vae = self._accelerated("VAE", vae=demo.out(1))
        self.control = self._accelerated("ControlNet", control_net=demo.out(2))
        prompts = self._controlled(add("Canny", image=picture, low_threshold=0.2, high_threshold=0.5))
        options = {"denoise": 1.0, **case.sampler}
        sampler = {"seed": seed, "steps": STEPS, "cfg": 4.0, "sampler_name": "euler", "scheduler": "normal", **options}
        latent = add(
            "KSampler",
            model=self.model,
            positive=prompts[0],
            negative=prompts[1],
            latent_image=self._latent(picture),
            **sampler,
        )
        self.graph.save(latent)
        made = self._decoded(latent)
        add("SaveImage", images=made, filename_prefix="image")
        if fast:
            add("SlipstreamEngineInfo", model=self.model, control_net=self.control, vae=self.vae, after=made)

    def _accelerated(self, what: str, **given: Any) -> Any:
        (source,) = given.values()
        if not self._fast:
            return source
        return self.graph.add(f"SlipstreamAccelerate{what}", **given, **CHOICES, resolutions="auto")

    def _picture(self, demo: Node) -> Node:
        add = self.graph.add
        prompts = [add("SlipstreamDemoPrompt", text=text) for text in (PROMPT, "")]
        empty = add("EmptyLatentImage", width=SIZE, height=SIZE, batch_size=1)
        sampler = {"seed": 1, "steps": 8, "cfg": 4.0, "sampler_name": "ddim", "scheduler": "ddim_uniform"}
        latent = add(
            "KSampler",
            model=demo.out(0),
            positive=prompts[0],
            negative=prompts[1],
            latent_image=empty,
            denoise=1.0,
            **sampler,
        )
        return add("VAEDecode", samples=latent, vae=self._plain_vae)

    def _controlled(self, edges: Node) -> tuple[Output, Output]:
        add = self.graph.add
        prompts = [add("SlipstreamDemoPrompt", text=text).out(0) for text in (PROMPT.replace("red", "green"), "")]
        for strength, start, end in self._case.controls:
            node = add(
                "ControlNetApplyAdvanced",
                positive=prompts[0],
                negative=prompts[1],
                control_net=self.control,
                image=edges,
                strength=strength,
                start_percent=start,
                end_percent=end,
            )
            prompts = [node.out(0), node.out(1)]
        return prompts[0], prompts[1]

    def _latent(self, picture: Node) -> Node:
        add = self.graph.add
        if self._case.start == "empty":
            return add("EmptyLatentImage", width=SIZE, height=SIZE, batch_size=1)
        latent = add("VAEEncode", pixels=picture, vae=self.vae)
        if self._case.start == "picture":
            return latent
        mask = add("SolidMask", value=1.0, width=SIZE // 2, height=SIZE)
        nothing = add("SolidMask", value=0.0, width=SIZE, height=SIZE)
        half = add("MaskComposite", destination=nothing, source=mask, x=0, y=0, operation="add")
        return add("SetLatentNoiseMask", samples=latent, mask=half)

    def _decoded(self, latent: Node) -> Node:
        if not self._case.tiled:
            return self.graph.add("VAEDecode", samples=latent, vae=self.vae)
        tiles = {"tile_size": 64, "overlap": 0, "temporal_size": 64, "temporal_overlap": 8}
        return self.graph.add("VAEDecodeTiled", samples=latent, vae=self.vae, **tiles)


@pytest.fixture(scope="module")
def client(server_of, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyClient]:
    with server_of(home=tmp_path_factory.mktemp("home")) as server, server.client() as client:
        yield client


def counted(run: Run) -> list[tuple[int, int]]:
    """Engine and eager calls of model, VAE and ControlNet, as Engine Info shows them."""
    text = "\n".join(text for output in run.outputs.values() for text in output.get("text", ()))
    return [(int(one), int(other)) for one, other in re.findall(r"calls on engines: (\d+), on your model: (\d+)", text)]


@pytest.mark.parametrize("name", with_slow(CASES, "tiled decode", "img2img", "inpainting mask"))
def test_the_picture_is_the_plain_one_and_engines_made_all_of_it(name: str, client: ComfyClient, model_files) -> None:
    case, lora = CASES[name], model_files.demo_lora()
    plain = client.run(Workflow(case, lora, fast=False).graph, timeout=120)
    fast = client.run(Workflow(case, lora, fast=True).graph, timeout=BUILDING)
    assert plain.ok, plain.error
    assert fast.ok, fast.error
    (model, vae, control) = counted(fast)
    assert [eager for _, eager in (model, vae, control)] == [0, 0, 0], fast.outputs
    assert [calls for calls, _ in (model, control, vae)] >= list(case.calls)
    assert model[0] == case.calls[0] and control[0] >= case.calls[1] and vae[0] >= case.calls[2]
    (wanted,), (found,) = plain.latents(), fast.latents()
    assert np.linalg.norm(found - wanted) / np.linalg.norm(wanted) < 1e-3
    assert np.abs(plain.images()[0] - fast.images()[0]).max() <= 2 / 255
    without = client.run(Workflow(Case(case.calls, (), case.start, case.tiled, case.sampler), lora, fast=False).graph)
    assert np.linalg.norm(without.latents()[0] - wanted) / np.linalg.norm(wanted) > 0.02, "no control: no proof"
