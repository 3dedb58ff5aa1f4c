"""ComfyUI's own `--fast`, switched on for a while: what it does to a model that is in half precision already."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

NAMES = ("fp16_accumulation", "autotune")
"""`fp8_matrix_mult` is for weights in fp8. `cublas_ops` is left out: it is chosen when a model is made, and needs a
package of its own."""


def why_not(device: torch.device) -> str | None:
    """Why the options cannot be switched on here; None where they can.

    `fp16_accumulation` is an attribute that older torches lack.
    """
    if device.type != "cuda":
        return "ComfyUI's --fast options are about CUDA GPUs"
    missing = sorted(set(NAMES) - _offered())
    if missing:
        return f"this ComfyUI has no --fast {missing[0]}"
    if not hasattr(torch.backends.cuda.matmul, "allow_fp16_accumulation"):
        return "this torch cannot accumulate in fp16"
    return None


def _offered() -> set[str]:
    from comfy import cli_args

    return {each.value for each in getattr(cli_args, "PerformanceFeature", ())}


@contextmanager
def switched_on() -> Iterator[None]:
    """As ComfyUI does at its start; afterwards everything is as it was.

    cuDNN's choices are kept by a key that `allow_tf32` is a part of and `benchmark` is not. Turning the former round,
    which means nothing to half precision, keeps the plain model's choices and those of the trials apart.
    """
    from comfy.cli_args import PerformanceFeature, args

    cudnn, products = torch.backends.cudnn, torch.backends.cuda.matmul
    before = args.fast, cudnn.benchmark, cudnn.allow_tf32, products.allow_fp16_accumulation
    args.fast = {*args.fast, *map(PerformanceFeature, NAMES)}
    cudnn.benchmark, cudnn.allow_tf32, products.allow_fp16_accumulation = True, not before[2], True
    try:
        yield
    finally:
        args.fast, cudnn.benchmark, cudnn.allow_tf32, products.allow_fp16_accumulation = before
