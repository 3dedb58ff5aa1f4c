"""What came of a soak: an account of all prompts, and a row for each, both written as they come."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SETTLED = 0.5
"""The share of the prompts after which memory has to be flat: until then engines come into it."""
_FEWEST, _WINDOW = 20, 25
"""Rows that growth can be told from; those of which the most memory counts, half of them where there are few: after
`/free` a server holds less until a model is loaded again."""
_MOST_EXACT = 0.05
"""The share of pictures that half precision may spoil."""


@dataclass
class Account:
    """What came of a soak. `wrong` pictures differ from those without Slipstream; `errors` are prompts that failed.

    Attributes:
        is_plain: no prompt had Slipstream's nodes: what ComfyUI does by itself.
        wanted: how many prompts were asked for; `prompts` were run.
        rss_first_mb, rss_last_mb: memory of the first server's process after half of the prompts and at the end.
        handles_first, handles_last: its open files then.
        rss_growth_mb, handles_growth: by how much the most of each 25 prompts grew in the second half for each 100
            prompts, by a straight line of least squares; None while too few prompts were run.
        host_growth_mb: `rss_growth_mb` of ComfyUI by itself, which keeps a history of its prompts; 0 where that was not
            measured. What is beyond it is Slipstream's, and has the limit `rss_growth_limit_mb`.
        cancelled: prompts that were interrupted before they ended.
        deaths: of servers.
        stale_engines: the most that were ever found in the store.
        worst: the largest difference of a value of a picture, from 0 to 1.
        worst_rms: the largest root mean square of a picture's differences.
        compared_with_exact: pictures that differ by more than the tolerance on a GPU, and were held against one of full
            precision.
        problems: numbers of prompts with what was wrong, to be repeated with --only.
    """

    seed: int
    commit: str
    device: str
    subject: str
    comfyui: str
    wanted: int
    tolerance: float
    rss_growth_limit_mb: float
    handles_growth_limit: float
    is_plain: bool = False
    host_growth_mb: float = 0.0
    prompts: int = 0
    wrong: int = 0
    errors: int = 0
    rss_first_mb: float = 0.0
    rss_last_mb: float = 0.0
    rss_growth_mb: float | None = None
    handles_first: int = 0
    handles_last: int = 0
    handles_growth: float | None = None
    engine_calls: int = 0
    eager_calls: int = 0
    deaths: int = 0
    stale_engines: int = 0
    cancelled: int = 0
    freed: int = 0
    deleted: int = 0
    on_second_server: int = 0
    seconds: float = 0.0
    worst: float = 0.0
    worst_rms: float = 0.0
    compared_with_exact: int = 0
    problems: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)

    def failures(self) -> list[str]:
        """Why the soak failed, a line each; empty where it did not."""
        counts = {"wrong pictures": self.wrong, "errors": self.errors, "deaths": self.deaths}
        counts["stale engines"] = self.stale_engines
        found = [f"{count} {name}" for name, count in counts.items() if count]
        if self.compared_with_exact > _MOST_EXACT * self.prompts:
            found.append(f"{self.compared_with_exact} pictures differ by more than the tolerance")
        own = 0.0 if self.is_plain or self.rss_growth_mb is None else self.rss_growth_mb - self.host_growth_mb
        if own > self.rss_growth_limit_mb:
            found.append(f"memory grows by {own:.1f} MB in 100 prompts more than ComfyUI's by itself")
        if self.handles_growth is not None and self.handles_growth > self.handles_growth_limit:
            found.append(f"open files grow by {self.handles_growth} in 100 prompts")
        calls = self.engine_calls + self.eager_calls
        if not self.is_plain and (self.engine_calls < 0.7 * calls or not calls):
            found.append(f"engines made {self.engine_calls} of {calls} calls only")
        return found


class Report:
    """An account with its rows in files, which hold all that was found so far at any time.

    Args:
        out: of the account.
        rows: of the rows, JSON lines; what an earlier soak wrote there is removed.
    """

    def __init__(self, account: Account, out: Path, rows: Path) -> None:
        self.account = account
        self._out, self._rows_file = out, rows
        self._footprints: list[tuple[int, float, int]] = []
        rows.write_text("", encoding="utf-8")

    def add(self, row: dict[str, Any], seconds: float) -> None:
        """Write the next prompt's row, and the account with it."""
        account = self.account
        account.seconds = round(seconds, 1)
        if row["rss_mb"]:
            self._footprints.append((account.prompts, row["rss_mb"], row["handles"]))
        settled = [found for found in self._footprints if found[0] > SETTLED * account.wanted]
        if settled:
            _, account.rss_first_mb, account.handles_first = settled[0]
        if self._footprints:
            _, account.rss_last_mb, account.handles_last = self._footprints[-1]
        if len(settled) >= _FEWEST:
            length = min(_WINDOW, len(settled) // 2)
            windows = [settled[start : start + length] for start in range(0, len(settled) - length + 1, length)]
            places, memory, handles = zip(*(map(max, zip(*window, strict=True)) for window in windows), strict=True)
            account.rss_growth_mb = round(100 * slope(places, memory), 2)
            account.handles_growth = round(100 * slope(places, handles), 2)
        with self._rows_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        self.write()

    def write(self) -> None:
        """Write the account."""
        part = self._out.with_suffix(".part")
        part.write_text(json.dumps(asdict(self.account), indent=1) + "\n", encoding="utf-8")
        part.replace(self._out)


def slope(places: tuple[float, ...], values: tuple[float, ...]) -> float:
    """The slope of the straight line of least squares through the values."""
    mean_place, mean = sum(places) / len(places), sum(values) / len(values)
    pairs = zip(places, values, strict=True)
    over = sum((place - mean_place) * (value - mean) for place, value in pairs)
    return over / sum((place - mean_place) ** 2 for place in places)
