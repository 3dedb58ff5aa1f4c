"""How good the model is, measured on scenes it never saw.

Pictures can be judged because the scene behind a caption is known: is each object's colour there, at the
place where the relation puts it, and is the backdrop right? Each figure comes with two marks to read it
against: `drawn` (the same test on the true drawings) and `chance` (on pictures of other captions).
"""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor
from torch.nn import functional as F

from . import model, scenes
from .canny import canny
from .pipeline import Pipeline

HELD_OUT_SEED = 990_000_000  # training draws its seeds below this
_SHADES = (0.55, 0.7, 0.85, 1.0, 1.15, 1.3)
_ENOUGH = 0.006  # of the picture: the least that an object's own colour must cover


@torch.no_grad()
def reconstruction_psnr(pipeline: Pipeline, count: int = 64, size: int = 256) -> float:
    """PSNR in dB of pictures through the autoencoder: the mean over pictures."""
    device = next(pipeline.vae.parameters()).device
    pictures = scenes.draw(scenes.sample(count, HELD_OUT_SEED).to(device), size, size)
    rebuilt = torch.cat([rebuild(pipeline, part) for part in pictures.split(16)])
    return float((-10 * ((rebuilt - pictures) ** 2).mean((1, 2, 3)).log10()).mean())


def rebuild(pipeline: Pipeline, pictures: Tensor) -> Tensor:
    latents = pipeline.vae.encode((pictures * 2 - 1).to(pipeline.dtype)).latent_dist.mode()
    decoded: Tensor = pipeline.vae.decode(latents, return_dict=False)[0]
    return (decoded.float() / 2 + 0.5).clamp(0, 1)


@torch.no_grad()
def caption_accuracy(
    pipeline: Pipeline, count: int = 128, size: int = 256, steps: int = 20, cfg: float = 5.0
) -> dict[str, dict[str, float]]:
    """Share of pictures that show what the caption says, by aspect: colours, relation, backdrop.

    Only scenes of two objects on a plain backdrop are used, whose parts can be told apart by colour.
    """
    device = next(pipeline.vae.parameters()).device
    wanted = plain_pairs(count, HELD_OUT_SEED + 1)
    texts = scenes.captions(wanted)
    drawn = scenes.draw(wanted.to(device), size, size)
    parts = [
        pipeline(texts[start : start + 64], height=size, width=size, steps=steps, cfg=cfg, seed=start)
        for start in range(0, count, 64)
    ]
    pictures = torch.cat([part.pictures for part in parts]).to(device).permute(0, 3, 1, 2) / 255
    return {
        "sampled": judge(pictures, wanted),
        "drawn": judge(drawn, wanted),
        "chance": judge(pictures.roll(1, 0), wanted),
    }


def plain_pairs(count: int, seed: int) -> scenes.Scenes:
    """Scenes of two objects on a plain backdrop, the caption telling the backdrop."""
    some = scenes.sample(count * 8, seed)
    fit = some.pair & (some.backdrop == 0) & some.mention[:, 2]
    rows = fit.nonzero()[:count, 0]
    assert len(rows) == count
    return scenes.Scenes(*(getattr(some, field.name)[rows] for field in fields(some)))


def judge(pictures: Tensor, wanted: scenes.Scenes) -> dict[str, float]:
    """Compare pictures [B, 3, H, W] in [0, 1] with scenes of two objects; shares in [0, 1]."""
    masks = F.one_hot(nearest_colour(pictures), len(scenes.COLOURS)).permute(0, 3, 1, 2).float()
    colour = wanted.colour.to(pictures.device)
    first, second, back = (_pick(masks, colour[:, k]) for k in range(3))
    there = torch.stack([first.mean((1, 2)) > _ENOUGH, second.mean((1, 2)) > _ENOUGH], 1)
    backdrop = back.mean((1, 2)) > 0.4
    axis = torch.tensor([[-1.0, 0.0], [1.0, 0.0], [0.0, -1.0], [0.0, 1.0]], device=pictures.device)
    offset = _centre(first) - _centre(second)
    related = ((offset * axis[wanted.relation.to(pictures.device)]).sum(1) > 0.1) & there.all(1)
    return {
        "object_colours": float(there.float().mean()),
        "relation": float(related.float().mean()),
        "backdrop_colour": float(backdrop.float().mean()),
        "all": float((related & backdrop).float().mean()),
    }


