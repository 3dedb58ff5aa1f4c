"""Trains the demo model on drawn scenes, on one GPU, in stretches that can be resumed.

    python demo/train.py --stage vae --minutes 4.5 --out DIR
    python demo/train.py --stage unet --minutes 8 --total 11 --out DIR
    python demo/train.py --stage unet --minutes 3 --total 11 --out DIR --resume
    python demo/train.py --stage controlnet --minutes 4 --out DIR

A stage leaves in DIR: `weights/*.safetensors` (moving averages of the weights, int8), `STAGE.pt` (what
`--resume` needs), `STAGE.jsonl` (log), `STAGE.png` (samples) and its part of `weights/training.json`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

if not __package__:  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "demo"

from . import evaluate, model, scenes, text
from .canny import canny
from .pipeline import Pipeline, grid, to_bytes

MAIN_SIZE = 256
OTHER_SIZES = (128, 192, 384, 512)
OTHER_EVERY = 32  # one step in so many is at another size: these run uncompiled, hence far slower
LOG_EVERY = 50
LEAST_SIGNAL = 0.02
SNR_LIMIT = 5.0  # Hang et al. 2023, "Efficient Diffusion Training via Min-SNR Weighting Strategy"


@dataclass(frozen=True)
class Options:
    """The command line; minutes are wall time, batch is in pictures of 256x256."""

    stage: str
    minutes: float
    total: float
    out: Path
    resume: bool
    spent: float
    seed: int
    batch: int
    rate: float
    pool: int
    weighting: str
    compile: bool
    quick: bool

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def weights(self) -> Path:
        return self.out / "weights"


# ---- the stages


class Stage(ABC):
    """What is trained, and its loss."""

    average = 0.999  # how much of the moving average stays at each step

    def __init__(self, options: Options) -> None:
        self.options = options
        self.device = options.device
        self.modules: dict[str, nn.Module] = {}

    @abstractmethod
    def loss(self, step: int, size: int) -> Tensor:
        """The loss of one batch."""

    @abstractmethod
    def report(self) -> dict[str, Any]:
        """Figures on held-out scenes and a sheet of samples, from the exported weights."""

    def exported(self, name: str, average: nn.Module) -> dict[str, Tensor]:
        """The weights to store for a module whose parameters are the moving average."""
        return average.state_dict()

    def parameters(self) -> list[nn.Parameter]:
        return [p for module in self.modules.values() for p in module.parameters() if p.requires_grad]

    def batch(self, size: int) -> int:
        """Pictures in a batch: about as many pixels at every size."""
        return max(1, round(self.options.batch * (MAIN_SIZE / size) ** 2))

    def compiled(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The function compiled for the main size, left alone for the others (a compile takes a minute)."""
        if not self.options.compile:
            return function
        fast = torch.compile(function, dynamic=False)

        def choose(*inputs: Tensor) -> Tensor:
            main = inputs[0].shape[-1] in (MAIN_SIZE, MAIN_SIZE // 8)
            result: Tensor = (fast if main else function)(*inputs)
            return result

        return choose

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16)

    def sheet(self, rows: list[Tensor]) -> None:
        """Write rows of pictures, each [N, H, W, 3] uint8, as one PNG."""
        columns = len(rows[0])
        grid(torch.cat(rows), columns).save(self.options.out / f"{self.options.stage}.png", optimize=True)


