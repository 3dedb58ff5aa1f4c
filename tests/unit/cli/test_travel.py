"""Engines leave and arrive by commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.cli.commands import run
from slipstream.engine_cache import EngineStore, Keyring
from slipstream.engine_cache.keyring import FOLDER_VARIABLE
from slipstream.engine_cache.manifest import MANIFEST_NAME
from slipstream.tests.unit.cli.conftest import Done


@pytest.fixture
def elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Run a command on an empty store of another user."""

    def command(*words: object) -> Done:
        capsys.readouterr()
        with monkeypatch.context() as patch:
            patch.setenv(FOLDER_VARIABLE, str(tmp_path / "others-keys"))
            status = run([str(word) for word in (*words, "--home", tmp_path / "elsewhere")])
        return Done(status, *capsys.readouterr())

    return command


@pytest.mark.parametrize("words", [(), ("--folder",)], ids=["file", "folder"])
def test_a_strangers_export_is_refused_until_the_key_is_trusted(cli, elsewhere, put, tmp_path: Path, words) -> None:
    entry = put()
    assert cli("export", tmp_path / "engines.tar", *words).status == 0
    refused = elsewhere("import", tmp_path / "engines.tar")
    assert refused.status == 1 and " trust add ed25519:" in refused.out
    key = cli("trust", "show").out.strip()
    assert elsewhere("trust", "add", key, "--name", "the build machine").status == 0
    assert key in elsewhere("trust", "list").out
    done = elsewhere("import", tmp_path / "engines.tar", "--json")
    assert done.status == 0 and done.json["engines"] == [{"digest": entry.digest, "ok": True, "reason": None}]
    (engine,) = elsewhere("list", "--json").json["engines"]
    assert engine["digest"] == entry.digest and engine["trusted"]


def test_an_export_of_some(cli, put, tmp_path: Path) -> None:
    entry, _ = put(), put(72)
    done = cli("export", tmp_path / "one", entry.digest[:16], "--json")
    assert done.json["engines"] == [entry.digest]
    assert "is there already" in cli("export", tmp_path / "one").err


def test_nothing_to_export(cli, tmp_path: Path) -> None:
    done = cli("export", tmp_path / "x")
    assert done.status == 1 and "No engines" in done.err and not (tmp_path / "x").exists()


def test_push_and_pull(cli, elsewhere, put, tmp_path: Path) -> None:
    entry, url = put(), tmp_path / "remote"
    assert "1 engines are in" in cli("push", "--remote", url).out
    assert "was there" in cli("push", entry.digest[:12], "--remote", url).out
    assert elsewhere("pull", "--remote", url).status == 1
    elsewhere("trust", "add", cli("trust", "show").out.strip())
    assert elsewhere("pull", entry.digest[:12], "--remote", url).status == 0
    assert elsewhere("verify").status == 0


def test_pull_of_what_is_not_there(cli, tmp_path: Path) -> None:
    assert "it is empty" in cli("pull", "--remote", tmp_path / "remote").err
    assert "has no engine" in cli("pull", "a" * 64, "--remote", tmp_path / "remote").out
    assert "--remote URL" in cli("pull").err


def test_engines_of_before_are_adopted_after_asking(cli, put, store: EngineStore) -> None:
    entry = put()
    path = entry.directory / MANIFEST_NAME
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "seal": None, "signature": None}))
    assert "trust adopt" in cli("show", entry.digest).out
    asked = cli("trust", "adopt")
    assert asked.status == 1 and "Did this machine build them all?" in asked.err
    assert cli("trust", "adopt", "--yes", "--json").json == {"adopted": [entry.digest]}
    found = store.lookup(entry.digest)
    assert found is not None and found.why_untrusted() is None
    assert "no unsigned engines" in cli("trust", "adopt").out


def test_a_wrong_engine_is_named_and_the_others_are_adopted(cli, put, store: EngineStore) -> None:
    good, damaged = put(64), put(72)
    for entry in (good, damaged):
        path = entry.directory / MANIFEST_NAME
        path.write_text(json.dumps({**json.loads(path.read_bytes()), "seal": None, "signature": None}))
    content = damaged.path("engine.bin").read_bytes()
    damaged.path("engine.bin").write_bytes(content[:-1] + b"!")
    done = cli("trust", "adopt", "--yes")
    assert done.status == 1 and "Engines adopted: 1" in done.out and "engine.bin" in done.out, done
    assert f"{damaged.digest[:12]}  not adopted" in done.out
    found = store.lookup(good.digest)
    assert found is not None and found.why_untrusted() is None


def test_a_key_that_the_environment_names_too_is_not_said_to_be_gone(
    cli, store: EngineStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "ed25519:" + "a" * 64
    cli("trust", "add", key)
    monkeypatch.setenv("SLIPSTREAM_TRUSTED_KEYS", key)
    assert "SLIPSTREAM_TRUSTED_KEYS names it too" in cli("trust", "remove", key).out
    monkeypatch.delenv("SLIPSTREAM_TRUSTED_KEYS")
    cli("trust", "add", key)
    assert "are loaded no more" in cli("trust", "remove", key).out


def test_adopting_does_not_take_what_others_signed(cli, put, store: EngineStore, tmp_path: Path) -> None:
    store.keyring = Keyring(tmp_path / "others")
    put()
    assert cli("trust", "adopt", "--yes", "--json").json == {"adopted": []}


def test_engines_of_a_lost_key_are_adopted_by_their_ids(cli, put, store: EngineStore, tmp_path: Path) -> None:
    store.keyring = Keyring(tmp_path / "lost")
    entry = put()
    assert "not among the keys" in cli("show", entry.digest).out
    assert cli("trust", "adopt", entry.digest[:12]).status == 1
    assert cli("trust", "adopt", entry.digest[:12], "--yes", "--json").json == {"adopted": [entry.digest]}
    found = EngineStore(store.root).lookup(entry.digest)
    assert found is not None and found.why_untrusted() is None


def test_the_secret_key_travels_by_a_file(cli, elsewhere, put, tmp_path: Path) -> None:
    put()
    assert "holds the secret key" in cli("trust", "export-key", tmp_path / "key").out
    assert (tmp_path / "key").stat().st_mode & 0o077 == 0
    assert "is there already" in cli("trust", "export-key", tmp_path / "key").err
    assert elsewhere("trust", "import-key", tmp_path / "key").status == 0
    assert elsewhere("trust", "show").out == cli("trust", "show").out
    (tmp_path / "nonsense").write_text("00")
    assert "no secret key" in elsewhere("trust", "import-key", tmp_path / "nonsense").err


def test_trust_that_is_misspelt(cli) -> None:
    assert "no public key" in cli("trust", "add", "ed25519:00").err
    assert "takes a public key" in cli("trust", "add").err
    assert "is not in" in cli("trust", "remove", "ed25519:" + "0" * 64).err
