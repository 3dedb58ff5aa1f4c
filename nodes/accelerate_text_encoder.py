"""Accelerate Text Encoder: layers of text encoders on engines."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..runtime.settings.model_settings import BackendChoice
from .shared.accelerated_output import HIDDEN, accelerated, fingerprint
from .shared.inputs import build_input
from .shared.search import ENGINES, found_by


class AccelerateTextEncoder(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SlipstreamAccelerateTextEncoder",
            display_name="Accelerate Text Encoder",
            category="Slipstream",
            description="Runs the layers of text encoders (CLIP, T5, Qwen, Gemma, Llama) on compiled engines, one for "
            "each kind of layer. They serve texts of any length. Place it between the loader and the nodes that encode "
            "texts, before or behind LoRAs. Whatever an engine cannot do runs on your text encoder without Slipstream, "
            "and Engine Info says why.",
            **found_by([*ENGINES, "clip", "t5", "prompt"]),
            inputs=[
                io.Clip.Input(
                    "clip", tooltip="The text encoder to accelerate. Other nodes may go on using it as it is."
                ),
                _backend_input(),
                build_input(with_manual=False),
            ],
            outputs=[io.Clip.Output(tooltip="For the nodes that encode texts, for LoRAs, and for Engine Info.")],
            hidden=HIDDEN,
        )

    @classmethod
    def fingerprint_inputs(cls, **inputs: Any) -> str:
        return fingerprint(cls)

    @classmethod
    def execute(cls, clip: Any, **chosen: Any) -> io.NodeOutput:
        from ..hosts.comfy.accelerate_text_encoder import accelerate_text_encoder

        if clip is None:
            raise ValueError(
                "There is no text encoder: the file that was loaded contains none. Load one by Load CLIP and connect it"
            )
        return accelerated(cls, accelerate_text_encoder, clip, **chosen)


def _backend_input() -> io.Combo.Input:
    """TensorRT has no engines of layers."""
    choices = BackendChoice.AUTO, BackendChoice.COMPILED, BackendChoice.OFF
    return io.Combo.Input(
        "backend",
        options=[choice.value for choice in choices],
        default=BackendChoice.AUTO.value,
        tooltip="auto: compiled, unless Slipstream's settings choose tensorrt or off. compiled: layers compiled ahead "
        "of time. off: your text encoder, without Slipstream.",
    )
