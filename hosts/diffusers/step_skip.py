"""Step skipping in diffusers: in a skipped step neither the network nor its ControlNet is called.

A pipeline calls its networks, forms the guided prediction of their results and gives it to `scheduler.step`. There it
is noted and filled in, outside of guidance as in ComfyUI; in a skipped step the networks give zeros of the right shape,
which the scheduler never sees. To fill in the networks' own results would be the same with `Reuse.HOLD` and `LINEAR`,
which commute with guidance; `MEASURED` follows the line by a share of its own in each row of a batch, and was 2 to 5 dB
further from the full picture (demo model, CFG 5, DDIM and DPM++ 2M, 20 steps).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from inspect import signature
from typing import Any

from ...core.errors import UnsupportedModel
from ...sampling.presets import Preset
from ...sampling.run import AfterRun, Skipped
from .picture import Picture
from .plan import Plan
from .taking_over import called_instead, stepped_instead

log = logging.getLogger(__name__)

_NETWORKS = ("unet", "transformer", "transformer_2")
_CONTROLNETS = ("controlnet",)
_ALWAYS_NEW = "what the pipeline gives its networks is new in each step"


@contextmanager
def skip_steps(pipeline: Any, preset: Preset, after_run: AfterRun | None = None) -> Iterator[None]:
    """Inside, each picture of `pipeline` skips steps, and is sampled as before outside.

    Such as:

        with pipe.unet.run(), skip_steps(pipe, PRESETS["balanced"]):
            image = pipe("a red fox").images[0]

    Args:
        pipeline: of diffusers, or anything with its `unet` or `transformer`, its `scheduler` and, where there is one,
            its `controlnet`. The scheduler may be exchanged between pictures.
        after_run: told what happened in each picture.

    Raises:
        UnsupportedModel: something else skips steps of this pipeline already, or it has no network.
    """
    names = _own(pipeline, (*_CONTROLNETS, *_NETWORKS))
    with ExitStack() as ending:
        skipping = _Skipping(pipeline, preset, after_run)
        ending.callback(skipping.close)
        for name in names:
            ending.enter_context(called_instead(pipeline, name, partial(skipping.call, name)))
        yield


def _own(pipeline: Any, names: tuple[str, ...]) -> list[str]:
    found = [name for name in names if getattr(pipeline, name, None) is not None]
    if not set(found) & set(_NETWORKS):
        raise UnsupportedModel(f"{type(pipeline).__name__} has no unet or transformer whose steps could be skipped.")
    if any(getattr(getattr(pipeline, name), "is_cache_enabled", False) for name in found):
        raise UnsupportedModel(
            "A cache of diffusers and step skipping are on for the same network: each would go on from the other's "
            "guesses. Call disable_cache() on the network, or leave step skipping out."
        )
    return found


class _Skipping:
    """One picture after another."""

    def __init__(self, pipeline: Any, preset: Preset, after_run: AfterRun | None) -> None:
        self._pipeline, self._preset, self._after_run = pipeline, preset, after_run
        self._picture: Picture | None = None
        self._scheduler: Any = None
        self._giving_back = ExitStack()  # the scheduler
        self._take(getattr(pipeline, "scheduler", None))

    def close(self) -> None:
        self._take(None)
        self._finish()

    def call(self, name: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of a network or a ControlNet."""
        scheduler = getattr(self._pipeline, "scheduler", None)
        if scheduler is None:
            return original(*args, **kwargs)
        picture = self._picture
        if picture is None or not picture.goes_on(scheduler):
            picture = self._begin(scheduler)
        return picture.call(name, name in _CONTROLNETS, original, args, kwargs)

    def step(self, scheduler: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of `scheduler.step`."""
        given, picture = signature(original).bind(*args, **kwargs), self._picture
        if picture is None or not given.arguments.keys() >= {"model_output", "timestep", "sample"}:
            return original(*args, **kwargs)
        if not picture.goes_to(given.arguments["timestep"]):
            picture = self._begin(scheduler)
        given.arguments["model_output"] = picture.step(given.arguments)
        return original(*given.args, **given.kwargs)

    def _begin(self, scheduler: Any) -> Picture:
        self._finish()
        self._take(scheduler)
        self._picture = Picture(self._pipeline, scheduler, self._preset)
        return self._picture

    def _take(self, scheduler: Any) -> None:
        if self._scheduler is not scheduler:
            self._giving_back.close()
            self._scheduler = scheduler
            if scheduler is not None:
                self._giving_back.enter_context(stepped_instead(scheduler, partial(self.step, scheduler)))

    def _finish(self) -> None:
        """Tell of the picture, and let go of its tensors."""
        picture, self._picture = self._picture, None
        if picture is not None and picture.plan is not None:
            told = _told(self._preset, picture.plan)
            if self._after_run is not None:
                self._after_run(told)


def _told(preset: Preset, plan: Plan) -> Skipped:
    reason = plan.reason or (_ALWAYS_NEW if plan.came_to_nothing else "")
    if reason and not plan.reason:
        log.warning("Slipstream skipped no steps: %s", reason)
    return Skipped(preset.name, plan.sampler, plan.steps, *plan.counts, plan.rule.value, reason, plan.remark)
