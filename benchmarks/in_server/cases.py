"""What is measured in a ComfyUI server: whole pictures, each as one workflow of stock nodes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..model_files.families import (
    CHECKPOINT,
    CONTROLNET,
    DIFFUSION_MODEL,
    FAMILIES,
    LORA,
    TEXT_ENCODER,
    VAE,
    ModelFile,
)
from ..subjects.references import References

SHORT_RUNS, COMPARING = range(4, 8), 6
"""Steps of runs that are too short for Slipstream to time model and engine in one of them, and pictures after which it
has compared them."""

MEETINGS = 8
"""How often texts of each length are encoded at first: meanwhile engines are compared with the model, and timed beside
it."""


@dataclass(frozen=True)
class PictureCase:
    """One kind of picture, or several at once, or one kind of text.

    Attributes:
        title: in plain words.
        family: a key of `FAMILIES`.
        size: width and height of the picture in pixels; 0 where a text is encoded.
        has_control: with a ControlNet.
        has_lora: with a LoRA, whose strength is another in each picture.
        tokens: lengths of the positive prompt, the next one in each picture; empty: always its family's.
        second_size: width and height to which the latent is enlarged for a second sampler; None: there is one sampler.
        frames: of a video in place of a picture; 0: none.
        is_sample_only: what the sampler makes is not decoded.
        is_decode_only: a VAE decodes random latents, and no model runs.
        is_encode_only: a text encoder encodes random texts, and nothing else runs.
        needs_gpu: a CPU would take minutes for a picture.
    """

    name: str
    title: str
    family: str
    size: int
    steps: int
    cfg: float = 7.0
    batch: int = 1
    has_control: bool = False
    has_lora: bool = False
    tokens: tuple[int, ...] = ()
    second_size: int | None = None
    frames: int = 0
    is_sample_only: bool = False
    is_decode_only: bool = False
    is_encode_only: bool = False
    needs_gpu: bool = True

    @property
    def first_pictures(self) -> int:
        """How many pictures there are at least before the one that is compared, by when no length is new and no step is
        computed on purpose."""
        comparing = COMPARING if self.steps in SHORT_RUNS else 0
        return max(comparing, len(self.tokens) * (MEETINGS if self.is_encode_only else 1))

    @property
    def files(self) -> tuple[ModelFile, ...]:
        """The model files that the workflow loads."""
        if self.is_decode_only or self.is_encode_only:
            return (ModelFile(VAE if self.is_decode_only else TEXT_ENCODER, self.family),)
        parts = (CHECKPOINT,) if FAMILIES[self.family].is_one_file else (DIFFUSION_MODEL, VAE)
        found = [ModelFile(each, self.family) for each in parts if each != VAE or not self.is_sample_only]
        found += [ModelFile(CONTROLNET, self.family)] if self.has_control else []
        found += [ModelFile(LORA, self.family)] if self.has_lora else []
        return tuple(found)


CASES = {
    case.name: case
    for case in (
        PictureCase("sd15-512-20", "SD1.5, 512×512, 20 steps of euler, CFG 7", "sd15", 512, 20),
        PictureCase(
            "sd15-canny-512-20",
            "SD1.5 with a ControlNet, 512×512, 20 steps of euler, CFG 7",
            "sd15",
            512,
            20,
            has_control=True,
        ),
        PictureCase(
            "sd15-512-20-b4",
            "SD1.5, four pictures at once, 512×512, 20 steps of euler, CFG 7",
            "sd15",
            512,
            20,
            batch=4,
        ),
        PictureCase(
            "sd15-512-20-b16",
            "SD1.5, sixteen pictures at once, 512×512, 20 steps of euler, CFG 7",
            "sd15",
            512,
            20,
            batch=16,
        ),
        PictureCase("sdxl-1024-30", "SDXL, 1024×1024, 30 steps of euler, CFG 7", "sdxl", 1024, 30),
        PictureCase("sdxl-1024-20", "SDXL, 1024×1024, 20 steps of euler, CFG 7", "sdxl", 1024, 20),
        PictureCase("sdxl-1024-8", "SDXL, 1024×1024, 8 steps of euler, CFG 7", "sdxl", 1024, 8),
        PictureCase("sdxl-1024-4", "SDXL, 1024×1024, 4 steps of euler, CFG 7", "sdxl", 1024, 4),
        PictureCase(
            "sdxl-canny-1024-20",
            "SDXL with a ControlNet, 1024×1024, 20 steps of euler, CFG 7",
            "sdxl",
            1024,
            20,
            has_control=True,
        ),
        PictureCase("sdxl-1024-30-cfg1", "SDXL, 1024×1024, 30 steps of euler, CFG 1", "sdxl", 1024, 30, cfg=1.0),
        PictureCase(
            "sdxl-1024-30-lora",
            "SDXL with a LoRA of another strength in each picture, 1024×1024, 30 steps of euler, CFG 7",
            "sdxl",
            1024,
            30,
            has_lora=True,
        ),
        PictureCase(
            "sdxl-hires-fix",
            "SDXL, 768×768 and 20 steps, then enlarged to 1152×1152 and 20 steps with denoise 0.5, euler, CFG 7",
            "sdxl",
            768,
            20,
            second_size=1152,
        ),
        PictureCase(
            "flux-1024-4",
            "Flux.1 of schnell's size, 1024×1024, 4 steps of euler, CFG 1",
            "flux",
            1024,
            4,
            cfg=1.0,
        ),
        PictureCase(
            "flux-third-1024-20",
            "6 of Flux.1's 19 double blocks and 13 of 38 single ones, 1024×1024, 20 steps of euler, CFG 1, not decoded",
            "flux-third",
            1024,
            20,
            cfg=1.0,
            is_sample_only=True,
        ),
        PictureCase(
            "flux-third-canny-1024-20",
            "a third of Flux.1 with a ControlNet of XLabs's kind, 1024×1024, 20 steps of euler, CFG 1, not decoded",
            "flux-third",
            1024,
            20,
            cfg=1.0,
            has_control=True,
            is_sample_only=True,
        ),
        PictureCase(
            "flux-third-gguf-1024-20",
            "a third of Flux.1 in GGUF (Q8_0), by ComfyUI-GGUF, 1024×1024, 20 steps of euler, CFG 1, not decoded",
            "flux-third-gguf",
            1024,
            20,
            cfg=1.0,
            is_sample_only=True,
        ),
        PictureCase(
            "wan-512-20",
            "Wan 2.1 of 1.3B's size, 33 frames of 512×512, 20 steps of euler, CFG 6, not decoded",
            "wan",
            512,
            20,
            cfg=6.0,
            frames=33,
            is_sample_only=True,
        ),
        PictureCase(
            "qwen-image-1024-8",
            "10 of Qwen-Image's 60 blocks and Flux's VAE, prompts of three lengths, 1024×1024, 8 steps of euler, CFG 4",
            "qwen-image",
            1024,
            8,
            cfg=4.0,
            tokens=(37, 112, 256),
        ),
        PictureCase(
            "z-image-1024-8",
            "8 of Z-Image's 30 layers and Flux's VAE, prompts of three lengths, 1024×1024, 8 steps of euler, CFG 1",
            "z-image",
            1024,
            8,
            cfg=1.0,
            tokens=(37, 112, 256),
        ),
        PictureCase(
            "vae-decode-1024",
            "SD's VAE decoder alone, 1024×1024",
            "sdxl",
            1024,
            0,
            is_decode_only=True,
        ),
        PictureCase(
            "t5-xxl-encode",
            "T5-XXL alone, texts of 24, 77 and 256 tokens",
            "t5-xxl",
            0,
            0,
            tokens=(24, 77, 256),
            is_encode_only=True,
        ),
        PictureCase(
            "tiny-64-3",
            "a tiny model of SD1.5's kind, 64×64, 3 steps, to try this out on any machine",
            "tiny",
            64,
            3,
            needs_gpu=False,
        ),
        PictureCase(
            "tiny-deep-64-6",
            "a tiny model of SD1.5's kind with two levels and a middle, 64×64, 6 steps, to try patches on any machine",
            "tiny-deep",
            64,
            6,
            needs_gpu=False,
        ),
        PictureCase(
            "tiny-flux-64-6",
            "a tiny model of Flux.1's kind, 64×64, 6 steps, not decoded, to try patches on any machine",
            "tiny-flux",
            64,
            6,
            cfg=1.0,
            is_sample_only=True,
            needs_gpu=False,
        ),
        PictureCase(
            "tiny-flux-canny-64-6",
            "a tiny model of Flux.1's kind with a ControlNet of XLabs's kind, 64×64, 6 steps, not decoded",
            "tiny-flux",
            64,
            6,
            cfg=1.0,
            has_control=True,
            is_sample_only=True,
            needs_gpu=False,
        ),
        PictureCase(
            "tiny-flux-gguf-64-6",
            "a tiny model of Flux.1's kind in GGUF (Q8_0), by ComfyUI-GGUF, 64×64, 6 steps, not decoded",
            "tiny-flux-gguf",
            64,
            6,
            cfg=1.0,
            is_sample_only=True,
            needs_gpu=False,
        ),
        PictureCase(
            "tiny-wan-64-6",
            "a tiny model of Wan's kind, 5 frames of 64×64, 6 steps, not decoded, to try patches on any machine",
            "tiny-wan",
            64,
            6,
            frames=5,
            is_sample_only=True,
            needs_gpu=False,
        ),
        PictureCase(
            "tiny-canny-64-3",
            "a tiny model with a ControlNet, 64×64, 3 steps, to try this out on any machine",
            "tiny",
            64,
            3,
            has_control=True,
            needs_gpu=False,
        ),
        PictureCase(
            "tiny-lora-hires-64-3",
            "a tiny model with a LoRA, 64×64, then 96×96, to try this out on any machine",
            "tiny",
            64,
            3,
            has_lora=True,
            second_size=96,
            needs_gpu=False,
        ),
        PictureCase(
            "tiny-vae-decode-64",
            "a tiny VAE decoder alone, 64×64, to try this out on any machine",
            "tiny",
            64,
            0,
            is_decode_only=True,
            needs_gpu=False,
        ),
        PictureCase(
            "t5-base-encode",
            "T5-base alone, texts of 24, 77 and 256 tokens, to try this out on any machine",
            "t5-base",
            0,
            0,
            tokens=(24, 77, 256),
            is_encode_only=True,
            needs_gpu=False,
        ),
    )
}

HEADLINE = ("sdxl-1024-30", "sdxl-1024-4", "sd15-512-20", "sd15-canny-512-20")
"""Measured where no case is named."""


def forget_references(file: ModelFile, models: Path) -> None:
    """Remove what is compared with of cases that load a file which was made anew."""
    for case in CASES.values():
        if file in case.files:
            References(models).forget(case.name)
