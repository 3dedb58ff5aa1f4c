"""Rows of the protocol, from what was made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...sampling.metrics import capped, high_frequency_energy, latent_psnr, psnr, ssim
from ...sampling.presets import PRESETS
from ...sampling.statistics import Interval, paired_bootstrap
from . import ways
from .protocol import DECODED, THRESHOLDS, Condition, converged
from .results import Raw, Row
from .runs import Made, Shelf, key_of
from .subject import Subject

Say = Callable[[str], None]


@dataclass(frozen=True)
class Rival:
    """A plain way to spend the time, and how close its samples are to the full run's: [B] dB."""

    made: Made
    db: Tensor


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
        whole = self._take(condition, "full")
        last = converged(condition)
        target = None if last is None else self._take(last, "full").latents
        costs, pictures = self._shelf.costs(condition.cfg), self._pictures(whole)
        for name in PRESETS:
            made = self._take(condition, f"preset-{name}")
            rivals = self._rivals(condition, name, whole, costs.affordable(made))
            best = max(rivals, key=lambda rival: float(rivals[rival].db.mean()))
            rival = rivals[best].made
            row = self._row(condition, name, made, _closeness(made, whole), best, rivals[best].db)
            row["rivals_db"] = {each: _mean(rivals[each].db) for each in rivals}
            if name == ways.BALANCED:
                row["random_db"] = _mean(_closeness(self._take(condition, "random"), whole))
            row["best_plain_computed"] = rival.calls
            row["step_seconds"] = asdict(costs)
            if target is not None:
                row["converged_db"] = {
                    "full": _mean(capped(latent_psnr(whole.latents, target))),
                    "preset": _mean(capped(latent_psnr(made.latents, target))),
                    "best_plain": _mean(capped(latent_psnr(rival.latents, target))),
                }
            row["decoded"] = self._decoded(pictures, {"preset": made, "best_plain": rival})
            yield row

    def _rivals(self, condition: Condition, preset: str, whole: Made, steps: int) -> dict[str, Rival]:
        made = {"shortened": self._take(condition, f"shortened-{preset}")}
        for way in ways.plain(self._subject, condition, steps):
            made[way.name.removeprefix("plain-")] = self._shelf.take(key_of(condition, way))
        found = {name: Rival(each, _closeness(each, whole)) for name, each in made.items()}
        for node, thresholds in THRESHOLDS.items():
            each = [self._take(condition, f"{node}-{threshold:g}") for threshold in thresholds]
            if (rival := _at_cost(each, steps, whole)) is not None:
                found[node] = rival
        return found

    def _row(self, condition: Condition, preset: str, made: Made, own: Tensor, best: str, best_db: Tensor) -> Row:
        gain: Interval = paired_bootstrap(own - best_db)
        key = f"{condition}-{preset}"
        self.raw[f"{key}-preset"], self.raw[f"{key}-best_plain"] = own.numpy(), best_db.numpy()
        tenth = own.sort().values[: max(1, len(own) // 10)]
        return {
            "sampler": condition.sampler,
            "scheduler": condition.scheduler,
            "cfg": condition.cfg,
            "steps": made.steps,
            "preset": preset,
            "computed": made.calls,
            "samples": len(own),
            "psnr_db": _mean(own),
            "worst_tenth_db": _mean(tenth),
            "best_plain": best,
            "best_plain_db": _mean(best_db),
            "gain_db": round(gain.mean, 3),
            "ci_low": round(gain.low, 3),
            "ci_high": round(gain.high, 3),
            "seconds": round(made.seconds, 4),
            "commit": self._commit,
        }

    def _decoded(self, reference: Tensor, others: Mapping[str, Made]) -> dict[str, dict[str, float]]:
        found = {}
        for name, made in others.items():
            pictures = self._pictures(made)
            found[name] = {
                "psnr_db": _mean(capped(psnr(pictures, reference))),
                "ssim": round(float(ssim(pictures, reference).mean()), 4),
                "high_frequencies": round(float(high_frequency_energy(pictures, reference).median()), 4),
            }
        return found

    def _pictures(self, made: Made) -> Tensor:
        device = self._subject.model.load_device
        return self._subject.decode(made.latents[:DECODED]).to(device)

    def _take(self, condition: Condition, name: str) -> Made:
        return self._shelf.take(f"{condition}-{name}")


def _closeness(made: Made, whole: Made) -> Tensor:
    """[B] dB."""
    return capped(latent_psnr(made.latents, whole.latents))


def _at_cost(cached: Sequence[Made], steps: int, whole: Made) -> Rival | None:
    """What a cache gives when it computes so many steps: between two thresholds, in proportion."""
    skipping = sorted((made for made in cached if made.calls < whole.calls), key=lambda made: made.calls)
    below = [made for made in skipping if made.calls <= steps]
    above = [made for made in skipping if made.calls > steps]
    if not below or not above:
        return Rival(below[-1], _closeness(below[-1], whole)) if below else None
    less, more = below[-1], above[0]
    part = (steps - less.calls) / (more.calls - less.calls)
    return Rival(less if part < 0.5 else more, torch.lerp(_closeness(less, whole), _closeness(more, whole), part))


def _mean(values: Tensor) -> float:
    return round(float(values.mean()), 3)
