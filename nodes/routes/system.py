"""The machine that engines are built on."""

from __future__ import annotations

from aiohttp import web

from ...hosts.comfy.process.shared_provider import device, provider
from ...runtime.reporting.machine_info import describe_machine
from .guard import Answer, Route, asks


@asks()
def system(request: web.Request) -> Answer:
    using = provider()
    return describe_machine(device(), using.backends, using.history)


ROUTES: list[Route] = [("GET", "/system", system)]
