"""Rows of the protocol, from what was made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ....sampling.metrics import PSNR_CAP, capped, high_frequency_energy, latent_psnr, psnr, ssim
from ....sampling.presets import Preset
from . import protocol, ways
from .averages import averages, mean, median, pooled
from .bootstrap import paired_bootstrap
from .fingerprint import fingerprint
from .protocol import DECODED, Condition
from .results import Raw, Row
from .runs import Compared, Run, Runs, taken
from .shelf import Made, Shelf
from .subject import Subject

Say = Callable[[str], None]
Judged = Callable[[Tensor], Tensor]
"""The part of latents that is looked at."""


@dataclass(frozen=True)
class Figures:
    """
    Attributes:
        row: of a preset in a condition.
        own, best: closeness of each sample to the full run, [B] dB: the preset's, and its closest rival's.
        rival: that rival.
    """

    row: Row
    own: Tensor
    best: Tensor
    rival: Run


class Scorer:
    """
    Args:
        commit: of the code.

    Attributes:
        raw: per-sample values of every row, by its key.
    """

    def __init__(self, subject: Subject, shelf: Shelf, commit: str | None, say: Say) -> None:
        self._subject, self._shelf, self._commit, self._say = subject, shelf, commit, say
        self.raw: Raw = {}

    def rows(self, conditions: Sequence[Condition]) -> list[Row]:
        """Of all conditions that were sampled."""
        found = []
        for condition in conditions:
            try:
                found += list(self._of(condition))
            except FileNotFoundError as error:
                self._say(f"{condition} is left out: {Path(str(error.filename)).name} was not sampled")
        return found

    def _of(self, condition: Condition) -> Iterator[Row]:
        runs = Runs.of_protocol(self._subject, condition, taken(self._shelf), self._shelf.costs)
        whole, target = runs.full(), runs.converged()
        pictures = self._pictures(whole)
        for preset, compared in runs.compared():
            found = figures(condition, preset, compared, whole, self._commit)
            row, key, made = found.row, f"{condition}-{preset.name}", compared.run.made
            self.raw[f"{key}-preset"], self.raw[f"{key}-best_plain"] = found.own.numpy(), found.best.numpy()
            if not compared.has_cache:
                row["no_cache_rival"] = True
            if preset.name == ways.BALANCED:
                row |= _against_chance(runs.randoms(), whole)
            if target is not None:
                row |= _to_converged(target, {"full": whole, "preset": made, "best_plain": found.rival.made})
            row["decoded"] = self._decoded(pictures, {"preset": made, "best_plain": found.rival.made})
            yield row

    def _decoded(self, reference: Tensor, others: Mapping[str, Made]) -> dict[str, dict[str, float]]:
        found = {}
        for name, made in others.items():
            pictures = self._pictures(made)
            found[name] = {
                **averages(capped(psnr(pictures, reference))),
                "ssim": round(float(ssim(pictures, reference).mean()), 4),
                "high_frequencies": round(float(high_frequency_energy(pictures, reference).median()), 4),
            }
        return found

    def _pictures(self, made: Made) -> Tensor:
        device = self._subject.model.load_device
        return self._subject.decode(made.latents[:DECODED]).to(device)


def figures(
    condition: Condition,
    preset: Preset,
    compared: Compared,
    whole: Made,
    commit: str | None,
    judged: Judged = lambda latents: latents,
) -> Figures:
    """How a preset fares against its rivals."""
    run, own = compared.run, closeness(compared.run.made, whole, judged)
    near = {name: closeness(rival.made, whole, judged) for name, rival in compared.rivals.items()}
    best = max(near, key=lambda name: float(near[name].mean()))
    rival, gains = compared.rivals[best], own - near[best]
    gain = paired_bootstrap(gains)
    row = {
        "sampler": condition.sampler,
        "scheduler": condition.scheduler,
        "cfg": condition.cfg,
        "steps": run.made.steps,
        "condition": str(condition),
        "preset": preset.name,
        "fingerprint": fingerprint(preset),
        "seeds": protocol.seeds(),
        "computed": run.made.calls,
        "samples": len(own),
        **averages(own),
        "worst_tenth_db": _worst_tenth(own),
        "best_plain": best,
        "best_plain_db": mean(near[best]),
        "best_plain_median_db": median(near[best]),
        "best_plain_pooled_db": pooled(near[best]),
        "best_plain_computed": rival.made.calls,
        "best_plain_seconds": round(rival.seconds, 4),
        "gain_db": round(gain.mean, 3),
        "ci_low": round(gain.low, 3),
        "ci_high": round(gain.high, 3),
        "worst_tenth_gain_db": _worst_tenth(gains),
        "seconds": round(run.seconds, 4),
        "step_seconds": compared.costs.told(),
        "rivals_db": {name: mean(each) for name, each in near.items()},
        "rivals_seconds": {name: round(each.seconds, 4) for name, each in compared.rivals.items()},
        "commit": commit,
    }
    return Figures(row, own, near[best], rival)


def closeness(made: Made, whole: Made, judged: Judged = lambda latents: latents) -> Tensor:
    """[B] dB; what is not finite is as far away as can be."""
    return capped(latent_psnr(judged(made.latents), judged(whole.latents))).nan_to_num(nan=-PSNR_CAP)


def _against_chance(randoms: Sequence[Made], whole: Made) -> Row:
    each = [mean(closeness(made, whole)) for made in randoms]
    return {"random_db": round(sum(each) / len(each), 3), "random_db_each": each}


def _to_converged(target: Made, others: Mapping[str, Made]) -> Row:
    found = {name: mean(closeness(made, target)) for name, made in others.items()}
    row: Row = {"converged_db": found}
    if found["full"] < found["best_plain"]:
        row["full_is_further"] = True
    return row


def _worst_tenth(values: Tensor) -> float:
    return mean(values.sort().values[: max(1, len(values) // 10)])


def said(row: Row) -> str:
    """A row in a line."""
    return (
        f"{row['sampler']} {row['scheduler']} cfg {row['cfg']:g} {row['steps']} {row['preset']}: "
        f"{row['psnr_db']:.2f} dB, {row['gain_db']:+.2f} [{row['ci_low']:+.2f}, {row['ci_high']:+.2f}] "
        f"against {row['best_plain']}"
    )
