"""Carries out the build requests of the engines' page inside ComfyUI, as prompts in ComfyUI's own queue.

No other thread may load models while ComfyUI does. So a request is a prompt of a loader and a Build Engine node.
"""

from __future__ import annotations

import json
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from ....core.errors import BuildCancelled, BuildFailed
from ....core.progress import Progress
from ....core.spec import Role
from ....demo.model import WEIGHTS
from ....runtime.provider import HostHooks
from ....runtime.requests.build_requests import Wanted
from ....runtime.settings.model_settings import word_of
from ...weight_files import parameter_count
from ..process.server_events import server_of_process
from ..process.shared_provider import device
from .without_server import CHECKPOINT_PREFIX

_DEMO = "demo"
_LOADERS = {
    "checkpoints": ("CheckpointLoaderSimple", "ckpt_name", {}),
    "diffusion_models": ("UNETLoader", "unet_name", {"weight_dtype": "default"}),
}
"""Folder → the loader's class, its input for the file, and its others."""
_BUILD = "2"
_POLL_SECONDS = 0.3
_POST_SECONDS = 30.0


class PromptBuilder:
    """Requests wait in ComfyUI's queue like any prompt."""

    roles: tuple[Role, ...] = (Role.UNET,)

    def device(self) -> torch.device:
        return device()

    def models(self) -> list[str]:
        import folder_paths

        return [_DEMO, *(f"{folder}/{name}" for folder in _LOADERS for name in folder_paths.get_filename_list(folder))]

    def file_of(self, model: str) -> str:
        import folder_paths

        file = folder_paths.get_full_path(*model.split("/", 1)) if "/" in model else None
        return "" if file is None else str(Path(file).resolve())

    def parameter_count(self, model: str, role: Role) -> int | None:
        if model == _DEMO:
            return parameter_count(WEIGHTS / "unet.safetensors", "")
        file = self.file_of(model)
        return parameter_count(Path(file), CHECKPOINT_PREFIX) if file else None

    def make(self, wanted: Wanted, hooks: HostHooks) -> Iterator[str]:
        """
        Raises:
            BuildFailed: ComfyUI refused the prompt, or it ended without an engine.
            BuildCancelled: somebody took it out of ComfyUI's queue, or stopped it there.
            whatever `hooks.check_interrupted` raises; the prompt is taken back then.
        """
        prompt = _post(prompt_of(wanted))
        try:
            while (done := _history(prompt)) is None:
                hooks.check_interrupted()
                hooks.progress(Progress("queued", None, _where(prompt)))
                time.sleep(_POLL_SECONDS)
        except BaseException:
            _take_back(prompt)
            raise
        yield from _report(wanted, done)

    def rest(self) -> None:
        """ComfyUI's own accounts say what stays in memory."""


def prompt_of(wanted: Wanted) -> dict[str, Any]:
    """The prompt that has a request's engines built."""
    settings = wanted.settings
    build = {
        "model": ["1", 0],
        "resolutions": ", ".join(f"{size.width}x{size.height}" for size in settings.resolutions),
        "batch": wanted.batch,
        "tokens": wanted.tokens,
        "backend": settings.backend.value,
        "precision": word_of(settings.precision),
        "optimize": settings.optimize.value,
        "engines": settings.shapes.value,
        "max_batch": settings.max_batch,
        "max_tokens": settings.max_tokens,
        "bake": settings.bake,
    }
    return {"1": _loader(wanted.model), _BUILD: {"class_type": "SlipstreamBuildEngine", "inputs": build}}


def _loader(model: str) -> dict[str, Any]:
    if model == _DEMO:
        return {"class_type": "SlipstreamDemoLoader", "inputs": {}}
    folder, name = model.split("/", 1)
    kind, field, others = _LOADERS[folder]
    return {"class_type": kind, "inputs": {field: name, **others}}


def _post(prompt: dict[str, Any]) -> str:
    """Queue a prompt by ComfyUI's public route; its id.

    Raises:
        BuildFailed: it was refused, or ComfyUI does not answer.
    """
    server = server_of_process()
    address = server.address if server.address not in ("", "0.0.0.0", "::") else "127.0.0.1"
    place = f"[{address}]" if ":" in address else address
    body = json.dumps({"prompt": prompt}).encode()
    for scheme in ("http", "https"):
        asked = urllib.request.Request(
            f"{scheme}://{place}:{server.port}/prompt", body, {"Content-Type": "application/json"}
        )
        # It is this very process that answers, under whatever name its certificate is for.
        secure = urllib.request.HTTPSHandler(context=ssl._create_unverified_context())
        direct = urllib.request.ProxyHandler({})  # and a proxy would look for it on another machine
        try:
            with urllib.request.build_opener(direct, secure).open(asked, timeout=_POST_SECONDS) as answer:
                return str(json.load(answer)["prompt_id"])
        except urllib.error.HTTPError as error:
            raise BuildFailed(f"ComfyUI refused to queue the build: {_refusal(error)}") from None
        except (OSError, ValueError) as error:
            reason = error
    raise BuildFailed(f"ComfyUI does not answer at {place}:{server.port}: {reason}")


def _refusal(error: urllib.error.HTTPError) -> str:
    try:
        told = json.load(error)
        details = [each["details"] for node in told.get("node_errors", {}).values() for each in node["errors"]]
        return "; ".join([str(told["error"]["message"]), *details])
    except (ValueError, KeyError, TypeError, AttributeError):
        return str(error)


def _history(prompt: str) -> dict[str, Any] | None:
    """What came of a prompt; None while it waits or runs."""
    found: dict[str, Any] = server_of_process().prompt_queue.get_history(prompt_id=prompt)
    return found.get(prompt)


def _where(prompt: str) -> str:
    """What a prompt without a history does, in words.

    Raises:
        BuildCancelled: it is nowhere any more.
    """
    running, waiting = server_of_process().prompt_queue.get_current_queue()
    if _is_among(running, prompt):
        return "building in ComfyUI's queue"
    # One that ended since it was looked for has a history by now: it leaves the queue and enters that at once.
    if not _is_among(waiting, prompt) and _history(prompt) is None:
        raise BuildCancelled("The build was taken out of ComfyUI's queue. Nothing was kept")
    return "waiting in ComfyUI's queue"


def _is_running(prompt: str) -> bool:
    running, _ = server_of_process().prompt_queue.get_current_queue()
    return _is_among(running, prompt)


def _is_among(items: Iterable[Any], prompt: str) -> bool:
    return any(item[1] == prompt for item in items)


def _take_back(prompt: str) -> None:
    server_of_process().prompt_queue.delete_queue_item(lambda item: item[1] == prompt)
    if _is_running(prompt):
        import nodes

        nodes.interrupt_processing()


def _report(wanted: Wanted, done: dict[str, Any]) -> list[str]:
    """
    Raises:
        BuildCancelled: it was interrupted.
        BuildFailed: it ended without an engine.
    """
    for kind, data in done.get("status", {}).get("messages", []):
        if kind == "execution_interrupted":
            raise BuildCancelled(f"Making {wanted} was stopped in ComfyUI. Nothing was kept")
        if kind == "execution_error":
            raise BuildFailed(str(data.get("exception_message", "the prompt failed")).strip())
    texts = done.get("outputs", {}).get(_BUILD, {}).get("text", ())
    return [line for text in texts for line in str(text).splitlines()] or [f"{wanted}: ready"]