class VaeStage(Stage):
    """Autoencoder: absolute error of pixels and of their differences (edges), and a weak pull to N(0, 1)."""

    kl_weight = 3e-4

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.vae = model.vae().to(self.device, memory_format=torch.channels_last)
        self.modules = {"vae": self.vae}
        self._loss = self.compiled(self._reconstruction)

    def loss(self, step: int, size: int) -> Tensor:
        pictures = scenes.draw(scenes.sample(self.batch(size), _seed(self.options, step)).to(self.device), size, size)
        noise = torch.randn(len(pictures), 4, size // 8, size // 8, device=self.device)
        return self._loss(pictures.contiguous(memory_format=torch.channels_last) * 2 - 1, noise)

    def _reconstruction(self, pictures: Tensor, noise: Tensor) -> Tensor:
        mean, log_variance = self.vae.quant_conv(self.vae.encoder(pictures)).float().chunk(2, 1)
        log_variance = log_variance.clamp(-20, 10)
        latents = mean + noise * (log_variance / 2).exp()
        difference = self.vae.decoder(self.vae.post_quant_conv(latents)).float() - pictures
        down, across = difference.diff(dim=2).abs().mean(), difference.diff(dim=3).abs().mean()
        mean, log_variance = mean * model.LATENT_SCALE, log_variance + 2 * math.log(model.LATENT_SCALE)
        divergence = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).mean()
        total: Tensor = difference.abs().mean() + 0.5 * (down + across) + self.kl_weight * divergence
        return total

    def exported(self, name: str, average: nn.Module) -> dict[str, Tensor]:
        return standardised(average, self.device).state_dict()

    def report(self) -> dict[str, Any]:
        vae = model.load_vae(self.options.weights).to(self.device)
        pipeline = Pipeline(unet=vae, text=model.text_encoder(), vae=vae)
        some = scenes.draw(scenes.sample(8, evaluate.HELD_OUT_SEED).to(self.device))
        rebuilt = evaluate.rebuild(pipeline, some)
        self.sheet([to_bytes(some), to_bytes(rebuilt)])
        psnr = {str(s): evaluate.reconstruction_psnr(pipeline, 64, s) for s in (MAIN_SIZE, *OTHER_SIZES)}
        return {"psnr_db": psnr}


@torch.no_grad()
def standardised(vae: nn.Module, device: torch.device) -> nn.Module:
    """Rewrite the autoencoder's 1x1 convolutions so that latents have zero mean and SD1.x's deviation.

    Each latent channel is shifted and scaled on its way out of the encoder and back into the decoder, which
    changes no picture; SD1.x's scale, fixed in ComfyUI, then fits this autoencoder as well.
    """
    pictures = scenes.draw(scenes.sample(256, evaluate.HELD_OUT_SEED + 9).to(device)) * 2 - 1
    latents = torch.cat([vae.encode(part).latent_dist.mode() for part in pictures.split(32)])  # type: ignore[operator]
    shift = latents.mean((0, 2, 3))
    scale = 1 / (latents.std((0, 2, 3)) * model.LATENT_SCALE)
    out, back = vae.quant_conv, vae.post_quant_conv
    assert isinstance(out, nn.Conv2d) and isinstance(back, nn.Conv2d)
    assert out.bias is not None and back.bias is not None
    channels = len(shift)
    out.bias[:channels] -= shift
    out.bias[:channels] *= scale
    out.weight[:channels] *= scale.view(-1, 1, 1, 1)
    out.bias[channels:] += 2 * scale.log()  # the second half is the logarithm of the variance
    back.bias += back.weight.flatten(1) @ shift
    back.weight /= scale.view(1, -1, 1, 1)
    return vae


