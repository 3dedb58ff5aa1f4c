"""Engine Info: what runs, since when, how often, and why not."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io, ui

from .shared.search import ENGINES, found_by


class EngineInfo(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SlipstreamEngineInfo",
            display_name="Engine Info",
            category="Slipstream",
            description="Shows what an accelerated model did: the engine in use, calls of the engine and of your "
            "model without Slipstream, and each reason why it ran. Connect a picture or latent to `after`, so that it "
            "looks after sampling. Behind Step Skip it also says how many steps were computed.",
            **found_by(ENGINES),
            inputs=[
                io.Model.Input("model", optional=True, tooltip="The output of Accelerate Model."),
                io.AnyType.Input("after", optional=True, tooltip="Anything that the sampler has made."),
                io.Vae.Input("vae", optional=True, tooltip="The output of Accelerate VAE."),
                io.ControlNet.Input("control_net", optional=True, tooltip="The output of Accelerate ControlNet."),
                io.Clip.Input("clip", optional=True, tooltip="The output of Accelerate Text Encoder."),
            ],
            outputs=[io.String.Output(display_name="info", tooltip="What the node shows, for Preview Any.")],
            is_output_node=True,
            not_idempotent=True,
        )

    @classmethod
    def fingerprint_inputs(cls, **inputs: Any) -> float:
        return float("nan")  # counts change with every run

    @classmethod
    def execute(
        cls, model: Any = None, after: Any = None, vae: Any = None, control_net: Any = None, clip: Any = None
    ) -> io.NodeOutput:
        from ..hosts.comfy.accelerate import accelerated_module
        from ..hosts.comfy.accelerate_controlnet import accelerated_controlnet_module
        from ..hosts.comfy.accelerate_text_encoder import accelerated_text_encoder_module
        from ..hosts.comfy.accelerate_vae import accelerated_vae_module
        from ..hosts.comfy.node_state.status_text import describe

        given = (
            (model, accelerated_module, "model", "Accelerate Model"),
            (vae, accelerated_vae_module, "VAE", "Accelerate VAE"),
            (control_net, accelerated_controlnet_module, "ControlNet", "Accelerate ControlNet"),
            (clip, accelerated_text_encoder_module, "text encoder", "Accelerate Text Encoder"),
        )
        found = [describe(module_of(it), what, node) for it, module_of, what, node in given if it is not None]
        if model is not None and (steps := _steps_of(model)):
            found.append(steps)
        text = "\n\n".join(found) or "Connect what an Accelerate node has made."
        return io.NodeOutput(text, ui=ui.PreviewText(text))


def _steps_of(model: Any) -> str:
    """What Step Skip did in the model's last sampling run; empty where it is not before this node."""
    from ..hosts.comfy.skip.step_skip import last_skipped, skips_steps

    if not skips_steps(model):
        return ""
    return f"step skipping: {last_skipped(model) or 'not sampled yet'}"
