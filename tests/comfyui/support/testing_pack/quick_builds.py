"""Engines that are the model's own code, "built" in seconds: for tests of what goes on around builds."""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from aiohttp import web

_PHASES = {"export": 0.3, "compile": 0.7}
_PACE = "/slipstream_test/build_seconds"
_ENGINE_SECONDS = float(os.environ.get("SLIPSTREAM_TEST_ENGINE_SECONDS", "0"))
"""That a call of an engine takes longer than the model's own."""


def use_quick_builds(seconds: float) -> None:
    """From the next prompt on, builds of the pack in this process take so long and compile nothing."""
    from server import PromptServer

    pace, done = _Pace(seconds), []

    def before_the_prompt(data: Any) -> Any:
        if not done:
            done.append(_put_in_place(_pack(), pace))
        return data

    PromptServer.instance.add_on_prompt_handler(before_the_prompt)
    PromptServer.instance.routes.post(_PACE)(pace.change)


class _Pace:
    """How long builds take, the one that runs included; `ComfyClient.builds_take` changes it."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    async def change(self, request: web.Request) -> web.Response:
        """Take the seconds of a request."""
        self.seconds = float((await request.json())["seconds"])
        return web.json_response({})


def _pack() -> str:
    """The name under which ComfyUI loaded Slipstream."""
    return next(name.removesuffix(".nodes.extension") for name in sys.modules if name.endswith(".nodes.extension"))


def _put_in_place(pack: str, pace: _Pace) -> object:
    def part(name: str) -> Any:
        return importlib.import_module(f"{pack}.{name}")

    provider = part("hosts.comfy.process.shared_provider").provider()
    provider.backends = [QuickBackend(part)]
    _use_quick_blocks(provider.blocks.backend, part)
    part("runtime.building.build").run_build = QuickWorker(part, pace)
    if patience := os.environ.get("SLIPSTREAM_TEST_TIGHT_MEMORY"):
        from .tight_memory import use_tight_memory  # this file is also read by itself

        use_tight_memory(part("hosts.comfy.process.build_room"), float(patience))
    return pack


class QuickWorker:
    """Takes the place of the build process.

    Args:
        part: imports a module of the pack by its name there.
        pace: None where builds take no time.
    """

    def __init__(self, part: Callable[[str], Any], pace: _Pace | None = None) -> None:
        self._part, self._pace = part, pace or _Pace(0)

    def __call__(
        self, job: Any, progress: Any, cancel: Any, *, may_run: Callable[[], bool] = lambda: True, **_: Any
    ) -> Any:
        report, ran, step = self._part("core.progress").Progress, 0.0, 0.05
        while ran < self._pace.seconds:
            cancel.raise_if_cancelled("The build")
            is_running = may_run()
            ran += step if is_running else 0.0
            progress(report("compile", 0.9 * ran / self._pace.seconds, "pretending" if is_running else "paused"))
            time.sleep(step)
        if job.spec.role.value == "block":
            return self._part("runtime.building.worker_process").Built(_traced_block(job, self._part), {"export": 0.1})
        model = self._part("runtime.building.job_file").as_plain((job.architecture, job.spec.precision))
        (job.directory / "model.json").write_text(json.dumps(model), encoding="utf-8")
        artifact = self._part("core.protocols").Artifact(job.directory, ("model.json",), {"nodes": 3})
        phases = {name: share * self._pace.seconds for name, share in _PHASES.items()}
        return self._part("runtime.building.worker_process").Built(artifact, phases)


_PROGRAM = "program"
_tracing = threading.Lock()  # torch traces in one thread at a time; else it takes itself to be tracing ever after
_programs: dict[str, Any] = {}
"""Traced blocks, by what is written into the file `_PROGRAM`."""


def _traced_block(job: Any, part: Callable[[str], Any]) -> Any:
    """The artifact of a block's engine: its traced program, kept in this process."""
    crossed = part("runtime.building.job_file")
    job = crossed.from_plain(json.loads(json.dumps(crossed.as_plain(job))))  # as it crosses to the build process
    blocks = part("compile_backend.blocks.program")
    with _tracing:
        program, signature = blocks.export_block(job, job.architecture)
    signature.save(job.directory)
    name = str(len(_programs))
    _programs[name] = program
    (job.directory / _PROGRAM).write_text(name)
    details = {"nodes": signature.nodes}
    return part("core.protocols").Artifact(job.directory, (_PROGRAM, blocks.SIGNATURE), details)


def _use_quick_blocks(backend: Any, part: Callable[[str], Any]) -> None:
    """Engines of blocks are what `_traced_block` made."""

    def load(artifact: Any, device: torch.device) -> Any:
        signature = part("compile_backend.blocks.program").BlockSignature.read(artifact.directory)
        program = _programs[(artifact.directory / _PROGRAM).read_text()]
        module, count = part("compile_backend.rewrites.traced_module").module_of(program), len(signature.dtypes)

        def run(given: list[torch.Tensor]) -> Any:
            return [*module(given[:count], given[count:])]

        return part("compile_backend.blocks.engine").BlockEngine(signature, run)

    backend.load_block = load
    backend.why_cannot_build = lambda device: None


class QuickBackend:
    """See `QuickWorker`."""

    name = "quick"
    can_bake = False

    def __init__(self, part: Callable[[str], Any]) -> None:
        self._part = part

    def environment(self, device: torch.device) -> Any:
        return self._part("core.environment").Environment.current(device)

    def options(self, *_: Any) -> Mapping[str, Any]:
        return {}

    def why_unavailable(self, device: torch.device) -> None:
        return None

    def why_cannot_build(self, device: torch.device) -> None:
        return None

    def why_unsupported(self, spec: Any) -> None:
        return None

    def build_bytes(self, spec: Any) -> int:
        return 0

    def load(self, spec: Any, outputs: tuple[str, ...], artifact: Any, device: torch.device) -> Any:
        model = json.loads((Path(artifact.directory) / "model.json").read_bytes())
        architecture, precision = self._part("runtime.building.job_file").from_plain(model)
        return _Engine(spec, outputs, architecture.placeholder(precision, device), device)


class _Engine:
    device_bytes = 0
    generation = 0
    copies_weights = False

    def __init__(self, spec: Any, outputs: tuple[str, ...], module: torch.nn.Module, device: torch.device) -> None:
        self._module, self._outputs = module, outputs
        self._weights: dict[str, torch.Tensor] = {}
        self.profile, self.more_profiles = spec.profile, spec.more_profiles

    def __call__(self, **tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        time.sleep(_ENGINE_SECONDS)
        with torch.inference_mode(False), torch.no_grad():  # some models ask for the tensors' versions
            given = {name: tensor.clone() for name, tensor in tensors.items()}
            results = torch.func.functional_call(self._module, self._weights, (), given)
        return dict(zip(self._outputs, results, strict=True))

    def update_weights(self, weights: Mapping[str, torch.Tensor], version: object = None) -> None:
        self._weights = dict(weights)
        self.generation += 1

    def release_weights(self) -> None:
        self._weights = {}

    def close(self) -> None:
        self._weights = {}
