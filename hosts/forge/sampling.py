"""A sampling run of the WebUI: where engines and step skipping take hold, and what is said of it afterwards.

Everything hangs on one call of `sampler.launch_sampling`: by then the host has loaded its models and all extensions
have had their say; it is called once for each pass of a picture, hires fix included, and what was put in place is gone
when it returns.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from ...core.errors import SlipstreamError, warn_once
from ...runtime.module import AcceleratedModule
from ...sampling.presets import Preset
from ..info_text import of_engines
from ..webui_process import module_of, waiting_hooks
from .calls import UNetCalls, calls_led
from .choices import Choices
from .fallback_reasons import why_not_this_run
from .families import Family, family_of
from .skipping import skipping
from .source import ForgeUNetSource
from .task import task_of

log = logging.getLogger(__name__)

ENGINES, STEPS = "Slipstream", "Slipstream steps"
"""In a picture's info text; a hires pass has its own."""
_HIRES = " hires"
_LAUNCH = "launch_sampling"


def lead_next_sampling(p: Any, choices: Choices) -> None:
    """Let the next sampling run of `p` be as chosen.

    Args:
        p: the WebUI's processing, whose `sampler` is about to run.
    """
    _forget(p)
    if choices.is_idle:
        return
    sampler = p.sampler
    before = vars(sampler).get(_LAUNCH)
    if isinstance(before, _Launch):  # Forge calls its scripts twice before a hires pass
        before.leave()
    if not hasattr(sampler, _LAUNCH):
        _note(p, ENGINES, f"plain model: the sampler {type(sampler).__name__} is of an unknown kind")
        return
    setattr(sampler, _LAUNCH, _Launch(p, sampler, choices))
    _preserve_memory(p, choices)


class _Launch:
    """A sampler's `launch_sampling` for one run."""

    def __init__(self, p: Any, sampler: Any, choices: Choices) -> None:
        self._p, self._sampler, self._choices = p, sampler, choices
        self._launch = getattr(sampler, _LAUNCH)
        self._own = vars(sampler).get(_LAUNCH)  # of another extension

    def __call__(self, steps: int, func: Callable[[], Any]) -> Any:
        self.leave()
        with ExitStack() as ending:
            _take_hold(self._p, self._sampler, self._choices, ending)
            return self._launch(steps, func)

    def leave(self) -> None:
        """Give the sampler back what it had."""
        if vars(self._sampler).get(_LAUNCH) is self:
            delattr(self._sampler, _LAUNCH)
            if self._own is not None:
                setattr(self._sampler, _LAUNCH, self._own)


def _forget(p: Any) -> None:
    """What an earlier batch of the same job left in the info text."""
    is_hires = getattr(p, "is_hr_pass", False)
    for name in (ENGINES, STEPS):
        p.extra_generation_params.pop(name + _HIRES, None)
        if not is_hires:
            p.extra_generation_params.pop(name, None)


def _note(p: Any, name: str, what: str) -> None:
    p.extra_generation_params[name + (_HIRES if getattr(p, "is_hr_pass", False) else "")] = what


def _preserve_memory(p: Any, choices: Choices) -> None:
    """Ask the host to leave room for what engines hold, besides its own models."""
    if choices.settings.is_off:
        return
    patcher = p.sd_model.forge_objects.unet
    held = module_of(choices.settings).provider.pool.device_bytes(_device(patcher))
    if held:
        patcher = patcher.clone()
        patcher.add_extra_preserved_memory_during_sampling(held)
        p.sd_model.forge_objects.unet = patcher


def _device(patcher: Any) -> Any:
    import torch

    return torch.device(patcher.load_device)


def _take_hold(p: Any, sampler: Any, choices: Choices, ending: ExitStack) -> None:
    if not choices.settings.is_off:
        ending.enter_context(_accelerated(p, module_of(choices.settings)))
    if choices.preset is not None:
        ending.enter_context(_skips_steps(p, sampler, choices.preset))


@contextmanager
def _accelerated(p: Any, module: AcceleratedModule) -> Iterator[None]:
    patcher = p.sd_model.forge_objects.unet
    module.status.begin_run()
    before = module.status.to_json()
    try:
        with ExitStack() as ending:
            _lead_calls(p, patcher, module, ending)
            yield
    finally:
        _note(p, ENGINES, of_engines(module.status.since(before)))
        _clear_text()


def _lead_calls(p: Any, patcher: Any, module: AcceleratedModule, ending: ExitStack) -> None:
    try:
        source = ForgeUNetSource(patcher)
        source.precision  # noqa: B018  an unsupported dtype is a reason too
    except SlipstreamError as error:
        module.count_eager(str(error))
        return
    run = ending.enter_context(module.run(source, waiting_hooks(source.family.manager())))
    ending.enter_context(calls_led(patcher.model, UNetCalls(run, source, why_not_this_run(p, patcher))))


def _clear_text() -> None:
    from modules import shared

    if str(shared.state.textinfo or "").startswith("Slipstream"):
        shared.state.textinfo = None


@contextmanager
def _skips_steps(p: Any, sampler: Any, preset: Preset) -> Iterator[None]:
    """Meanwhile the sampler's function runs with steps that are skipped: only its arguments tell which there are."""
    function = sampler.func

    def func(denoiser: Any, *args: Any, **kwargs: Any) -> Any:
        sampler.func = function
        task = task_of(p, sampler, kwargs)
        patcher = p.sd_model.forge_objects.unet
        family = family_of(patcher)
        reason = task if isinstance(task, str) else _why_no_skipping(family, patcher)
        if isinstance(task, str) or family is None or reason:
            _note(p, STEPS, f"every step computed: {reason}")
            return function(denoiser, *args, **kwargs)
        with skipping(family, patcher, denoiser, preset, task, lambda told: _tell(p, told)):
            return function(denoiser, *args, **kwargs)

    sampler.func = func
    try:
        yield
    finally:
        sampler.func = function


def _why_no_skipping(family: Family | None, patcher: Any) -> str | None:
    if family is None:
        return f"{type(patcher).__name__} is of no WebUI that Slipstream knows"
    return family.why_no_skipping()


def _tell(p: Any, told: Any) -> None:
    _note(p, STEPS, str(told))
    if told.reason:
        warn_once(log, f"Slipstream skips no steps: {told.reason}")
