"""The WebUI's own loader finds the extension, and nothing of it gets in the way of others."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from modules import script_callbacks, scripts

from slipstream.hosts.detect import Host, running_host
from slipstream.tests.webui.support.boot import EXTENSION, script_of


def ours() -> list[scripts.ScriptClassData]:
    return [found for found in scripts.scripts_data if EXTENSION in found.path]


def test_the_loader_finds_one_script() -> None:
    (found,) = ours()
    assert found.path.endswith("scripts/slipstream_webui.py")
    assert found.script_class.__name__ == "SlipstreamScript"


def test_the_script_is_shown_always_with_its_controls() -> None:
    import gradio as gr

    for is_img2img in (False, True):
        runner = scripts.ScriptRunner()
        runner.initialize_scripts(is_img2img)
        script = script_of(runner)
        with gr.Blocks():
            controls = script.ui(is_img2img)
        assert [control.label for control in controls] == ["Backend", "Build", "Step skipping", "Resolutions"]


def test_our_rooms_are_on_no_path_once_the_page_is_made(root: Path) -> None:
    script_callbacks.before_ui_callback()
    assert root not in {Path(entry or ".").resolve() for entry in sys.path}


def test_a_running_webui_is_found_though_comfyui_can_be_imported() -> None:
    assert running_host() is Host.FORGE


def test_the_tab_shows_the_engines_page(monkeypatch: pytest.MonkeyPatch) -> None:
    ((blocks, title, name),) = webui().tabs()
    assert (title, name) == ("Slipstream", "slipstream_tab")
    assert blocks.blocks and all(part.do_not_save_to_config for part in blocks.blocks.values())


def test_a_page_that_cannot_be_shown_leaves_the_webui_its_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise ImportError("no page")

    monkeypatch.setattr(webui(), "_page", broken)
    assert webui().tabs() == []
    assert "list of engines cannot be shown" in caplog.text


def webui() -> Any:
    from slipstream.ui import webui as found

    return found
