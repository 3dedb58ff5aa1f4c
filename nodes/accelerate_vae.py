"""Accelerate VAE: decoder and encoder on engines."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from .inputs import backend_input, build_input, optimize_input, precision_input, resolutions_input


class AccelerateVAE(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SlipstreamAccelerateVAE",
            display_name="Accelerate VAE",
            category="Slipstream",
            description="Runs the VAE's decoder and encoder on engines that are compiled for your resolution. Place it "
            "between the loader and the nodes that decode or encode, tiled ones and inpainting included. Whatever an "
            "engine cannot honour runs on the plain VAE, and Engine Info says why.",
            inputs=[
                io.Vae.Input("vae"),
                backend_input(),
                precision_input(),
                optimize_input(),
                build_input(with_manual=False),
                resolutions_input(),
            ],
            outputs=[io.Vae.Output()],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(
        cls, vae: Any, backend: str, precision: str, optimize: str, build: str, resolutions: str
    ) -> io.NodeOutput:
        from ..hosts.comfy.accelerate_vae import accelerate_vae
        from ..hosts.comfy.host import provider
        from ..hosts.comfy.pictures import record_run
        from ..runtime.module import AcceleratedModule
        from ..runtime.settings import Settings

        settings = Settings.of_text(
            backend=backend, precision=precision, optimize=optimize, build=build, resolutions=resolutions
        )
        module = AcceleratedModule(provider(), settings)
        node_id = str(cls.hidden.unique_id)
        return io.NodeOutput(accelerate_vae(vae, module, lambda what: record_run(what, node_id)))
