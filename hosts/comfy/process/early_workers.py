"""Build processes that are made ready while the model of a prompt is still being loaded.

A model file that Slipstream has not met needs engines soon. What a build process imports first takes seconds, in which
ComfyUI reads the file. Where cores or memory suffice for one build alone, nothing is begun ahead of it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ....runtime.settings.model_settings import BuildPolicy

log = logging.getLogger(__name__)

_NODES = "SlipstreamAccelerate", "SlipstreamBuildEngine"
_FOLDERS = "checkpoints", "diffusion_models"

_met: set[Path] = set()
"""Files of earlier prompts."""


def prepare(json_data: dict[str, Any]) -> dict[str, Any]:
    """Begin to make processes ready where a prompt needs some soon; see `server_events.watch_prompts`."""
    nodes = json_data.get("prompt")
    if isinstance(nodes, dict) and any(_builds(node) for node in nodes.values()):
        threading.Thread(target=_warm, args=(nodes,), daemon=True, name="slipstream-early").start()
    return json_data


def _builds(node: Any) -> bool:
    if not isinstance(node, Mapping) or not str(node.get("class_type", "")).startswith(_NODES):
        return False
    inputs = node.get("inputs")
    return not isinstance(inputs, Mapping) or inputs.get("build") != BuildPolicy.MANUAL.value


def _warm(nodes: Mapping[str, Any]) -> None:
    try:
        from ....runtime.blocks.block_engines import builds_at_once
        from .shared_provider import provider

        files = set(_model_files(nodes)) - _met
        _met.update(files)
        found = provider()
        known = {path for paths in found.weights_memo.files().values() for path in paths}
        if builds_at_once() > 1 and any(str(file) not in known for file in files) and not found.supply.never_builds:
            found.blocks.workers.warm()
    except Exception:  # a head start is all that is lost
        log.debug("Slipstream: build processes are not made ready", exc_info=True)


def _model_files(nodes: Mapping[str, Any]) -> Iterator[Path]:
    import folder_paths

    for node in nodes.values():
        for value in dict(node.get("inputs") or {}).values():
            paths = [folder_paths.get_full_path(folder, value) for folder in _FOLDERS] if isinstance(value, str) else []
            yield from (Path(path).resolve() for path in paths if path)
