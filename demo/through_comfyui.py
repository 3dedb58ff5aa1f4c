"""The demo model sampled by a real ComfyUI: a headless server with this pack in it, driven by API graphs."""

from __future__ import annotations

import json
import os
import tempfile
import time
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from .run import Case, Sample, Teller, Variant, step_seconds

# The tests' own driver of a ComfyUI. Imported by its path, so that the type check of the package ends here.
_client, _graph, _server = (
    import_module(f"slipstream.tests.comfyui.support.{name}") for name in ("client", "graph", "server")
)

_LONGEST_SECONDS = 1800.0
_ENDS = ("execution_success", "execution_error", "execution_interrupted")


class PromptFailed(RuntimeError):
    """ComfyUI could not run one of the demo's graphs."""


class _Server(_server.ComfyServer):  # type: ignore[misc, name-defined]
    """Uses the GPU where there is one."""

    def _command(self) -> list[str]:
        command: list[str] = super()._command()
        return [word for word in command if word != "--cpu"] if torch.cuda.is_available() else command


class _Client(_client.ComfyClient):  # type: ignore[misc, name-defined]
    """Also knows when each event came."""

    def __init__(self, url: str) -> None:
        self.moments: list[float] = []  # one for each of `events`
        super().__init__(url)

    def _keep(self, kind: int, data: bytes) -> None:
        moment = time.perf_counter()
        super()._keep(kind, data)
        self.moments += [moment] * (len(self.events) - len(self.moments))


class ComfyUIHost:
    """A server of its own, stopped at the end of the `with` block.

    Args:
        checkout: the ComfyUI to run, by this process's Python.
        home: engine store.
        log: where the server's log is kept.
    """

    def __init__(self, checkout: Path, home: Path, log: Path, teller: Teller) -> None:
        self._log, self._teller = log, teller
        self._ending = ExitStack()
        # Outside of the pack's folder: the pack is linked into it.
        base = Path(self._ending.enter_context(tempfile.TemporaryDirectory(prefix="slipstream-demo-")))
        models = base / "demo-models"
        models.mkdir()
        self._server = _Server(
            checkout,
            base,
            models,
            home=home,
            arguments=["--preview-method", "none"],
            environment={"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "")},  # tests take one; a user all
        )
        self.name = "ComfyUI"

    def __enter__(self) -> ComfyUIHost:
        self._teller.now("starting ComfyUI")
        self._ending.callback(self._stop)
        try:
            self._server.start()
            self._client = self._ending.enter_context(_Client(self._server.url))
        except BaseException:
            self._ending.close()
            raise
        self.name = f"ComfyUI {self._client.get('/system_stats')['system']['comfyui_version']}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.close()

    def sample(self, case: Case, variant: Variant, seed: int) -> Sample:
        graph, accelerate, skip = self._graph(case, variant, seed)
        first_event = len(self._client.events)
        run = self._run(graph, first_event)
        moments = self._step_moments(first_event, case.steps)
        status = _record(run, accelerate)
        skipped = _record(run, skip).get("step_skipping", {})
        reasons = [*status.get("reasons", {}), skipped.get("reason", "")]
        return Sample(
            seconds=run.seconds,
            step_seconds=step_seconds(moments),
            latent=run.latents()[0][0],
            picture=(run.images()[0] * 255).round().astype(np.uint8),
            engine_calls=status.get("engine_calls", 0),
            eager_calls=status.get("eager_calls", skipped.get("computed", max(moments, default=0))),
            computed_steps=skipped.get("computed", 0),
            precision=next((engine["precision"] for engine in status.get("engines", [])), "fp32"),
            reasons=[reason for reason in reasons if reason],
        )

    def _graph(self, case: Case, variant: Variant, seed: int) -> tuple[Any, Any, Any]:
        """The prompt, and its nodes that accelerate and skip steps, where it has them."""
        graph = _graph.Graph()
        loader = graph.add("SlipstreamDemoLoader")
        model, accelerate, skip = loader.out(0), None, None
        positive, negative = self._prompt(graph, case.prompt), self._prompt(graph, "")
        latent = graph.add("EmptyLatentImage", width=case.width, height=case.height, batch_size=1)
        if variant.accelerate:
            settings = {"backend": "auto", "precision": "auto", "optimize": "balanced", "resolutions": "auto"}
            model = accelerate = graph.add("SlipstreamAccelerateModel", model=model, build="first use", **settings)
        if variant.preset:
            model = skip = graph.add("SlipstreamStepSkip", model=model, preset=variant.preset)
        sampler = {"seed": seed, "steps": case.steps, "cfg": case.cfg, "denoise": 1.0}
        samples = graph.add(
            "KSampler",
            model=model,
            positive=positive,
            negative=negative,
            latent_image=latent,
            sampler_name="ddim",
            scheduler="ddim_uniform",
            **sampler,
        )
        graph.save(samples, vae=loader.out(1))
        return graph, accelerate, skip

    def _prompt(self, graph: Any, text: str) -> Any:
        return graph.add("SlipstreamDemoPrompt", text=text)

    def _run(self, graph: Any, first_event: int) -> Any:
        prompt = self._client.queue(graph)
        deadline = time.monotonic() + _LONGEST_SECONDS
        while not self._has_ended(prompt, first_event):
            self._tell_progress(first_event)
            time.sleep(0.05)
            if time.monotonic() > deadline:
                raise PromptFailed(f"ComfyUI did not end the prompt within {_LONGEST_SECONDS:.0f} s; see {self._log}")
        run = self._client.wait(prompt)
        if not run.ok:
            error = run.error or {}
            why = str(error.get("exception_message")).strip()
            raise PromptFailed(f"{error.get('node_type')} failed: {why}; see {self._log}")
        return run

    def _has_ended(self, prompt: str, first_event: int) -> bool:
        ends = (event for event in self._client.events[first_event:] if event["type"] in _ENDS)
        return any(event["data"].get("prompt_id") == prompt for event in ends)

    def _tell_progress(self, first_event: int) -> None:
        events = self._client.events[first_event:]
        newest = next((event for event in reversed(events) if event["type"] == "progress"), None)
        if newest is not None and newest["data"]["max"] == 100:  # Slipstream's own bar; samplers count steps
            self._teller.now(f"building the engine: {newest['data']['value']} %")

    def _step_moments(self, first_event: int, steps: int) -> dict[int, float]:
        events = zip(self._client.events[first_event:], self._client.moments[first_event:], strict=False)
        return {
            event["data"]["value"]: moment
            for event, moment in events
            if event["type"] == "progress" and event["data"]["max"] == steps and event["data"]["value"] > 0
        }

    def _stop(self) -> None:
        self._server.stop()
        self._log.write_text(self._server.log(), encoding="utf-8")


def _record(run: Any, node: Any) -> dict[str, Any]:
    """What a node wrote into the saved picture; nothing where there is no such node."""
    for texts in run.metadata() if node is not None else ():
        if "slipstream" in texts:
            return dict(json.loads(texts["slipstream"])[node.id][-1])
    return {}
