"""Workflows for ComfyUI's API: the same stock nodes for every variant, but for those that make the model faster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...core.spec import Optimize
from ..model_files.families import (
    CHECKPOINT,
    CONTROLNET,
    DIFFUSION_MODEL,
    FAMILIES,
    GGUF,
    LORA,
    TEXT_ENCODER,
    VAE,
    ModelFile,
)
from ..patching.patches import APPLY_CONTROLNET, FILES, KSAMPLER, Given, Node, Patch
from .cases import PictureCase
from .variants import TORCH_COMPILE, ServerVariant

SAMPLER, SCHEDULER = "euler", "normal"
POSITIVE, NEGATIVE = 1, 2
"""Seeds of the two prompts."""

ACCELERATE_MODEL, ACCELERATE_CONTROLNET, ACCELERATE_VAE, ACCELERATE_TEXT_ENCODER, STEP_SKIP = OUR_NODES = (
    "SlipstreamAccelerateModel", "SlipstreamAccelerateControlNet", "SlipstreamAccelerateVAE",
    "SlipstreamAccelerateTextEncoder", "SlipstreamStepSkip",
)  # fmt: skip

Link = list[Any]
"""An output of a node: the node's id and the output's index."""

Prompt = dict[str, dict[str, Any]]
Defaults = Mapping[str, Mapping[str, Any]]
"""By node class, the default values of the inputs that ComfyUI insists on."""


@dataclass(frozen=True)
class Wish:
    """What tells one picture from another.

    Attributes:
        seed: of the noise, or of the latent or text that is decoded or encoded.
        number: says which of the case's lengths the prompt has.
        lora_strength: where the case has a LoRA.
        nonce: another one makes ComfyUI compute a picture again that it has computed before.
    """

    seed: int
    number: int = 0
    lora_strength: float = 0.75
    nonce: int = 0


class Graph:
    """A prompt that grows node by node."""

    def __init__(self) -> None:
        self.prompt: Prompt = {}

    def add(self, class_type: str, **inputs: Any) -> str:
        """Add a node and return its id; inputs are plain values or links."""
        node = str(len(self.prompt) + 1)
        self.prompt[node] = {"class_type": class_type, "inputs": inputs}
        return node


def build_prompt(
    case: PictureCase,
    variant: ServerVariant,
    wish: Wish,
    defaults: Defaults,
    patch: Patch | None = None,
    has_vae: bool = True,
) -> Prompt:
    """Return the prompt of one picture.

    Args:
        defaults: of `OUR_NODES`, as the server describes them, and of the patch's; empty where none of them is used.
        patch: stands between the accelerated model and the sampler.
        has_vae: whether Slipstream's variants accelerate the VAE, too.
    """
    return _Builder(case, variant, wish, defaults, patch, has_vae).build()


class _Builder:
    def __init__(
        self,
        case: PictureCase,
        variant: ServerVariant,
        wish: Wish,
        defaults: Defaults,
        patch: Patch | None,
        has_vae: bool,
    ) -> None:
        self._case, self._variant, self._wish, self._defaults = case, variant, wish, defaults
        self._patch, self._has_vae = patch, has_vae
        self._family = FAMILIES[case.family]
        self._graph = Graph()
        self._given: dict[str, Any] = {}

    def build(self) -> Prompt:
        picture = self._encode() if self._case.is_encode_only else self._decode()
        self._graph.add("SaveImage", images=picture, filename_prefix="slipstream-benchmark")
        return self._graph.prompt

    def _encode(self) -> Link:
        """A picture of nothing, which is there when a text is encoded."""
        clip = self._first("CLIPLoader", clip_name=self._file(TEXT_ENCODER), type=self._family.clip_type)
        if self._variant.is_ours:
            clip = self._first(ACCELERATE_TEXT_ENCODER, clip=clip)
        wish = {"seed": self._wish.seed, "nonce": self._wish.nonce, "tokens": self._prompt_tokens}
        text = self._first("CLIPTextEncode", clip=clip, text=self._first("SlipstreamBenchmarkText", **wish))
        return self._first("SlipstreamBenchmarkBlank", behind=text)

    def _decode(self) -> Link:
        vae: Link | None
        if self._case.is_decode_only:
            latent, vae = self._random_latent(), self._load_vae()
        else:
            model, vae = self._load()
            latent = self._sample(self._accelerated_model(model))
        if vae is None:
            return self._first("SlipstreamBenchmarkBlank", behind=latent)
        if self._variant.is_ours and self._has_vae:
            vae = self._first(ACCELERATE_VAE, vae=vae)
        return self._first("VAEDecode", samples=latent, vae=vae)

    def _load(self) -> tuple[Link, Link | None]:
        """The model, with its LoRA where there is one, and the VAE, None where nothing is decoded."""
        vae: Link | None
        if self._family.is_one_file:
            loader = self._graph.add("CheckpointLoaderSimple", ckpt_name=self._file(CHECKPOINT))
            model, vae = [loader, 0], [loader, 2]
            self._given.update(clip=[loader, 1], vae=vae)
        else:
            file = self._file(DIFFUSION_MODEL)
            if self._family.pack == GGUF:
                model = self._first("UnetLoaderGGUF", unet_name=file)
            else:
                model = self._first("UNETLoader", unet_name=file, weight_dtype="default")
            vae = None if self._case.is_sample_only else self._load_vae()
        if self._case.has_lora:
            strength = self._wish.lora_strength
            lora = {"lora_name": self._file(LORA), "strength_model": strength}
            model = self._first("LoraLoaderModelOnly", model=model, **lora)
        return model, vae

    def _load_vae(self) -> Link:
        return self._first("VAELoader", vae_name=self._file(VAE))

    def _accelerated_model(self, model: Link) -> Link:
        if self._variant.kind == TORCH_COMPILE:
            return self._first("TorchCompileModel", model=model, backend="inductor")
        if self._variant.is_ours:
            model = self._first(ACCELERATE_MODEL, model=model, **self._variant_choices)
        if self._variant.preset is not None:
            model = self._first(STEP_SKIP, model=model, preset=self._variant.preset)
        return model

    def _sample(self, model: Link) -> Link:
        """The latent of the last sampler."""
        case = self._case
        positive, negative = self._prompts()
        if self._patch is not None and not self._patch.stands_for:
            node = self._patch.node
            self._given.update(model=model, positive=positive, negative=negative)
            model = self._made(replace(node, inputs={"model": Given("model"), **node.inputs}))
        empty = {"width": case.size, "height": case.size, "batch_size": case.batch}
        if case.frames:
            latent = self._first("EmptyHunyuanLatentVideo", **empty, length=case.frames)
        else:
            latent = self._first("EmptyLatentImage", **empty)
        common = {
            "model": model, "positive": positive, "negative": negative, "seed": self._wish.seed, "steps": case.steps,
            "cfg": case.cfg, "sampler_name": SAMPLER, "scheduler": SCHEDULER,
        }  # fmt: skip
        self._given["half_of_steps"] = case.steps // 2
        latent = self._in_place_of(KSAMPLER, latent_image=latent, denoise=1.0, **common)
        if case.second_size is None:
            return latent
        larger = {"width": case.second_size, "height": case.second_size, "crop": "disabled"}
        latent = self._first("LatentUpscale", samples=latent, upscale_method="nearest-exact", **larger)
        return self._first(KSAMPLER, latent_image=latent, denoise=0.5, **common)

    def _made(self, node: Node) -> Link:
        """Add a node and those among its inputs, with the known defaults of its others, and return its output."""
        inputs = {name: self._value(value) for name, value in node.inputs.items()}
        defaults = self._defaults.get(node.class_type, {})
        return [self._graph.add(node.class_type, **{**defaults, **inputs}), node.output]

    def _value(self, value: Any) -> Any:
        """What an input is in the prompt."""
        if isinstance(value, Node):
            return self._made(value)
        if isinstance(value, Given):
            return self._file(value.name) if value in FILES else self._given[value.name]
        return value

    def _prompts(self) -> tuple[Link, Link]:
        positive = self._random_prompt(POSITIVE, self._prompt_tokens)
        negative = self._random_prompt(NEGATIVE, self._family.tokens)
        if not self._case.has_control:
            return positive, negative
        control = self._first("ControlNetLoader", control_net_name=self._file(CONTROLNET))
        if self._variant.is_ours:
            control = self._first(ACCELERATE_CONTROLNET, control_net=control, **self._variant_choices)
        applied, _ = self._in_place_of(
            APPLY_CONTROLNET, positive=positive, negative=negative, control_net=control,
            image=self._first("SlipstreamBenchmarkEdges", size=self._case.size), strength=1.0, start_percent=0.0,
            end_percent=1.0,
        )  # fmt: skip
        return [applied, 0], [applied, 1]

    def _random_prompt(self, seed: int, tokens: int) -> Link:
        family = self._family
        shape = {"tokens": tokens, "width": family.width, "pooled": family.pooled}
        return self._first("SlipstreamBenchmarkPrompt", seed=seed, nonce=self._wish.nonce, **shape)

    def _random_latent(self) -> Link:
        shape = {"size": self._case.size, "batch": self._case.batch, "channels": self._family.channels}
        return self._first("SlipstreamBenchmarkLatent", seed=self._wish.seed, nonce=self._wish.nonce, **shape)

    @property
    def _prompt_tokens(self) -> int:
        lengths = self._case.tokens or (self._family.tokens,)
        return lengths[self._wish.number % len(lengths)]

    @property
    def _variant_choices(self) -> dict[str, Any]:
        """What the variant sets on the nodes of model and ControlNet."""
        by_blocks = {"optimize": Optimize.BLOCKS.value} if self._variant.by_blocks else {}
        return {"precision": self._variant.precision, **by_blocks}

    def _first(self, class_type: str, **inputs: Any) -> Link:
        """Add a node and return its first output."""
        return self._made(Node(class_type, inputs))

    def _in_place_of(self, class_type: str, **inputs: Any) -> Link:
        """Add the patch's node that stands for one of ComfyUI's, or that one, and return its output."""
        if self._patch is None or self._patch.stands_for != class_type:
            return self._first(class_type, **inputs)
        self._given.update(inputs)
        return self._made(self._patch.node)

    def _file(self, folder: str) -> str:
        return ModelFile(folder, self._case.family).name


def required_defaults(node_info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the default values of a node's required widgets, from ComfyUI's `/object_info`.

    Inputs that only take links, such as models, are left out.
    """
    found: dict[str, Any] = {}
    for name, (kind, *rest) in node_info["input"].get("required", {}).items():
        options = rest[0] if rest else {}
        choices = kind if isinstance(kind, list) else options.get("options")
        if "default" in options:
            found[name] = options["default"]
        elif choices:
            found[name] = choices[0]
    return found
