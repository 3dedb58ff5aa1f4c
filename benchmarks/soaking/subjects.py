"""The models that a soak runs on: the demo model, or model files of random weights, tiny or at full size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..in_server.graph import Graph, Link
from ..model_files.families import CHECKPOINT, CONTROLNET, FAMILIES, LORA, ModelFile

_TEXTS = ("a large yellow star left of a red circle on a blue background", "a small green square on a white background")


class Subject:
    """The demo model, which is trained and comes with Slipstream.

    Attributes:
        sizes: of pictures; batches of two are made in the first one.
        texts: how many different prompts there are.
        files: that have to be made before.
    """

    sizes: tuple[tuple[int, int], ...] = ((64, 64), (96, 64), (128, 64))
    texts = len(_TEXTS)
    cfg = 5.0
    files: tuple[ModelFile, ...] = ()

    def __init__(self, optimize: str | None) -> None:
        """
        Args:
            optimize: what the Accelerate nodes are set to; None: their default.
        """
        self._changed = {"build": "first use", **({} if optimize is None else {"optimize": optimize})}

    def choices(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs of an Accelerate node."""
        return {**defaults, **{name: value for name, value in self._changed.items() if name in defaults}}

    def load(self, graph: Graph) -> tuple[Link, Link]:
        """Model and VAE."""
        self._loader = graph.add("SlipstreamDemoLoader")
        return [self._loader, 0], [self._loader, 1]

    def load_controlnet(self, graph: Graph) -> Link:
        """The ControlNet, after `load`."""
        return [self._loader, 2]

    def add_lora(self, graph: Graph, model: Link, strength: float) -> Link:
        """The model with its LoRA."""
        return [graph.add("SlipstreamDemoLora", model=model, strength=strength), 0]

    def add_text(self, graph: Graph, number: int | None) -> Link:
        """A conditioning; None is the negative one."""
        return [graph.add("SlipstreamDemoPrompt", text="" if number is None else _TEXTS[number]), 0]


class FromFiles(Subject):
    """A model of SD1.5's class by stock loaders, from files of random weights.

    Attributes:
        family: of the files.
    """

    family: str
    cfg = 3.0  # a higher one multiplies the rounding of random models

    def load(self, graph: Graph) -> tuple[Link, Link]:
        """Model and VAE."""
        loader = graph.add("CheckpointLoaderSimple", ckpt_name=ModelFile(CHECKPOINT, self.family).name)
        return [loader, 0], [loader, 2]

    def load_controlnet(self, graph: Graph) -> Link:
        """The ControlNet."""
        return [graph.add("ControlNetLoader", control_net_name=ModelFile(CONTROLNET, self.family).name), 0]

    def add_lora(self, graph: Graph, model: Link, strength: float) -> Link:
        """The model with its LoRA."""
        lora = {"lora_name": ModelFile(LORA, self.family).name, "strength_model": strength}
        return [graph.add("LoraLoaderModelOnly", model=model, **lora), 0]

    def add_text(self, graph: Graph, number: int | None) -> Link:
        """A conditioning of random numbers."""
        family = FAMILIES[self.family]
        shape = {"tokens": family.tokens, "width": family.width, "pooled": family.pooled}
        return [graph.add("SlipstreamBenchmarkPrompt", seed=0 if number is None else number + 1, nonce=0, **shape), 0]


def _files_of(family: str) -> tuple[ModelFile, ...]:
    return tuple(ModelFile(folder, family) for folder in (CHECKPOINT, CONTROLNET, LORA))


class Tiny(FromFiles):
    """The smallest one that stock loaders take."""

    family = "tiny"
    sizes = ((64, 64), (96, 64))
    files = _files_of("tiny")


class FullSize(FromFiles):
    """SD1.5 at full size."""

    family = "sd15"
    sizes = ((512, 512), (640, 512))
    files = _files_of("sd15")


SUBJECTS = {"demo": Subject, "tiny": Tiny, "sd15": FullSize}
