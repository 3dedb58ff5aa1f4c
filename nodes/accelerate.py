"""Accelerate Model: the one node that a workflow needs."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from .inputs import (
    backend_input,
    build_input,
    engine_inputs,
    optimize_input,
    precision_input,
    resolutions_input,
)


class AccelerateModel(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SlipstreamAccelerateModel",
            display_name="Accelerate Model",
            category="Slipstream",
            description="Runs the model on engines that are compiled for your resolution, built once and kept on disk. "
            "Place it anywhere between the loader and the sampler; LoRA works before and after it. "
            "Whatever an engine cannot honour runs on the plain model, and Engine Info says why.",
            inputs=[
                io.Model.Input("model"),
                backend_input(),
                precision_input(),
                optimize_input(),
                build_input(),
                resolutions_input(),
                *engine_inputs(),
            ],
            outputs=[io.Model.Output()],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(
        cls,
        model: Any,
        backend: str,
        precision: str,
        optimize: str,
        build: str,
        resolutions: str,
        **engines: Any,
    ) -> io.NodeOutput:
        from ..hosts.comfy.accelerate import accelerate_model
        from ..hosts.comfy.host import provider
        from ..hosts.comfy.pictures import record_run
        from ..runtime.module import AcceleratedModule
        from ..runtime.settings import Settings

        settings = Settings.of_text(
            backend=backend, precision=precision, optimize=optimize, build=build, resolutions=resolutions, **engines
        )
        module = AcceleratedModule(provider(), settings)
        node_id = str(cls.hidden.unique_id)
        return io.NodeOutput(accelerate_model(model, module, lambda what: record_run(what, node_id)))
