"""The part of a workflow that the build of one node's engines needs, as a prompt of its own.

Pure: it works on prompts as ComfyUI's API takes them, and on a table of what each class of node makes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ....runtime.settings.model_settings import AUTO, BackendChoice, BuildPolicy, parse_resolutions
from .prompt_bypass import check_kept, passed_by
from .prompt_links import NodeKind, Prompt, Slot, Wiring
from .prompt_walks import MODEL_NODE, WALKS, Walk, takes_model, terminals_of

ONE_STEP = "SlipstreamOneStep"
END = "SlipstreamDryRunEnd"
BUILD_ENGINE = "SlipstreamBuildEngine"
MARK = "slipstream_dry_run"
"""An input of our nodes that no class of theirs has: what they make in a dry run is kept apart by it."""

_LISTED = "slipstream-list-"
"""How the ids begin of Build Engines that no person placed."""


@dataclass(frozen=True)
class DryRun:
    """
    Attributes:
        prompt: to queue.
        targets: ids of its output nodes that end it.
    """

    prompt: Prompt
    targets: list[str]


def is_dry_run(prompt: Any) -> bool:
    """Whether a prompt was made by `dry_run_of` for an accelerated node."""
    nodes = prompt.values() if isinstance(prompt, Mapping) else ()
    return any(isinstance(node, Mapping) and node.get("class_type") == END for node in nodes)


def is_added(prompt: Any, node: Any) -> bool:
    """Whether a Build Engine is not the user's, but was added to a dry run for a list of sizes."""
    return is_dry_run(prompt) and str(node).startswith(_LISTED)


def dry_run_of(prompt: Prompt, node: str, kinds: Mapping[str, NodeKind], mark: str) -> DryRun:
    """The part of `prompt` that meets each shape for which `node` will want an engine.

    Args:
        kinds: of all classes of nodes.
        mark: different for each dry run.

    Raises:
        ValueError: in words, what is wrong with the node's place in the workflow.
    """
    if node not in prompt:
        raise ValueError(f"Node {node} is not part of the workflow that runs; is it muted, bypassed or not connected?")
    wiring = passed_by(prompt, kinds)
    kind = wiring.class_of(node)
    if kind == BUILD_ENGINE:
        return DryRun(_prepared(wiring, [node], mark), [node])
    if kind not in WALKS:
        raise ValueError(f"Node {node} is no Accelerate node and no Build Engine, so it has nothing to build")
    if _is_off(wiring.prompt[node]):
        raise ValueError("Acceleration is switched off in this node: choose another backend than off, then build")
    return _of_accelerated(wiring, node, WALKS[kind], mark)


def _of_accelerated(wiring: Wiring, node: str, walk: Walk, mark: str) -> DryRun:
    terminals = list(terminals_of(wiring, node, walk))
    if not terminals:
        raise ValueError(walk.nowhere)
    made = _prepared(wiring, terminals, mark)
    targets = []
    for terminal in terminals:
        index = next(place for place, kind in enumerate(wiring.makes(terminal)) if kind in walk.results)
        targets.append(_add(made, "slipstream-end-", END, {"value": [terminal, index]}))
    if (listed := _of_list(wiring, node, terminals)) is not None:
        targets.append(_add(made, _LISTED, BUILD_ENGINE, {**listed, MARK: mark}))
    return DryRun(made, targets)


# ------------------------------------------------------------------------------------------- what is kept


def _prepared(wiring: Wiring, ends: Sequence[str], mark: str) -> Prompt:
    """What leads to `ends`: samplers take one step, and accelerated nodes wait for their engines."""
    kept = wiring.ancestors(ends)
    check_kept(wiring, sorted(kept))
    made = {name: copy.deepcopy(node) for name, node in wiring.prompt.items() if name in kept}
    steps: dict[Slot, str] = {}
    for name in list(made):
        inputs = made[name].setdefault("inputs", {})
        if wiring.class_of(name) in (*WALKS, BUILD_ENGINE):
            inputs[MARK] = mark
        if wiring.class_of(name) in WALKS and not _is_off(made[name]):
            inputs["build"] = BuildPolicy.FIRST_USE.value
        if not takes_model(wiring, name):
            continue
        for key, slot in wiring.inputs(name).items():
            if wiring.type_of(slot) == "MODEL":
                if slot not in steps:
                    steps[slot] = _add(made, "slipstream-step-", ONE_STEP, {"model": [slot.node, slot.index]})
                inputs[key] = [steps[slot], 0]
    return made


def _add(prompt: Prompt, begins: str, kind: str, inputs: dict[str, Any]) -> str:
    number = 1
    while (name := f"{begins}{number}") in prompt:
        number += 1
    prompt[name] = {"class_type": kind, "inputs": inputs}
    return name


def _is_off(node: Mapping[str, Any]) -> bool:
    return bool(node.get("inputs", {}).get("backend") == BackendChoice.OFF.value)


# --------------------------------------------------------------------------------------- a list of sizes

_SHARED = ("backend", "precision", "optimize", "engines", "max_batch", "max_tokens", "bake")
_TOKENS = 77


def _of_list(wiring: Wiring, node: str, samplers: Sequence[str]) -> dict[str, Any] | None:
    """Inputs of a Build Engine for the sizes that an Accelerate Model lists; None where it lists none.

    Raises:
        ValueError: the list cannot be read.
    """
    given = wiring.prompt[node]["inputs"]
    listed = given.get("resolutions", AUTO)
    if wiring.class_of(node) != MODEL_NODE or not isinstance(listed, str) or not parse_resolutions(listed):
        return None
    batch = 1 if all(_is_unguided(wiring, sampler) for sampler in samplers) else 2
    shared = {name: given[name] for name in _SHARED if name in given}
    return {"model": given["model"], "resolutions": listed, "batch": batch, "tokens": _TOKENS, **shared}


def _is_unguided(wiring: Wiring, node: str) -> bool:
    """Whether a sampler, or the guider behind it, does without a negative prompt: CFG 1, or one prompt alone."""
    scale = wiring.prompt[node]["inputs"].get("cfg")
    if scale is not None:
        return bool(scale == 1)
    slots = list(wiring.inputs(node).values())
    if guider := next((slot for slot in slots if wiring.type_of(slot) == "GUIDER"), None):
        return _is_unguided(wiring, guider.node)
    return [wiring.type_of(slot) for slot in slots].count("CONDITIONING") == 1
