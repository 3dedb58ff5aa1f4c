"""Accelerate ControlNet: a ControlNet's own network on an engine."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from .inputs import backend_input, build_input, optimize_input, precision_input, resolutions_input


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
            inputs=[
                io.ControlNet.Input("control_net"),
                backend_input(),
                precision_input(),
                optimize_input(),
                build_input(with_manual=False),
                resolutions_input(),
            ],
            outputs=[io.ControlNet.Output()],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(
        cls, control_net: Any, backend: str, precision: str, optimize: str, build: str, resolutions: str
    ) -> io.NodeOutput:
        from ..hosts.comfy.accelerate_controlnet import accelerate_controlnet
        from ..hosts.comfy.host import provider
        from ..hosts.comfy.pictures import record_run
        from ..runtime.module import AcceleratedModule
        from ..runtime.settings import Settings

        settings = Settings.of_text(
            backend=backend, precision=precision, optimize=optimize, build=build, resolutions=resolutions
        )
        module = AcceleratedModule(provider(), settings)
        node_id = str(cls.hidden.unique_id)
        return io.NodeOutput(accelerate_controlnet(control_net, module, lambda what: record_run(what, node_id)))
