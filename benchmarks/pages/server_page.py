"""The benchmarks page's part about pictures from a ComfyUI server, in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..in_server.cases import CASES
from ..in_server.rows import is_of_patches
from ..in_server.variants import OURS, PLAIN, TORCH_COMPILE, described, flags_text
from ..subjects.rows import Row
from .server_summary import CaseTurns, Turns, by_machine
from .tables import escaped

_HEADLINE = ("case", "plain", "TorchCompileModel", "Slipstream", "over plain", "over TorchCompileModel")
_WITHIN = (
    "case", "variant", "before ms", "step ms", "after ms", "decoder or encoder ms", "first picture s", "VRAM MB",
    "peak MB", "error", "calls on engines",
)  # fmt: skip
_OTHERS = ("case", "flags", "variant", "nodes s", "client s", "over plain", "error", "calls on engines")

_MOST_WORDS = 400
"""Letters that the page shows of a reason; the row has all."""


def section(rows: Sequence[Row]) -> str:
    """Return the whole part; empty where nothing was measured. What patches leave of the speed is told elsewhere."""
    rows = [row for row in rows if not is_of_patches(row)]
    if not rows:
        return ""
    machines = by_machine(rows)
    parts = [_HEAD, *(_machine(*machine, cases) for machine, cases in machines.items()), _HOW, _words(rows)]
    return "\n".join(parts)


def headline_table(cases: Iterable[CaseTurns]) -> str:
    """Return the table of seconds a picture, which the README shows too.

    What does not count as a speed is left out: see `rows.counts_as_headline`.
    """
    lines = [line for case in cases if any((line := _headline_line(case))[1:])]
    return table(_HEADLINE, lines, left=1) if lines else ""


def _machine(gpu: str, comfyui: str, cases: Sequence[CaseTurns]) -> str:
    within = [_within_line(case, turns) for case in cases for turns in case.shown]
    others = [_other_line(case, turns) for case in cases for turns in case.others]
    parts = [f"### {gpu}, ComfyUI {comfyui}\n", headline_table(cases), _UNIT, table(_WITHIN, within, left=2)]
    parts += ["\nWith other flags, and other variants:\n", table(_OTHERS, others, left=3)] if others else []
    troubles = _troubles(cases)
    parts += ["\nWhat went wrong:\n", *troubles] if troubles else []
    return "\n".join([*parts, "", _circumstances(cases), ""])


def _headline_line(case: CaseTurns) -> list[str]:
    plain, compiled, ours = (_if_counts(case.of(name)) for name in (PLAIN, TORCH_COMPILE, OURS))
    return [
        case.case,
        *(_seconds(turns) for turns in (plain, compiled, ours)),
        _ratios(plain, ours),
        _ratios(compiled, ours),
    ]


def _within_line(case: CaseTurns, turns: Turns) -> list[str]:
    seconds = [turns.median(figure) for figure in ("before_s", "after_s", "decoder_s", "encoder_s")]
    before, after, decoder, encoder = (_rounded(None if each is None else 1000 * each, 1) for each in seconds)
    first, *_ = (row["build_s"] for row in turns.rows)
    return [
        case.case, f"`{turns.variant}`", before, _rounded(turns.median("step_ms"), 2), after, decoder or encoder,
        _rounded(first, 1), _rounded(turns.largest("vram_mb"), 0), _rounded(turns.largest("peak_mb"), 0),
        *_trust(turns),
    ]  # fmt: skip


def _other_line(case: CaseTurns, turns: Turns) -> list[str]:
    """A line for other flags, compared with the plain workflow at default flags where the same run has it."""
    plain = case.plain_of(turns.run)
    busy, client = (turns.busy_s, turns.median("client_s")) if turns.counts else (None, None)
    over_plain = "" if plain is None else _ratio(plain.busy_s, busy)
    return [
        case.case, f"`{flags_text(turns.flags)}`", f"`{turns.variant}`", _rounded(busy, 3), _rounded(client, 3),
        over_plain, *_trust(turns),
    ]  # fmt: skip


def _trust(turns: Turns) -> list[str]:
    error, share = turns.largest("error"), turns.engine_share
    return ["unknown" if error is None else f"{error:.1e}", "" if share is None else f"{100 * share:.0f} %"]


def _if_counts(turns: Turns | None) -> Turns | None:
    return turns if turns is not None and turns.counts else None


def _seconds(turns: Turns | None) -> str:
    """Seconds in sampler and decoder, or in the encoder, and behind them the client's."""
    if turns is None or turns.busy_s is None:
        return ""
    return f"{turns.busy_s:.2f} ({_rounded(turns.median('client_s'), 2)})"


