"""What the page does, without a page."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from slipstream.core.spec import Role
from slipstream.engine_cache import EngineStore
from slipstream.runtime.building import build
from slipstream.runtime.provider import EngineProvider, HostHooks
from slipstream.runtime.requests.build_requests import Wanted
from slipstream.runtime.settings.model_settings import Settings
from slipstream.sampling.saved import SavedPreset, save
from slipstream.tests.fakes import CPU, FakeSource, FakeWorker, NullBackend, run_once
from slipstream.ui.manager import Manager


class ModelBuilder:
    """Offers one model and makes nothing of it."""

    roles: tuple[Role, ...] = (Role.UNET,)

    def device(self) -> torch.device:
        return CPU

    def models(self) -> list[str]:
        return ["tiny"]

    def file_of(self, model: str) -> str:
        return ""

    def parameter_count(self, model: str, role: Role) -> int | None:
        return None

    def make(self, wanted: Wanted, hooks: HostHooks) -> Iterable[str]:
        return ["made"]

    def rest(self) -> None: ...


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Manager:
    backend = NullBackend()
    monkeypatch.setattr(build, "run_build", FakeWorker([backend]))
    return Manager(EngineProvider(EngineStore(tmp_path / "engines"), [backend]), ModelBuilder())


def wanted(model: str = "tiny", role: Role = Role.UNET) -> Wanted:
    return Wanted(model, role, Settings.of_text(resolutions="64x64"), 2, 77)


def test_an_order_is_carried_out_and_seen(manager: Manager) -> None:
    before = manager.version()
    manager.request_build(wanted())
    assert manager.requests.wait(30)
    (row,) = manager.progress()
    assert row["state"] == "done" and row["report"] == ["made"] and manager.version() != before


def test_a_cell_of_the_grid_is_ordered(manager: Manager) -> None:
    manager.show_sizes("72x64")
    assert "72x64" in manager.grid()["sizes"]
    manager.request_cell("tiny", "72×64")
    assert manager.requests.wait(30)
    (row,), at = manager.grid()["models"], manager.grid()["sizes"].index("72x64")
    assert row["model"] == "tiny" and row["cells"][at]["state"] == "ready"
    with pytest.raises(ValueError, match="multiples of 8"):
        manager.show_sizes("70x64")


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (wanted("../etc/passwd"), "no model file '../etc/passwd'; the closest: tiny"),
        (wanted(role=Role.CONTROLNET), "first uses it"),
    ],
)
def test_what_is_not_offered_is_not_ordered(manager: Manager, asked: Wanted, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        manager.request_build(asked)
    assert not manager.requests.all()


def test_what_was_calibrated_lies_beside_engines(manager: Manager, tmp_path: Path) -> None:
    assert manager.calibrated() == []
    mine = SavedPreset("Mine", 20, (0, 5, 19), "SD15", "euler", "normal", 4.0, 33.3, "2025-11-30")
    save(mine, tmp_path / "engines" / "step_skipping")
    assert manager.calibrated() == [mine]
    assert Manager(manager.provider, ModelBuilder(), tmp_path / "elsewhere").calibrated() == []


def test_an_engine_comes_and_goes(manager: Manager) -> None:
    empty = manager.version()
    run_once(manager.provider, FakeSource())
    assert manager.version() != empty
    (engine,) = manager.overview()["engines"]
    short = engine["digest"][:12]
    assert manager.details(short)["label"] == engine["label"]
    assert manager.verify([short]) == manager.verify() == {engine["digest"]: None}
    there = manager.version()
    assert manager.delete([short]) == ([engine["digest"]], []), "the pool's own hold on it does not count"
    assert manager.version() != there
    with pytest.raises(ValueError, match="press Refresh"):
        manager.details(short)


def test_an_engine_in_use_is_kept(manager: Manager) -> None:
    run_once(manager.provider, FakeSource())
    (entry,) = manager.provider.store.list()
    with manager.provider.store.hold(entry):
        deleted, reasons = manager.delete([entry.digest[:12]])
    assert not deleted and "in use" in reasons[0] and manager.provider.store.has(entry.digest)


def test_prune(manager: Manager) -> None:
    run_once(manager.provider, FakeSource())
    manager.provider.pool.clear()
    assert not manager.prune(2**40, None)
    assert len(manager.prune(0, None)) == 1


def test_there_is_nothing_to_cancel(manager: Manager) -> None:
    assert manager.cancel() == "" and manager.cancel_all() == 0


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("sd15.safetensors", "sd15.safetensors"), ("SD15", "sd15.safetensors"), (" xl/juggernaut ", "xl/juggernaut.ckpt")],
)
def test_a_typed_name_is_looked_up(manager: Manager, monkeypatch: pytest.MonkeyPatch, typed: str, meant: str) -> None:
    offered = ["sd15.safetensors", "sd15-inpainting.safetensors", "xl/juggernaut.ckpt", "xl/other.ckpt"]
    monkeypatch.setattr(manager.builder, "models", lambda: offered)
    assert manager.model_named(typed) == meant
    with pytest.raises(ValueError, match="may be xl/juggernaut.ckpt, xl/other.ckpt: write more"):
        manager.model_named("ckpt")
    with pytest.raises(ValueError, match="no model file 'jugernaut.ckpt'; the closest: xl/juggernaut.ckpt"):
        manager.model_named("jugernaut.ckpt")
