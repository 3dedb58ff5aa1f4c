"""The page on a port of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ..core.errors import BackendUnavailable, first_line
from .compat import gradio, launch_options, queued
from .guard import LOOPBACK, Guard
from .manager import Manager
from .page import blocks

USER = "slipstream"
PASSWORD_VARIABLE = "SLIPSTREAM_UI_PASSWORD"


class Server:
    """The page while it is given out, on a thread of its own."""

    def __init__(self, page: Any, url: str) -> None:
        self._page = page
        self.url = url

    def close(self) -> None:
        self._page.close(verbose=False)


def start(
    manager: Manager,
    address: str = "127.0.0.1",
    port: int | None = None,
    password: str | None = None,
    in_browser: bool = False,
) -> Server:
    """Give the page out.

    Args:
        address: to listen at. Whoever can reach it can delete engines and have others built.
        port: None for the first free one from 7860 on.
        password: asked for, with the user `USER`; without one only this machine is listened to.

    Raises:
        BackendUnavailable: Gradio is not installed, or the address cannot be had.
        ValueError: another address than this machine's own, and no password.
    """
    gradio()  # says first what is missing
    check_address(address, password)
    page = queued(blocks(manager))
    try:
        with _without_proxy(address):
            _, url, _ = page.launch(
                server_name=f"[{address.strip('[]')}]" if ":" in address else address,
                server_port=port,
                auth=(USER, password) if password else None,
                inbrowser=in_browser,
                share=False,
                quiet=True,
                show_error=True,
                prevent_thread_lock=True,
                blocked_paths=[os.getcwd()],  # older Gradios give its files to whoever asks
                app_kwargs={"middleware": [_guard(address)]},
                **launch_options(),
            )
    except Exception as error:  # of Gradio and of the clients that it asks itself by, after the port was opened
        with suppress(Exception):
            page.close(verbose=False)
        raise BackendUnavailable(
            f"The page cannot be given out at {address}: {first_line(error)}. Choose another port"
        ) from error
    return Server(page, str(url))


def check_address(address: str, password: str | None) -> None:
    """Refuse an address that others can reach without a password.

    Raises:
        ValueError: others could reach it, and no password keeps them out.
    """
    if address not in LOOPBACK and not password:
        raise ValueError(
            f"Refused to listen at {address} without a password: whoever reaches the page can delete engines and have "
            f"others built. Set {PASSWORD_VARIABLE} (the user is {USER}), or leave --listen away"
        )


@contextmanager
def _without_proxy(address: str) -> Iterator[None]:
    """Meanwhile no proxy stands before this machine: Gradio begins by asking its own page for an answer."""
    names = ("no_proxy", "NO_PROXY")
    before = {name: os.environ.get(name) for name in names}
    kept = next(filter(None, before.values()), "")
    for name in names:
        os.environ[name] = ",".join(filter(None, [kept, *sorted(LOOPBACK), address]))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _guard(address: str) -> Any:
    from starlette.middleware import Middleware

    return Middleware(Guard, hosts=LOOPBACK if address in LOOPBACK else None)
