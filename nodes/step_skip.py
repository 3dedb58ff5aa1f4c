"""Step Skip, Step Skip Sampler and Skip Sigmas: fewer calls of the model in a sampling run of any kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from comfy_api.latest import io

from .shared.search import SKIPPING, found_by
from .shared.skip_inputs import CATEGORY, fingerprint_of, preset_of, reuse_inputs, selection_inputs

if TYPE_CHECKING:
    from torch import Tensor

    from ..sampling.run import Skipped


def recorder(node: type[io.ComfyNode]) -> Callable[[Skipped], None]:
    """Writes into the pictures' record what happened in each run that `node` is part of, and tells the page."""
    from ..hosts.comfy.process.running_prompts import running_prompts
    from ..hosts.comfy.process.saved_pictures import record_run
    from ..hosts.comfy.process.server_events import SKIPPED, send

    node_id = str(node.hidden.unique_id)

    def after_run(skipped: Skipped) -> None:
        record_run({"step_skipping": asdict(skipped)}, node_id)
        for workflow in {prompt.workflow for prompt in running_prompts() if node_id in prompt.nodes}:
            told = {"computed": skipped.computed, "steps": skipped.steps, "reason": skipped.reason}
            send(SKIPPED, {"node": node_id, "workflow": workflow, **told})

    return after_run


class StepSkip(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SlipstreamStepSkip",
            display_name="Step Skip",
            category=CATEGORY,
            description="Keeps all steps of your sampler and computes the model, with its ControlNets and guidance, in "
            "some of them; in the rest the sampler goes on from what earlier steps gave. Works with any sampler node, "
            "with Accelerate nodes and LoRA before and after it. Samplers for which that makes no sense compute every "
            "step.",
            **found_by(SKIPPING),
            inputs=[
                io.Model.Input("model", tooltip="The model whose calls are skipped."),
                *selection_inputs(),
                *reuse_inputs(),
            ],
            outputs=[io.Model.Output(tooltip="For the sampler, and for Engine Info.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def fingerprint_inputs(cls, preset: str | None = None, **_: Any) -> str:
        return fingerprint_of(preset)

    @classmethod
    def execute(cls, model: Any, **chosen: Any) -> io.NodeOutput:
        from ..hosts.comfy.skip.step_skip import skip_steps

        return io.NodeOutput(skip_steps(model, preset_of(**chosen), recorder(cls)))


class StepSkipSampler(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SlipstreamStepSkipSampler",
            display_name="Step Skip Sampler",
            category=CATEGORY,
            description="Step Skip for a SAMPLER, as SamplerCustom and SamplerCustomAdvanced take it: it skips steps "
            "with whatever model and guider they are given. Use one of the two.",
            **found_by(SKIPPING),
            inputs=[
                io.Sampler.Input("sampler", tooltip="Of KSamplerSelect, say."),
                *selection_inputs(),
                *reuse_inputs(),
            ],
            outputs=[io.Sampler.Output(tooltip="For SamplerCustom and SamplerCustomAdvanced.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def fingerprint_inputs(cls, preset: str | None = None, **_: Any) -> str:
        return fingerprint_of(preset)

    @classmethod
    def execute(cls, sampler: Any, **chosen: Any) -> io.NodeOutput:
        from ..hosts.comfy.skip.skipping_sampler import SkippingSampler

        return io.NodeOutput(SkippingSampler(sampler, preset_of(**chosen), recorder(cls)))


class SkipSigmas(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SlipstreamSkipSigmas",
            display_name="Skip Sigmas",
            category=CATEGORY,
            description="The sigmas of the steps that a preset computes, and no others: a shorter schedule for any "
            "sampler, which reuses nothing. With Euler and DDIM it is what Step Skip with hold gives; compare Step "
            "Skip with it.",
            **found_by(SKIPPING),
            inputs=[
                io.Sigmas.Input("sigmas", tooltip="A whole schedule, of BasicScheduler say."),
                *selection_inputs(),
            ],
            outputs=[io.Sigmas.Output(tooltip="A shorter schedule, for SamplerCustom.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def fingerprint_inputs(cls, preset: str | None = None, **_: Any) -> str:
        return fingerprint_of(preset)

    @classmethod
    def execute(cls, sigmas: Tensor, preset: str, **chosen: Any) -> io.NodeOutput:
        from ..hosts.comfy.process.saved_pictures import record_run
        from ..sampling.schedule import shortened

        steps, selection = max(len(sigmas) - 1, 0), preset_of(preset, **chosen).selection
        if steps == 0:
            return io.NodeOutput(sigmas)
        computed = selection.computed(steps)
        what = {"preset": preset, "steps": steps, "computed": len(computed)}
        record_run({"skip_sigmas": what}, str(cls.hidden.unique_id))
        return io.NodeOutput(shortened(sigmas, computed))
