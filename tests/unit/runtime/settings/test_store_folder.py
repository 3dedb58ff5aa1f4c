"""Where engines are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.runtime.settings.store_folder import store_home


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLIPSTREAM_HOME", raising=False)


def test_the_users_choice_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path))
    assert store_home(Path("models")) == tmp_path
    monkeypatch.setenv("SLIPSTREAM_HOME", "~/engines")
    assert store_home() == Path.home() / "engines"


def test_then_the_hosts_folder() -> None:
    assert store_home(Path("models")) == Path("models")


def test_then_the_users_cache() -> None:
    assert store_home() == Path.home() / ".cache" / "slipstream" / "engines"


def test_an_empty_choice_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_HOME", "")
    assert store_home(Path("models")) == Path("models")
