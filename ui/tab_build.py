"""The second tab: build requests and their progress."""

from __future__ import annotations

from typing import Any

from ..core.spec import Optimize
from ..runtime.requests.build_needs import say_needs
from ..runtime.settings.model_settings import (
    AUTO,
    MAX_BATCH,
    MAX_TOKENS,
    PRECISIONS,
    BackendChoice,
    ShapeChoice,
)
from . import wording
from .compat import gradio, listen
from .form import PRESETS, Answers, batch_slider, tokens_slider
from .manager import Manager


class BuildTab:
    """The build form, an estimate, and progress bars.

    Attributes:
        progress: shows `wording.bars`.
        requested: the event after which a build is pending.
    """

    def __init__(self, manager: Manager) -> None:
        gr = gradio()
        self._manager = manager
        answers = self._form()
        with gr.Row():
            look = gr.Button("Look for files")
            foresee = gr.Button("What will it take?")
            build = gr.Button("Build", variant="primary", elem_id="slipstream_build")
            cancel, cancel_all = gr.Button("Cancel"), gr.Button("Cancel all")
        self.message = gr.Markdown(elem_id="slipstream_needs")
        self.progress = gr.HTML(elem_id="slipstream_progress")
        listen(look.click, self._models, [], answers[:1])
        listen(foresee.click, self._foresee, answers, [self.message])
        requested = listen(build.click, self._request, answers, [self.message])
        listen(cancel.click, self._cancel, [], [self.message])
        listen(cancel_all.click, self._cancel_all, [], [self.message])
        self.requested = requested.then

    def _form(self) -> list[Any]:
        """Its components, in the order of `Answers`."""
        gr = gradio()
        with gr.Row():
            models = self._manager.builder.models()
            model = gr.Dropdown(
                choices=models,
                value=None,
                label="Model file: choose one, or write its name",
                allow_custom_value=True,
                elem_id="slipstream_model",
            )
            role = gr.Radio(self._roles(), value=self._roles()[0], label="Role")
        with gr.Row():
            preset = gr.Radio(list(PRESETS), label="Sizes for")
            sizes = gr.Textbox("512x512", label="Resolutions", elem_id="slipstream_sizes")
            batch = batch_slider()
        with gr.Row():
            precision = gr.Radio(list(PRECISIONS), value=AUTO, label="Precision")
            backends = [each.value for each in BackendChoice if each is not BackendChoice.OFF]
            backend = gr.Radio(backends, value=AUTO, label="Backend")
        more = self._advanced()
        listen(preset.change, PRESETS.get, [preset], [sizes])
        return [model, role, sizes, batch, precision, backend, *more]

    def _advanced(self) -> list[Any]:
        gr = gradio()
        with gr.Accordion("Advanced", open=False):
            efforts = [each.value for each in Optimize if each is not Optimize.BLOCKS]
            optimize = gr.Radio(efforts, value=Optimize.BALANCED.value, label="Optimisation: build time to spend")
            shapes = [each.value for each in ShapeChoice]
            engines = gr.Radio(shapes, value=ShapeChoice.EACH.value, label="Engines")
            gr.Markdown(
                "*One for a range* goes from the smallest to the largest of the listed resolutions and is tuned for "
                "the first; batches go from 1 up, texts from 77 tokens up. Both kinds of one engine for all need "
                "TensorRT; other backends make one per size."
            )
            max_batch = batch_slider(MAX_BATCH, "Largest batch of such an engine")
            tokens = tokens_slider()
            longest = tokens_slider(MAX_TOKENS, "Longest text of an engine for all")
            bake = gr.Checkbox(False, label="Bake the weights in (TensorRT only: one checkpoint, no LoRA)")
        return [optimize, engines, max_batch, tokens, longest, bake]

    def _roles(self) -> list[str]:
        return [role.value for role in self._manager.builder.roles]

    def _models(self) -> Any:
        return gradio().update(choices=self._manager.builder.models())

    def _foresee(self, *answers: Any) -> str:
        needs = self._manager.foresee(Answers(*answers).wanted())
        warning = [f"**Too little {needs.shortage}.**"] if needs.shortage else []
        return "\n".join([*(f"- {line}" for line in say_needs(needs)), "", *warning])

    def _request(self, *answers: Any) -> str:
        request = self._manager.request_build(Answers(*answers).wanted())
        return f"Requested: {wording.code(request.wanted)}. The build goes on when this page is closed."

    def _cancel(self) -> str:
        stopped = self._manager.cancel()
        if not stopped:
            raise ValueError("Nothing is being built that could be cancelled")
        return f"Cancelled: {wording.code(stopped)}. Nothing of it is kept."

    def _cancel_all(self) -> str:
        return f"{self._manager.cancel_all()} cancelled."
