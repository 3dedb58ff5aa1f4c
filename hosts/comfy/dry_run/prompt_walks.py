"""Which nodes behind an accelerated one have it computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .prompt_links import Slot, Wiring

MODEL_NODE, CONTROLNET_NODE, VAE_NODE, TEXT_ENCODER_NODE = (
    "SlipstreamAccelerateModel",
    "SlipstreamAccelerateControlNet",
    "SlipstreamAccelerateVAE",
    "SlipstreamAccelerateTextEncoder",
)

RESULTS = {"LATENT", "IMAGE", "VIDEO", "AUDIO"}
PLAIN = {
    *RESULTS, "MASK", "CLIP", "CLIP_VISION", "CLIP_VISION_OUTPUT", "CONDITIONING", "CONTROL_NET", "VAE", "MODEL",
    "GUIDER", "SAMPLER", "SIGMAS", "NOISE", "STRING", "INT", "FLOAT", "BOOLEAN", "COMBO", "UPSCALE_MODEL",
    "STYLE_MODEL",
}  # fmt: skip
"""Types of ComfyUI's own, each of which holds one thing; others may be bundles that hold a model."""


def takes_model(wiring: Wiring, node: str) -> bool:
    """Whether a node samples with a model, or leads it to what samples; not one that hands it on as a model."""
    if "MODEL" in wiring.makes(node) and not RESULTS.intersection(wiring.makes(node)):
        return False
    return any(wiring.type_of(slot) == "MODEL" for slot in wiring.inputs(node).values())


@dataclass(frozen=True)
class Walk:
    """
    Attributes:
        carriers: types in which what is accelerated goes on to the next node.
        enough: types of an input by which a node that makes a result has it computed.
        results: what such a node makes.
        nowhere: what to tell people where there is none.
    """

    carriers: frozenset[str]
    enough: frozenset[str]
    results: frozenset[str]
    nowhere: str


_TO_SAMPLERS = frozenset({"MODEL", "GUIDER"})
WALKS = {
    MODEL_NODE: Walk(
        _TO_SAMPLERS,
        _TO_SAMPLERS,
        frozenset(RESULTS),
        "Nothing samples with this model: connect it to a KSampler or another sampler, then build",
    ),
    CONTROLNET_NODE: Walk(
        frozenset({"CONTROL_NET", "CONDITIONING", "GUIDER"}),
        _TO_SAMPLERS,
        frozenset(RESULTS),
        "Nothing samples with this ControlNet: connect it to Apply ControlNet, and that to a KSampler or another "
        "sampler, then build",
    ),
    VAE_NODE: Walk(
        frozenset({"VAE"}),
        frozenset({"VAE"}),
        frozenset(RESULTS | {"CONDITIONING"}),
        "Nothing decodes or encodes with this VAE: connect it to VAE Decode or VAE Encode, then build",
    ),
    TEXT_ENCODER_NODE: Walk(
        frozenset({"CLIP"}),
        frozenset({"CLIP"}),
        frozenset({"CONDITIONING"}),
        "Nothing encodes texts with this text encoder: connect it to CLIP Text Encode, then build",
    ),
}


def terminals_of(wiring: Wiring, start: str, walk: Walk) -> Iterator[str]:
    """Nodes behind `start` that have it computed, each once."""
    seen, waiting = {start}, [Slot(start, 0)]
    while waiting:
        slot = waiting.pop(0)
        for name in wiring.users(slot):
            if name in seen:
                continue
            computed = _is_computed(wiring, name, slot, walk)
            onward = [Slot(name, place) for place, kind in enumerate(wiring.makes(name)) if _carries(kind, walk)]
            if computed:
                yield name
            if computed or onward:
                seen.add(name)
            waiting += onward


def _is_computed(wiring: Wiring, node: str, by: Slot, walk: Walk) -> bool:
    if not walk.results.intersection(wiring.makes(node)):
        return False
    kinds = {wiring.type_of(slot) for slot in wiring.inputs(node).values()}
    return bool(walk.enough & kinds) or wiring.type_of(by) not in PLAIN


def _carries(kind: str, walk: Walk) -> bool:
    return kind in walk.carriers or kind not in PLAIN
