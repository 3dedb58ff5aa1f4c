"""Pictures as a WebUI makes them: through its `process_images`, with our script and whatever others a test wants."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from modules import processing, scripts

from .boot import script_of

OFF = ("off", "background", "off", "auto")
ENGINE = ("auto", "first use", "off", "auto")
ENGINES, STEPS = "Slipstream", "Slipstream steps"


@dataclass
class Picture:
    """What came of a job.

    Attributes:
        latent: of its last pass, before the autoencoder.
        said: the extra parameters of its info text.
        info: the text.
    """

    latent: torch.Tensor
    said: dict[str, Any]
    info: str
    texts: list[str]


@dataclass
class Watch(scripts.Script):
    """A further script, which notes the latents."""

    latents: list[torch.Tensor] = field(default_factory=list)

    def title(self) -> str:
        return "watch"

    def post_sample(self, p: Any, ps: Any, *_: Any) -> None:
        self.latents.append(torch.stack(list(ps.samples)).clone())  # after a hires pass they are pictures


def runner_of(*others: Any) -> Any:
    """The WebUI's runner with our script, which its own loader found, and others around it."""
    runner = scripts.ScriptRunner()
    runner.initialize_scripts(False)
    runner.alwayson_scripts = [script_of(runner), *others]
    runner.scripts = list(runner.alwayson_scripts)
    runner.callback_map.clear()
    for script in others:
        script.args_from = script.args_to = 0
        script.filename = script.title()
    return runner


def picture(choices: tuple[Any, ...] = OFF, *others: Any, **options: Any) -> Picture:
    """Make a picture of 64 by 64 pixels.

    Args:
        choices: what the controls of our script say.
        others: further scripts.
        options: of `StableDiffusionProcessingTxt2Img`.
    """
    watch = Watch()
    runner = runner_of(*others, watch)
    ours = script_of(runner)
    ours.args_from, ours.args_to = 0, len(choices)
    usual = {
        "prompt": "a fox", "negative_prompt": "blurred", "seed": 3, "steps": 4, "cfg_scale": 5.0, "width": 64,
        "height": 64, "sampler_name": "Euler", "scheduler": "Normal", "do_not_save_samples": True,
        "do_not_save_grid": True,
    }  # fmt: skip
    p = processing.StableDiffusionProcessingTxt2Img(**{**usual, **options})
    p.scripts, p.script_args = runner, tuple(choices)
    made = processing.process_images(p)
    return Picture(watch.latents[-1], dict(p.extra_generation_params), made.info, list(made.infotexts))


def module(choices: tuple[Any, ...] = ENGINE) -> Any:
    """The accelerated module that serves these choices."""
    from slipstream.hosts.forge.choices import Choices
    from slipstream.hosts.webui_process import module_of

    return module_of(Choices.of_text(*choices).settings)


@dataclass
class Counted:
    """Calls that were made meanwhile."""

    engine: int = 0
    eager: int = 0
    reasons: dict[str, int] = field(default_factory=dict)


class Counting:
    """`with Counting() as counted:` counts the calls of engines and of the plain model."""

    def __init__(self, choices: tuple[Any, ...] = ENGINE) -> None:
        self._status = module(choices).status
        self.counted = Counted()

    def __enter__(self) -> Counted:
        self._before = self._status.to_json()
        return self.counted

    def __exit__(self, *_: object) -> None:
        happened = self._status.since(self._before)
        self.counted.engine, self.counted.eager = happened["engine_calls"], happened["eager_calls"]
        self.counted.reasons = happened["reasons"]
