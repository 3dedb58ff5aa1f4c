"""The page's facts in words: rows, choices, bars."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from ..core.formatting import (
    SHOWN,
    say_backend,
    say_bytes,
    say_engine_error,
    say_speed,
    say_speedup,
    say_state,
    say_when,
)
from ..runtime.building import build_queue
from ..runtime.planning.build_estimate import say_roughly

COLUMNS = (
    "id", "model", "role", "profile", "precision", "backend", "GPU", "MiB", "error", "speed-up", "last used", "state",
)  # fmt: skip
WIDTHS = (10.1, 8.3, 8.6, 9.0, 9.7, 9.5, 6.6, 5.6, 7.0, 7.7, 9.2, 8.7)
"""Of the columns, in percent: no word of a usual row is broken on a page 1280 wide."""
ENDED = tuple(state.value for state in build_queue.ENDED)
_LINES = 200
_COLOURS = {"done": "#2e9e5b", "failed": "#d05050", "cancelled": "#999999"}
_COLOUR = "#3b7dd8"
FASTER, SLOWER = "#2e9e5b", "#d08a2e"


def table(engines: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """A row for each engine. With the headers, which Gradio 3 forgets where there is no row."""
    return {"headers": list(COLUMNS), "data": [_row(engine) for engine in engines]}


def _row(engine: Mapping[str, Any]) -> list[str]:
    model, profile = _parts(engine)
    return [
        engine["digest"][:SHOWN],
        model,
        engine["role"],
        profile,
        engine["precision"],
        say_backend(engine["backend"]),
        engine["gpu"] or "CPU",
        f"{engine['bytes'] / 2**20:.1f}",
        say_engine_error(engine),
        say_speedup(engine["speedup"]),
        say_when(engine["last_used"]),
        say_state(engine),
    ]


def _parts(engine: Mapping[str, Any]) -> tuple[str, str]:
    """The model and the sizes out of a label such as "SD15 512×512 batch 2"."""
    model, found, sizes = engine["label"].partition(f" {engine['resolution']}")
    return (model.removesuffix(" for"), (found + sizes).strip()) if found else (engine["label"], engine["resolution"])


def choices(engines: Iterable[Mapping[str, Any]]) -> list[str]:
    """One text for each engine, its id in front: what is clicked in a table may have been sorted meanwhile."""
    return [_choice(engine) for engine in engines]


def _choice(engine: Mapping[str, Any]) -> str:
    return f"{engine['digest'][:SHOWN]} | {engine['label']} | {engine['precision']} {say_backend(engine['backend'])}"


def ids(chosen: Sequence[str] | str | None) -> list[str]:
    """The ids of what was chosen.

    Raises:
        ValueError: nothing was.
    """
    texts = [chosen] if isinstance(chosen, str) else list(chosen or [])
    if not any(texts):
        raise ValueError("Choose engines first: click rows of the table, or take them from the list below it")
    return [text.partition(" | ")[0].strip() for text in texts]


def head(overview: Mapping[str, Any], machine: Mapping[str, Any]) -> str:
    """Markdown above all."""
    count = len(overview["engines"])
    used = f"{say_bytes(overview['bytes'])} of {say_bytes(overview['limit_bytes'])}"
    store = (
        f"**{count} engine{'' if count == 1 else 's'}**, {used}, {say_bytes(overview['free_bytes'])} free on its disk"
    )
    return f"{store} · {code(overview['store'])} · {machine['gpu'] or 'no GPU'} · Slipstream {machine['version']}"


def code(text: object) -> str:
    """Markdown that shows a text as it is."""
    return f"`{str(text).replace('`', ' ')}`"


def bars(progress: Sequence[Mapping[str, Any]]) -> str:
    """HTML: a bar for each build request and build, the unfinished ones first."""
    if not progress:
        return "<p>Nothing is being built.</p>"
    goes_on = [row for row in progress if row["state"] not in ENDED]
    ended = [row for row in reversed(progress) if row["state"] in ENDED]
    return "".join(map(_bar, [*goes_on, *ended]))


def _bar(row: Mapping[str, Any]) -> str:
    fraction = 1.0 if row["state"] in ENDED else row["fraction"] or 0.0
    lines = [*row["report"], *([row["reason"]] if row["reason"] else [])]
    told = "".join(f"<li>{escape(line)}</li>" for line in lines)
    colour = _COLOURS.get(row["state"], _COLOUR)
    title = f"<b>{escape(row['label'])}</b> · {escape(_say(row))}"
    return (
        f'<div class="slipstream-request" data-state="{escape(row["state"])}" style="margin:.6em 0">{title}'
        f'{bar(fraction, colour)}<ul style="margin:.2em 0 0 1.2em">{told}</ul></div>'
    )


def bar(fraction: float, colour: str = _COLOUR, mark: float | None = None) -> str:
    """HTML: one bar, of a fraction of the whole width; with a line at `mark`, another such fraction."""
    fill = f'<div style="width:{_percent(fraction)};height:100%;background:{colour};border-radius:4px"></div>'
    line = ""
    if mark is not None:
        at = f"left:calc({_percent(mark)} - 1px);top:-3px;width:2px;height:14px"
        line = f'<div class="slipstream-mark" style="position:absolute;{at};background:currentColor"></div>'
    frame = "position:relative;height:8px;margin:.3em 0;background:#8884;border-radius:4px"
    return f'<div style="{frame}">{fill}{line}</div>'


def _percent(fraction: float) -> str:
    return f"{min(100.0, max(0.0, 100 * fraction)):.1f}%"


def _say(row: Mapping[str, Any]) -> str:
    state = str(row["state"])
    if state in ENDED:
        return state
    words = [state if row["fraction"] is None else f"{state} {row['fraction']:.0%}", row["message"]]
    if row["held"]:
        words.append("waits until the host is idle")
    elif row["left_s"] is not None:
        words.append(f"{say_roughly(row['left_s'])} left" if row["left_s"] else "done any moment")
    return ", ".join(filter(None, words))


_CELLS = {
    "ready": "✔ ready",
    "building": "being built",
    "stale": "to be built again",
    "failed": "not built",
    "missing": "no engine yet",
}


def grid(found: Mapping[str, Any]) -> dict[str, list[Any]]:
    """A row for each model, a column for each picture size."""
    rows = [[row["model"], *map(_cell, row["cells"])] for row in found["models"]]
    return {"headers": ["model", *(size.replace("x", "×") for size in found["sizes"])], "data": rows}


def _cell(cell: Mapping[str, Any]) -> str:
    state = _CELLS[cell["state"]]
    return f"{state}: {cell['why']}" if cell["why"] and cell["state"] in ("stale", "failed") else state


def details(engine: Mapping[str, Any]) -> str:
    """Markdown: what is known of one engine."""
    facts = {
        "engine": f"{engine['label']}, {engine['role']}",
        "id": engine["digest"],
        "state": say_state(engine) + (", in use" if engine["in_use"] else ""),
        "made by": f"{say_backend(engine['backend'])} {engine['precision']}, {engine['optimize']}",
        "made with": f"Slipstream {engine['slipstream']}, {say_when(engine['created'])}",
        "error": say_engine_error(engine),
        "speed": say_speed(engine),
        "inputs": ", ".join(f"{name} {'×'.join(axes)}" for name, axes in engine["shapes"].items()),
        "folder": engine["directory"],
    }
    return "\n".join(f"- {name}: {code(value)}" for name, value in facts.items())


def verified(problems: Mapping[str, str | None]) -> str:
    """Markdown: what came of a comparison with the checksums."""
    bad = {digest: problem for digest, problem in problems.items() if problem is not None}
    told = [f"- {code(digest[:SHOWN])}: {problem}" for digest, problem in bad.items()]
    return "\n".join([f"{len(problems)} checked, {len(bad)} bad.", "", *told])


def log_text(lines: Sequence[Mapping[str, Any]]) -> str:
    """The last lines of the log."""
    return "\n".join(
        f"{time.strftime('%H:%M:%S', time.localtime(line['time']))} {line['level']}: {line['text']}"
        for line in lines[-_LINES:]
    )
