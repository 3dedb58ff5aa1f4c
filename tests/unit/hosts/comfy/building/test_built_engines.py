"""When Build Engine looks for its engines again, instead of being served from ComfyUI's cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from slipstream.hosts.comfy.building.built_engines import BuiltEngines
from slipstream.runtime.settings.model_settings import BackendChoice
from slipstream.runtime.settings.preferences import Preferences


def provider_of(stored: dict[str, object], **preferred: Any) -> Any:
    return SimpleNamespace(store=SimpleNamespace(lookup=stored.get), preferences=lambda: Preferences(**preferred))


def test_it_looks_again_once_an_engine_is_gone() -> None:
    found, stored = BuiltEngines(), {"a": object(), "b": object()}
    provider = provider_of(stored)
    first = found.fingerprint(provider)
    found.note(["a"])
    found.note(["b"])
    assert found.fingerprint(provider) == first, "pictures behind it would be sampled again"
    del stored["a"]
    second = found.fingerprint(provider)
    assert second != first and found.fingerprint(provider) == second
    stored["a"] = object()
    found.note(["a"])
    assert found.fingerprint(provider) == second


def test_it_looks_again_once_auto_means_something_else() -> None:
    found = BuiltEngines()
    kinds = [{}, {"backend": BackendChoice.OFF}, {"backend": BackendChoice.COMPILED}]
    assert len({found.fingerprint(provider_of({}, **kind)) for kind in kinds}) == 3
