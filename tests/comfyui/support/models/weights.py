"""Random weights that behave: outputs finite, of the size of real ones, and every parameter matters.

ComfyUI's layers leave their memory uninitialised, so each parameter is set here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

IDENTITY_GAIN = 10.0
RANDOM_SHARE = 0.15
INPUT_GAIN = 0.85
"""How much of its input a UNet predicts: with all of it latents end near 0, where rounding is all that is left."""


def randomise(module: nn.Module, seed: int) -> None:
    """Set every parameter at random: matrices keep the variance of what passes, biases are small."""
    device = next(module.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, device=device)
        if parameter.ndim > 1:
            value = noise / parameter[0].numel() ** 0.5
        elif name.endswith("weight"):
            value = 1 + 0.1 * noise
        else:
            value = 0.02 * noise
        with torch.no_grad():
            parameter.copy_(value)


@torch.no_grad()
def randomise_unet(unet: Any, seed: int) -> None:
    """Set a UNet at random, so that it removes noise as a trained one does.

    Most of the prediction is the input itself, led along the outermost skip connection in two channels per
    latent channel (one positive, one negative, whose difference survives the SiLU at the end); the rest is
    random. Sampling so ends near the size of real latents instead of a dozen times that.
    """
    randomise(unet, seed)
    latent = unet.out_channels
    _lead(unet.input_blocks[0][0].weight, latent)
    _lead_through(unet.output_blocks[-1][0].skip_connection.weight, 2 * latent)
    last = unet.out[-1].weight
    last.mul_(RANDOM_SHARE)
    for channel in range(latent):
        last[channel, [channel, latent + channel]] = 0
        last[channel, channel, 1, 1] = INPUT_GAIN
        last[channel, latent + channel, 1, 1] = -INPUT_GAIN


def _lead(weight: torch.Tensor, latent: int) -> None:
    """Make the first convolution write each latent channel twice, with either sign."""
    for channel in range(latent):
        for place, sign in ((channel, 1), (latent + channel, -1)):
            weight[place] = 0
            weight[place, channel, 1, 1] = sign * IDENTITY_GAIN


def _lead_through(weight: torch.Tensor, count: int) -> None:
    """Make the last block's skip connection pass on those channels, which come behind the block's own."""
    own = weight.shape[1] - weight.shape[0]
    for channel in range(count):
        weight[channel] *= 0.1
        weight[channel, own + channel] = 1


@torch.no_grad()
def randomise_controlnet(controlnet: nn.Module, seed: int, strength: float = 0.3) -> None:
    """Set a ControlNet at random, with an influence that shows and does not drown the picture."""
    randomise(controlnet, seed)
    for name, parameter in controlnet.named_parameters():
        if name.startswith(("zero_convs", "middle_block_out")):
            parameter.mul_(strength)


@torch.no_grad()
def randomise_taesd(vae: Any, seed: int) -> None:
    """Set the tiny autoencoder at random, with pictures from dark to bright and latents of size one."""
    randomise(vae, seed)
    vae.vae_scale.fill_(0.18215)
    vae.vae_shift.fill_(0)
    generator = torch.Generator().manual_seed(seed)
    _standardise(vae.taesd_decoder, torch.randn(1, 4, 16, 16, generator=generator), mean=0.5, std=0.2)
    _standardise(vae.taesd_encoder, torch.rand(1, 3, 64, 64, generator=generator), mean=0.0, std=1.0)


def _standardise(network: Any, example: torch.Tensor, mean: float, std: float) -> None:
    """Scale the last layer so that the output on an example has this mean and deviation per channel."""
    last = network[-1]
    out = network(example)
    factor = std / out.std(dim=(0, 2, 3))
    last.weight.mul_(factor[:, None, None, None])
    last.bias.copy_(mean + (last.bias - out.mean(dim=(0, 2, 3))) * factor)
