"""The built-in tiny model: a checkpoint's three outputs, and its text encoder."""

from __future__ import annotations

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
                io.Model.Output(),
                io.Vae.Output(),
                io.ControlNet.Output(tooltip="Guided by canny edges."),
            ],
        )

    @classmethod
    def execute(cls) -> io.NodeOutput:
        from ..hosts.comfy.demo_model import load_demo_controlnet, load_demo_model, load_demo_vae

        return io.NodeOutput(load_demo_model(), load_demo_vae(), load_demo_controlnet())


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
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(cls, text: str) -> io.NodeOutput:
        from ..hosts.comfy.demo_model import encode_demo_prompt

        return io.NodeOutput(encode_demo_prompt(text))
