"""`slipstream build --workflow`: the engines that a workflow needs, by a test run of it in a ComfyUI server."""

from __future__ import annotations

import contextlib
import json
import shlex
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...core.formatting import SHOWN
from ...engine_cache import EngineStore
from ...runtime.building.supply import REMOTE_VARIABLE, WORKER_VARIABLE
from ...runtime.settings.store_folder import VARIABLE
from ..errors import FAILED, MISSING, OK, CommandError
from ..output import Output
from .comfyui import ComfyUI, started
from .prompts import our_nodes, prompt_of

_API = "/slipstream/v1"


def build_workflow(store: EngineStore, output: Output, options: Namespace) -> int:
    """Build what a workflow needs; with --check only say what is missing.

    Raises:
        CommandError: the file is no workflow, or nothing in it has engines.
    """
    data = _read(options.workflow)
    with _server(store, options) as server:
        if options.check and not server.get(_API + "/health")["never_builds"]:
            raise CommandError(f"--check needs a server that never builds: start it with {WORKER_VARIABLE}=1")
        prompt = prompt_of(data, server.get("/object_info"))
        nodes = our_nodes(prompt)
        if not nodes:
            raise CommandError(
                f"{options.workflow} has no Accelerate node: put Accelerate Model behind the model's loader, then save"
            )
        failures = {node: reason for node in nodes if (reason := _test_run(server, prompt, node)) is not None}
        health = server.get(_API + "/health")
    missing = health["missing"]
    if options.check:
        failures = {}  # a Build Engine node fails where nothing may be built, and what it lacks is among the missing
    outcome = {"workflow": str(options.workflow), "store": str(store.root), "nodes": nodes, "failures": failures}
    output.show({**outcome, **health}, lambda: _tell(output, failures, health))
    return FAILED if failures else MISSING if missing else OK


def _test_run(server: ComfyUI, prompt: dict[str, Any], node: str) -> str | None:
    try:
        made = server.post(_API + "/dry-run", {"prompt": prompt, "node": node})
    except CommandError as error:
        return str(error)
    return server.run(made["prompt"], made["targets"])


def _tell(output: Output, failures: dict[str, str], health: dict[str, Any]) -> None:
    for node, reason in failures.items():
        output.line(f"node {node}: {reason}")
    for engine in health["missing"]:
        output.line(f"{engine['digest'][:SHOWN]}  {engine['label']}: missing")
    output.line(health["text"])


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except FileNotFoundError:
        raise CommandError(f"There is no file {file}") from None
    except ValueError as error:
        raise CommandError(f"{file} is no workflow: {error}") from None


@contextlib.contextmanager
def _server(store: EngineStore, options: Namespace) -> Iterator[ComfyUI]:
    if options.server:
        yield ComfyUI(options.server)
        return
    environment = {VARIABLE: str(store.root)}
    if options.check:
        environment[WORKER_VARIABLE] = "1"
    if options.remote:
        environment[REMOTE_VARIABLE] = options.remote
    with started(options.comfyui, shlex.split(options.comfyui_args), environment) as server:
        yield server
