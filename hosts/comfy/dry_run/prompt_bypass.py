"""What a dry run passes by, and what it refuses to run: its pictures are of one step, and nobody wants them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping

from .prompt_links import NodeKind, Prompt, Slot, Wiring
from .prompt_walks import PLAIN, RESULTS, takes_model

CALIBRATE = "SlipstreamSkipCalibrate"
_OURS = {CALIBRATE, "SlipstreamBuildEngine", "SlipstreamEngineInfo"}
_PICTURES = {*RESULTS, "MASK"}
_SAVED = {*_PICTURES, "STRING"}


def passed_by(prompt: Prompt, kinds: Mapping[str, NodeKind]) -> Wiring:
    """A copy of `prompt` where nodes that save pictures and hand them on are led around, and so is Skip Calibrate."""
    wiring = Wiring(prompt, kinds)
    stands_for = dict(_detours(wiring))
    made = copy.deepcopy(prompt)
    for name, node in made.items():
        if wiring.class_of(name) == CALIBRATE:
            node["inputs"] = {}
            continue
        for key, slot in wiring.inputs(name).items():
            source = _source(slot, stands_for)
            node["inputs"][key] = [source.node, source.index]
    return Wiring(made, kinds)


def check_kept(wiring: Wiring, kept: Iterable[str]) -> None:
    """
    Args:
        wiring: of `passed_by`.

    Raises:
        ValueError: something is kept that a dry run must not run, in words that say what to do.
    """
    half_done = _half_done(wiring)
    for name in kept:
        kind, what = wiring.kind_of(name), f"Node {name} ({wiring.class_of(name)})"
        fed = [slot for slot in wiring.inputs(name).values() if slot.node in half_done]
        if wiring.class_of(name) == CALIBRATE:
            raise ValueError(
                f"{what} would sample a hundred pictures, so a build goes past it by its model; disconnect its report "
                "and chart from what leads on, or bypass it, then build"
            )
        if fed and kind.is_api:
            raise ValueError(
                f"{what} costs money, and a build would send it a picture of one step; bypass it, then build"
            )
        if _saves(wiring, name) and any(wiring.type_of(slot) in _SAVED for slot in fed):
            raise ValueError(
                f"{what} may save what it is given, which is of one step in a build; bypass it, or connect what is "
                "behind it to what is before it, then build"
            )


def _detours(wiring: Wiring) -> Iterator[tuple[Slot, Slot]]:
    """Outputs of nodes that are passed by, and what each stands for."""
    for name in wiring.prompt:
        inputs = wiring.inputs(name)
        if wiring.class_of(name) == CALIBRATE and "model" in inputs:
            yield Slot(name, 0), inputs["model"]
        if _saves(wiring, name):
            yield from _handed_on(wiring, name)


def _handed_on(wiring: Wiring, node: str) -> Iterator[tuple[Slot, Slot]]:
    """Outputs that are what goes in, where it looks so: each picture has its one input, the rest are file names.

    Texts and numbers may be changed on the way, and nodes that make anything else may change pictures too.
    """
    found = []
    for place, kind in enumerate(wiring.makes(node)):
        same = [slot for slot in wiring.inputs(node).values() if wiring.type_of(slot) == kind]
        if kind in _PICTURES and len(same) == 1:
            found.append((Slot(node, place), same[0]))
        elif kind != "STRING":
            return
    yield from found


def _saves(wiring: Wiring, node: str) -> bool:
    """Whether a node may write files: one that ComfyUI runs for its own sake, unless it is there to sample."""
    kind = wiring.kind_of(node)
    is_candidate = kind.is_output and bool(kind.makes) and wiring.class_of(node) not in _OURS
    return is_candidate and not _samples(wiring, node)


def _samples(wiring: Wiring, node: str) -> bool:
    """Whether a node makes pictures by a model, by a guider, or by a bundle that came from what takes models."""
    if not RESULTS.intersection(wiring.makes(node)):
        return False
    sources = wiring.inputs(node).values()
    if any(wiring.type_of(slot) in ("MODEL", "GUIDER") for slot in sources):
        return True
    bundles = [slot.node for slot in sources if wiring.type_of(slot) not in PLAIN]
    return any(takes_model(wiring, name) for name in wiring.ancestors(bundles))


def _half_done(wiring: Wiring) -> set[str]:
    """Nodes whose outputs come of one step of sampling, and what they lead to."""
    behind = wiring.behind(name for name in wiring.prompt if takes_model(wiring, name))
    return wiring.behind(name for name in behind if RESULTS.intersection(wiring.makes(name)))


def _source(slot: Slot, stands_for: Mapping[Slot, Slot]) -> Slot:
    seen: set[Slot] = set()
    while slot in stands_for and slot not in seen:  # links may go round
        seen.add(slot)
        slot = stands_for[slot]
    return slot
