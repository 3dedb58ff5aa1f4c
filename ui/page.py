"""The whole page."""

from __future__ import annotations

from typing import Any

from . import charts, wording
from .compat import follow, gradio, listen
from .manager import Manager
from .tab_build import BuildTab
from .tab_engines import EnginesTab
from .tab_models import ModelsTab

TITLE = "Slipstream engines"


def blocks(manager: Manager) -> Any:
    """The page as `gradio.Blocks`, to launch, to mount, or to hand a WebUI as a tab.

    Raises:
        BackendUnavailable: Gradio is not installed.
    """
    gr = gradio()
    with gr.Blocks(title=TITLE, analytics_enabled=False) as page:
        _Page(manager, page)
    return page


class _Page:
    """Puts the tabs together and keeps them up to date."""

    def __init__(self, manager: Manager, page: Any) -> None:
        gr = gradio()
        self._manager = manager
        self._machine = manager.machine()
        self._head = gr.Markdown()
        with gr.Tabs():
            with gr.Tab("Engines"):
                self._engines = EnginesTab(manager)
            with gr.Tab("Build"):
                self._build = BuildTab(manager)
            with gr.Tab("My models"):
                self._models = ModelsTab(manager)
            with gr.Tab("Charts"):
                self._speed = gr.HTML(elem_id="slipstream_speed")
                gr.Markdown("### Step skipping, calibrated on this machine")
                self._calibrated = gr.HTML(elem_id="slipstream_calibrated")
                gr.HTML(charts.measured())
            with gr.Tab("Log"):
                self._log = gr.Textbox(lines=20, max_lines=20, interactive=False, label="Slipstream's last lines")
        seen = gr.State(None)
        refresh = self._engines.refresh.click
        listen(page.load, self._look, [], [*self._outputs(), seen])
        listen(refresh, self._look_again, [], [*self._outputs(), seen])
        starts = [page.load, refresh, self._build.requested, self._models.requested]
        follow(self._tick, self._is_idle, seen, self._outputs(), starts)

    def _outputs(self) -> list[Any]:
        return [*self._about_engines(), self._models.table, self._build.progress, self._log]

    def _about_engines(self) -> list[Any]:
        return [self._head, self._engines.table, self._engines.chosen, self._speed, self._calibrated]

    def _look(self) -> list[Any]:
        return self._tick(None)

    def _look_again(self) -> list[Any]:
        """With nothing chosen any more: engines may be gone."""
        found, place = self._look(), self._outputs().index(self._engines.chosen)
        found[place] = self._engines.none_chosen(found[place])
        return found

    def _tick(self, seen: Any) -> list[Any]:
        """New values of `_outputs` where they changed, and what is seen now."""
        progress, log = self._manager.progress(), self._manager.log()
        bars, states = wording.bars(progress), [(row["label"], row["state"]) for row in progress]
        version = self._manager.version()
        now = (version, bars, log["next"], (version, states))
        same, before = gradio().update(), seen or (None, None, None, None)
        return [
            *(self._of_engines() if now[0] != before[0] else [same] * len(self._about_engines())),
            self._models.shown() if now[3] != before[3] else same,
            bars if bars != before[1] else same,
            wording.log_text(log["lines"]) if log["next"] != before[2] else same,
            now,
        ]

    def _of_engines(self) -> list[Any]:
        overview = self._manager.overview()
        head = wording.head(overview, self._machine)
        return [head, *self._engines.shown(overview), *self._of_machine(overview)]

    def _of_machine(self, overview: dict[str, Any]) -> list[str]:
        return [charts.speedups(overview["engines"]), charts.calibrated(self._manager.calibrated())]

    def _is_idle(self) -> bool:
        return all(row["state"] in wording.ENDED for row in self._manager.progress())