def _ratios(other: Turns | None, own: Turns | None) -> str:
    if other is None or own is None:
        return ""
    clients = other.median("client_s"), own.median("client_s")
    return f"{_ratio(other.busy_s, own.busy_s)} ({_ratio(*clients)})"


def _ratio(other: float | None, own: float | None) -> str:
    return "" if other is None or not own else f"{other / own:.2f}×"


def _rounded(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _troubles(cases: Iterable[CaseTurns]) -> list[str]:
    """A line for each turn in which the server died or a picture failed, and for engines that hardly served."""
    lines = []
    for case in cases:
        for turns in (*case.shown, *case.others):
            what = f"{case.case}, `{turns.variant}`, flags `{flags_text(turns.flags)}`"
            for row in turns.rows:
                if "failed" in row:
                    head = f"turn {row['turn']}: {'the server died' if row['died'] else 'failed'}"
                    lines.append(f"- {what}, {head}: {escaped(row['failed'][:_MOST_WORDS])}")
            if turns.engine_share is not None and not turns.counts:
                reasons = "; ".join(dict.fromkeys(why for row in turns.rows for why in row["reasons"] or {}))
                share = f"engines computed {100 * turns.engine_share:.0f} % of the calls"
                lines.append(f"- {what}: {share}{f': {escaped(reasons)}' if reasons else ''}")
    return lines


def _circumstances(cases: Iterable[CaseTurns]) -> str:
    """One sentence for all that was alike."""
    rows = [row for case in cases for turns in (*case.shown, *case.others) for row in turns.rows]
    return "  \n".join(dict.fromkeys(circumstances_of(row) for row in rows if row["pictures"]))


def circumstances_of(row: Row) -> str:
    """Return versions, commit and how many pictures were made, in a sentence."""
    versions, commit = row["versions"], f", commit {row['commit'][:12]}" if row["commit"] else ""
    driver = f", driver {row['driver']}" if row["driver"] else ""
    machine = f"torch {versions.get('torch')}, Python {versions.get('python')}{driver}"
    others = len(row["samples"].get("warmup_s", []))
    pictures = f"timed pictures a turn: {row['pictures']}, after {others} others"
    return f"{machine}; Slipstream {versions['slipstream']}{commit}; {pictures}."


def _words(rows: Iterable[Row]) -> str:
    rows = list(rows)
    cases, variants = (dict.fromkeys(row[name] for row in rows) for name in ("case", "variant"))
    lines = [f"- `{name}`: {CASES[name].title if name in CASES else name}" for name in cases]
    return "\n".join([*lines, *(f"- `{name}`: {described(name)}" for name in variants), ""])


def table(columns: Sequence[str], lines: Iterable[Sequence[str]], left: int) -> str:
    """Return Markdown, the first `left` columns to the left and the others to the right."""
    rule = ["---"] * left + ["---:"] * (len(columns) - left)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (columns, rule, *lines))


_HEAD = """## Pictures from a ComfyUI server

What a user has: ComfyUI's own server, stock loader and sampler nodes, models of full size with random weights, one
prompt after another.
"""

_UNIT = """
Seconds of a picture in the nodes KSampler and VAE Decode, or of a text in CLIP Text Encode; in brackets by the client's
clock, from sending the prompt to hearing that the picture is saved. Each is the median of all turns.
"""

_HOW = """Variants take turns in the same server, servers of other flags take turns on the same card, and before each
turn ComfyUI unloads its models. Each turn begins with pictures that are not timed: the first builds or compiles, and
the last is compared. No two pictures are alike, since ComfyUI computes nothing twice. All variants have the same
workflow but for the nodes that make it faster.

The GPU is waited for where such a node begins and ends, and nowhere in between. "before" is the time from the sampler's
begin to the first call of the model, "step" from call to call, "after" from the last call's end to the sampler's end,
all three by CUDA events. "first picture" is that of the first turn, with all that is built or compiled in it. "VRAM" is
the memory in use on the whole device after the timed pictures, "peak" the highest while they were made. "error" is the
relative error of latent or picture, whichever is larger, or of the encoded text, against the plain workflow with
default flags and the same seed. A row of Slipstream is given no speed where more than 5 % of its calls ran on the eager
model. Of other flags and variants, "over plain" is left out where their run has no plain workflow at default flags.
"""
