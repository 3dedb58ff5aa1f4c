"""The built-in tiny model: a checkpoint's three outputs, its LoRA and its text encoder."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

CATEGORY = "Slipstream/demo"


class SlipstreamDemoLoader(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SlipstreamDemoLoader",
            display_name="Demo Model (Slipstream)",
            category=CATEGORY,
            description="A tiny Stable Diffusion 1 model that comes with Slipstream and draws coloured "
            "shapes, best at 256x256. It lets you try everything without a download.",
            inputs=[],
            outputs=[
                io.Model.Output(tooltip="For Accelerate Model and the sampler."),
                io.Vae.Output(tooltip="For VAE Decode and VAE Encode."),
                io.ControlNet.Output(tooltip="Guided by canny edges, white on black."),
            ],
        )

    @classmethod
    def execute(cls) -> io.NodeOutput:
        from ..hosts.comfy.models.demo_model import load_demo_controlnet, load_demo_model, load_demo_vae

        return io.NodeOutput(load_demo_model(), load_demo_vae(), load_demo_controlnet())


class SlipstreamDemoLora(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SlipstreamDemoLora",
            display_name="Demo LoRA (Slipstream)",
            category=CATEGORY,
            description="A tiny LoRA that comes with Slipstream and turns the demo model's scenes into night: the "
            "backdrop is dark, and the shapes glow in their colours.",
            inputs=[
                io.Model.Input("model", tooltip="Of Demo Model, before or behind Accelerate Model."),
                io.Float.Input(
                    "strength",
                    default=1.0,
                    min=-2.0,
                    max=2.0,
                    step=0.05,
                    tooltip="0: day, as without the LoRA. 1: night. In between: dusk. No strength needs a new engine.",
                ),
            ],
            outputs=[io.Model.Output(tooltip="The model with the LoRA.")],
        )

    @classmethod
    def execute(cls, model: Any, strength: float) -> io.NodeOutput:
        from ..hosts.comfy.models.demo_lora import add_demo_lora

        return io.NodeOutput(add_demo_lora(model, strength))


class SlipstreamDemoPrompt(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SlipstreamDemoPrompt",
            display_name="Demo Prompt (Slipstream)",
            category=CATEGORY,
            description="The demo model's text encoder. It knows colours, shapes, textures and places; an "
            "unknown word is an error that lists them. An empty text is the negative prompt.",
            inputs=[
                io.String.Input(
                    "text",
                    multiline=True,
                    default="a red striped circle above a blue square on a green background",
                    tooltip="What the picture shows, such as: a large yellow star left of a black ring.",
                )
            ],
            outputs=[io.Conditioning.Output(tooltip="For the sampler: positive, or negative where the text is empty.")],
        )

    @classmethod
    def execute(cls, text: str) -> io.NodeOutput:
        from ..hosts.comfy.models.demo_model import encode_demo_prompt

        return io.NodeOutput(encode_demo_prompt(text))
