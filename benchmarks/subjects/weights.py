"""Random weights that behave: what comes out is of order 1, and sampling ends near the size of real latents."""

from __future__ import annotations

from typing import Any

import torch

_LEAD = 10.0
_RANDOM_SHARE = 0.15
_CONTROL_SHARE = 4.0
_HINT_GAIN = 2.1  # makes up for a SiLU


@torch.no_grad()
def randomise(module: torch.nn.Module, seed: int) -> None:
    """Set every number, so that what comes out is of order 1: ComfyUI's layers leave their memory as it was."""
    generators: dict[torch.device, torch.Generator] = {}
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if not tensor.is_floating_point():
            continue
        generator = generators.get(tensor.device)
        if generator is None:
            generator = generators[tensor.device] = torch.Generator(tensor.device).manual_seed(seed)
        if not name.endswith(("weight", "norm.scale")):
            tensor.normal_(0, 0.02 if tensor.ndim == 1 else 0.5, generator=generator)  # biases; tables of positions
        elif tensor.ndim == 1:
            tensor.normal_(1, 0.1, generator=generator)  # of a norm
        else:
            tensor.normal_(0, 0.8 / tensor[0].numel() ** 0.5, generator=generator)


@torch.no_grad()
def randomise_unet(unet: Any, seed: int) -> None:
    """So that it takes noise away as a trained one does: what it predicts is mostly its own input.

    The input passes by the outermost skip connection, each latent channel in two, of either sign: the difference of
    what the last SiLU makes of v and of -v is v again.
    """
    randomise(unet, seed)
    count = unet.out_channels
    places, signs = range(2 * count), [1.0] * count + [-1.0] * count
    first, skip, last = unet.input_blocks[0][0], unet.output_blocks[-1][0].skip_connection, unet.out[-1]
    own = skip.weight.shape[1] - skip.weight.shape[0]  # channels from below come first
    last.weight.mul_(_RANDOM_SHARE)
    first.weight[: 2 * count] = 0
    skip.weight[: 2 * count] = 0
    last.weight[:, : 2 * count] = 0
    for place, sign in zip(places, signs, strict=True):
        first.weight[place, place % count, 1, 1] = sign * _LEAD
        skip.weight[place, own + place] = 1
        last.weight[place % count, place, 1, 1] = sign


@torch.no_grad()
def randomise_t5(network: Any, seed: int) -> None:
    """With tokens that stand out among what layers add, and attention to many: T5 leaves its scale to the weights."""
    randomise(network, seed)
    width = network.shared.weight.shape[1]
    network.shared.weight.mul_(width**0.5)
    for block in network.encoder.block:
        attention = block.layer[0].SelfAttention
        attention.q.weight.mul_((attention.num_heads / attention.q.weight.shape[0]) ** 0.5)


@torch.no_grad()
def randomise_controlnet(network: Any, seed: int) -> None:
    """With an influence that shows and does not drown the picture; its hint passes many layers without a norm."""
    randomise(network, seed)
    for layer in network.input_hint_block:
        if hasattr(layer, "weight"):
            layer.weight.mul_(_HINT_GAIN)
    for layers in (network.zero_convs, network.middle_block_out):
        for parameter in layers.parameters():
            parameter.mul_(_CONTROL_SHARE)
