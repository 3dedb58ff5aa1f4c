"""Slipstream's controls below the prompt of a WebUI, and its tab of engines."""

from __future__ import annotations

import functools
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..hosts.detect import Host, running_host

if TYPE_CHECKING:
    from ..runtime.provider import EngineProvider
    from .manager import Manager

log = logging.getLogger(__name__)

TITLE = "Slipstream"
_TAB = "slipstream_tab"
_NO_TAB = "Slipstream's list of engines cannot be shown in this WebUI"


def register(root: Path) -> None:
    """Tell the WebUI of the tab, and on AUTOMATIC1111 of the UNet; called at each load of the scripts.

    Args:
        root: our folder, which the WebUI put on `sys.path` and which leaves it again.
    """
    from modules import script_callbacks

    script_callbacks.on_before_ui(lambda: _leave_path(root))
    script_callbacks.on_ui_tabs(tabs)
    if running_host() is Host.A1111:
        from ..hosts.a1111.unet_option import add_options

        script_callbacks.on_list_unets(add_options)


def _leave_path(root: Path) -> None:
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != root]


def tabs() -> list[tuple[Any, str, str]]:
    """For `on_ui_tabs`: (Blocks, title, id), or nothing where the page cannot be shown."""
    try:
        return [(_page(), TITLE, _TAB)]
    except Exception:  # whatever this version of gradio raises: the WebUI itself must start
        log.exception(_NO_TAB)
        return []


def _page() -> Any:
    from ..hosts.webui_process import provider
    from . import page

    page_of_webui = page.blocks(_manager(provider()))
    for component in page_of_webui.blocks.values():
        component.do_not_save_to_config = True  # the WebUI keeps the values of tabs by their labels
    return page_of_webui


@functools.lru_cache(maxsize=1)
def _manager(provider: EngineProvider) -> Manager:
    """One for all pages: a WebUI makes them anew when it is reloaded."""
    from ..hosts.forge.checkpoint_builder import CheckpointBuilder
    from .manager import Manager

    return Manager(provider, CheckpointBuilder(provider))


def script_class() -> type:
    """The script, whose base class only a WebUI has."""
    from modules import scripts

    host = running_host()

    class SlipstreamScript(scripts.Script):  # type: ignore[misc]
        sorting_priority = 100_000  # after those that change the model

        def title(self) -> str:
            return TITLE

        def show(self, is_img2img: bool) -> Any:
            return scripts.AlwaysVisible

        def ui(self, is_img2img: bool) -> list[Any]:
            return controls("img2img" if is_img2img else "txt2img") if host is Host.FORGE else []

        def process_before_every_sampling(self, p: Any, *chosen: Any, **_: Any) -> None:
            """Once for each pass of a picture."""
            if host is Host.FORGE:
                _lead(p, chosen)

        def process_batch(self, p: Any, *_: Any, **__: Any) -> None:
            if host is Host.A1111:
                from ..hosts.a1111.pictures import begin_picture

                begin_picture(p)

        def postprocess_batch(self, p: Any, *_: Any, **__: Any) -> None:
            if host is Host.A1111:
                from ..hosts.a1111.pictures import end_picture

                end_picture(p)

    return SlipstreamScript


def _lead(p: Any, chosen: tuple[Any, ...]) -> None:
    from ..hosts.forge.choices import Choices
    from ..hosts.forge.sampling import ENGINES, lead_next_sampling

    try:
        choices = Choices.of_text(*chosen)
    except ValueError as error:
        p.extra_generation_params[ENGINES] = f"plain model: {error}"
        log.warning("Slipstream runs your model without an engine: %s", error)
        return
    lead_next_sampling(p, choices)


def controls(tab: str) -> list[Any]:
    """The components whose values are the arguments of `Choices.of_text`.

    Args:
        tab: that they are for, as a part of their ids.
    """
    import gradio as gr

    from ..hosts.forge.choices import BACKENDS, NO_PRESET, POLICIES, preset_names

    def named(name: str) -> str:
        return f"slipstream_{tab}_{name}"

    with gr.Accordion(TITLE, open=False, elem_id=named("accordion")):
        with gr.Row():
            backend = gr.Dropdown(list(BACKENDS), value="off", label="Backend", elem_id=named("backend"))
            build = gr.Dropdown(list(POLICIES), value="background", label="Build", elem_id=named("build"))
            preset = gr.Dropdown(preset_names(), value=NO_PRESET, label="Step skipping", elem_id=named("preset"))
        resolutions = gr.Textbox("auto", label="Resolutions", elem_id=named("resolutions"))
    return [backend, build, preset, resolutions]
