"""The first tab: the stored engines, and actions on them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..core.formatting import say_bytes
from . import wording
from .compat import column_widths, gradio, listen, listen_to_rows
from .manager import Manager

_GB = 2**30
_MOST_DAYS = 365


class EnginesTab:
    """The table of engines, and buttons for what is chosen in it.

    Attributes:
        table, chosen: show the store's engines; see `shown`.
        refresh: the button that looks again.
    """

    def __init__(self, manager: Manager) -> None:
        gr = gradio()
        self._manager = manager
        self.table = gr.Dataframe(
            headers=list(wording.COLUMNS),
            datatype=["str"] * len(wording.COLUMNS),
            type="array",
            interactive=False,
            wrap=True,
            label="Engines",
            **column_widths(wording.WIDTHS),
        )
        self.chosen = gr.Dropdown(
            choices=[], value=[], multiselect=True, label="Chosen engines", elem_id="slipstream_chosen",
            allow_custom_value=True,  # else what is offered no longer ends in an error of Gradio's, without words
        )  # fmt: skip
        with gr.Row():
            self.refresh = gr.Button("Refresh")
            details, verify, verify_all = (gr.Button(text) for text in ("Details", "Verify chosen", "Verify all"))
            delete = gr.Button("Delete chosen…", variant="stop")
        asked = gr.State([])  # what the question names: the list may be changed before it is answered
        with gr.Group(visible=False) as asking:
            question = gr.Markdown()
            with gr.Row():
                yes, no = gr.Button("Yes, delete them", variant="stop"), gr.Button("Keep them")
        self.message = gr.Markdown(elem_id="slipstream_message")
        self._prune()
        changed = [self.table, self.chosen, self.message]
        listen_to_rows(self.table, self._clicked, self.chosen, [self.chosen])
        listen(details.click, self._details, [self.chosen], [self.message])
        listen(verify.click, self._verify, [self.chosen], changed, waits=True)
        listen(verify_all.click, self._verify_all, [], changed, waits=True)
        listen(delete.click, self._ask, [self.chosen], [asking, question, asked])
        listen(no.click, lambda: gr.update(visible=False), [], [asking])
        listen(yes.click, self._delete, [asked], [asking, *changed])

    @staticmethod
    def shown(overview: Mapping[str, Any]) -> list[Any]:
        """Of table and choices."""
        engines = overview["engines"]
        return [wording.table(engines), gradio().update(choices=wording.choices(engines))]

    @staticmethod
    def none_chosen(choices: Mapping[str, Any]) -> dict[str, Any]:
        """The same choices, of which none is chosen any more."""
        return {**choices, "value": []}

    def _prune(self) -> None:
        gr = gradio()
        most = max(1.0, math.ceil(2 * self._manager.provider.store.limit_bytes / _GB) / 2)
        with gr.Accordion("Prune: make room on the disk", open=False):
            gr.Markdown("Removes the engines that were not used for the longest time until the rest fits.")
            keep = gr.Slider(0, most, value=most, step=0.5, label="GB that may stay")
            days = gr.Slider(
                0, _MOST_DAYS, value=0, step=1, label="also those not used for so many days (0: keep them)"
            )
            sure = gr.Checkbox(label="Yes, remove them", value=False)
            prune = gr.Button("Prune", variant="stop")
        outputs = [self.table, self.chosen, self.message, sure]
        listen(prune.click, self._pruned, [keep, days, sure], outputs)

    def _clicked(self, chosen: Sequence[str], digest: str) -> Any:
        """What is chosen after a click on the row of an engine: it as well, or it no more."""
        others = [each for each in chosen if wording.ids(each) != [digest]]
        if len(others) == len(chosen):
            offered = wording.choices(self._manager.overview()["engines"])
            others += [each for each in offered if wording.ids(each) == [digest]]
        return gradio().update(value=others)

    def _details(self, chosen: Sequence[str]) -> str:
        found = [self._manager.details(each) for each in wording.ids(chosen)]
        return "\n\n".join(map(wording.details, found))

    def _verify(self, chosen: Sequence[str]) -> list[Any]:
        problems = self._manager.verify(wording.ids(chosen))
        return [*self._after(), wording.verified(problems)]

    def _verify_all(self) -> list[Any]:
        problems = self._manager.verify()
        return [*self._after(), wording.verified(problems)]

    def _ask(self, chosen: Sequence[str]) -> list[Any]:
        wording.ids(chosen)
        named = "\n".join(f"- {wording.code(each)}" for each in chosen)
        return [gradio().update(visible=True), f"**Delete for good?**\n\n{named}", list(chosen)]

    def _delete(self, asked: Sequence[str]) -> list[Any]:
        deleted, reasons = self._manager.delete(wording.ids(asked))
        message = "\n\n".join([f"{len(deleted)} deleted.", *reasons])
        return [gradio().update(visible=False), *self._after(), message]

    def _pruned(self, gigabytes: float, days: float, sure: bool) -> list[Any]:
        if not sure:
            raise ValueError("Tick “Yes, remove them” first: what is pruned is gone for good")
        removed = self._manager.prune(int(gigabytes * _GB), days or None)
        freed = say_bytes(sum(entry.bytes for entry in removed))
        return [*self._after(), f"{len(removed)} engines removed, {freed} freed.", False]

    def _after(self) -> list[Any]:
        """Of table and choices, with nothing chosen any more."""
        table, choices = self.shown(self._manager.overview())
        return [table, self.none_chosen(choices)]
