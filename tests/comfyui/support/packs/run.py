"""Measures one pack in a process of its own, where nothing of another pack is left."""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream.runtime.provider import EngineProvider


WHOLE, BLOCKS, GRAPHS = "whole", "blocks", "graphs"
"""Engines that are measured with: of whole models, of blocks, and of blocks with what stands for CUDA graphs here."""


def main(pack: str, checkout: str, store: str, rows: str, engines: str = WHOLE, wanted: str = "") -> None:
    """Measure a pack and append a line of JSON for each row.

    Args:
        pack: name of its folder, `loading.TOGETHER`, or `loading.CORE`.
        checkout: the ComfyUI.
        store: folder of the engines, shared by all packs; of blocks' engines none are kept.
        rows: file of the rows.
        engines: `WHOLE`, `BLOCKS` or `GRAPHS`.
        wanted: part of a feature's name; the others are left out.
    """
    sys.argv = sys.argv[:1]
    from slipstream.tests.comfyui.support.in_process import enter

    with tempfile.TemporaryDirectory() as base:
        enter(Path(checkout), Path(base))
        from slipstream.engine_cache import EngineStore
        from slipstream.runtime.provider import EngineProvider
        from slipstream.tests.comfyui.blocks.host_graphs import host_graphs
        from slipstream.tests.comfyui.blocks.quick_blocks import quick_block_provider

        if engines == WHOLE:
            _measure(pack, Path(base), EngineProvider(EngineStore(Path(store))), Path(rows), engines, wanted)
            return
        with quick_block_provider(EngineStore(Path(base) / "engines of blocks")) as provider:
            with host_graphs(provider) if engines == GRAPHS else nullcontext():
                _measure(pack, Path(base), provider, Path(rows), engines, wanted)


def _measure(pack: str, base: Path, provider: EngineProvider, rows: Path, engines: str, wanted: str) -> None:
    from . import loading
    from .features import COMPANIONS, LENT, PREPARED, features_of
    from .measuring import Feature, Measurement, Row

    folder = loading.packs_folder() / pack
    about = {"commit": "" if pack == loading.CORE else loading.commit_of(folder), "comfyui": _version()}

    def write(found: list[Row]) -> None:
        with rows.open("a", encoding="utf-8") as lines:
            for row in found:
                lines.write(json.dumps({**row.to_json(), **about}) + "\n")

    measurement = Measurement(pack, provider)
    names = loading.all_packs() if pack == loading.TOGETHER else (*COMPANIONS.get(pack, ()), pack)
    if pack == loading.CORE:
        loading.load_core()
        names = []
    for name in names:
        PREPARED.get(name, lambda: None)()
        try:
            loading.load(folder.with_name(name), base, LENT.get(name, ()))
        except loading.PackFailed as failure:
            if pack == loading.TOGETHER:
                continue
            write([Row(pack, "", "", "", broken=str(failure))])
            return
    for feature in [Feature("installed, no node of it used", changes=False), *features_of(pack)]:
        if wanted not in feature.name:
            continue
        if engines != WHOLE:
            write([measurement.row_by_blocks(feature)])
        else:
            write(measurement.rows(feature, ("later",) if feature.sample else ("before", "after", "later")))


def _version() -> str:
    import comfyui_version

    return str(comfyui_version.__version__)
