"""What a person can do where a node has no engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.compile_backend.cpp import toolchain
from slipstream.core.eight_bits import CHOOSE_AUTO
from slipstream.core.spec import Quantised
from slipstream.engine_cache import EngineStore
from slipstream.hosts.comfy.node_state.ways_out import way_out
from slipstream.runtime.module import AcceleratedModule
from slipstream.runtime.provider import EngineProvider
from slipstream.runtime.settings.model_settings import BackendChoice, Settings
from slipstream.tests.fakes import NullBackend


@pytest.fixture
def module_of(tmp_path: Path):
    provider = EngineProvider(EngineStore(tmp_path), [NullBackend()])
    return lambda **chosen: AcceleratedModule(provider, Settings(**chosen))


def test_a_missing_compiler_is_to_be_installed(module_of, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: None)
    missing = toolchain.why_no_cpp_compiler()
    assert missing and way_out(module_of(), "failed", f"failed: nothing was built. compiled: {missing}") == "compiler"
    monkeypatch.undo()
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: name)
    assert way_out(module_of(), "failed", f"failed: {missing}") == "retry", "it is there by now"


def test_a_precision_that_this_gpu_lacks_is_chosen_in_the_node_or_in_the_settings(module_of) -> None:
    reason = f"fp8 needs another GPU; {CHOOSE_AUTO}"
    assert way_out(module_of(precision=Quantised.FP8), "eager", reason) == "precision"
    assert way_out(module_of(), "eager", reason) == "settings"


def test_acceleration_is_switched_on_where_it_was_switched_off(module_of) -> None:
    assert way_out(module_of(backend=BackendChoice.OFF), "off", "switched off") == "backend"
    assert way_out(module_of(), "off", "switched off") == "settings"


@pytest.mark.parametrize(
    ("kind", "mend"), [("failed", "retry"), ("slower", "retry"), ("eager", None), ("ready", None), ("building", None)]
)
def test_a_failed_build_may_be_tried_again(module_of, kind: str, mend: str | None) -> None:
    assert way_out(module_of(), kind, "another node patches the attention") == mend
