"""Which host a process is, whatever else it could import."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from slipstream.hosts.detect import Host, running_host


@pytest.fixture
def none(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process that is no host."""
    for name in ("modules.script_callbacks", "modules_forge", "server"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return monkeypatch


def loaded(patch: pytest.MonkeyPatch, name: str, **contents: object) -> None:
    module = ModuleType(name)
    vars(module).update(contents)
    patch.setitem(sys.modules, name, module)


def comfyui(patch: pytest.MonkeyPatch) -> None:
    loaded(patch, "server", PromptServer=SimpleNamespace(instance=object()))


def webui(patch: pytest.MonkeyPatch) -> None:
    loaded(patch, "modules.script_callbacks", on_ui_tabs=print)


def test_nothing_runs(none: pytest.MonkeyPatch) -> None:
    assert running_host() is Host.NONE


def test_comfyui(none: pytest.MonkeyPatch) -> None:
    comfyui(none)
    assert running_host() is Host.COMFYUI


def test_comfyui_that_can_be_imported_and_does_not_run(none: pytest.MonkeyPatch) -> None:
    loaded(none, "comfy")
    loaded(none, "server", PromptServer=SimpleNamespace())
    assert running_host() is Host.NONE


def test_a_module_of_somebody_else_called_server(none: pytest.MonkeyPatch) -> None:
    loaded(none, "server")
    assert running_host() is Host.NONE


def test_automatic1111(none: pytest.MonkeyPatch) -> None:
    webui(none)
    assert running_host() is Host.A1111


def test_forge_goes_before_a_comfyui_inside_of_it(none: pytest.MonkeyPatch) -> None:
    webui(none)
    loaded(none, "modules_forge")
    comfyui(none)
    loaded(none, "comfy")
    assert running_host() is Host.FORGE


def test_forge_that_has_not_imported_its_own_part_yet(none: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "modules_forge").mkdir()
    none.syspath_prepend(str(tmp_path))
    webui(none)
    assert running_host() is Host.FORGE
