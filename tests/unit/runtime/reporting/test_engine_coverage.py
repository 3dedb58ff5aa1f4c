"""Would an engine serve pictures of this size?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from slipstream.core.shapes import ShapeProfile, ShapeRange
from slipstream.core.spec import EngineSpec, Role
from slipstream.engine_cache import BuildRecord, EngineKey, Manifest
from slipstream.runtime.reporting import engine_coverage as module
from slipstream.runtime.reporting.engine_coverage import Asked, engine_coverage
from slipstream.tests.unit.engine_cache.support import make_environment, make_spec

ASKED = Asked(width=512, height=512, batch=2, tokens=77)
RANGED = ShapeProfile(
    {
        "x": (ShapeRange(1, 2, 4), ShapeRange.exactly(4), ShapeRange(64, 64, 128), ShapeRange(64, 64, 96)),
        "timesteps": (ShapeRange(1, 2, 4),),
        "context": (ShapeRange(1, 2, 4), ShapeRange(77, 77, 154), ShapeRange.exactly(768)),
    }
)


@pytest.fixture(autouse=True)
def _everything_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    def why_not_used(manifest: Manifest) -> list[str]:
        return ["torch: 2.11 → 2.12"] if manifest.label == "old" else []

    monkeypatch.setattr(module, "why_not_used", why_not_used)


def manifest_of(label: str = "an engine", **changes: Any) -> Manifest:
    spec: EngineSpec = make_spec(**changes)
    key = EngineKey(spec, make_environment())
    facts = (spec.precision.value, spec.optimize.value, spec.backend.name)
    return Manifest(key.digest, key.factors, label, spec.role.value, spec.profile, *facts, {}, "0.1", BuildRecord(1.0))


def why(manifest: Manifest, **asked: int) -> list[str]:
    found = engine_coverage([manifest], replace(ASKED, **asked))
    assert len(found["hits"]) + len(found["near"]) == 1
    return list(found["near"][0]["why"]) if found["near"] else []


def test_an_engine_for_one_size() -> None:
    assert why(manifest_of()) == []
    assert why(manifest_of(), width=768) == ["it is for 512×512, not for 768×512"]
    assert why(manifest_of(), batch=1, tokens=154) == [
        "it is for batch 2, not 1",
        "it is for texts of 77 tokens, not 154",
    ]
    assert why(manifest_of(), batch=4) == ["it is for batch 2, not 4"]


def test_an_engine_for_a_range() -> None:
    engine = manifest_of(profile=RANGED)
    assert why(engine, width=768, height=1024, batch=1, tokens=154) == []
    assert why(engine, batch=64) == [], "it computes a larger batch in parts"
    assert why(engine, width=1024) == ["it is for 512×512…768×1024, not for 1024×512"]
    assert why(engine, tokens=231) == ["it is for texts of 77..154 tokens, not 231"]


def test_an_engine_with_several_profiles() -> None:
    small = ShapeProfile.static({"x": (2, 4, 32, 32), "timesteps": (2,), "context": (2, 77, 768)})
    engine = manifest_of(more_profiles=(small,))
    assert why(engine) == why(engine, width=256, height=256) == []
    assert why(engine, width=256) == ["it is for 512×512, 256×256, not for 256×512"]


def test_engines_of_blocks_are_told_by_themselves_where_they_take_any_size() -> None:
    def block(label: str, *open_axes: ShapeRange) -> Manifest:
        profile = ShapeProfile({"img": (ShapeRange.exactly(1), *open_axes, ShapeRange.exactly(64))})
        return manifest_of(label, role=Role.BLOCK, profile=profile)

    any_size, equal = ShapeRange(2, 2, 1 << 17), ShapeRange(2, 3, 1 << 17)
    engines = [
        block("all", any_size, any_size), block("old", any_size), block("square", any_size, equal),
        block("one", ShapeRange.exactly(4096)), manifest_of("whole"),
    ]  # fmt: skip
    for width, hits in ((512, ["whole"]), (2048, [])):
        found = engine_coverage(iter(engines), replace(ASKED, width=width))
        assert [engine["label"] for engine in found["hits"]] == hits
        assert found["blocks"] == [{"digest": engines[0].digest, "label": "all"}]
        assert not any(engine["label"] in ("all", "square", "one") for engine in found["near"])


def test_a_stale_engine_is_near() -> None:
    assert why(manifest_of("old")) == ["torch: 2.11 → 2.12"]


def test_the_nearest_come_first_and_others_do_not_come() -> None:
    hit, near, far = manifest_of("hit"), manifest_of("old"), manifest_of("old", profile=RANGED)
    decoder = manifest_of("decoder", role=Role.VAE_DECODE, profile=ShapeProfile.static({"z": (1, 4, 64, 64)}))
    found = engine_coverage([far, decoder, near], replace(ASKED, width=2048))
    assert [engine["label"] for engine in found["near"]] == ["old", "old"] and not found["hits"]
    found = engine_coverage([far, hit, decoder], ASKED)
    assert found["hits"] == [{"digest": hit.digest, "label": "hit"}]
