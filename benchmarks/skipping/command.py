"""The command: time, sample, then score; several processes may share sampling and scoring."""

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
from ...hosts.comfy.building import without_server
from ...runtime.checking.measure import commit
from ...sampling.reuse import Reuse
from . import beside, closer, fit, hackathon, image_to_image, plan
from .overhead import overhead
from .page import write_page
from .samples import protocol
from .samples.protocol import Condition
from .samples.results import Row, keep, read
from .samples.runs import Runs, make_all, sampled
from .samples.score import Scorer, said
from .samples.shelf import Shelf
from .samples.subject import Subject
from .samples.timing import time_steps, timed_samplers

RESULTS = Path(__file__).resolve().parents[1] / "results"


def main(words: Sequence[str]) -> int:
    options = _parser().parse_args(words)
    if options.page:
        write_page(options.results, options.pages)
        return 0
    checkout = without_server.find_checkout(None)
    if checkout is None:
        _say("No ComfyUI was found; name its folder in COMFYUI_DIR.")
        return 1
    without_server.enter(checkout)
    torch.set_grad_enabled(False)
    if options.plan:
        chosen, fitted = (_chosen(options, each) for each in (protocol.conditions(), protocol.fit_conditions()))
        print("\n".join(plan.lines(plan.plan(_subject(1), chosen, fitted, _tried(options)))))
        return 0
    return _Command(options).run()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks/step_skipping.py", description="Judges the presets of Step Skip.")
    add = parser.add_argument
    add("--shelf", type=Path, default=Path("test-results/step-skipping"), help="keeps what was sampled, to go on later")
    add("--results", type=Path, default=RESULTS, help="where rows go")
    add("--engines", type=Path, help="a folder: sample on engines, which are made there; default: the plain model")
    add("--samples", type=int, default=protocol.SAMPLES)
    add("--fit-samples", type=int, default=protocol.FIT_SAMPLES)
    add("--fit-shares", type=float, nargs="*", default=protocol.FIT_SHARES)
    add("--fit-powers", type=float, nargs="*", default=protocol.FIT_POWERS)
    add("--fit-rules", type=Reuse, nargs="*", default=tuple(Reuse), metavar="RULE")
    add("--steps", type=int, nargs="*", default=protocol.STEPS)
    add("--cfgs", type=float, nargs="*", default=protocol.CFGS)
    add("--samplers", nargs="*", help="of the protocol's; default: all")
    add("--only", nargs="*", help="conditions by name, such as euler-normal-cfg4-20; default: all")
    add("--part", type=int, default=0, help="this process's share of the conditions")
    add("--parts", type=int, default=1, help="processes; --time-only comes before, and each stage is named")
    add("--pages", type=Path, help="with --page: a folder for all that is written; default: where it belongs")
    stage = parser.add_mutually_exclusive_group()
    add = stage.add_argument
    add("--plan", action="store_true", help="only tell how many steps each stage computes")
    add("--time-only", action="store_true", help="only time steps, on a quiet machine; all other stages read that")
    add("--fit", action="store_true", help="try powers and rules on other captions, and write nothing but their rows")
    add("--closer", action="store_true", help="only selections of more steps, where a preset misses its floor")
    add("--image-to-image", action="store_true", help="only runs that begin with a picture, with several powers")
    add("--sample-only", action="store_true", help="--beside and --score come later")
    add("--beside", action="store_true", help="only inpainting, other samplers and the hackathon's list")
    add("--score", action="store_true", help="only score what was sampled")
    add("--page", action="store_true", help="only write docs/step-skipping.md and the nodes' figures from the rows")
    return parser


