"""Trains the demo model's LoRA, `night`, on a CPU: a dark backdrop, and objects that glow in their colours.

    python demo/train_lora.py --out DIR

Leaves in DIR `night.safetensors` (fp16, kohya's key names, which ComfyUI and others read) and `night.png`: pictures
of captions that training never saw, as drawn, without the LoRA and with it. The number of steps and every random
number follow from the arguments, so the same machine makes the same file again.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

if not __package__:  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "demo"

from . import evaluate, model, scenes
from .pipeline import Pipeline, grid, to_bytes

NAME = "night"
DROPOUT = 0.1  # of captions: guidance moves away from a night without a caption, not from a day
POOLS = ((128, 320, 8), (256, 80, 2))
"""Sizes that take turns: pictures drawn in advance, and in a batch. Small ones show more nights in the same time; of
them alone, shapes would come out twice in large pictures."""
SNR_LIMIT = 5.0
LEAST_SIGNAL = 0.1


class Lora(nn.Module):
    """What is added to the output of one layer of the denoiser: two thin layers, nothing at first."""

    def __init__(self, layer: nn.Linear | nn.Conv2d, rank: int) -> None:
        super().__init__()
        self.down: nn.Module
        self.up: nn.Module
        if isinstance(layer, nn.Linear):
            self.down = nn.Linear(layer.in_features, rank, bias=False)
            self.up = nn.Linear(rank, layer.out_features, bias=False)
        else:
            size, stride, padding = layer.kernel_size, layer.stride, layer.padding
            self.down = nn.Conv2d(layer.in_channels, rank, size, stride, padding, bias=False)  # type: ignore[arg-type]
            self.up = nn.Conv2d(rank, layer.out_channels, 1, bias=False)
        nn.init.zeros_(self.up.weight)
        layer.register_forward_hook(lambda _, inputs, output: output + self(inputs[0]))

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.up(self.down(x))
        return added


def add_lora(unet: nn.Module, rank: int) -> dict[str, Lora]:
    """A LoRA for every layer of the blocks, by diffusers' names of the layers."""
    layers = [(name, layer) for name, layer in unet.named_modules() if "blocks." in name or "mid_block" in name]
    return {name: Lora(layer, rank) for name, layer in layers if isinstance(layer, nn.Linear | nn.Conv2d)}


def exported(loras: dict[str, Lora], rank: int) -> dict[str, Tensor]:
    """Weights under kohya's names, float16."""
    weights: dict[str, Tensor] = {}
    for name, lora in loras.items():
        key = f"lora_unet_{name.replace('.', '_')}"
        weights[f"{key}.lora_down.weight"] = lora.down.weight.detach().half().contiguous()  # type: ignore[operator]
        weights[f"{key}.lora_up.weight"] = lora.up.weight.detach().half().contiguous()  # type: ignore[operator]
        weights[f"{key}.alpha"] = torch.tensor(float(rank)).half()
    return weights


@torch.no_grad()
def draw_pool(pipeline: Pipeline, count: int, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Scenes at night, encoded once: latents [N, 4, h, w] of unit variance, and what the captions mean."""
    latents, contexts = [], []
    for start in range(0, count, 16):
        some = scenes.sample(16, seed * 7_919_003 + start)
        pictures = scenes.draw(some, size, size, night=True)
        latents.append(pipeline.vae.encode(pictures * 2 - 1).latent_dist.mode() * model.LATENT_SCALE)
        contexts.append(pipeline.text.encode(scenes.captions(some)))
    return torch.cat(latents), torch.cat(contexts)


def train(pipeline: Pipeline, loras: dict[str, Lora], options: argparse.Namespace) -> None:
    """Predict the noise of noisy nights."""
    parameters = [parameter for lora in loras.values() for parameter in lora.parameters()]
    optimizer = torch.optim.AdamW(parameters, options.rate, betas=(0.9, 0.99))
    plan = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.rate, options.steps, pct_start=0.1)
    pools = [(*draw_pool(pipeline, count, size, options.seed), batch) for size, count, batch in POOLS]
    empty, kept = pipeline.text.encode(""), model.alphas_cumprod()
    started = time.perf_counter()
    for step in range(1, options.steps + 1):
        latents, contexts, batch = pools[step % len(pools)]
        rows = torch.randint(len(latents), (batch,))
        context = torch.where(torch.rand(batch, 1, 1) < DROPOUT, empty, contexts[rows])
        loss = noise_error(pipeline.unet, latents[rows], context, kept)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        plan.step()
        if step % 20 == 0:
            print(f"step {step}: loss {float(loss.detach()):.4f}, {time.perf_counter() - started:.0f} s", flush=True)


def noise_error(unet: object, latents: Tensor, context: Tensor, kept: Tensor) -> Tensor:
    """Mean squared error of the predicted noise, weighted towards much noise, where brightness is decided."""
    assert isinstance(unet, nn.Module)
    times, noise = torch.randint(len(kept), (len(latents),)), torch.randn_like(latents)
    signal = kept[times].view(-1, 1, 1, 1)
    noisy = signal.sqrt() * latents + (1 - signal).sqrt() * noise
    error = (unet(noisy, times, encoder_hidden_states=context, return_dict=False)[0] - noise) ** 2
    weight = (SNR_LIMIT * (1 - signal) / signal).clamp(max=1) / signal.clamp(min=LEAST_SIGNAL)
    mean: Tensor = (error * weight).mean()
    return mean


def sheet(pipeline: Pipeline, options: argparse.Namespace) -> Tensor:
    """Pictures [N, H, W, 3] uint8 of held-out captions."""
    captions = scenes.captions(scenes.sample(options.pictures, evaluate.HELD_OUT_SEED + 40))
    print("\n".join(captions))
    return pipeline(captions, seed=1).pictures


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # the same sums in the same order on every machine, and faster beside other programs
    torch.manual_seed(options.seed)
    pipeline = Pipeline.load(with_controlnet=False)
    assert isinstance(pipeline.unet, nn.Module)
    some = scenes.sample(options.pictures, evaluate.HELD_OUT_SEED + 40)
    rows = [to_bytes(scenes.draw(some, night=True)), sheet(pipeline, options)]
    loras = add_lora(pipeline.unet, options.rank)
    train(pipeline, loras, options)
    save_file(exported(loras, options.rank), options.out / f"{NAME}.safetensors")
    grid(torch.cat([*rows, sheet(pipeline, options)]), options.pictures).save(options.out / f"{NAME}.png")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the demo model's LoRA on scenes drawn at night.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--rate", type=float, default=4e-3, help="learning rate at its highest")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pictures", type=int, default=4, help="on the sheet of samples")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
