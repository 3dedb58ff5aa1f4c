"""The third tab: engines for the user's own models, a grid of model files and sizes in which a click builds."""

from __future__ import annotations

from typing import Any

from . import wording
from .compat import gradio, listen, listen_to_cells
from .manager import Manager


class ModelsTab:
    """The grid.

    Attributes:
        table: shows what is there; see `shown`.
        requested: the event after which a build is pending.
    """

    def __init__(self, manager: Manager) -> None:
        gr = gradio()
        self._manager = manager
        gr.Markdown(
            "An engine for each of your models and picture sizes, for one picture with CFG. A click on a cell has it "
            "built. Engines of blocks serve any size, and are not in this table."
        )
        with gr.Row():
            more = gr.Textbox(
                "", label="More picture sizes, such as 768x512, 832x1216", elem_id="slipstream_more_sizes"
            )
            show = gr.Button("Show")
        # As pandas has tables, with the columns' names: by then there may be more sizes.
        self.table = gr.Dataframe(
            type="pandas", interactive=False, wrap=True, label="Models", elem_id="slipstream_grid"
        )
        self.message = gr.Markdown(elem_id="slipstream_grid_message")
        listen(show.click, self._show, [more], [self.table])
        self.requested = listen_to_cells(self.table, self._build, self.table, [self.message]).then

    def shown(self) -> Any:
        """Of the table."""
        return wording.grid(self._manager.grid())

    def _show(self, text: str) -> Any:
        self._manager.show_sizes(text or "")
        return self.shown()

    def _build(self, seen: Any, model: str, column: int) -> str:
        if not model:
            raise ValueError("This Gradio does not say which row was clicked: use the tab Build, or a newer Gradio")
        if column == 0:
            raise ValueError("Click the cell of a picture size, right of the model's name")
        request = self._manager.request_cell(model, str(list(seen.columns)[column]))
        return f"Requested: {wording.code(request.wanted)}. The build goes on when this page is closed."
