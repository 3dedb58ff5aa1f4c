"""list, show, verify, prune and delete, on a store whose engines were made by a fake build."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from slipstream.core.environment import versions_now
from slipstream.engine_cache import Speed
from slipstream.runtime.loaded.canary import CAPTURE
from slipstream.tests.unit.cli.support import current_block_key, current_key, verification
from slipstream.tests.unit.runtime.doomed import Doomed


def damage(entry) -> None:
    """Change one byte; the size stays."""
    path = entry.path("engine.bin")
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)


def last_used(entry, seconds_ago: float) -> None:
    path = entry.directory / ".last_used"
    path.touch()
    os.utime(path, (time.time() - seconds_ago,) * 2)


def test_an_empty_store(cli, store) -> None:
    done = cli("list")
    assert done.status == 0
    assert f"No engines in {store.root}" in done.out and "slipstream build" in done.out
    assert cli("list", "--json").json["engines"] == []
    assert not store.root.exists()


def test_list_for_machines(cli, put, store) -> None:
    entry = put(verifications={"1" * 64: verification(1e-6), "2" * 64: verification(3e-6)})
    store.record_speed(entry, Speed(2.0, 5.0))
    data = cli("list", "--json").json
    assert data["store"] == str(store.root) and data["bytes"] == 1000
    (engine,) = data["engines"]
    assert engine == {
        **{"digest": entry.digest, "label": "SD15 512×512 batch 2", "role": "unet", "bytes": 1000},
        **{"backend": "aotinductor", "precision": "fp32", "optimize": "balanced", "build_s": 3.5},
        **{"error": 3e-6, "state": "ok", "reasons": [], "gpu": None, "resolution": "512×512", "batch": "2"},
        **{"speedup": 2.5, "engine_ms": 2.0, "eager_ms": 5.0, "timed_by": "step", "retired": False},
        **{"trusted": True, "adoptable": None, "base": False},
        "caution": "",
        "created": engine["created"],
        "last_used": engine["last_used"],
    }
    assert engine["last_used"].startswith("20") and engine["last_used"].endswith("+00:00")


def test_an_engine_of_blocks(cli, put, store) -> None:
    entry = put(key=current_block_key())
    (engine,) = cli("list", "--json").json["engines"]
    assert (engine["role"], engine["resolution"], engine["batch"]) == ("block", "any size", "")
    assert (engine["state"], engine["reasons"]) == ("ok", [])
    told = cli("list").out
    assert "blocks SD15 ResBlock 64 fp32, any size" in told and "not checked" not in cli("list", "--wide").out
    told = cli("show", entry.digest).out
    assert "blocks SD15 ResBlock 64, any size" in told and "compared with its blocks in each process" in told
    assert cli("verify", entry.digest[:8]).status == 0
    assert cli("delete", "--yes", entry.digest).status == 0 and not store.list()


def test_how_fast_an_engine_is(cli, put, store) -> None:
    entry = put()
    assert "not measured yet" in cli("show", entry.digest).out
    store.record_speed(entry, Speed(104.4, 312.3))
    assert "3.0x" in cli("list").out
    assert "312 → 104 ms a step (3.0x)" in cli("show", entry.digest).out


def test_an_engine_that_ended_a_process_is_treated_with_care(cli, put, store) -> None:
    entry = put()
    Doomed(store.marks, entry.digest, CAPTURE, True, versions_now()).end()
    (engine,) = cli("list", "--json").json["engines"]
    assert engine["state"] == "ok" and engine["caution"].startswith("It runs without CUDA graphs: the program ended")
    assert "It runs without CUDA graphs" in cli("show", entry.digest).out


def test_an_engine_that_is_slower_than_the_model_is_not_used(cli, put, store) -> None:
    entry = put()
    slow = Speed(9.64, 8.0, retired=versions_now())
    store.record_speed(entry, slow)
    (engine,) = cli("list", "--json").json["engines"]
    assert engine["state"] == "stale" and engine["retired"]
    assert "or when you press Build engine" in cli("show", entry.digest).out
    assert "is built when it is asked for" not in cli("show", entry.digest).out
    assert "takes 9.6 ms a step where your model without Slipstream takes 8.0 ms" in engine["reasons"][0]
    store.record_speed(entry, Speed(9.64, 8.0, retired={**versions_now(), "torch": "1.0"}))
    assert cli("list", "--json").json["engines"][0]["state"] == "ok", "another torch has come since"


def test_list_for_people(cli, put) -> None:
    entry = put()
    head, row, total = cli("list").out.splitlines()
    assert head.split() == ["id", "engine", "speed", "state"]
    assert row.split() == [entry.digest[:12], "SD15", "512×512", "batch", "2", "fp32", "-", "ok"]
    assert total.startswith("1 engines, 1000 B of 20.0 GB")


def test_a_list_fits_into_80_columns(cli, put, monkeypatch) -> None:
    put(torch="2.6.0", threads=77)
    monkeypatch.setenv("COLUMNS", "80")
    _, row, _ = cli("list").out.splitlines()
    assert len(row) <= 80 and "stale: " in row and row.endswith("…")


def test_list_for_people_who_want_all(cli, put) -> None:
    entry = put()
    head, row, total = cli("list", "--wide").out.splitlines()
    assert head.split()[:3] == ["id", "engine", "backend"]
    assert row.startswith(entry.digest[:12])
    for part in ("SD15 512×512 batch 2", "compiled", "fp32", "1000 B", "3.5 s", "not checked", "  ok"):
        assert part in row
    assert total.startswith("1 engines, 1000 B of 20.0 GB")


def test_the_most_recently_used_comes_first(cli, put) -> None:
    first, second = put(64), put(72)
    last_used(first, seconds_ago=-60)
    assert [row["digest"] for row in cli("list", "--json").json["engines"]] == [first.digest, second.digest]


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"torch": "2.6.0"}, "torch: 2.6.0 → "),
        ({"threads": 77}, "CPU threads: 77 → "),
        (
            {"device": "cuda", "gpu": "NVIDIA Imaginary", "cpu": None, "threads": 0},
            "NVIDIA Imaginary",
        ),
    ],
)
def test_an_engine_of_another_machine_or_version_is_stale(cli, put, environment, reason) -> None:
    put(**environment)
    (row,) = cli("list", "--json").json["engines"]
    assert row["state"] == "stale"
    assert any(reason in text for text in row["reasons"])
    assert "stale: " in cli("list").out


def test_show(cli, put) -> None:
    entry = put(verifications={"1" * 64: verification(1e-6)})
    data = cli("show", entry.digest[:8].upper(), "--json").json
    assert data["factors"]["spec"]["fingerprint"]["architecture"] == "a" * 64
    assert data["files"]["engine.bin"] == {
        "bytes": 1000,
        "sha256": entry.manifest.files["engine.bin"].sha256,
    }
    assert data["verifications"]["1" * 64]["relative_error"] == 1e-6
    assert data["shapes"] == {"timesteps": ["2"], "x": ["2", "4", "64", "64"]}
    assert data["build_phases"] == {"export": 0.5, "compile": 3.0} and data["details"] == {"nodes": 7}
    text = cli("show", entry.digest).out
    for part in (
        entry.digest,
        "2×4×64×64",
        "under 0.001 % off fp32",
        "yes, for this architecture",
        "environment.torch",
    ):
        assert part in text


def test_show_says_why_an_engine_would_not_be_used(cli, put) -> None:
    entry = put(torch="2.6.0")
    text = cli("show", entry.digest[:10]).out
    assert "no: torch: 2.6.0 → " in text
    assert "before it is first used" in text  # not checked yet


def test_an_unknown_id(cli, put) -> None:
    digest = put().digest
    other = f"{(int(digest[0], 16) + 1) % 16:x}"
    for command in (["show"], ["verify"], ["delete", "--yes"]):
        done = cli(*command, other)
        assert done.status == 1 and not done.out
        assert f"begins with {other}" in done.err and "slipstream list" in done.err


def test_an_ambiguous_id(cli, put) -> None:
    by_digit: dict[str, int] = {}
    for height in range(8, 8 * 20, 8):  # 17 digests must share a first digit
        digit = current_key(height).digest[0]
        if digit in by_digit:
            break
        by_digit[digit] = height
    one, two = put(by_digit[digit]), put(height)
    done = cli("delete", "--yes", digit)
    assert done.status == 1 and "fits 2 engines" in done.err and "more digits" in done.err
    assert one.digest[:12] in done.err and two.digest[:12] in done.err
    assert len(cli("list", "--json").json["engines"]) == 2
    assert cli("show", one.digest[:20], "--json").json["digest"] == one.digest


@pytest.mark.parametrize("words", [("verify",), ("verify", "--all")])
def test_verify_all(cli, put, words) -> None:
    good, bad = put(64), put(72)
    assert cli(*words, "--json").json["bad"] == 0
    damage(bad)
    done = cli(*words, "--json")
    assert done.status == 1
    states = {engine["digest"]: engine for engine in done.json["engines"]}
    assert states[good.digest]["ok"] and not states[bad.digest]["ok"]
    assert "engine.bin" in states[bad.digest]["reason"]
    assert [row["digest"] for row in cli("list", "--json").json["engines"]] == [good.digest]


def test_verify_of_one_reads_no_other(cli, put) -> None:
    good, bad = put(64), put(72)
    damage(bad)
    done = cli("verify", good.digest[:12])
    assert done.status == 0 and f"{good.digest[:12]}  ok" in done.out
    done = cli("verify", bad.digest[:12])
    assert done.status == 1 and "another content" in done.out


def test_verify_reports_a_file_that_was_cut_short(cli, put) -> None:
    entry = put()
    entry.path("engine.bin").write_bytes(b"short")
    done = cli("verify", entry.digest[:12], "--json")
    assert done.status == 1 and done.json["bad"] == 1
    assert "has 5 bytes instead of 1000" in done.err


def test_verify_in_a_process_that_checked_before(cli, put) -> None:
    entry = put()
    entry.verify_files()
    before = entry.path("engine.bin").stat()
    damage(entry)
    os.utime(entry.path("engine.bin"), ns=(before.st_atime_ns, before.st_mtime_ns))
    assert cli("verify").status == 1


def test_prune_to_a_size(cli, put, store) -> None:
    old, new = put(64), put(72)
    last_used(old, seconds_ago=100)
    last_used(new, seconds_ago=0)
    assert cli("prune").out.startswith("0 engines removed")
    done = cli("prune", "--limit", "1.5KB", "--json")
    assert done.status == 0
    assert done.json == {"store": str(store.root), "removed": [old.digest], "freed_bytes": 1000}
    assert "1 engines removed, 1000 B freed, 0 B left" in cli("prune", "--limit", "0").out


def test_prune_by_age(cli, put) -> None:
    old, new = put(64), put(72)
    last_used(old, seconds_ago=31 * 86400)
    last_used(new, seconds_ago=29 * 86400)
    assert cli("prune", "--older-than", "30d", "--json").json["removed"] == [old.digest]


def test_prune_removes_what_a_killed_build_left(cli, put, store) -> None:
    put()
    leftover = store.root / "tmp" / "tmp-build-abc.1.0"
    leftover.mkdir()
    (leftover / "part").touch()
    assert cli("prune", "--json").json["removed"] == []
    assert not leftover.exists()


def test_prune_leaves_an_engine_in_use(cli, put) -> None:
    entry = put()
    with entry.hold():
        assert cli("prune", "--limit", "0", "--json").json["removed"] == []
        done = cli("delete", "--yes", entry.digest[:12])
        assert done.status == 1 and "in use" in done.err


def test_delete_asks_first(cli, put, process, store) -> None:
    keep, drop = put(64), put(72)
    done = process("delete", drop.digest[:12], "--home", store.root)
    assert done.status == 1 and "--yes" in done.err and "SD15 512×576" in done.err
    assert drop.directory.is_dir()
    done = cli("delete", drop.digest[:12], "--yes", "--json")
    assert done.json["deleted"] == [drop.digest]
    assert not drop.directory.exists() and keep.directory.is_dir()


@pytest.mark.parametrize(("answer", "deleted"), [("y\n", True), ("\n", False)])
def test_delete_does_as_it_is_told(cli, put, monkeypatch, answer, deleted) -> None:
    import io

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    entry = put()
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    done = cli("delete", entry.digest[:12])
    assert (done.status == 0) is deleted
    assert "Delete" in done.err and entry.directory.exists() is not deleted


def test_an_engine_of_a_newer_slipstream_can_be_deleted(cli, put) -> None:
    entry = put()
    path: Path = entry.directory / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), "schema_version": 99}))
    done = cli("show", entry.digest[:12])
    assert done.status == 1 and "newer Slipstream" in done.err
    assert cli("delete", "--yes", entry.digest[:12]).status == 0
    assert not entry.directory.exists()
