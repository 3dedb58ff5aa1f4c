"""Rows put together for tables: the turns of a variant as one, and which run of each case is shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from ..in_server.cases import CASES
from ..in_server.rows import PREFIX, counts_as_headline, is_ours
from ..in_server.variants import OURS, PLAIN, TORCH_COMPILE, Flags
from ..subjects.rows import Row, gpu_of, read


@dataclass(frozen=True)
class Turns:
    """All turns of one variant at a case, in servers of the same flags, in one run of the command."""

    rows: tuple[Row, ...]

    @property
    def variant(self) -> str:
        return str(self.rows[0]["variant"])

    @property
    def flags(self) -> Flags:
        return tuple(self.rows[0]["flags"])

    @property
    def run(self) -> str:
        return str(self.rows[0]["run"])

    @property
    def counts(self) -> bool:
        """Whether these turns may be shown as the variant's speed: each of them may."""
        return all(map(counts_as_headline, self.rows))

    @property
    def busy_s(self) -> float | None:
        """Seconds in sampler and decoder, or in the encoder of a text, the median of all pictures."""
        found: list[float] = []
        for row in self.rows:
            parts = [row["samples"][name] for name in ("sampler_s", "decoder_s", "encoder_s") if name in row["samples"]]
            found += [sum(each) for each in zip(*parts, strict=False)]
        return median(found) if found else None

    def median(self, figure: str) -> float | None:
        """The median of a figure over all pictures, see `rows.FIGURES`."""
        found = [value for row in self.rows for value in row["samples"].get(figure, [])]
        return median(found) if found else None

    def largest(self, field: str) -> float | None:
        """The largest value of a field over all turns."""
        return max((row[field] for row in self.rows if row[field] is not None), default=None)

    @property
    def engine_share(self) -> float | None:
        """Of all calls, the share that engines computed; None without Slipstream, or where pictures do not tell."""
        calls = [(row["engine_calls"], row["eager_calls"]) for row in self.rows if is_ours(row)]
        if not calls or any(None in each for each in calls) or not (total := sum(map(sum, calls))):
            return None
        return float(sum(engine for engine, _ in calls) / total)


@dataclass(frozen=True)
class CaseTurns:
    """What was measured of one case on one GPU with one ComfyUI.

    Attributes:
        shown: of the run that is shown: the last of those with most of the plain workflow, the compiled one and
            Slipstream at default flags.
        others: other variants and flags, each of its last run.
        every: of all runs.
    """

    case: str
    shown: tuple[Turns, ...]
    others: tuple[Turns, ...]
    every: tuple[Turns, ...]

    def plain_of(self, run: str) -> Turns | None:
        """Return the plain workflow's turns at default flags in a run: another run may be of another day."""
        found = (turns for turns in self.every if turns.run == run)
        return next((turns for turns in found if turns.variant == PLAIN and not turns.flags), None)

    def of(self, variant: str) -> Turns | None:
        """Return a variant's turns at default flags in the run that is shown."""
        return next((turns for turns in self.shown if turns.variant == variant and not turns.flags), None)


def read_rows(folder: Path) -> list[Row]:
    """Return the rows of all of a folder's files about servers, the oldest first.

    Raises:
        ValueError: a line is no row.
    """
    files = sorted(folder.glob(f"{PREFIX}*.jsonl"), key=lambda file: (file.stem[-len("2026-01-31") :], file.name))
    return [row for file in files for row in read(file)]


def by_machine(rows: Iterable[Row]) -> dict[tuple[str, str], list[CaseTurns]]:
    """Return the cases of each GPU and ComfyUI, in the order in which they are offered."""
    found: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for row in rows:
        found.setdefault((gpu_of(row), row["comfyui"]), {}).setdefault(row["case"], []).append(row)
    order = {name: number for number, name in enumerate(CASES)}
    return {
        machine: [_case(name, cases[name]) for name in sorted(cases, key=lambda name: order.get(name, len(order)))]
        for machine, cases in sorted(found.items())
    }


def _case(name: str, rows: Sequence[Row]) -> CaseTurns:
    found = _turns(rows)
    runs = list(dict.fromkeys(turns.run for turns in found))
    usual = {run: {turns.variant for turns in found if turns.run == run and not turns.flags} for run in runs}
    run = max(reversed(runs), key=lambda run: len(usual[run] & {PLAIN, TORCH_COMPILE, OURS}))
    shown = tuple(turns for turns in found if turns.run == run and not turns.flags)
    last = {(turns.flags, turns.variant): turns for turns in found}
    taken = {(turns.flags, turns.variant) for turns in shown}
    return CaseTurns(name, shown, tuple(turns for key, turns in last.items() if key not in taken), tuple(found))


def _turns(rows: Sequence[Row]) -> list[Turns]:
    """Rows of one case by run, flags and variant, in the order of their first ones."""
    found: dict[tuple[str, Flags, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row["run"], tuple(row["flags"]), row["variant"]), []).append(row)
    return [Turns(tuple(each)) for each in found.values()]
