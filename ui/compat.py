"""What differs between Gradio 3.41, 4.40 and 6: all of the page asks here. Gradio is imported when that happens."""

from __future__ import annotations

import importlib.util
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..core.errors import BackendUnavailable, SlipstreamError, first_line

log = logging.getLogger(__name__)

GET_GRADIO = (
    "The engine manager's page needs Gradio, which is not installed for this Python: "
    'pip install "slipstream[ui]", or pip install gradio'
)
_SECONDS = 1.0
"""Between two looks at what goes on."""

Tick = Callable[[Any], Sequence[Any]]
"""Given what was seen last, None at first: the new values of all outputs, and what is seen now."""


def is_there() -> bool:
    """Whether Gradio is installed."""
    return importlib.util.find_spec("gradio") is not None


def gradio() -> Any:
    """The module.

    Raises:
        BackendUnavailable: it is not installed, or does not load.
    """
    if not is_there():
        raise BackendUnavailable(GET_GRADIO)
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # it is read when Gradio is imported
    try:
        import gradio
    except Exception as error:  # packages beside it that it does not fit
        raise BackendUnavailable(
            f"Gradio is installed but does not load ({first_line(error)}). {GET_GRADIO}"
        ) from error
    return gradio


def version() -> tuple[int, ...]:
    """Of Gradio, such as (4, 40)."""
    return tuple(int(part) for part in gradio().__version__.split(".")[:2])


def listen(
    event: Callable[..., Any],
    act: Callable[..., Any],
    inputs: Sequence[Any] = (),
    outputs: Sequence[Any] = (),
    waits: bool = False,
) -> Any:
    """Have `act` answer an event, such as `button.click`; what it raises is shown to the person.

    Args:
        waits: it takes a while, and the outputs show that.
    """
    return _listen(event, _told(act), inputs, outputs, waits)


def _listen(
    event: Callable[..., Any],
    handler: Callable[..., Any],
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    waits: bool = False,
) -> Any:
    progress = "full" if waits else "hidden"
    # Gradio 6 shows errors of queued handlers alone; 3 would have all of them wait for one another.
    queue = version() >= (5,)
    return event(handler, list(inputs), list(outputs), queue=queue, show_progress=progress, **_private())


def listen_to_rows(table: Any, act: Callable[[Any, str], Any], given: Any, outputs: Sequence[Any]) -> None:
    """Have `act` answer a click on a row of a `Dataframe`: it gets the value of `given` and the row's first cell.

    A Gradio that does not say which row was clicked answers clicks on first cells alone: the table may be sorted.
    """

    told = _told(act)

    def on_select(value: Any, event: Any) -> Any:
        row = getattr(event, "row_value", None) or ([event.value] if event.index[1] == 0 else [])
        return told(value, str(row[0]) if row else "")

    on_select.__annotations__ = {"event": gradio().SelectData}  # by which Gradio knows what to hand over
    _listen(table.select, on_select, [given], outputs)


def listen_to_cells(table: Any, act: Callable[[Any, str, int], Any], given: Any, outputs: Sequence[Any]) -> Any:
    """Have `act` answer a click on a cell of a `Dataframe`: it gets the value of `given`, the row's first cell, and the
    number of the column; returns the event.

    A Gradio that does not say which row was clicked gives an empty text for it: the table may be sorted.
    """
    told = _told(act)

    def on_select(value: Any, event: Any) -> Any:
        row = getattr(event, "row_value", None)
        return told(value, str(row[0]) if row else "", int(event.index[1]))

    on_select.__annotations__ = {"event": gradio().SelectData}
    return _listen(table.select, on_select, [given], outputs)


def follow(tick: Tick, is_idle: Callable[[], bool], state: Any, outputs: Sequence[Any], starts: Sequence[Any]) -> None:
    """Keep outputs up to date.

    Args:
        is_idle: nothing goes on that would change them.
        state: a `gr.State` for what was seen last.
        starts: events after which something may go on, which Gradio 3 does not notice by itself.
    """
    timer = getattr(gradio(), "Timer", None)
    if timer is not None:
        listen(timer(_SECONDS).tick, tick, [state], [*outputs, state])
        return

    def watch() -> Iterator[list[Any]]:
        seen, goes_on = None, True
        while goes_on:
            goes_on = not is_idle()  # before it is looked at: so the end is seen too
            *shown, seen = tick(seen)
            yield shown
            time.sleep(_SECONDS if goes_on else 0)

    for start in starts:
        start(watch, [], list(outputs), show_progress="hidden", **_private())


def column_widths(percent: Sequence[float]) -> dict[str, Any]:
    """Of `Dataframe`; Gradio 3 goes by what stands in the cells."""
    return {"column_widths": [f"{each}%" for each in percent]} if version() >= (4,) else {}


def queued(page: Any) -> Any:
    """The page, with handlers that do not wait for one another."""
    return page.queue(concurrency_count=16) if version() < (4,) else page.queue(default_concurrency_limit=16)


def launch_options() -> dict[str, Any]:
    """Of `launch`, for a page that only this project's documentation describes."""
    if version() < (5,):
        return {"show_api": False}
    if version() < (6,):
        return {"show_api": False, "ssr_mode": False}
    return {"footer_links": [], "ssr_mode": False}


def _private() -> dict[str, Any]:
    """Handlers are no programming interface: the routes and the command line are."""
    return {"api_visibility": "private"} if version() >= (6,) else {"api_name": False}


def _told(act: Callable[..., Any]) -> Callable[..., Any]:
    def handler(*values: Any) -> Any:  # without the hints of `act`, which older Gradios look for in the wrong module
        try:
            return act(*values)
        except (SlipstreamError, ValueError) as error:
            raise _error(str(error)) from None
        except Exception as error:
            log.exception("Slipstream: the page's %s broke", getattr(act, "__name__", "handler"))
            raise _error(f"Slipstream broke ({first_line(error)}); please report this with the log") from None

    return handler


def _error(message: str) -> Exception:
    """What Gradio shows on the page; newer ones can do without a traceback in the log."""
    options = {"print_exception": False} if version() >= (5,) else {}
    error: Exception = gradio().Error(message, **options)
    return error
