"""Tables of rows in Markdown: one of single calls, one of whole pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ..subjects.rows import IN_A_ROW, TIMES_EAGER, Row, gpu_of, is_of_job, is_of_skipped
from ..subjects.variants import COMPILE, EAGER, describe


@dataclass(frozen=True)
class Group:
    """The rows of one case from one run on one GPU."""

    gpu: str
    case: str
    rows: tuple[Row, ...]

    @property
    def is_job(self) -> bool:
        """Whether whole pictures were measured."""
        return any(map(is_of_job, self.rows))

    @property
    def eager_ms(self) -> float | None:
        return next((row["ms"] for row in self.sound if row["variant"] == EAGER), None)

    @property
    def best_compile_ms(self) -> float | None:
        """The fastest mode of torch.compile that computes the right thing."""
        return min((row["ms"] for row in self.sound if row["variant"].startswith(COMPILE)), default=None)

    @property
    def is_blind(self) -> bool:
        """Whether pictures are so far apart by the eager model's own error that a quite different one would pass."""
        eager = next((row for row in self.sound if row["variant"] == EAGER and is_of_job(row)), None)
        return eager is not None and any(
            TIMES_EAGER * error >= _nearest(eager, output) for output, error in eager["errors"].items()
        )

    @property
    def sound(self) -> list[Row]:
        """Rows that may be trusted."""
        return [row for row in self.rows if "failed" not in row]


_CALLS = ("case", "variant", "ms", "over eager", "over torch.compile", "error", "build s", "load s", "VRAM MB")
_JOBS = (
    "case", "variant", "ms in all", "over eager", "over torch.compile", "error of latent", "error of picture",
    "nearest other", "build s", "VRAM MB",
)  # fmt: skip
_JOBS_SKIPPED = (*_JOBS[:2], "steps", *_JOBS[2:])
_IN_A_ROW = "in a row"
_CALLS_IN_A_ROW = (*_CALLS[:3], _IN_A_ROW, *_CALLS[3:])

_CALLS_HEAD = "Single calls, each from an idle GPU:\n"
_CALLS_IN_A_ROW_HEAD = f'Single calls, each from an idle GPU; "{_IN_A_ROW}": ms a call of many, none waited for:\n'
_JOBS_HEAD = "Whole pictures in a process of the benchmark's own, without ComfyUI's server:\n"


def tables(groups: Sequence[Group]) -> str:
    """Of single calls, then of whole pictures; what was not measured has no table."""
    calls = [group for group in groups if not group.is_job]
    jobs = [group for group in groups if group.is_job]
    of_jobs = _JOBS if not any(is_of_skipped(row) for group in jobs for row in group.rows) else _JOBS_SKIPPED
    has_rows = any(row.get(IN_A_ROW) is not None for group in calls for row in group.rows)
    of_calls = (_CALLS_IN_A_ROW_HEAD, _CALLS_IN_A_ROW) if has_rows else (_CALLS_HEAD, _CALLS)
    parts = ((*of_calls, calls), (_JOBS_HEAD, of_jobs, jobs))
    return "\n\n".join(f"{head}\n{_table(columns, part)}" for head, columns, part in parts if part)


def _table(columns: Sequence[str], groups: Sequence[Group]) -> str:
    lines = [_line(columns), _line(["---", "---", *["---:"] * (len(columns) - 2)])]
    for group in groups:
        lines += [_line(_cells(columns, group, row)) for row in group.rows]
    return "\n".join(lines)


def _cells(columns: Sequence[str], group: Group, row: Row) -> list[str]:
    head = [row["case"], f"`{row['variant']}`"]
    if "steps" in columns:
        head.append(f"{row['computed']} of {row['steps']}" if is_of_skipped(row) else str(row["steps"]))
    if "failed" in row:
        return [*head, "failed", *[""] * (len(columns) - len(head) - 1)]
    in_a_row = [_rounded(row.get(IN_A_ROW), 2)] if _IN_A_ROW in columns else []
    speed = [f"{row['ms']:.2f}", *in_a_row, _ratio(group.eager_ms, row["ms"]), _ratio(group.best_compile_ms, row["ms"])]
    built, held = _rounded(row["build_s"], 0), _rounded(row["vram_mb"], 0)
    if is_of_job(row):
        errors = [f"{row['errors'][output]:.1e}" for output in ("latent", "picture")]
        return [*head, *speed, *errors, f"{_nearest(row):.1e}", built, held]
    return [*head, *speed, f"{row['error']:.1e}", built, _rounded(row["load_s"], 2), held]


def escaped(text: str) -> str:
    """What is no Markdown of ours."""
    return text.replace("|", "\\|").replace("<", "&lt;")


def section(
    head: str, table: Callable[[str, Sequence[Row]], str], found: Sequence[Row], circumstances: Iterable[str]
) -> str:
    """A part of the page with a table for each GPU, in Markdown; empty where nothing was measured.

    Args:
        table: of a GPU's rows among those that may be trusted.
        circumstances: of each row, in words.
    """
    if not found:
        return ""
    sound = [row for row in found if "failed" not in row]
    lines = [head, *(table(gpu, sound) for gpu in dict.fromkeys(map(gpu_of, sound)))]
    lines += [*failures(found), "", "  \n".join(dict.fromkeys(circumstances)), "", words_of(found), ""]
    return "\n".join(lines)


def failures(rows: Iterable[Row]) -> list[str]:
    """A line for each row that may not be trusted: why."""
    failed = [row for row in rows if "failed" in row]
    return [f"- not to be trusted: {row['case']}, `{row['variant']}`: {escaped(row['failed'])}" for row in failed]


def words_of(rows: Iterable[Row]) -> str:
    """A line for each variant: what it is."""
    return "\n".join(f"- `{name}`: {described(name)}" for name in dict.fromkeys(row["variant"] for row in rows))


def described(variant: str) -> str:
    """What a variant is, or was, in plain words."""
    try:
        return describe(variant)
    except ValueError:
        return "no longer offered"


def _nearest(row: Row, output: str = "picture") -> float:
    """How far the picture is away that differs least: by its noise, its prompts or its hint alone."""
    return min(float(distances[output]) for distances in row["distances"].values())


def _rounded(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _ratio(other: float | None, own: float) -> str:
    return "" if other is None else f"{other / own:.2f}×"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
