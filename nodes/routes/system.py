"""The machine that engines are built on."""

from __future__ import annotations

import asyncio

from aiohttp import web

from ...hosts.comfy.process.shared_provider import device, provider
from ...runtime.reporting.machine_info import describe_machine
from .guard import Answer, Route, asks


@asks()
async def system(request: web.Request) -> Answer:
    def describe() -> Answer:
        using = provider()
        return describe_machine(device(), using.backends, using.history)

    return await asyncio.to_thread(describe)


ROUTES: list[Route] = [("GET", "/system", system)]
