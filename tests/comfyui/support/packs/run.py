"""Measures one pack in a process of its own, where nothing of another pack is left."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path


def main(pack: str, checkout: str, store: str, rows: str, wanted: str = "") -> None:
    """Measure a pack and append a line of JSON for each row.

    Args:
        pack: name of its folder, or `loading.TOGETHER`.
        checkout: the ComfyUI.
        store: folder of the engines, shared by all packs.
        rows: file of the rows.
        wanted: part of a feature's name; the others are left out.
    """
    sys.argv = sys.argv[:1]
    from slipstream.tests.comfyui.support.in_process import enter

    with tempfile.TemporaryDirectory() as base:
        enter(Path(checkout), Path(base))
        _measure(pack, Path(base), Path(store), Path(rows), wanted)


def _measure(pack: str, base: Path, store: Path, rows: Path, wanted: str) -> None:
    from slipstream.engine_cache import EngineStore

    from . import loading
    from .features import COMPANIONS, LENT, PREPARED, features_of
    from .measuring import Feature, Measurement, Row

    folder = loading.packs_folder() / pack
    about = {"commit": loading.commit_of(folder), "comfyui": _version()}

    def write(found: list[Row]) -> None:
        with rows.open("a", encoding="utf-8") as lines:
            for row in found:
                lines.write(json.dumps({**row.to_json(), **about}) + "\n")

    measurement = Measurement(pack, EngineStore(store))
    for name in loading.all_packs() if pack == loading.TOGETHER else (*COMPANIONS.get(pack, ()), pack):
        PREPARED.get(name, lambda: None)()
        try:
            loading.load(folder.with_name(name), base, LENT.get(name, ()))
        except loading.PackFailed as failure:
            if pack == loading.TOGETHER:
                continue
            write([Row(pack, "", "", "", broken=str(failure))])
            return
    for feature in [Feature("installed, no node of it used", changes=False), *features_of(pack)]:
        if wanted in feature.name:
            write(measurement.rows(feature, ("later",) if feature.sample else ("before", "after", "later")))


def _version() -> str:
    import comfyui_version

    return str(comfyui_version.__version__)
