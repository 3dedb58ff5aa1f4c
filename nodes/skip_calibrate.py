"""Skip Calibrate: which steps to compute, found on the user's own model and prompts."""

from __future__ import annotations

from functools import partial
from typing import Any

from comfy_api.latest import io, ui

from .shared.sampler_inputs import denoise_input, sampler_inputs
from .shared.search import SKIPPING, found_by
from .shared.skip_inputs import CATEGORY
from .step_skip import recorder

_FURTHER = ("positive_2", "positive_3", "positive_4")


class SkipCalibrate(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SlipstreamSkipCalibrate",
            display_name="Skip Calibrate",
            category=CATEGORY,
            description="Samples your own pictures many times to find which steps Step Skip should compute for this "
            "model, sampler, schedule and CFG, judges them on pictures that were held out, and saves them as a preset. "
            "Takes the time of a hundred pictures or more; cancel leaves nothing behind.",
            **found_by(SKIPPING),
            inputs=[*_what_is_sampled(), *_how(), *_wishes(), *map(_prompt, _FURTHER)],
            outputs=[
                io.Model.Output(tooltip="The model with the proposed steps."),
                io.String.Output(
                    display_name="report", tooltip="The conclusion, and the figures that it follows from."
                ),
                io.Image.Output(display_name="chart", tooltip="Computed steps against closeness."),
            ],
            hidden=[io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    def execute(
        cls,
        model: Any,
        positive: Any,
        negative: Any,
        latent_image: dict[str, Any],
        first_seed: int,
        seeds: int,
        steps: int,
        cfg: float,
        sampler_name: str,
        scheduler: str,
        denoise: float,
        computed_steps: int = 0,
        seconds: float = 0.0,
        name: str = "",
        **further: Any,
    ) -> io.NodeOutput:
        from ..hosts.comfy.process.server_events import show_text
        from ..hosts.comfy.skip.calibrate import Wish, calibrate_model
        from ..hosts.comfy.skip.calibration_chart import draw_chart
        from ..hosts.comfy.skip.calibration_pictures import Job

        job = Job(model, negative, latent_image, steps, cfg, sampler_name, scheduler, denoise)
        positives = [positive, *(further[key] for key in _FURTHER if further.get(key) is not None)]
        wish = Wish(computed_steps, seconds, name.strip())
        tell = partial(show_text, str(cls.hidden.unique_id))
        proposal = calibrate_model(job, positives, first_seed, seeds, wish, recorder(cls), tell)
        chart = draw_chart(proposal.calibration)
        shown = ui.PreviewImage(chart).as_dict() | ui.PreviewText(proposal.report).as_dict()
        return io.NodeOutput(proposal.model, proposal.report, chart, ui=shown)


def _what_is_sampled() -> list[io.Input]:
    return [
        io.Model.Input("model", tooltip="With its LoRA, Accelerate and other nodes before this one."),
        io.Conditioning.Input("positive", tooltip="A prompt as you use them, with its ControlNets."),
        io.Conditioning.Input("negative", tooltip="The negative prompt, the same for all."),
        io.Latent.Input("latent_image", tooltip="Of the size that you sample."),
        # Not called seed: of that name the page makes a new one for each queue, which would calibrate anew each time.
        io.Int.Input("first_seed", default=0, min=0, max=2**64 - 1, tooltip="Further ones follow it."),
        io.Int.Input(
            "seeds",
            default=2,
            min=1,
            max=64,
            tooltip="How many seeds of each prompt are fitted on. At least 4 further seeds are held out.",
        ),
    ]


def _how() -> list[io.Input]:
    return [
        io.Int.Input("steps", default=20, min=1, max=10000, tooltip="Of the sampler. The preset is for this number."),
        *sampler_inputs(),
        denoise_input(),
    ]


def _wishes() -> list[io.Input]:
    return [
        io.Int.Input(
            "computed_steps",
            default=0,
            min=0,
            max=10000,
            tooltip="How many steps are computed. 0: seven in ten.",
        ),
        io.Float.Input(
            "seconds",
            default=0.0,
            min=0.0,
            max=86400.0,
            step=0.1,
            round=0.001,
            tooltip="Above 0, in place of computed_steps: as many computed steps as fit into a sampling run of this "
            "latent that takes so long here. Measured before the search begins.",
        ),
        io.String.Input(
            "name",
            default="",
            tooltip="Saved under this name, for the preset of Step Skip. One of the same name is replaced. Empty does "
            "not save.",
        ),
    ]


def _prompt(name: str) -> io.Conditioning.Input:
    return io.Conditioning.Input(
        name, optional=True, tooltip="A further prompt. The last one is held out: nothing is fitted on it."
    )
