"""What each prompt of a soak asks for, drawn by its number and the soak's seed alone."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from ..in_server.graph import (
    ACCELERATE_CONTROLNET,
    ACCELERATE_MODEL,
    ACCELERATE_VAE,
    STEP_SKIP,
    Defaults,
    Graph,
    Prompt,
)

SIZES = ((64, 64), (96, 64))
SAMPLERS = ("euler", "dpmpp_2m", "ddim", "euler_ancestral", "heun", "lms")
TEXTS = ("a large yellow star left of a red circle on a blue background", "a small green square on a white background")
_SHARES = {"cancel": 0.03, "free": 0.05, "delete": 0.015, "second_server": 0.06}


@dataclass(frozen=True)
class SoakWish:
    """One prompt.

    Attributes:
        lora_strength: 0 where there is no LoRA.
        event: what happens besides: "cancel", "free", "delete", "second_server" or nothing.
    """

    number: int
    seed: int
    size: tuple[int, int]
    batch: int
    sampler: str
    steps: int
    text: str
    lora_strength: float
    has_control: bool
    has_skip: bool
    event: str


def wish_of(soak_seed: int, number: int) -> SoakWish:
    """The prompt of that number: the same whichever others are run."""
    draw = Random(f"{soak_seed}/{number}")
    size = draw.choice(SIZES)
    shares = list(_SHARES.items())
    events = [name for name, _ in shares] + [""]
    weights = [share for _, share in shares] + [1 - sum(_SHARES.values())]
    return SoakWish(
        number=number,
        seed=draw.getrandbits(32),
        size=size,
        batch=draw.choice((1, 1, 2)) if size == SIZES[0] else 1,
        sampler=draw.choice(SAMPLERS),
        steps=draw.randint(4, 8),
        text=draw.choice(TEXTS),
        lora_strength=round(draw.choice((0.0, draw.uniform(-1.0, 1.0))), 2),
        has_control=draw.random() < 0.25,
        has_skip=draw.random() < 0.25,
        event=draw.choices(events, weights)[0],
    )


def prompt_of(wish: SoakWish, defaults: Defaults | None) -> Prompt:
    """The prompt for ComfyUI.

    Args:
        defaults: of Slipstream's nodes; None makes the prompt without an Accelerate node.
    """
    graph = Graph()
    loader = graph.add("SlipstreamDemoLoader")
    model: list[Any] = [loader, 0]
    vae, control = [loader, 1], [loader, 2]
    if wish.lora_strength:
        model = [graph.add("SlipstreamDemoLora", model=model, strength=wish.lora_strength), 0]
    if defaults is not None:
        model = [graph.add(ACCELERATE_MODEL, model=model, **_choices(defaults, ACCELERATE_MODEL)), 0]
        vae = [graph.add(ACCELERATE_VAE, vae=vae, **_choices(defaults, ACCELERATE_VAE)), 0]
    if wish.has_skip:
        model = [graph.add(STEP_SKIP, model=model, preset="balanced"), 0]
    positive, negative = ([graph.add("SlipstreamDemoPrompt", text=text), 0] for text in (wish.text, ""))
    if wish.has_control:
        if defaults is not None:
            choices = _choices(defaults, ACCELERATE_CONTROLNET)
            control = [graph.add(ACCELERATE_CONTROLNET, control_net=control, **choices), 0]
        edges = [graph.add("SlipstreamBenchmarkEdges", size=max(wish.size)), 0]
        applied = graph.add(
            "ControlNetApplyAdvanced", positive=positive, negative=negative, control_net=control, image=edges,
            strength=0.8, start_percent=0.0, end_percent=1.0,
        )  # fmt: skip
        positive, negative = [applied, 0], [applied, 1]
    width, height = wish.size
    latent = [graph.add("EmptyLatentImage", width=width, height=height, batch_size=wish.batch), 0]
    sampled = graph.add(
        "KSampler", model=model, positive=positive, negative=negative, latent_image=latent, seed=wish.seed,
        steps=wish.steps, cfg=5.0, sampler_name=wish.sampler, scheduler="normal", denoise=1.0,
    )  # fmt: skip
    picture = [graph.add("VAEDecode", samples=[sampled, 0], vae=vae), 0]
    graph.add("SaveImage", images=picture, filename_prefix="soak")
    return graph.prompt


def _choices(defaults: Defaults, node: str) -> dict[str, Any]:
    return {**defaults[node], "build": "first use", "optimize": "fast build"}
