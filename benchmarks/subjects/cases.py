"""What is measured: single calls of models, and whole pictures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...hosts.comfy.building import without_server
from ...hosts.comfy.process.checkout import use_checkout
from .jobs import sd15_job, sdxl_job
from .models import TINY_SD15, TINY_VAE, flux, pixart, sd3, sd15, sdxl, ssd1b, vae, vega
from .subject import Subject


@dataclass(frozen=True)
class Case:
    """What is measured.

    Attributes:
        title: in plain words.
        build: makes the model; ComfyUI has been entered by then.
        needs_gpu: a call would take minutes on a CPU.
        convolutional: whether the memory format of pictures matters to it.
        usual: measured where no case is named.
        is_job: a whole picture, not a single call.
    """

    name: str
    title: str
    build: Callable[[], Subject]
    needs_gpu: bool = True
    convolutional: bool = True
    usual: bool = True
    is_job: bool = False


def enter(checkout: Path) -> None:
    """Make ComfyUI's modules importable, with torch's attention: what it chooses by itself on NVIDIA's GPUs.

    Its attention for CPUs looks at the free memory in every call, which no compiler can look into.

    Raises:
        BackendUnavailable: this Python cannot load them.
    """
    use_checkout(str(checkout))
    from comfy.cli_args import args

    args.use_pytorch_cross_attention = True
    without_server.enter(checkout)


def _picture(name: str, title: str, build: Callable[[], Subject], needs_gpu: bool = True) -> Case:
    return Case(name, title, build, needs_gpu, usual=False, is_job=True)


CASES = {
    case.name: case
    for case in (
        Case("sd15-512-b2", "SD1.5's UNet, 512×512, batch 2, fp16", lambda: sd15(512, 512)),
        Case("sd15-768x512-b2", "SD1.5's UNet, 768×512, batch 2, fp16", lambda: sd15(512, 768), usual=False),
        Case("sd15-512-b8", "SD1.5's UNet, 512×512, batch 8, fp16", lambda: sd15(512, 512, batch=8), usual=False),
        Case("sd15-1024-b2", "SD1.5's UNet, 1024×1024, batch 2, fp16", lambda: sd15(1024, 1024), usual=False),
        Case("sdxl-1024-b2", "SDXL's UNet, 1024×1024, batch 2, fp16", sdxl),
        Case("sdxl-1024-b4", "SDXL's UNet, 1024×1024, batch 4, fp16", lambda: sdxl(batch=4), usual=False),
        Case("sdxl-1024-b8", "SDXL's UNet, 1024×1024, batch 8, fp16", lambda: sdxl(batch=8), usual=False),
        Case("sdxl-2048-b2", "SDXL's UNet, 2048×2048, batch 2, fp16", lambda: sdxl(2048), usual=False),
        Case("ssd1b-1024-b2", "SSD-1B's UNet, 1024×1024, batch 2, fp16", ssd1b, usual=False),
        Case("vega-1024-b2", "Segmind Vega's UNet, 1024×1024, batch 2, fp16", vega, usual=False),
        Case("vae-decode-1024", "SD's VAE decoder, 1024×1024, batch 1, bf16", lambda: vae(1024)),
        Case("sd3-1024-b2", "SD3 medium, 1024×1024, batch 2, fp16", sd3, convolutional=False),
        Case("pixart-1024-b2", "PixArt-α, 1024×1024, batch 2, fp16", pixart, convolutional=False, usual=False),
        Case("flux-1024-b1", "Flux.1 dev, 1024×1024, batch 1, bf16", flux, convolutional=False, usual=False),
        Case(
            "tiny-sd15-64-b2",
            "a tiny UNet of SD1.5's kind, 64×64, batch 2, to try this out on any machine",
            lambda: sd15(64, 64, TINY_SD15),
            needs_gpu=False,
            usual=False,
        ),
        _picture(
            "sd15-canny-512-20steps",
            "a whole picture: SD1.5 with a ControlNet, 512×512, 20 steps of euler, CFG 7, and the VAE's decoder",
            lambda: sd15_job(512, 20, control=True),
        ),
        _picture(
            "sd15-512-20steps",
            "a whole picture: SD1.5, 512×512, 20 steps of euler, CFG 7, and the VAE's decoder",
            lambda: sd15_job(512, 20, control=False),
        ),
        _picture(
            "sd15-512-50steps",
            "a whole picture: SD1.5, 512×512, 50 steps of euler, CFG 7, and the VAE's decoder",
            lambda: sd15_job(512, 50, control=False),
        ),
        _picture(
            "sdxl-1024-30steps",
            "a whole picture: SDXL, 1024×1024, 30 steps of euler, CFG 7, and the VAE's decoder",
            lambda: sdxl_job(1024, 30),
        ),
        _picture(
            "sd15-512-20steps-b4",
            "four whole pictures at once: SD1.5, 512×512, 20 steps of euler, CFG 7, and the VAE's decoder",
            lambda: sd15_job(512, 20, control=False, batch=4),
        ),
        _picture(
            "sdxl-1024-30steps-b4",
            "four whole pictures at once: SDXL, 1024×1024, 30 steps of euler, CFG 7, and the VAE's decoder",
            lambda: sdxl_job(1024, 30, batch=4),
        ),
        _picture(
            "tiny-sd15-canny-64-3steps",
            "a whole picture of a tiny model with a ControlNet, to try this out on any machine",
            lambda: sd15_job(64, 3, control=True, unet=TINY_SD15, vae=TINY_VAE),
            needs_gpu=False,
        ),
    )
}
