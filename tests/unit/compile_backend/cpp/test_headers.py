"""Where torch's precompiled headers are made, and whether."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from torch._inductor import codecache, config

from slipstream.compile_backend.cpp.headers import headers_with_the_cache
from slipstream.tests.unit.compile_backend.conftest import Built


def test_with_a_cache_that_goes_with_the_build_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    with headers_with_the_cache():
        assert config.aot_inductor.precompile_headers is False
    assert config.aot_inductor.precompile_headers is True


def test_a_cache_that_is_kept_holds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "kept"))
    before = codecache._HEADER_DIR
    with headers_with_the_cache():
        assert config.aot_inductor.precompile_headers is True
        assert Path(codecache._HEADER_DIR) == tmp_path / "kept" / "precompiled_headers"
    assert codecache._HEADER_DIR == before


def test_a_build_leaves_them_there(packaged: Built, probes: Path) -> None:
    assert list((probes / "precompiled_headers").rglob("*.gch"))
