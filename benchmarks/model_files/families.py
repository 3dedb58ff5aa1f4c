"""Families of models, and the files of theirs that are made."""

from __future__ import annotations

from dataclasses import dataclass

from ..patching.patches import ADAPTER, MOTION_MODULE

CHECKPOINT, DIFFUSION_MODEL, VAE, CONTROLNET, LORA = "checkpoints", "diffusion_models", "vae", "controlnet", "loras"
TEXT_ENCODER = "text_encoders"
"""ComfyUI's folders of model files."""

GGUF = "ComfyUI-GGUF"
"""The pack that loads models in GGUF."""

FOLDERS = (CHECKPOINT, DIFFUSION_MODEL, VAE, CONTROLNET, LORA, TEXT_ENCODER, ADAPTER, MOTION_MODULE)


@dataclass(frozen=True)
class ModelFile:
    """A model file of random weights.

    Attributes:
        folder: ComfyUI's folder of such files.
        family: the key of `FAMILIES` that it belongs to.
    """

    folder: str
    family: str

    @property
    def name(self) -> str:
        """The file's name, as loader nodes take it."""
        is_gguf = self.folder == DIFFUSION_MODEL and FAMILIES[self.family].pack == GGUF
        return f"slipstream-benchmark-{self.family}.{'gguf' if is_gguf else 'safetensors'}"

    @property
    def path(self) -> str:
        """The file's path below a folder of models."""
        return f"{self.folder}/{self.name}"


@dataclass(frozen=True)
class Family:
    """A model family: the shapes of its prompts and latents.

    Attributes:
        width: of the text's embedding, [1, tokens, width].
        pooled: width of the pooled text, [1, pooled]; 0 where the family takes none.
        channels: of its latents.
        is_one_file: a checkpoint holds model and VAE; otherwise each has a file of its own.
        clip_type: as ComfyUI's node Load CLIP takes it, of a family of text encoders.
        pack: the folder of `custom_nodes` that has the model's loader; empty: ComfyUI itself.
    """

    width: int
    pooled: int = 0
    tokens: int = 77
    channels: int = 4
    is_one_file: bool = True
    clip_type: str = ""
    pack: str = ""


FAMILIES = {
    "sd15": Family(768),
    "sdxl": Family(2048, pooled=1280),
    "flux": Family(4096, pooled=768, tokens=256, channels=16, is_one_file=False),
    "flux-third": Family(4096, pooled=768, tokens=256, channels=16, is_one_file=False),
    "flux-third-gguf": Family(4096, pooled=768, tokens=256, channels=16, is_one_file=False, pack=GGUF),
    "wan": Family(4096, tokens=512, channels=16, is_one_file=False),
    "qwen-image": Family(3584, tokens=24, channels=16, is_one_file=False),
    "z-image": Family(2560, tokens=24, channels=16, is_one_file=False),
    "t5-xxl": Family(4096, clip_type="pixart"),
    "t5-base": Family(768, clip_type="stable_audio"),
    "tiny": Family(768),
    "tiny-deep": Family(768),
    "tiny-flux": Family(64, pooled=32, channels=16, is_one_file=False),
    "tiny-flux-gguf": Family(64, pooled=32, channels=16, is_one_file=False, pack=GGUF),
    "tiny-wan": Family(4096, channels=16, is_one_file=False),
}
