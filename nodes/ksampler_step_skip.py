"""KSampler (Step Skip): ComfyUI's KSampler, and Step Skip in the same node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from comfy_api.latest import io

from .shared.sampler_inputs import denoise_input, sampler_inputs
from .shared.search import SKIPPING, found_by
from .shared.skip_inputs import CATEGORY, fingerprint_of, preset_of, reuse_inputs, selection_inputs
from .step_skip import recorder

if TYPE_CHECKING:
    from ..sampling.run import Skipped

_CHOSEN = ("preset", "share", "computed_steps", "power", "step_list", "rule", "block_cache")


class KSamplerStepSkip(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SlipstreamKSamplerStepSkip",
            display_name="KSampler (Step Skip)",
            category=CATEGORY,
            description="KSampler that computes the model in some of its steps and goes on from what earlier steps "
            "gave in the rest. Its report says what happened.",
            **found_by(SKIPPING),
            inputs=[*_ksampler_inputs(), *selection_inputs(), *reuse_inputs()],
            outputs=[
                io.Latent.Output(tooltip="The sampled latent."),
                io.String.Output(
                    display_name="report", tooltip="How many steps were computed, or why all of them were."
                ),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def fingerprint_inputs(cls, preset: str | None = None, **_: Any) -> str:
        return fingerprint_of(preset)

    @classmethod
    def execute(cls, model: Any, latent_image: Any, **inputs: Any) -> io.NodeOutput:
        from nodes import common_ksampler

        from ..hosts.comfy.skip.step_skip import skip_steps

        record, reports = recorder(cls), []

        def after_run(skipped: Skipped) -> None:
            record(skipped)
            reports.append(str(skipped))

        chosen = {name: inputs.pop(name) for name in _CHOSEN if name in inputs}
        skipping = skip_steps(model, preset_of(**chosen), after_run)
        (latent,) = common_ksampler(skipping, latent=latent_image, **inputs)
        return io.NodeOutput(latent, "\n".join(reports) or "nothing was sampled")


def _ksampler_inputs() -> list[io.Input]:
    """KSampler's own, by the same names."""
    return [
        io.Model.Input("model", tooltip="The model to sample, of Accelerate Model for instance."),
        io.Int.Input("seed", default=0, min=0, max=2**64 - 1, control_after_generate=True, tooltip="Of the noise."),
        io.Int.Input("steps", default=20, min=1, max=10000, tooltip="Of the sampler, computed and skipped ones."),
        *sampler_inputs(),
        io.Conditioning.Input("positive", tooltip="What the picture shows, with or without ControlNets."),
        io.Conditioning.Input("negative", tooltip="What it does not show."),
        io.Latent.Input("latent_image", tooltip="What sampling starts from."),
        denoise_input(),
    ]
