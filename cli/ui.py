"""The command `ui`: the engine manager as a page in the browser."""

from __future__ import annotations

import logging
import os
import signal
import threading
from argparse import Namespace

from ..core.errors import BackendUnavailable
from ..engine_cache import EngineStore
from ..hosts.standalone.file_builder import FileBuilder
from ..ui.compat import GET_GRADIO, is_there
from ..ui.manager import Manager
from ..ui.serve import PASSWORD_VARIABLE, Server, check_address, start
from .errors import OK, CommandError
from .home import open_provider
from .output import Output

_LONGEST_SECONDS = 10.0


def ui(store: EngineStore, output: Output, options: Namespace) -> int:
    """Give the page out until Ctrl-C.

    Raises:
        CommandError: the address would be open to others, or a named model is no file.
        BackendUnavailable: Gradio is not installed, or the address cannot be had.
    """
    password = os.environ.get(PASSWORD_VARIABLE) or None
    if not is_there():
        raise BackendUnavailable(GET_GRADIO)
    try:
        check_address(options.listen, password)
    except ValueError as error:
        raise CommandError(str(error)) from None
    manager = _manager(store, options)
    server = start(manager, options.listen, options.port, password, options.open)
    output.show({"url": server.url, "store": str(store.root)}, lambda: _tell(server, store, output))
    output.flush()
    _until_interrupted()
    _close(manager, server)
    return OK


def _manager(store: EngineStore, options: Namespace) -> Manager:
    missing = [str(file) for file in options.model if not file.is_file()]
    if missing:
        raise CommandError(f"There is no file {', '.join(missing)}; name checkpoints or UNet files with --model")
    _keep_the_log()
    provider = open_provider(store, options)
    return Manager(provider, FileBuilder(provider, options.comfyui, [file.resolve() for file in options.model]))


def _keep_the_log() -> None:
    """The page tells of all that happens; the terminal goes on telling of as much as before."""
    ours = logging.getLogger("slipstream")
    for handler in ours.handlers:
        handler.setLevel(ours.level)
    ours.setLevel(logging.INFO)


def _tell(server: Server, store: EngineStore, output: Output) -> None:
    output.line(f"Engines in {store.root}")
    output.line(f"The engine manager is at {server.url} (Ctrl-C ends it)")


def _until_interrupted() -> None:
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    try:
        while not ended.wait(1.0):  # in parts: Windows notices Ctrl-C only in between
            pass
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first one is enough


def _close(manager: Manager, server: Server) -> None:
    """Leave no half-built engine in the store."""
    manager.cancel_all()
    manager.requests.wait(_LONGEST_SECONDS)
    server.close()
