"""The third tab: would an engine serve pictures of this size?"""

from __future__ import annotations

from ..runtime.reporting.engine_coverage import Asked
from ..runtime.settings.model_settings import parse_resolutions
from . import wording
from .compat import gradio, listen
from .form import batch_slider, tokens_slider
from .manager import Manager


class CheckTab:
    def __init__(self, manager: Manager) -> None:
        gr = gradio()
        self._manager = manager
        with gr.Row():
            size = gr.Textbox("512x512", label="Resolution of the picture", elem_id="slipstream_hit_size")
            batch, tokens = batch_slider(), tokens_slider()
        ask = gr.Button("Would it hit?", variant="primary")
        verdict = gr.Markdown(elem_id="slipstream_verdict")
        listen(ask.click, self._coverage, [size, batch, tokens], [verdict])

    def _coverage(self, size: str, batch: float, tokens: float) -> str:
        found = parse_resolutions(size or "")
        if len(found) != 1:
            raise ValueError("Write one resolution, such as 512x768")
        (resolution,) = found
        return wording.coverage(
            self._manager.coverage(Asked(resolution.width, resolution.height, int(batch), int(tokens)))
        )
