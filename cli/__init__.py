"""The engine manager on the command line."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    if words == ["worker", "serve"]:
        from ..runtime.building.worker import serve

        return serve()
    if words == ["worker", "fork"]:
        from ..runtime.building import fork_server, worker

        return fork_server.serve(lambda: worker.serve(is_nice=True))
    if words[:1] == ["worker"] and len(words) == 2:  # internal, and light: a build process needs no command line
        from ..runtime.building.worker import main as work

        return work(words[1])
    if words[:2] == ["worker", "capture"] and len(words) == 3:
        from ..runtime.building.worker import compile_capture_library

        return compile_capture_library(words[2])
    from .commands import run

    return run(words)
