"""Build Engine: makes engines before the first picture needs them."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io, ui

from .inputs import backend_input, engine_inputs, optimize_input, precision_input


class BuildEngine(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SlipstreamBuildEngine",
            display_name="Build Engine",
            category="Slipstream",
            description="Builds engines now, with a progress bar, and checks them against the model. An engine that "
            "exists already is only checked. Cancel stops the build and leaves nothing behind.",
            inputs=[
                io.Model.Input("model"),
                io.String.Input("resolutions", default="512x512", tooltip="Picture sizes, such as 512x512, 768x512."),
                io.Int.Input(
                    "batch",
                    default=2,
                    min=1,
                    max=64,
                    tooltip="Samples in one call of the model: 2 for one picture with CFG (prompt and negative "
                    "prompt), 1 with CFG 1, 2 per picture for batches.",
                ),
                io.Int.Input(
                    "tokens",
                    default=77,
                    min=1,
                    max=77 * 16,
                    tooltip="Length of the text: 77 for prompts up to 75 words or so, 154 for the next 75.",
                ),
                backend_input(with_off=False),
                precision_input(),
                optimize_input(),
                *engine_inputs(),
            ],
            outputs=[io.Model.Output(), io.String.Output(display_name="report")],
            is_output_node=True,
        )

    @classmethod
    def execute(
        cls,
        model: Any,
        resolutions: str,
        batch: int,
        tokens: int,
        backend: str,
        precision: str,
        optimize: str,
        **engines: Any,
    ) -> io.NodeOutput:
        from ..hosts.comfy.build import build_engines
        from ..hosts.comfy.host import provider
        from ..runtime.settings import Settings

        settings = Settings.of_text(
            backend=backend,
            precision=precision,
            optimize=optimize,
            build="first use",
            resolutions=resolutions,
            **engines,
        )
        report = "\n".join(build_engines(provider(), model, settings, batch, tokens))
        return io.NodeOutput(model, report, ui=ui.PreviewText(report))
