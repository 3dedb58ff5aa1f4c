"""The page's part about changes between two pictures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...runtime.settings.model_settings import Resolution, latent_of
from ..subjects.rows import Row, gpu_of, is_of_switched, last_of_each
from ..subjects.variants import SWITCH_BATCH
from . import tables


def switches(rows: Iterable[Row]) -> list[Row]:
    """Of each GPU, case and variant the last row, by GPU and in the order in which they were measured."""
    return last_of_each(filter(is_of_switched, rows))


def section(found: Sequence[Row], circumstances: Iterable[str]) -> str:
    """See `tables.section`."""
    return tables.section(_HEAD, _table, found, circumstances)


def _table(gpu: str, rows: Sequence[Row]) -> str:
    columns = "case | variant | change | first ms | the same again ms | steady ms | first − steady"
    lines = [f"### {gpu}: changes\n", f"| {columns} |", "| --- | --- | --- | ---: | ---: | ---: | ---: |"]
    for row in rows:
        if gpu_of(row) == gpu:
            own, other = (_kind(row, shapes) for shapes in (row["shapes"], row["other"]["shapes"]))
            lines += [_line(row, f"{other} → {own}", row), _line(row, f"{own} → {other}", row["other"])]
    return "\n".join([*lines, ""])


def _line(row: Row, change: str, figures: Row) -> str:
    first, again, steady = (figures[name] for name in ("ms", "again_ms", "steady_ms"))
    times = f"{first:.2f} | {again:.2f} | {steady:.2f} | {first - steady:+.2f}"
    return f"| {row['case']} | `{row['variant']}` | {change} | {times} |"


def _kind(row: Row, shapes: dict[str, list[int]]) -> str:
    """What a picture is like, as far as the two kinds differ."""
    if SWITCH_BATCH in row["variant"].split("+"):
        return f"batch {latent_of(_tuples(shapes))[0]}"
    return str(Resolution.of_call(_tuples(shapes)))


def _tuples(shapes: dict[str, list[int]]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(shape) for name, shape in shapes.items()}


_HEAD = """## Changing between pictures

What the first call costs after a change of size, or of batch, and back, where what computes either is loaded already.
"first ms" is such a call with all that Slipstream does at the beginning of a picture: it looks the engine up and gives
it the model's weights. What ComfyUI itself does between two pictures is not in it. "the same again ms" is the first
call of a picture like the one before, "steady ms" a later call; each is a median.
"""