def nearest_colour(pictures: Tensor) -> Tensor:
    """Index of the named colour nearest to each pixel, in the best of several shades: [B, H, W]."""
    palette = torch.tensor(list(scenes.COLOURS.values()), device=pictures.device)
    distances = []
    for colour in palette:
        shades = [((pictures - (colour * s).view(1, 3, 1, 1)) ** 2).sum(1) for s in _SHADES]
        distances.append(torch.stack(shades).amin(0))
    return torch.stack(distances).argmin(0)


def _pick(masks: Tensor, index: Tensor) -> Tensor:
    return masks[torch.arange(len(masks), device=masks.device), index]


def _centre(mask: Tensor) -> Tensor:
    """Centre of mass (x, y) of masks [B, H, W], in fractions of the picture."""
    weight = mask / mask.sum((1, 2), keepdim=True).clamp(min=1)
    height, width = mask.shape[1:]
    x = (weight.sum(1) * torch.linspace(0, 1, width, device=mask.device)).sum(1)
    y = (weight.sum(2) * torch.linspace(0, 1, height, device=mask.device)).sum(1)
    return torch.stack([x, y], 1)


@torch.no_grad()
def edge_agreement(
    pipeline: Pipeline, count: int = 64, size: int = 256, steps: int = 20, cfg: float = 5.0
) -> dict[str, float]:
    """F1 of the edges of sampled pictures against the hint, within two pixels.

    `controlled` with the ControlNet; `uncontrolled` the same captions and noise without; `rebuilt` the true
    drawing through the autoencoder, about the best that can be reached.
    """
    device = next(pipeline.vae.parameters()).device
    some = scenes.sample(count, HELD_OUT_SEED + 2)
    texts, pictures = scenes.captions(some), scenes.draw(some.to(device), size, size)
    hint = canny(pictures)

    def edges(with_hint: bool) -> Tensor:
        result = pipeline(
            texts, height=size, width=size, steps=steps, cfg=cfg, hint=hint.float() if with_hint else None
        )
        return canny(result.pictures.to(device).permute(0, 3, 1, 2) / 255)

    rebuilt = canny(torch.cat([rebuild(pipeline, part) for part in pictures.split(16)]))
    return {
        "controlled": edge_f1(edges(True), hint),
        "uncontrolled": edge_f1(edges(False), hint),
        "rebuilt": edge_f1(rebuilt, hint),
    }


def edge_f1(found: Tensor, wanted: Tensor, slack: int = 2) -> float:
    """F1 of edge maps [B, 1, H, W] bool; a pixel counts if the other map has one within `slack` pixels."""
    found, wanted = found.float(), wanted.float()
    near_found, near_wanted = (F.max_pool2d(m, 2 * slack + 1, 1, slack) for m in (found, wanted))
    precision = (found * near_wanted).sum() / found.sum().clamp(min=1)
    recall = (wanted * near_found).sum() / wanted.sum().clamp(min=1)
    return float(2 * precision * recall / (precision + recall).clamp(min=1e-9))


@torch.no_grad()
def denoising_loss(pipeline: Pipeline, count: int = 256, size: int = 256) -> float:
    """Mean squared error of the predicted noise on held-out scenes, over all timesteps, unweighted."""
    device = next(pipeline.vae.parameters()).device
    some = scenes.sample(count, HELD_OUT_SEED + 3)
    pictures = scenes.draw(some.to(device), size, size)
    parts = [pipeline.vae.encode((part * 2 - 1).to(pipeline.dtype)) for part in pictures.split(32)]
    latents = torch.cat([part.latent_dist.mode().float() for part in parts])
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(latents.shape, generator=generator).to(device)
    times = torch.linspace(0, 999, count).round().long().to(device)
    keep = model.alphas_cumprod().to(device)[times].view(-1, 1, 1, 1)
    noisy = keep.sqrt() * latents * model.LATENT_SCALE + (1 - keep).sqrt() * noise
    context = pipeline.text.encode(scenes.captions(some)).to(pipeline.dtype)
    noisy = noisy.to(pipeline.dtype)
    predicted = pipeline.unet(noisy, times, encoder_hidden_states=context, return_dict=False)[0]
    return float(F.mse_loss(predicted.float(), noise))
