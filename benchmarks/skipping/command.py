"""The command: sample, then score; several processes may share the sampling."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ...core.environment import Environment
from ...demo import scenes
from ...hosts.comfy import standalone
from ...runtime.measure import commit
from . import fit, hackathon, protocol
from .overhead import overhead
from .page import write_page
from .protocol import Condition
from .results import keep
from .runs import Shelf, run_all, time_steps
from .score import Scorer
from .subject import Subject

RESULTS = Path(__file__).resolve().parents[1] / "results"


def main(words: Sequence[str]) -> int:
    options = _parser().parse_args(words)
    if options.page:
        write_page(options.results)
        return 0
    checkout = standalone.find_checkout(None)
    if checkout is None:
        _say("No ComfyUI was found; name its folder in COMFYUI_DIR.")
        return 1
    standalone.enter(checkout)
    torch.set_grad_enabled(False)
    shelf, chosen = Shelf(options.shelf), _chosen(options)
    if options.fit:
        return _fit(chosen[options.part :: options.parts], options)
    subject = _subject(options.samples, engines=options.engines)
    if not options.score:
        for cfg in options.cfgs:
            subject.sample("euler", subject.sigmas("euler", "normal", 4), cfg)  # warms up, makes engines
        time_steps(subject, shelf, options.cfgs, _say)
        run_all(subject, shelf, [] if options.time_only else chosen[options.part :: options.parts], _say)
    if not (options.sample_only or options.time_only) and options.parts == 1:
        _score(subject, shelf, chosen, options.results, standalone.version())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks/step_skipping.py", description="Judges the presets of Step Skip.")
    add = parser.add_argument
    add("--shelf", type=Path, default=Path("test-results/step-skipping"), help="keeps what was sampled, to go on later")
    add("--results", type=Path, default=RESULTS, help="where rows go")
    add("--engines", type=Path, help="a folder: sample on engines, which are made there; default: the plain model")
    add("--samples", type=int, default=protocol.SAMPLES)
    add("--steps", type=int, nargs="*", default=protocol.STEPS)
    add("--cfgs", type=float, nargs="*", default=protocol.CFGS)
    add("--samplers", nargs="*", help="of the protocol's; default: all")
    add("--part", type=int, default=0, help="this process's share of the conditions; samples only, --score comes after")
    add("--parts", type=int, default=1)
    add("--time-only", action="store_true", help="only time steps; do so first where processes share a machine")
    add("--fit", action="store_true", help="try powers and rules on other captions, and write nothing but their rows")
    add("--sample-only", action="store_true", help="--score comes later")
    add("--score", action="store_true", help="only score what was sampled")
    add("--page", action="store_true", help="only write docs/step-skipping.md from the rows")
    return parser


def _chosen(options: argparse.Namespace) -> list[Condition]:
    return [
        condition
        for condition in protocol.conditions()
        if condition.steps in options.steps
        and condition.cfg in options.cfgs
        and (not options.samplers or condition.sampler in options.samplers)
    ]


def _subject(samples: int, with_hints: bool = False, engines: Path | None = None) -> Subject:
    captioned = scenes.sample(samples, protocol.CAPTIONS_SEED)
    generator = torch.Generator().manual_seed(protocol.NOISE_SEED)
    noise = torch.randn(samples, *protocol.LATENT, generator=generator)
    return Subject(scenes.captions(captioned), noise, hackathon.hints(captioned) if with_hints else None, engines)


def _score(subject: Subject, shelf: Shelf, chosen: list[Condition], folder: Path, comfyui: str) -> None:
    now = commit() or os.environ.get("SLIPSTREAM_COMMIT")
    scorer = Scorer(subject, shelf, now, _say)
    rows = scorer.rows(chosen)
    device = torch.device(subject.model.load_device)
    environment = Environment.current(device)
    others: list[dict[str, Any]] = [
        {
            "case": "machine",
            "gpu": environment.gpu or "CPU",
            "driver": environment.driver,
            "cuda": environment.cuda,
            "precision": str(subject.model.model.get_dtype()).removeprefix("torch."),
            "torch": torch.__version__,
            "comfyui": comfyui,
            "commit": now,
        },
        {"case": "overhead", "rules": overhead(device), "commit": now},
        *hackathon.rows(_subject(len(subject.noise), with_hints=True), now),
    ]
    keep(folder, [*others, *rows], scorer.raw)
    for row in rows:
        _say(
            f"{row['sampler']} {row['scheduler']} cfg {row['cfg']:g} {row['steps']} {row['preset']}: "
            f"{row['psnr_db']:.2f} dB, {row['gain_db']:+.2f} [{row['ci_low']:+.2f}, {row['ci_high']:+.2f}] "
            f"against {row['best_plain']}"
        )


def _fit(chosen: list[Condition], options: argparse.Namespace) -> int:
    captions = scenes.captions(scenes.sample(fit.SAMPLES, fit.CAPTIONS_SEED))
    subject = Subject(captions, fit.noise(), engines=options.engines)
    for row in fit.rows(subject, chosen):
        keep(options.results, [row], {})
        _say(f"{row['sampler']} {row['scheduler']} cfg {row['cfg']:g} {row['steps']} {row['preset']}: {row['psnr_db']}")
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
