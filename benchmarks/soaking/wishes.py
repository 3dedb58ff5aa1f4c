"""What each prompt of a soak asks for, drawn by its number and the soak's seed alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from ..in_server.graph import (
    ACCELERATE_CONTROLNET,
    ACCELERATE_MODEL,
    ACCELERATE_VAE,
    STEP_SKIP,
    Defaults,
    Graph,
    Link,
    Prompt,
)
from .subjects import Subject

SAMPLERS = ("euler", "dpmpp_2m", "ddim", "euler_ancestral", "heun", "lms")
CANCELLED_STEPS = 40
"""Steps of a prompt that is interrupted: enough for the interrupt to come amid them."""
_SHARES = {"cancel": 0.03, "free": 0.05, "delete": 0.015, "second_server": 0.06}


@dataclass(frozen=True)
class SoakWish:
    """One prompt.

    Attributes:
        text: number of the subject's text.
        lora_strength: 0 where there is no LoRA.
        event: what happens besides: "cancel", "free", "delete", "second_server" or nothing.
    """

    number: int
    seed: int
    size: tuple[int, int]
    batch: int
    sampler: str
    steps: int
    text: int
    lora_strength: float
    has_control: bool
    has_skip: bool
    event: str

    @property
    def cancelled(self) -> SoakWish:
        """The same with so many steps that it can be interrupted."""
        return replace(self, steps=CANCELLED_STEPS)


def wish_of(soak_seed: int, number: int, subject: Subject) -> SoakWish:
    """The prompt of that number: the same whichever others are run."""
    draw = Random(f"{soak_seed}/{number}")
    size = draw.choice(subject.sizes)
    shares = list(_SHARES.items())
    events = [name for name, _ in shares] + [""]
    weights = [share for _, share in shares] + [1 - sum(_SHARES.values())]
    return SoakWish(
        number=number,
        seed=draw.getrandbits(32),
        size=size,
        batch=draw.choice((1, 1, 2)) if size == subject.sizes[0] else 1,
        sampler=draw.choice(SAMPLERS),
        steps=draw.randint(4, 8),
        text=draw.randrange(subject.texts),
        lora_strength=round(draw.choice((0.0, draw.uniform(-1.0, 1.0))), 2),
        has_control=draw.random() < 0.25,
        has_skip=draw.random() < 0.25,
        event=draw.choices(events, weights)[0],
    )


def prompt_of(wish: SoakWish, subject: Subject, defaults: Defaults | None) -> Prompt:
    """The prompt for ComfyUI.

    Args:
        defaults: of Slipstream's nodes; None makes the prompt without an Accelerate node.
    """
    graph = Graph()
    model, vae = subject.load(graph)
    if wish.lora_strength:
        model = subject.add_lora(graph, model, wish.lora_strength)
    if defaults is not None:
        model = _first(graph, ACCELERATE_MODEL, model=model, **subject.choices(defaults[ACCELERATE_MODEL]))
        vae = _first(graph, ACCELERATE_VAE, vae=vae, **subject.choices(defaults[ACCELERATE_VAE]))
    if wish.has_skip:
        model = _first(graph, STEP_SKIP, model=model, preset="balanced")
    positive, negative = (subject.add_text(graph, number) for number in (wish.text, None))
    if wish.has_control:
        control = subject.load_controlnet(graph)
        if defaults is not None:
            choices = subject.choices(defaults[ACCELERATE_CONTROLNET])
            control = _first(graph, ACCELERATE_CONTROLNET, control_net=control, **choices)
        applied = graph.add(
            "ControlNetApplyAdvanced", positive=positive, negative=negative, control_net=control,
            image=_first(graph, "SlipstreamBenchmarkEdges", size=max(wish.size)), strength=0.8, start_percent=0.0,
            end_percent=1.0,
        )  # fmt: skip
        positive, negative = [applied, 0], [applied, 1]
    width, height = wish.size
    latent = _first(graph, "EmptyLatentImage", width=width, height=height, batch_size=wish.batch)
    sampled = _first(
        graph, "KSampler", model=model, positive=positive, negative=negative, latent_image=latent, seed=wish.seed,
        steps=wish.steps, cfg=subject.cfg, sampler_name=wish.sampler, scheduler="normal", denoise=1.0,
    )  # fmt: skip
    graph.add("SaveImage", images=_first(graph, "VAEDecode", samples=sampled, vae=vae), filename_prefix="soak")
    return graph.prompt


def _first(graph: Graph, class_type: str, **inputs: object) -> Link:
    return [graph.add(class_type, **inputs), 0]
