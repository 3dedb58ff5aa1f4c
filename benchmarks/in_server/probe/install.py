"""Puts the probe around ComfyUI's own nodes. Only a running server can import this.

What is wrapped lies outside of what Slipstream looks at when it decides whether ComfyUI's code is its own: the nodes'
methods, and the callable that ComfyUI's samplers ask for each step.
"""

from __future__ import annotations

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
    PromptServer.instance.add_on_prompt_handler(probe.take_wishes)
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


def _send(figures: dict[str, Any]) -> None:
    context, server = get_executing_context(), PromptServer.instance
    prompt_id = None if context is None else context.prompt_id
    server.send_sync(EVENT, {**figures, "prompt_id": prompt_id}, server.client_id)
