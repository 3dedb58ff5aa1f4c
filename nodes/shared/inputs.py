"""Inputs that several nodes share."""

from __future__ import annotations

from comfy_api.latest import io

from ...core.spec import Optimize
from ...runtime.settings.model_settings import (
    AUTO,
    MAX_BATCH,
    MAX_TOKENS,
    PRECISIONS,
    TOKENS,
    BackendChoice,
    BuildPolicy,
    ShapeChoice,
)


def backend_input(with_off: bool = True) -> io.Combo.Input:
    choices = [choice.value for choice in BackendChoice if with_off or choice is not BackendChoice.OFF]
    return io.Combo.Input(
        "backend",
        options=choices,
        default=BackendChoice.AUTO.value,
        tooltip="auto: the first that works here, compiled before TensorRT. compiled: torch modules compiled ahead of "
        "time. tensorrt: engines by NVIDIA's TensorRT, where it is installed; else the reason says how to."
        + (" off: your model, without Slipstream." if with_off else ""),
    )


def precision_input() -> io.Combo.Input:
    return io.Combo.Input(
        "precision",
        options=list(PRECISIONS),
        default=AUTO,
        tooltip="What the engine computes in. auto: the model's own, as ComfyUI chose it. fp8: large linear layers in "
        "8-bit floats, on Ada, Hopper and Blackwell GPUs; faster for large models such as SDXL, and "
        "details of pictures differ visibly from fp16. int8: the same in 8-bit integers, for Ampere GPUs and newer; "
        "slower than fp16 on Hopper. With both, all else is as with auto, and so is a whole VAE.",
    )


BLOCKS_OF_MODELS = (
    "blocks: no engine of the whole model, but one for each kind of block that it is made of. They serve all "
    "sizes and prompts, and where another node patches some blocks, only those run as they are. Built sooner than "
    "the whole, and slower: on an H100 a step of SDXL takes 36 ms by them, 32 by the whole, 98 without. "
    "On an NVIDIA GPU those of a diffusion model come with the other choices too, and serve until the whole is built."
)
BLOCKS_OF_VAES = (
    "blocks: no engine of the whole decoder or encoder, but one for each kind of block that it is made of. They serve "
    "all picture sizes and tiles, and where another node changes some blocks, only those run as they are."
)


def optimize_input(blocks: str) -> io.Combo.Input:
    """
    Args:
        blocks: what engines of blocks alone are.
    """
    return io.Combo.Input(
        "optimize",
        options=[level.value for level in Optimize],
        default=Optimize.BALANCED.value,
        tooltip="How much build time to spend. fast build: the shortest build, with slower kernels. balanced: the "
        "default. max: on a GPU, tries more variants of each fused kernel, which takes several times as long and gains "
        "a few per cent, and joins layers that share an input even where that costs copies of their weights in GPU "
        f"memory. {blocks}",
    )


def build_input(with_manual: bool = True) -> io.Combo.Input:
    return io.Combo.Input(
        "build",
        options=[policy.value for policy in BuildPolicy if with_manual or policy is not BuildPolicy.MANUAL],
        default=BuildPolicy.BACKGROUND.value,
        tooltip="background: pictures keep coming from your model while the engine is built whenever ComfyUI is "
        "idle. first use: the first picture waits for its engine."
        + (" manual: only the Build Engine node builds." if with_manual else ""),
    )


def resolutions_input() -> io.String.Input:
    return io.String.Input(
        "resolutions",
        default=AUTO,
        tooltip="auto: every size that comes up gets an engine. Or a list such as 512x512, 768x512: only these do.",
    )


def choices(with_manual: bool = True, blocks: str = BLOCKS_OF_MODELS) -> list[io.Input]:
    """What every Accelerate node asks for."""
    effort, seldom = optimize_input(blocks), advanced(resolutions_input())
    return [backend_input(), precision_input(), effort, build_input(with_manual), seldom]


def engine_inputs() -> list[io.Input]:
    """What one engine is for. Workflows that were saved before these inputs were there go without them."""
    return [advanced(each) for each in (_engines_input(), _max_batch_input(), _max_tokens_input(), _bake_input())]


def advanced(widget: io.Input) -> io.Input:
    """Folded away by pages that can; older ComfyUIs have no argument for it."""
    widget.extra_dict = {**widget.extra_dict, "advanced": True}
    return widget


def _engines_input() -> io.Combo.Input:
    return io.Combo.Input(
        "engines",
        options=[choice.value for choice in ShapeChoice],
        default=ShapeChoice.EACH.value,
        optional=True,
        tooltip="one engine per size: the fastest. one for a range: a single engine from the smallest to the largest "
        "of the listed resolutions, fastest at the first. one with a profile per size: a single engine for exactly the "
        "listed resolutions. Both need a list of resolutions and TensorRT; other backends make one engine per size.",
    )


def _max_batch_input() -> io.Int.Input:
    return io.Int.Input(
        "max_batch",
        default=MAX_BATCH,
        min=1,
        max=64,
        optional=True,
        tooltip="Not for one engine per size: the most samples that the engine takes at once, 2 per picture with CFG. "
        "Larger batches run in parts.",
    )


def _max_tokens_input() -> io.Int.Input:
    return io.Int.Input(
        "max_tokens",
        default=MAX_TOKENS,
        min=TOKENS,
        max=TOKENS * 16,
        step=TOKENS,
        optional=True,
        tooltip="Not for one engine per size: the longest text that the engine takes, 77 for each 75 words or so. A "
        "longer one gets an engine of its own.",
    )


def _bake_input() -> io.Boolean.Input:
    return io.Boolean.Input(
        "bake",
        default=False,
        optional=True,
        tooltip="TensorRT only: put the weights into the engine instead of refitting it. Each checkpoint then needs an "
        "engine of its own, which is not built in the background, and LoRA runs on your model without Slipstream.",
    )