@dataclass
class Pool:
    """Scenes drawn and encoded once, kept on the GPU: a pass over the autoencoder costs as much as a step."""

    latents: Tensor  # [N, 4, h, w] float16, unit variance
    tokens: Tensor  # [N, 77] uint8
    edges: Tensor | None  # [N, 1, H, W] bool

    @classmethod
    def draw(cls, count: int, size: int, seed: int, device: torch.device, folder: Path, with_edges: bool) -> Pool:
        vae = model.load_vae(folder, torch.bfloat16 if device.type == "cuda" else torch.float32)
        vae = vae.to(device, memory_format=torch.channels_last)
        latents, tokens, edges = [], [], []
        chunk = max(1, 64 * MAIN_SIZE**2 // size**2)
        for start in range(0, count, chunk):
            some = scenes.sample(chunk, seed + start)
            pictures = scenes.draw(some.to(device), size, size)
            inputs = (pictures * 2 - 1).to(vae.dtype, memory_format=torch.channels_last)
            latents.append((vae.encode(inputs).latent_dist.mode().float() * model.LATENT_SCALE).half())
            tokens += [text.tokenize(caption)[0].byte() for caption in scenes.captions(some)]
            if with_edges:
                edges.append(canny(pictures))
        return cls(torch.cat(latents), torch.stack(tokens).to(device), torch.cat(edges) if edges else None)


class _Diffusion(Stage):
    """What the denoiser's and the ControlNet's training share: pools of scenes, and noise to predict."""

    dropout = 0.1  # of captions, so that guidance has an unconditional prediction to move away from
    with_edges = False

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.kept = model.alphas_cumprod().to(self.device)
        self.empty = text.tokenize("")[0].byte().to(self.device)
        self.pools: dict[int, Pool] = {}

    @torch.no_grad()
    def pool(self, size: int) -> Pool:
        if size not in self.pools:
            count = self.options.pool if size == MAIN_SIZE else max(64, self.options.pool // 24)
            seed = _seed(self.options, size * 1_000_003 + torch.initial_seed() * 97)  # new ones on resuming
            started = time.perf_counter()
            with torch.autocast(self.device.type, enabled=False):
                self.pools[size] = Pool.draw(count, size, seed, self.device, self.options.weights, self.with_edges)
            print(f"pool of {count} at {size}: {time.perf_counter() - started:.1f} s", flush=True)
        return self.pools[size]

    def loss(self, step: int, size: int) -> Tensor:
        pool, count = self.pool(size), self.batch(size)
        rows = torch.randint(len(pool.latents), (count,), device=self.device)
        dropped = torch.rand(count, 1, device=self.device) < self.dropout
        tokens = torch.where(dropped, self.empty, pool.tokens[rows])
        latents = pool.latents[rows].float()
        times = torch.randint(len(self.kept), (count,), device=self.device)
        inputs = [latents, tokens, times, torch.randn_like(latents)]
        if pool.edges is not None:
            inputs.append(pool.edges[rows])
        return self._loss(*inputs)

    _loss: Callable[..., Tensor]

    def _noise_error(
        self,
        latents: Tensor,
        times: Tensor,
        noise: Tensor,
        predict: Callable[[Tensor], Tensor],
    ) -> Tensor:
        kept = self.kept[times].view(-1, 1, 1, 1)
        noisy = kept.sqrt() * latents + (1 - kept).sqrt() * noise
        error = (predict(noisy).float() - noise) ** 2
        weight = (SNR_LIMIT * (1 - kept) / kept).clamp(max=1)
        if self.options.weighting == "layout":
            weight = weight / kept.clamp(min=LEAST_SIGNAL)
        return (error * weight).mean()

    def pipeline(self, with_controlnet: bool = False) -> Pipeline:
        return Pipeline.load(self.options.weights, self.device, with_controlnet=with_controlnet)


class UnetStage(_Diffusion):
    """Denoiser and text encoder together."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.unet = model.unet().to(self.device, memory_format=torch.channels_last)
        self.text = model.text_encoder().to(self.device)
        self.modules = {"unet": self.unet, "text": self.text}
        self._loss = self.compiled(self._error)

    def _error(self, latents: Tensor, tokens: Tensor, times: Tensor, noise: Tensor) -> Tensor:
        context = self.text(tokens)
        return self._noise_error(
            latents,
            times,
            noise,
            lambda noisy: self.unet(noisy, times, encoder_hidden_states=context, return_dict=False)[0],
        )

    def report(self) -> dict[str, Any]:
        pipeline = self.pipeline()
        rows = []
        for part in range(3):
            some = scenes.sample(8, evaluate.HELD_OUT_SEED + 20 + part)
            captions = scenes.captions(some)
            print("\n".join(captions))
            rows += [to_bytes(scenes.draw(some)), pipeline(captions, steps=20, seed=part).pictures]
        self.sheet(rows)
        count = 32 if self.options.quick else 128
        return {
            "denoising_loss": evaluate.denoising_loss(pipeline, count * 2),
            "captions": evaluate.caption_accuracy(pipeline, count),
        }


class ControlnetStage(_Diffusion):
    """ControlNet, the denoiser frozen; starts as a copy of the denoiser's way down."""

    dropout = 0.3
    with_edges = True

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.unet = model.load_unet(options.weights).to(self.device, memory_format=torch.channels_last)
        self.text = model.load_text_encoder(options.weights).to(self.device)
        guide = model.controlnet()
        known = {key: value for key, value in self.unet.state_dict().items() if key in guide.state_dict()}
        guide.load_state_dict(known, strict=False)
        self.guide = guide.to(self.device, memory_format=torch.channels_last)
        self.modules = {"controlnet": self.guide}
        self._loss = self.compiled(self._error)

    def _error(self, latents: Tensor, tokens: Tensor, times: Tensor, noise: Tensor, edges: Tensor) -> Tensor:
        context = self.text(tokens)

        def predict(noisy: Tensor) -> Tensor:
            down, mid = self.guide(
                noisy, times, context, edges.to(noisy.dtype).expand(-1, 3, -1, -1), return_dict=False
            )
            predicted: Tensor = self.unet(
                noisy,
                times,
                encoder_hidden_states=context,
                down_block_additional_residuals=down,
                mid_block_additional_residual=mid,
                return_dict=False,
            )[0]
            return predicted

        return self._noise_error(latents, times, noise, predict)

    def report(self) -> dict[str, Any]:
        pipeline = self.pipeline(with_controlnet=True)
        some = scenes.sample(8, evaluate.HELD_OUT_SEED + 30)
        captions, drawn = scenes.captions(some), scenes.draw(some)
        edges = canny(drawn).float()
        rows = [to_bytes(drawn), to_bytes(edges.expand(-1, 3, -1, -1))]
        rows += [pipeline(captions, hint=hint).pictures for hint in (edges, None)]
        rows.append(pipeline([""] * 8, hint=edges).pictures)
        self.sheet(rows)
        return {"edges_f1": evaluate.edge_agreement(pipeline, 32 if self.options.quick else 64)}


STAGES: dict[str, tuple[type[Stage], int, float]] = {  # class, batch, learning rate
    "vae": (VaeStage, 16, 1e-3),
    "unet": (UnetStage, 192, 1e-3),
    "controlnet": (ControlnetStage, 128, 8e-4),
}


# ---- the loop


class Trainer:
    """Runs a stage for a while; its state can be saved and taken up again."""

    def __init__(self, stage: Stage, options: Options) -> None:
        self.stage, self.options = stage, options
        self.parameters = stage.parameters()
        self.averages = [p.detach().clone() for p in self.parameters]
        fused = options.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            self.parameters, options.rate, betas=(0.9, 0.99), weight_decay=0.01, fused=fused
        )
        self.step = 0
        self.spent = options.spent * 60  # seconds
        self.curve: list[tuple[int, float]] = []
        self.before: dict[str, Any] = {}  # the record of training whose weights alone were taken up

    def fit(self) -> None:
        started, already, seen = time.perf_counter(), self.spent, 0
        losses: list[Tensor] = []
        while self.spent - already < self.options.minutes * 60:
            size = _size(self.step)
            losses.append(self._one_step(size))
            seen += self.stage.batch(size)
            self.step += 1
            if self.step % LOG_EVERY == 0 or self.options.device.type == "cpu":
                self._log(float(torch.stack(losses).mean()), seen, time.perf_counter() - started)
                losses = []
            self.spent = already + time.perf_counter() - started

    def _one_step(self, size: int) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.rate * self._rate()
        with self.stage.autocast():
            loss = self.stage.loss(self.step, size)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        # young averages forget their random start faster
        keep = min(self.stage.average, (1 + self.step) / (10 + self.step))
        torch._foreach_lerp_(self.averages, [p.detach() for p in self.parameters], 1 - keep)
        return loss.detach()

    def _rate(self) -> float:
        """Warm up for 200 steps, then fall along a cosine over the stage's total time."""
        progress = min(1.0, self.spent / (self.options.total * 60))
        return min(1.0, (self.step + 1) / 200) * max(0.02, 0.5 + 0.5 * math.cos(math.pi * progress))

    def _log(self, loss: float, seen: int, seconds: float) -> None:
        if not math.isfinite(loss):
            raise FloatingPointError(f"The loss is {loss} at step {self.step}.")
        self.curve.append((self.step, round(loss, 5)))
        line = {"step": self.step, "seconds": round(seconds, 1), "loss": round(loss, 5)}
        line["pictures_per_second"] = round(seen / seconds)
        with (self.options.out / f"{self.options.stage}.jsonl").open("a") as log:
            log.write(json.dumps(line) + "\n")
        if self.step % (LOG_EVERY * 10) == 0 or self.step <= LOG_EVERY * 3:
            print(line, flush=True)

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """The modules with their moving averages in place of their parameters."""
        kept = [p.detach().clone() for p in self.parameters]
        with torch.no_grad():
            for parameter, average in zip(self.parameters, self.averages, strict=True):
                parameter.copy_(average)
        yield
        with torch.no_grad():
            for parameter, value in zip(self.parameters, kept, strict=True):
                parameter.copy_(value)

    def save(self) -> None:
        """Write the state and export the averaged weights."""
        state = {
            "parameters": [p.detach() for p in self.parameters],
            "averages": self.averages,
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "spent": self.spent,
            "curve": self.curve,
        }
        _replace(self.options.out / f"{self.options.stage}.pt", lambda file: torch.save(state, file))
        with self._averaged():
            for name, module in self.stage.modules.items():
                weights = self.stage.exported(name, module)
                _replace(self.options.weights / f"{name}.safetensors", partial(save_file, model.packed(weights)))

    def load(self) -> None:
        """Take up the state that `save` left; without one, the exported weights alone."""
        file = self.options.out / f"{self.options.stage}.pt"
        if not file.exists():
            self._load_exported()
            return
        state = torch.load(file, map_location=self.options.device, weights_only=True)
        with torch.no_grad():
            for name in ("parameters", "averages"):
                for mine, saved in zip(getattr(self, name), state[name], strict=True):
                    mine.copy_(saved)
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.spent, self.curve = state["step"], state["spent"], state["curve"]

    def _load_exported(self) -> None:
        for name, module in self.stage.modules.items():
            module.load_state_dict(model.read_weights(name, self.options.weights))
        self.averages = [p.detach().clone() for p in self.parameters]
        self.before = json.loads((self.options.weights / "training.json").read_text())[self.options.stage]

    def record(self, figures: dict[str, Any]) -> None:
        """Put this stage into the training record."""
        file = self.options.weights / "training.json"
        record = json.loads(file.read_text()) if file.exists() else {}
        every = max(1, len(self.curve) // 60)
        record[self.options.stage] = {
            "seed": self.options.seed,
            "steps": self.step,
            "minutes": round(self.spent / 60, 2),
            "before": {key: self.before[key] for key in ("steps", "minutes", "batch", "before") if key in self.before},
            "batch": self.options.batch,
            "learning_rate": self.options.rate,
            "weighting": self.options.weighting,
            "parameters": sum(p.numel() for p in self.parameters),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
            "versions": {"python": platform.python_version(), "torch": torch.__version__}
            | {"diffusers": diffusers.__version__},
            "figures": figures,
            "loss_curve": self.curve[::every],
        }
        _replace(file, lambda path: Path(path).write_text(json.dumps(record, indent=1) + "\n"))


def _replace(file: Path, write: Callable[[str], Any]) -> None:
    """Write beside, then rename: a killed run never leaves half a file."""
    beside = f"{file}.part"
    write(beside)
    os.replace(beside, file)


def _size(step: int) -> int:
    turn, rest = divmod(step, OTHER_EVERY)
    return MAIN_SIZE if rest != OTHER_EVERY - 1 else OTHER_SIZES[turn % len(OTHER_SIZES)]


def _seed(options: Options, offset: int) -> int:
    """A seed for scenes, apart from the held-out ones."""
    return (options.seed * 7_919_003 + offset * 4099) % (evaluate.HELD_OUT_SEED - 10_000_000)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    options.weights.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(options.seed)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    stage = STAGES[options.stage][0](options)
    trainer = Trainer(stage, options)
    if options.resume:
        trainer.load()
        torch.manual_seed(options.seed + trainer.step)
    trainer.fit()
    trainer.save()
    torch.backends.cudnn.benchmark = False
    figures = stage.report()
    trainer.record(figures)
    print(json.dumps(figures), f"{trainer.step} steps, {trainer.spent / 60:.2f} minutes", flush=True)


def parse(arguments: list[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(description="Train a stage of the demo model on drawn scenes.")
    parser.add_argument("--stage", required=True, choices=STAGES)
    parser.add_argument("--minutes", type=float, required=True, help="how long this stretch lasts")
    parser.add_argument("--total", type=float, help="minutes of all stretches of the stage (default: this one)")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--spent", type=float, default=0.0, help="minutes trained before, to resume from weights")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--rate", type=float, help="learning rate at its highest")
    parser.add_argument("--pool", type=int, default=49152, help="scenes drawn in advance (unet, controlnet)")
    parser.add_argument(
        "--weighting",
        choices=("min-snr", "layout"),
        default="min-snr",
        help="layout: divide the error by the signal left: places are decided where little is left",
    )
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--quick", action="store_true", help="a short evaluation")
    known = parser.parse_args(arguments)
    _, batch, rate = STAGES[known.stage]
    known.batch, known.rate = known.batch or batch, known.rate or rate
    known.total = known.total or known.minutes
    return Options(**vars(known))


if __name__ == "__main__":
    main()
