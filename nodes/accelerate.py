"""Accelerate Model: the one node that a workflow needs."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from .shared.accelerated_output import HIDDEN, accelerated, fingerprint
from .shared.inputs import choices, engine_inputs
from .shared.search import ENGINES, found_by


class AccelerateModel(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SlipstreamAccelerateModel",
            display_name="Accelerate Model",
            category="Slipstream",
            description="Runs the model on engines that are compiled for your resolution, built once and kept on disk. "
            "Place it anywhere between the loader and the sampler; LoRA works before and after it. "
            "Whatever an engine cannot do runs on your model without Slipstream, and Engine Info says why.",
            **found_by(ENGINES),
            inputs=[
                io.Model.Input("model", tooltip="The model to accelerate. Other nodes may go on using it as it is."),
                *choices(),
                *engine_inputs(),
            ],
            outputs=[io.Model.Output(tooltip="For the sampler, and for Engine Info.")],
            hidden=HIDDEN,
        )

    @classmethod
    def fingerprint_inputs(cls, **inputs: Any) -> str:
        return fingerprint(cls)

    @classmethod
    def execute(cls, model: Any, **chosen: Any) -> io.NodeOutput:
        from ..hosts.comfy.accelerate import accelerate_model

        return accelerated(cls, accelerate_model, model, **chosen)
