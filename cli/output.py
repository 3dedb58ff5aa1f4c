"""Output of the commands: tables or one JSON document on stdout, progress on stderr."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

from ..core.formatting import say_seconds
from ..core.progress import Progress, ProgressCallback

Rows = Sequence[Sequence[str]]


class Output:
    """Where a command's results go.

    Args:
        as_json: results are one JSON document instead of text.
        stream: for results; the real stdout, also while libraries' prints are sent elsewhere.
    """

    def __init__(self, as_json: bool, stream: TextIO) -> None:
        self.as_json = as_json
        self._stream = stream

    def show(self, data: Any, tell: Callable[[], None]) -> None:
        """Print a command's result: `data` for machines, or what `tell` prints for people."""
        if self.as_json:
            print(json.dumps(data, indent=2, ensure_ascii=False), file=self._stream)
        else:
            tell()

    def line(self, text: str = "") -> None:
        print(text, file=self._stream)

    def flush(self) -> None:
        """For commands that go on."""
        self._stream.flush()

    def table(self, columns: Sequence[str], rows: Rows, width: int | None = None) -> None:
        """A row a line; with a `width`, what does not fit is cut from the last column."""
        if width is not None:
            rows = _cut(columns, rows, width)
        if _is_terminal(self._stream) and _has_rich():
            _rich_table(columns, rows, self._stream)
        else:
            _plain_table(columns, rows, self._stream)

    def facts(self, facts: Sequence[tuple[str, str]]) -> None:
        """Names and values, one pair a line."""
        width = max(len(name) for name, _ in facts)
        for name, value in facts:
            self.line(f"{name.ljust(width)}  {value}")


@contextlib.contextmanager
def until_ready(text: str) -> Iterator[None]:
    """Show on a terminal what is waited for, until it is there."""
    if not _is_terminal(sys.stderr):
        yield
        return
    print(text, end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print(f"\r{' ' * len(text)}\r", end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress_bar(title: str) -> Iterator[ProgressCallback]:
    """Show a build's progress on stderr: a bar on a terminal, else a line whenever something new begins."""
    if _is_terminal(sys.stderr) and _has_rich():
        with _rich_bar(title) as update:
            yield update
    else:
        yield _plain_progress(title)


def set_up_logging(verbose: bool) -> None:
    """Slipstream's own warnings go to stderr; those of the libraries it uses only when asked for."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    ours, theirs = logging.getLogger("slipstream"), logging.getLogger()
    ours.handlers, ours.propagate = [handler], False
    ours.setLevel(logging.INFO if verbose else logging.WARNING)
    theirs.handlers = [handler] if verbose else [logging.NullHandler()]
    if not verbose:
        warnings.simplefilter("ignore")


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty()


def _has_rich() -> bool:
    try:
        import rich  # noqa: F401
    except ImportError:  # a pack that was cloned by hand, its requirements not installed
        return False
    return True


def _rich_table(columns: Sequence[str], rows: Rows, stream: TextIO) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*map(escape, row))
    Console(file=stream).print(table)


def _cut(columns: Sequence[str], rows: Rows, width: int) -> Rows:
    """The rows with their last cells cut to what is left of `width`, or to the length of their column's name."""
    taken = sum(max(map(len, column)) + 2 for column in list(zip(columns, *rows, strict=True))[:-1])
    left = max(width - taken, len(columns[-1]))
    return [(*row[:-1], row[-1] if len(row[-1]) <= left else f"{row[-1][: left - 1]}…") for row in rows]


def _plain_table(columns: Sequence[str], rows: Rows, stream: TextIO) -> None:
    lines = [tuple(columns), *map(tuple, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join(cells).rstrip(), file=stream)


@contextlib.contextmanager
def _rich_bar(title: str) -> Iterator[ProgressCallback]:
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    message = TextColumn("{task.fields[message]}")
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), message)
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(escape(title), total=1.0, message="")

        def update(progress: Progress) -> None:
            text = escape(f"{progress.phase}: {progress.message}")
            if progress.fraction is None:
                bar.update(task, message=text)
            else:
                bar.update(task, completed=progress.fraction, message=text)

        yield update


def _plain_progress(title: str) -> ProgressCallback:
    started = time.monotonic()
    shown: list[tuple[str, str]] = []

    def update(progress: Progress) -> None:
        step = (progress.phase, progress.message)
        if shown[-1:] != [step]:
            shown.append(step)
            elapsed = say_seconds(time.monotonic() - started)
            print(f"{title}: {progress.phase}: {progress.message} ({elapsed})", file=sys.stderr, flush=True)

    return update
