"""Accelerate VAE: decoder and encoder on engines."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from .shared.accelerated_output import HIDDEN, accelerated, fingerprint
from .shared.inputs import BLOCKS_OF_VAES, choices
from .shared.search import ENGINES, found_by


class AccelerateVAE(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SlipstreamAccelerateVAE",
            display_name="Accelerate VAE",
            category="Slipstream",
            description="Runs the VAE's decoder and encoder on engines that are compiled for your resolution. Place it "
            "between the loader and the nodes that decode or encode, tiled ones and inpainting included. Whatever an "
            "engine cannot do runs on your VAE without Slipstream, and Engine Info says why.",
            **found_by(ENGINES),
            inputs=[
                io.Vae.Input("vae", tooltip="The VAE to accelerate. Other nodes may go on using it as it is."),
                *choices(with_manual=False, blocks=BLOCKS_OF_VAES),
            ],
            outputs=[io.Vae.Output(tooltip="For the nodes that decode or encode, and for Engine Info.")],
            hidden=HIDDEN,
        )

    @classmethod
    def fingerprint_inputs(cls, **inputs: Any) -> str:
        return fingerprint(cls)

    @classmethod
    def execute(cls, vae: Any, **chosen: Any) -> io.NodeOutput:
        from ..hosts.comfy.accelerate_vae import accelerate_vae

        return accelerated(cls, accelerate_vae, vae, **chosen)