class _Command:
    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._comfyui = without_server.version()
        self._commit = os.environ.get("SLIPSTREAM_COMMIT") or commit()
        self._chosen = _chosen(options, protocol.conditions())
        self._shelf = Shelf(options.shelf, _shelf_name(options, protocol.seeds(), options.samples))

    def run(self) -> int:
        options = self._options
        named = [options.time_only, options.fit, options.sample_only, options.beside, options.closer, options.score]
        if options.parts > 1 and not (options.fit or options.sample_only or options.score):
            _say("Processes share --fit, --sample-only and --score; name one of them beside --parts.")
            return 1
        if options.fit:
            return self._fit()
        if options.closer:
            return self._closer()
        if options.image_to_image:
            return self._image_to_image()
        subject = _subject(options.samples, engines=options.engines)
        if options.time_only or not any(named):
            self._time(subject)
        if options.sample_only or not any(named):
            self._sample(subject)
        if options.beside or not any(named):
            self._beside()
        if options.score or not any(named):
            self._score(subject)
        return 0

    def _time(self, subject: Subject) -> None:
        time_steps(subject, self._shelf, self._wanted_costs(), _say)
        device = torch.device(subject.model.load_device)
        environment = Environment.current(device)
        machine: Row = {
            "case": "machine",
            "gpu": environment.gpu or "CPU",
            "driver": environment.driver,
            "cuda": environment.cuda,
            "precision": str(subject.model.model.get_dtype()).removeprefix("torch."),
            "engines": self._options.engines is not None,
            "torch": torch.__version__,
            "comfyui": self._comfyui,
            "commit": self._commit,
        }
        rules: Row = {"case": "overhead", "rules": overhead(device), "commit": self._commit}
        costs = [self._costs_row(sampler, cfg) for sampler, cfg in self._wanted_costs()]
        keep(self._options.results, [machine, rules, *costs], {})

    def _costs_row(self, sampler: str, cfg: float) -> Row:
        costs = self._shelf.costs(sampler, cfg)
        return {"case": "costs", "sampler": sampler, "cfg": cfg, **costs.told(), "commit": self._commit}

    def _wanted_costs(self) -> list[tuple[str, float]]:
        return timed_samplers([*self._chosen, *_chosen(self._options, protocol.fit_conditions())])

    def _sample(self, subject: Subject) -> None:
        self._check_costs()
        make = sampled(subject, self._shelf, _say)
        for condition in self._part(self._chosen):
            make_all(Runs.of_protocol(subject, condition, make, self._shelf.costs))

    def _fit(self) -> int:
        self._check_costs()
        options, seeds = self._options, protocol.seeds(protocol.FIT_CAPTIONS_SEED, protocol.FIT_NOISE_SEED)
        subject = _subject(options.fit_samples, seeds, engines=options.engines)
        make = sampled(subject, Shelf(options.shelf, _shelf_name(options, seeds, options.fit_samples)), _say)
        for condition in self._part(_chosen(options, protocol.fit_conditions())):
            found = list(fit.rows(subject, condition, make, self._shelf.costs, self._commit, _tried(options)))
            keep(options.results, found, {})
        print("\n".join(fit.table(read(options.results))))
        return 0

    def _closer(self) -> int:
        """Of fewer samples than the rest, since it can be run without a GPU."""
        options, samples = self._options, min(self._options.samples, closer.SAMPLES)
        subject = _subject(samples, engines=options.engines)
        device = torch.device(subject.model.load_device)
        facts = {"gpu": Environment.current(device).gpu or "CPU", "commit": self._commit}
        make = sampled(subject, Shelf(options.shelf, _shelf_name(options, protocol.seeds(), samples)), _say)
        for row in closer.all_rows(subject, self._chosen, make, facts):
            keep(options.results, [row], {})
            _say(f"{row['case']}: {said(row)}; pictures {row['decoded']['preset']['psnr_db']:.1f} dB")
        return 0

    def _image_to_image(self) -> int:
        """Of few small pictures, since it can be run without a GPU."""
        options, samples = self._options, min(self._options.samples, image_to_image.SAMPLES)
        subject = _subject(samples, engines=options.engines)
        device = torch.device(subject.model.load_device)
        facts = {"gpu": Environment.current(device).gpu or "CPU", "commit": self._commit}
        shelf = Shelf(options.shelf, _shelf_name(options, protocol.seeds(), samples))
        for row in image_to_image.rows(subject, image_to_image.cases(), shelf, facts, _say):
            keep(options.results, [row], {})
            told = ", ".join(f"{name}: {each['psnr_db']:.1f} dB" for name, each in row["decoded"].items())
            begun = f"denoise {row['denoise']:g}, begun with {row['begins_with']}"
            _say(f"{row['sampler']}, CFG {row['cfg']:g}, {begun}: {told}")
        return 0

    def _beside(self) -> None:
        """Rows are kept as they come, should the time run out."""
        options, samples = self._options, self._options.samples
        for row in hackathon.rows(_subject(samples, with_hints=True), self._commit):
            keep(options.results, [row], {})
        subject = _subject(samples, engines=options.engines)
        for row in beside.rows(subject, self._shelf, self._commit, _say):
            keep(options.results, [row], {})
            _say(f"{row['case']}: {said(row)}")

    def _score(self, subject: Subject) -> None:
        scorer = Scorer(subject, self._shelf, self._commit, _say)
        rows = scorer.rows(self._part(self._chosen))
        if rows:
            keep(self._options.results, rows, scorer.raw)
        for row in rows:
            _say(said(row))

    def _check_costs(self) -> None:
        """
        Raises:
            RuntimeError: something was not timed; while others sample is no time for it.
        """
        missing = [(name, cfg) for name, cfg in self._wanted_costs() if not self._shelf.has_costs(name, cfg)]
        if missing:
            told = ", ".join(f"{name} at CFG {cfg:g}" for name, cfg in missing)
            raise RuntimeError(f"Not timed yet: {told}. Run --time-only first, with the same options")

    def _part(self, conditions: Sequence[Condition]) -> Sequence[Condition]:
        return protocol.share(conditions, self._options.part, self._options.parts)


def _chosen(options: argparse.Namespace, conditions: Sequence[Condition]) -> list[Condition]:
    return [
        condition
        for condition in conditions
        if condition.steps in options.steps
        and condition.cfg in options.cfgs
        and (not options.samplers or condition.sampler in options.samplers)
        and (not options.only or str(condition) in options.only)
    ]


def _tried(options: argparse.Namespace) -> fit.Tried:
    return fit.Tried(options.fit_shares, options.fit_rules, options.fit_powers)


def _shelf_name(options: argparse.Namespace, seeds: dict[str, int], samples: int) -> str:
    on = "plain" if options.engines is None else "engines"
    return f"captions{seeds['captions']}-noise{seeds['noise']}-{samples}-{on}"


def _subject(
    samples: int, seeds: dict[str, Any] | None = None, with_hints: bool = False, engines: Path | None = None
) -> Subject:
    seeds = seeds or protocol.seeds()
    captioned = scenes.sample(samples, seeds["captions"])
    generator = torch.Generator().manual_seed(seeds["noise"])
    noise = torch.randn(samples, *protocol.LATENT, generator=generator)
    hints = hackathon.hints(captioned) if with_hints else None
    return Subject(scenes.captions(captioned), noise, hints, engines, seeds["noise"])


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
