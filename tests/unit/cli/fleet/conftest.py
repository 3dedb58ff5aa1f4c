"""Builds of many machines, pretended in processes of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.cli.fleet import matrix, ray_cluster

PRETENDING = Path(__file__).with_name("pretending")


@pytest.fixture
def pretended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commands of a matrix compile nothing; the folder where each build leaves a file."""
    folder = tmp_path / "pretended"
    folder.mkdir()
    monkeypatch.setenv("PRETENDED", str(folder))
    for module in (matrix, ray_cluster):
        monkeypatch.setattr(module, "PACK", PRETENDING)
    return folder


def builds(folder: Path) -> int:
    """How many builds there were."""
    return len(list(folder.glob("built-*")))
