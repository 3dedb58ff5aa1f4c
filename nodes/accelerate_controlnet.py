"""Accelerate ControlNet: a ControlNet's own network on an engine."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from .shared.accelerated_output import HIDDEN, accelerated, fingerprint
from .shared.inputs import choices
from .shared.search import ENGINES, found_by


class AccelerateControlNet(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SlipstreamAccelerateControlNet",
            display_name="Accelerate ControlNet",
            category="Slipstream",
            description="Runs the ControlNet on an engine that is compiled for your resolution. Place it between the "
            "ControlNet's loader and Apply ControlNet; strength, timing and chains work as ever. Use it together with "
            "Accelerate Model, whose engines take what ControlNets add.",
            **found_by(ENGINES),
            inputs=[
                io.ControlNet.Input(
                    "control_net", tooltip="The ControlNet to accelerate. Other nodes may go on using it."
                ),
                *choices(with_manual=False),
            ],
            outputs=[io.ControlNet.Output(tooltip="For Apply ControlNet, and for Engine Info.")],
            hidden=HIDDEN,
        )

    @classmethod
    def fingerprint_inputs(cls, **inputs: Any) -> str:
        return fingerprint(cls)

    @classmethod
    def execute(cls, control_net: Any, **chosen: Any) -> io.NodeOutput:
        from ..hosts.comfy.accelerate_controlnet import accelerate_controlnet

        return accelerated(cls, accelerate_controlnet, control_net, **chosen)
