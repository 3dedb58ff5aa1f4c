"""A CONTROL_NET whose network runs on engines."""

from __future__ import annotations

import logging
from typing import Any

from comfy.controlnet import ControlNet, ControlNetSD35

from ...core.errors import SlipstreamError, UnsupportedModel
from ...runtime.module import AcceleratedModule
from .models.controlnet import ComfyControlNet
from .run.controlnet_calls import ControlNetAcceleration, accelerated_class, is_accelerated, is_advanced
from .run.run_start import RunRecorder

log = logging.getLogger(__name__)

_CLASSES = ControlNet, ControlNetSD35
"""All else that one does is its network's work."""


def accelerate_controlnet(control: Any, module: AcceleratedModule, after_run: RunRecorder | None = None) -> Any:
    """A copy of `control` whose network's calls go through `module`.

    One that engines cannot stand for is copied as it is, and the reason is told.

    Args:
        after_run: given what happened in each sampling run, see `Status.since`.
    """
    kind: type = type(control)
    copy = control.copy()
    copy.previous_controlnet = control.previous_controlnet
    copy.acceleration = ControlNetAcceleration(module, after_run)
    try:
        if kind not in _CLASSES and not is_accelerated(kind) and not is_advanced(kind):
            raise UnsupportedModel(f"ControlNets of this kind ({kind.__name__}) have no engines yet; it runs as ever")
        ComfyControlNet.of(control.control_model)
    except SlipstreamError as error:
        module.status.note(str(error))
        log.warning("Slipstream: %s", error)
    else:
        copy.__class__ = accelerated_class(kind)
    return copy


def accelerated_controlnet_module(control: Any) -> AcceleratedModule | None:
    """The module that `accelerate_controlnet` put into this ControlNet or one it was copied from."""
    found = getattr(control, "acceleration", None)
    return found.module if isinstance(found, ControlNetAcceleration) else None
