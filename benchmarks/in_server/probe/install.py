"""Puts the probe around ComfyUI's own nodes. Only a running server can import this.

What is wrapped lies outside of what Slipstream looks at when it decides whether ComfyUI's code is its own: the nodes'
methods, and the callable that ComfyUI's samplers ask for each step.
"""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import Any

import comfy.samplers
import folder_paths
from aiohttp import web
from comfy_execution.utils import get_executing_context
from server import PromptServer

import nodes

from .objects import ROUTE, count_objects
from .timing import EVENT, Probe


def install() -> None:
    """Time the server's nodes from now on, tell its client of each, and count objects if asked."""
    probe = Probe(_send, Path(folder_paths.get_output_directory()))
    PromptServer.instance.add_on_prompt_handler(functools.partial(take_wishes, probe))
    wrap(probe)
    PromptServer.instance.routes.get(ROUTE)(_count)


async def _count(request: web.Request) -> web.Response:
    return web.json_response(count_objects())


def wrap(probe: Probe) -> None:
    """Put a probe around the nodes that sample, decode and encode texts, and the calls of each step."""
    nodes.KSampler.sample = probe.around_sampler(nodes.KSampler.sample)
    nodes.VAEDecode.decode = probe.around_decoder(nodes.VAEDecode.decode)
    nodes.CLIPTextEncode.encode = probe.around_encoder(nodes.CLIPTextEncode.encode)
    model = comfy.samplers.KSamplerX0Inpaint
    model.__call__ = probe.around_call(model.__call__)


def take_wishes(probe: Probe, json_data: dict[str, Any]) -> dict[str, Any]:
    """Have the probe read a prompt's wishes, and time the sampler node of another pack that the prompt has."""
    probe.take_wishes(json_data)
    if name := probe.wishes.get("sampler"):
        wrap_sampler(probe, name)
    return json_data


@functools.cache
def wrap_sampler(probe: Probe, name: str) -> None:
    """Put a probe around a node that samples in KSampler's place, once."""
    node = nodes.NODE_CLASS_MAPPINGS[name]
    is_static = isinstance(inspect.getattr_static(node, node.FUNCTION), staticmethod)
    timed = probe.around_sampler(getattr(node, node.FUNCTION))
    setattr(node, node.FUNCTION, staticmethod(timed) if is_static else timed)


def _send(figures: dict[str, Any]) -> None:
    context, server = get_executing_context(), PromptServer.instance
    prompt_id = None if context is None else context.prompt_id
    server.send_sync(EVENT, {**figures, "prompt_id": prompt_id}, server.client_id)
