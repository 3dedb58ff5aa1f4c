"""The page's part about what engines of blocks keep of their speed where another node patches the model."""

from __future__ import annotations

from collections.abc import Sequence

from ..in_server.cases import CASES
from ..in_server.rows import is_of_patches, is_ours
from ..in_server.variants import PLAIN, Flags, flags_text
from ..patching.patches import PATCHES
from ..subjects.rows import Row, gpu_of
from .server_page import circumstances_of, table
from .server_summary import Turns
from .tables import escaped

_COLUMNS = (
    "patch", "pack", "changes the picture by", "plain s", "Slipstream s", "faster by", "kept",
    "of the gain", "calls of blocks on engines", "error",
)  # fmt: skip

_LEAST_GAIN = 1.02
"""How many times as fast Slipstream has to be without a patch for there to be a gain that a part can be told of."""

_Place = tuple[str, str, str, Flags, str]
"""GPU, ComfyUI, case, flags and variant: what has a table of its own."""


def section(rows: Sequence[Row]) -> str:
    """Return the whole part in Markdown; empty where no row is of a patch."""
    found = [row for row in rows if is_of_patches(row)]
    places = dict.fromkeys(_place_of(row) for row in found if is_ours(row))
    rows_of = {place: [row for row in found if _place_of(row) in (place, (*place[:-1], PLAIN))] for place in places}
    parts = [part for place, each in rows_of.items() if (part := _part(place, each))]
    return "\n".join([_HEAD, *parts]) if parts else ""


def _place_of(row: Row) -> _Place:
    return gpu_of(row), row["comfyui"], row["case"], tuple(row["flags"]), row["variant"]


def _part(place: _Place, rows: Sequence[Row]) -> str:
    """The table of one place: each patch by the last run with both, beside what that made without."""
    gpu, comfyui, case, flags, variant = place
    runs: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        runs.setdefault((row["run"], row["patch"]), []).append(row)
    pairs = ((patch, _Pair.of(each, runs.get((run, ""), []))) for (run, patch), each in runs.items())
    last = {patch: pair for patch, pair in pairs if pair}
    failed = [
        f"- {row['variant']} with {row['patch'] or 'none'}: {escaped(row['failed'])}" for row in rows if "failed" in row
    ]
    if not any(last) and not failed:
        return ""
    lines = [pair.line(patch) for patch, pair in sorted(last.items(), key=lambda each: _rank_of(each[0]))]
    said = dict.fromkeys(circumstances_of(row) for row in rows if row["pictures"] and is_ours(row))
    words = f"{CASES[case].title if case in CASES else case}; Slipstream's variant is `{variant}`."
    words += f" The server's flags are `{flags_text(flags)}`." if flags else ""
    return "\n".join(
        [f"### {gpu}, ComfyUI {comfyui}: with other nodes' patches\n", f"{words}\n", table(_COLUMNS, lines, left=2), ""]
        + [*(["What went wrong:\n", *failed, ""] if failed else []), "  \n".join(said), ""]
    )


def _rank_of(patch: str) -> int:
    return list(PATCHES).index(patch) if patch in PATCHES else -1


class _Pair:
    """The plain workflow and Slipstream with one patch, and the two without any, of the same run."""

    def __init__(self, plain: Turns, ours: Turns, base: tuple[Turns, Turns]) -> None:
        self._plain, self._ours, self._base = plain, ours, base

    @classmethod
    def of(cls, rows: Sequence[Row], base: Sequence[Row]) -> _Pair | None:
        """Make it of a run's rows; None where one of the four lacks pictures that may be trusted."""
        pair, other = _both(rows), _both(base)
        return cls(*pair, other) if pair and other else None

    def line(self, patch: str) -> list[str]:
        """The table's line."""
        known = PATCHES.get(patch)
        effect = self._plain.largest("effect")
        plain, ours = _seconds(self._plain), _seconds(self._ours)
        speed, alone = plain / ours, _seconds(self._base[0]) / _seconds(self._base[1])
        return [
            known.title if known else patch or "none", "" if not patch else (known and known.pack) or "ComfyUI",
            "" if effect is None else f"{100 * effect:.2g} %", f"{plain:.2f}", f"{ours:.2f}", f"{speed:.2f}×",
            f"{100 * speed / alone:.0f} %", _of_the_gain(speed, alone), _share(self._ours),
            f"{self._ours.largest('error'):.1e}",
        ]  # fmt: skip


def _both(rows: Sequence[Row]) -> tuple[Turns, Turns] | None:
    sound = [row for row in rows if "failed" not in row and row["sampler_s"] and row["error"] is not None]
    plain, ours = ([row for row in sound if is_ours(row) == wanted] for wanted in (False, True))
    return (Turns(tuple(plain)), Turns(tuple(ours))) if plain and ours else None


def _seconds(turns: Turns) -> float:
    return turns.median("sampler_s") or 0.0


def _of_the_gain(speed: float, alone: float) -> str:
    """How much of what Slipstream gains without a patch it gains with one; empty where it gains next to nothing."""
    return f"{round(100 * (speed - 1) / (alone - 1))} %" if alone > _LEAST_GAIN else ""


def _share(turns: Turns) -> str:
    blocks, on_engines = (sum(row[name] or 0 for row in turns.rows) for name in ("blocks", "blocks_on_engines"))
    return f"{100 * on_engines / blocks:.0f} %" if blocks else "none is called through Slipstream"


_HEAD = """## With other nodes' patches

What [engines of blocks](engines.md#engines-of-blocks) keep of their speed where another node patches the model.
Accelerate Model stands before that node; all else is as above, and the VAE is ComfyUI's own. Plain and Slipstream take
turns in one server, first without a patch, then with each. Seconds are the sampler's, the median of the timed
pictures; "faster by" is plain's over Slipstream's. "kept" is that ratio with the patch over that ratio without one,
both of the same run (the line "none" is the last run's). "of the gain" compares only what is above 1 in these two
ratios: 100 % where Slipstream gains as much as without the patch, 0 % where it is as fast as plain, less where it is
slower; empty where it gains 2 % or less without a patch. Both are told, since "kept" is how the speed changes, but
where Slipstream gains little without a node (Wan 1.3 times, AnimateDiff 1.35, PuLID 1.3) it stays high even for a node
that leaves nothing: there the gain has to be read. "changes the picture by" is how far plain's picture with the patch
is from plain's without it, 0 % where the node finds nothing to do in this model, or moves weights only; it is told for
default flags alone. "error" is how far Slipstream's picture is from plain's with the same patch and default flags; each
is that of latent or picture, whichever is larger. Blocks that engines do not compute run as they are, with whatever the
node changed in them. Each line is of the last run of its patch on that GPU with those flags. Lines of older commits
tell about these, not about today's code; the commits stand below each table.
"""
