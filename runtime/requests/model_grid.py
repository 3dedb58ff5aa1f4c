"""Engines for the user's own models: each model file against each picture size, and what a click on a cell asks for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...core.spec import Role
from ...engine_cache import EngineStore, Entry, WeightsMemo
from ..reporting.engine_coverage import Asked, is_for
from ..reporting.engine_info import why_entry_not_used
from ..settings.model_settings import Resolution, Settings
from .build_requests import BuildRequest, ModelBuilder, Wanted

BATCH, TOKENS = 2, 77
"""Of one picture with CFG, and a prompt of up to 75 words or so."""
USUAL = (Resolution(512, 512), Resolution(1024, 1024))


def model_grid(
    store: EngineStore, builder: ModelBuilder, requests: Iterable[BuildRequest], more: Iterable[Resolution] = ()
) -> dict[str, Any]:
    """What is there for each model that a builder offers and each size, as docs/web-api.md says.

    Args:
        requests: of cells, the oldest first.
        more: sizes that are shown beside the usual ones and those of engines.
    """
    engines = [entry for entry in store.list() if entry.manifest.role == Role.UNET.value]
    sizes = sorted({*USUAL, *more, *_sizes_of(engines)}, key=lambda size: (size.width * size.height, size.width))
    used, asked = engines_by_file(store, engines), list(requests)
    rows = [
        {
            "model": name,
            "cells": [_cell(used.get(path, []), size, _last(asked, name, size), bool(path)) for size in sizes],
        }
        for name, path in ((name, builder.file_of(name)) for name in builder.models())
    ]
    return {"sizes": [f"{size.width}x{size.height}" for size in sizes], "models": rows}


def wanted_for(model: str, size: Resolution) -> Wanted:
    """What a click on a cell asks for."""
    settings = Settings.of_text(build="first use", resolutions=f"{size.width}x{size.height}")
    return Wanted(model, Role.UNET, settings, BATCH, TOKENS)


def engines_by_file(store: EngineStore, engines: Iterable[Entry]) -> dict[str, list[Entry]]:
    """Path of a model file -> the engines that its weights were used with."""
    files = WeightsMemo(store.root).files()
    found: dict[str, list[Entry]] = {}
    for entry in engines:
        for weights in entry.manifest.verifications:
            for path in files.get(weights, ()):
                found.setdefault(path, []).append(entry)
    return found


def names_of_files(store: EngineStore, engines: Iterable[Entry]) -> Mapping[str, list[str]]:
    """Digest of an engine -> names of the model files that used it."""
    found: dict[str, list[str]] = {}
    for path, entries in sorted(engines_by_file(store, engines).items()):
        for entry in entries:
            found.setdefault(entry.digest, []).append(Path(path).stem)
    return found


def _sizes_of(engines: Iterable[Entry]) -> set[Resolution]:
    return {Resolution.of_call(profile.opt) for entry in engines for profile in entry.manifest.profiles}


def _last(requests: Iterable[BuildRequest], model: str, size: Resolution) -> BuildRequest | None:
    """The last request of a cell."""
    fitting = [each for each in requests if each.wanted.model == model and size in each.wanted.settings.resolutions]
    return fitting[-1] if fitting else None


def _cell(engines: Iterable[Entry], size: Resolution, asked: BuildRequest | None, is_file: bool) -> dict[str, Any]:
    """One cell.

    Args:
        engines: that the model has used.
        is_file: whether these are known; of the built-in model only the request tells.
    """
    if asked is not None and not asked.ended:
        return {"state": "building", "digest": None, "fraction": asked.progress.fraction, "why": asked.progress.message}
    fitting = [entry for entry in engines if is_for(entry.manifest, Asked(size.width, size.height, BATCH, TOKENS))]
    reasons = {entry.digest: why_entry_not_used(entry) for entry in fitting}
    ready = next((digest for digest, why in reasons.items() if not why), None)
    if ready is not None or (asked is not None and not asked.reason and not is_file):
        return {"state": "ready", "digest": ready, "fraction": None, "why": ""}
    if reasons:
        digest, differences = next(iter(reasons.items()))
        return {"state": "stale", "digest": digest, "fraction": None, "why": "; ".join(differences)}
    why = asked.reason if asked is not None else ""
    return {"state": "failed" if why else "missing", "digest": None, "fraction": None, "why": why}
