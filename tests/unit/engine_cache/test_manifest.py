"""Manifests: what is written is read back, and what is damaged or hostile is refused."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import pytest

from slipstream.core.errors import CorruptEngine, IncompatibleEngine, SlipstreamError
from slipstream.engine_cache import BuildRecord, FileRecord, Manifest, Speed, Verification
from slipstream.engine_cache.manifest import VERIFICATIONS_KEPT
from slipstream.tests.unit.engine_cache.support import WEIGHTS, make_key

HOSTILE_NAMES = [
    *("", ".", "..", "../x", "a/b", "a\\b", "/etc/passwd", "C:x", "C:\\x", "\\\\server\\x", "x\0y", "x\ny"),
    *(
        "manifest.json",
        "MANIFEST.json",
        ".last_used",
        "x ",
        "x.",
        "con",
        "NUL.txt",
        "com1.pt2",
        "ä",
        "a" * 200,
    ),
]


OPTIONAL = ("signature", "quantised", "seal", "speed")
SPEED = Speed(2.0, 5.0, "2026-01-01T00:00:00+00:00", {"torch": "2.12.0", "the driver": "580"})


def make_manifest(**changes: Any) -> Manifest:
    key = make_key()
    fields: dict[str, Any] = {
        "digest": key.digest,
        "factors": key.factors,
        "label": "SD15 “unet” 512×512",
        "role": "unet",
        "profile": key.spec.profile,
        "precision": "fp16",
        "optimize": "balanced",
        "backend": "compiled",
        "files": {"model.pt2": FileRecord(3, "c" * 64), "model.constants-1.bin": FileRecord(0, "d" * 64)},
        "slipstream": "0.1.0",
        "build": BuildRecord(57.25, {"export": 3.25, "compile": 54.0}),
        "details": {"nodes": 7, "names": ["a", {"b": None}], "ratio": 0.1},
        "verifications": {WEIGHTS: Verification(1e-3, 2e-3, 5, "fp16", "550.1", "2026-01-01T00:00:00+00:00", "fine")},
    }
    return Manifest(**{**fields, **changes})


def damaged(**changes: Any) -> str:
    return json.dumps({**json.loads(make_manifest().to_json()), **changes})


def test_round_trip() -> None:
    manifest = make_manifest()
    again = Manifest.from_json(manifest.to_json())
    assert again == manifest
    assert again.bytes == 3
    assert json.loads(manifest.to_json())["schema_version"] == 1
    assert Manifest.from_json(manifest.to_json().encode()) == manifest
    assert manifest.created.endswith("+00:00")


def test_a_quantised_engine_says_both_what_it_computes_in_and_what_was_chosen() -> None:
    manifest = Manifest.from_json(make_manifest(quantised="fp8").to_json())
    assert (manifest.precision, manifest.quantised, manifest.precision_name) == ("fp16", "fp8", "fp8")


def test_a_manifest_from_before_there_were_quantised_engines() -> None:
    data = json.loads(make_manifest().to_json())
    del data["quantised"]
    manifest = Manifest.from_json(json.dumps(data))
    assert (manifest.quantised, manifest.precision_name) == (None, "fp16")
    with pytest.raises(CorruptEngine, match="'quantised' is a int"):
        Manifest.from_json(damaged(quantised=8))


def test_a_field_of_a_later_minor_version_is_ignored() -> None:
    assert Manifest.from_json(damaged(mood="good")).label == make_manifest().label


def test_a_newer_schema_is_incompatible_not_corrupt() -> None:
    with pytest.raises(IncompatibleEngine, match=r"schema 2, this Slipstream reads up to 1.*Update Slipstream"):
        Manifest.from_json(damaged(schema_version=2))


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Manifest) if field.name not in OPTIONAL])
def test_each_field_is_needed_and_has_its_type(field: str) -> None:
    data = json.loads(make_manifest().to_json())
    del data[field]
    with pytest.raises(CorruptEngine, match=rf"'{field}' is missing"):
        Manifest.from_json(json.dumps(data), "The manifest of X")
    for wrong in (None, 5, True, [], "text"):
        if not (isinstance(wrong, str) and isinstance(json.loads(make_manifest().to_json())[field], str)):
            with pytest.raises(CorruptEngine, match="The manifest of X"):
                Manifest.from_json(damaged(**{field: wrong}), "The manifest of X")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "7",
        '{"schema_version": 1}',
        "\x00",
        "[" * 100_000,
        b"\xff\xfe",
        b"\x80abc",
        "{}",
    ],
)
def test_what_is_no_manifest_is_corrupt(text: str | bytes) -> None:
    with pytest.raises(CorruptEngine, match="rebuilt"):
        Manifest.from_json(text)


@pytest.mark.parametrize("version", [None, 0, -1, True, "1", 1.0, [1]])
def test_an_odd_schema_version_is_corrupt(version: object) -> None:
    with pytest.raises(CorruptEngine, match="schema_version"):
        Manifest.from_json(damaged(schema_version=version))


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none(constant: str) -> None:
    text = damaged(build={"seconds": "HERE", "phases": {}}).replace('"HERE"', constant)
    with pytest.raises(CorruptEngine):
        Manifest.from_json(text)


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_a_hostile_file_name_is_refused(name: str) -> None:
    record = {"bytes": 1, "sha256": "c" * 64}
    with pytest.raises(CorruptEngine):
        Manifest.from_json(damaged(files={name: record}))
    with pytest.raises(ValueError, match="not allowed"):
        make_manifest(files={name: FileRecord(1, "c" * 64)})


@pytest.mark.parametrize("names", [("Model.pt2", "model.pt2"), ("model.pt2", "MODEL.pt2")])
def test_names_that_one_disk_would_confuse_are_refused(names: tuple[str, str]) -> None:
    record = {"bytes": 1, "sha256": "c" * 64}
    with pytest.raises(CorruptEngine, match="twice"):
        Manifest.from_json(damaged(files=dict.fromkeys(names, record)))


@pytest.mark.parametrize(
    "record",
    [
        {"bytes": -1, "sha256": "c" * 64},
        {"bytes": 1.5, "sha256": "c" * 64},
        {"bytes": True, "sha256": "c" * 64},
        {"bytes": 1, "sha256": "C" * 64},
        {"bytes": 1, "sha256": "c" * 63},
        {"bytes": 1},
        [],
        None,
    ],
)
def test_an_odd_file_record_is_corrupt(record: object) -> None:
    with pytest.raises(CorruptEngine):
        Manifest.from_json(damaged(files={"model.pt2": record}))


@pytest.mark.parametrize("error", [float("nan"), float("inf"), -1.0])
def test_an_error_that_is_no_number_is_never_recorded(error: float) -> None:
    with pytest.raises(ValueError, match="never kept"):
        Verification(error, 1e-3, 1, "fp16")
    with pytest.raises(ValueError, match="never kept"):
        Verification(1e-3, error, 1, "fp16")


@pytest.mark.parametrize("ms", [float("nan"), float("inf"), -1.0, 0.0])
def test_a_time_that_is_none_is_never_recorded(ms: float) -> None:
    for times in ((ms, 5.0), (2.0, ms)):
        with pytest.raises(ValueError, match="no time of a step"):
            Speed(*times)


def test_how_much_faster() -> None:
    assert SPEED.speedup == 2.5
    manifest = make_manifest(speed=SPEED)
    assert Manifest.from_json(manifest.to_json()) == manifest
    by_role = {role: make_manifest(role=role).timed_by for role in ("unet", "controlnet", "vae_decode")}
    assert by_role == {"unet": "step", "controlnet": "call", "vae_decode": "call"}


@pytest.mark.parametrize(
    "speed", [5, [], {}, {"engine_ms": 0}, {"eager_ms": "5"}, {"retired": None}, {"retired": {"torch": 2}}]
)
def test_an_odd_speed_is_corrupt(speed: Any) -> None:
    known = json.loads(make_manifest(speed=SPEED).to_json())["speed"]
    with pytest.raises(CorruptEngine):
        Manifest.from_json(damaged(speed={**known, **speed} if isinstance(speed, dict) and speed else speed))


def test_times_of_single_calls_that_older_versions_wrote_are_not_shown() -> None:
    data = json.loads(make_manifest().to_json())
    data["verifications"][WEIGHTS] |= {"engine_ms": 2.0, "eager_ms": 16.6}
    del data["speed"]
    assert Manifest.from_json(json.dumps(data)) == make_manifest()


def test_details_that_json_cannot_hold_are_refused() -> None:
    with pytest.raises(TypeError):
        make_manifest(details={"x": object()}).to_json()
    with pytest.raises(ValueError, match="JSON"):
        make_manifest(details={"x": float("nan")}).to_json()


def test_with_verification_replaces_and_forgets_the_oldest() -> None:
    manifest = make_manifest()
    better = Verification(1e-4, None, 2, "fp16")
    assert manifest.with_verification(WEIGHTS, better).verifications == {WEIGHTS: better}
    assert manifest.verifications[WEIGHTS].relative_error == 1e-3
    for number in range(VERIFICATIONS_KEPT):
        manifest = manifest.with_verification(f"{number:064x}", better)
    assert len(manifest.verifications) == VERIFICATIONS_KEPT
    assert WEIGHTS not in manifest.verifications
    assert Manifest.from_json(manifest.to_json()) == manifest


def test_random_damage_never_raises_anything_else() -> None:
    chance = random.Random(7)
    text = make_manifest(signature="s").to_json()
    refused = 0
    for _ in range(1500):
        position = chance.randrange(len(text))
        length = chance.choice([1, 1, 2, 10, 200])
        junk = "".join(chance.choice('0"{}[]:,-9aé \\') for _ in range(chance.randrange(3)))
        try:
            Manifest.from_json(text[:position] + junk + text[position + length :])
        except SlipstreamError:
            refused += 1
    assert refused > 500
