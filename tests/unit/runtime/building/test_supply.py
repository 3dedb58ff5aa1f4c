"""What others have built is pulled before anything is built; a worker only pulls."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from slipstream.compile_backend import AOTInductorBackend
from slipstream.core.errors import SlipstreamError
from slipstream.engine_cache import EngineStore, Entry, Keyring
from slipstream.engine_cache.manifest import MANIFEST_NAME
from slipstream.engine_cache.travel import remote_store
from slipstream.engine_cache.travel.remote_store import RemoteStore
from slipstream.engine_cache.travel.retries import RemoteError, Retries
from slipstream.runtime.building import supply as supply_module
from slipstream.runtime.building.supply import REMOTE_VARIABLE, WORKER_VARIABLE, Supply
from slipstream.runtime.loaded.device_memory import DeviceRoom
from slipstream.runtime.planning.plan import CallShape
from slipstream.runtime.provider import EngineProvider, HostHooks
from slipstream.tests.fakes import (
    BACKGROUND,
    FIRST_USE,
    MANUAL,
    FakeSource,
    FakeWorker,
    NullBackend,
    ask,
    make_inputs,
    run_once,
    wait_until,
)

CALL = CallShape.of(make_inputs())


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "remote")


@pytest.fixture
def pushed(provider: EngineProvider, source: FakeSource, worker: FakeWorker, url: str) -> str:
    """The digest of an engine that another machine has built and pushed."""
    entry = provider.make(source, CALL, MANUAL, HostHooks()).entry
    RemoteStore(url).push(entry, provider.store)
    worker.builds = 0
    return entry.digest


@pytest.fixture
def elsewhere(tmp_path: Path, backend: NullBackend, worker: FakeWorker) -> Iterator[Callable[..., EngineProvider]]:
    """A process on an empty store, which shares the maker's key."""
    made: list[EngineProvider] = []

    def run(*urls: str, never_builds: bool = False, keyring: Keyring | None = None) -> EngineProvider:
        store = EngineStore(tmp_path / f"elsewhere-{len(made)}", keyring=keyring)
        made.append(EngineProvider(store, [backend], supply=Supply(urls, never_builds)))
        return made[-1]

    yield run
    for each in made:
        each.queue.cancel_all("the test is over")


@pytest.mark.parametrize("never_builds", [False, True])
def test_an_engine_is_pulled_instead_of_built(pushed, url, elsewhere, source, worker, never_builds: bool) -> None:
    offer = run_once(elsewhere(url, never_builds=never_builds), source, FIRST_USE)
    assert offer.engine is not None and offer.engine.entry.digest == pushed and worker.builds == 0


@pytest.mark.parametrize("settings", [BACKGROUND, MANUAL], ids=lambda settings: settings.policy.value)
def test_a_picture_does_not_wait_for_a_pull(pushed, url, elsewhere, source, worker, settings) -> None:
    provider = elsewhere(url, never_builds=settings is BACKGROUND)
    offer = ask(provider, source, settings)
    assert offer.engine is None and "is being looked for in" in offer.reason
    wait_until(lambda: not provider.queue.pending())
    assert run_once(provider, source, settings).engine is not None and worker.builds == 0


def test_a_pull_needs_no_device_memory(pushed, url, elsewhere, source, worker, monkeypatch) -> None:
    asked: list[int] = []

    def is_there(room: DeviceRoom, device: torch.device, needed: int) -> bool:
        asked.append(needed)
        return False

    monkeypatch.setattr(DeviceRoom, "is_there", is_there)
    provider = elsewhere(url)
    ask(provider, source, BACKGROUND)
    wait_until(lambda: not provider.queue.pending())
    assert run_once(provider, source, BACKGROUND).engine is not None and asked == []
    ask(builder := elsewhere(), source, BACKGROUND)
    wait_until(lambda: asked)
    assert set(asked) == {2 << 30} and worker.builds == 0 and len(builder.queue.pending()) == 1


def test_what_nobody_has_is_built(url, elsewhere, source, worker) -> None:
    assert run_once(elsewhere(url), source, FIRST_USE).engine is not None and worker.builds == 1


def test_what_nobody_has_is_not_built_by_hand_only(url, elsewhere, source, worker) -> None:
    provider = elsewhere(url)
    ask(provider, source, MANUAL)
    wait_until(lambda: not provider.queue.pending())
    assert "build it with" in ask(provider, source, MANUAL).reason and worker.builds == 0
    assert run_once(provider, source, FIRST_USE).engine is not None and worker.builds == 1


def test_a_worker_never_builds(url, elsewhere, source, worker) -> None:
    for provider in (elsewhere(never_builds=True), elsewhere(url, never_builds=True)):
        for settings in (FIRST_USE, BACKGROUND, FIRST_USE):
            assert ask(provider, source, settings).engine is None
            wait_until(lambda provider=provider: not provider.queue.pending())
        assert "never builds" in ask(provider, source, BACKGROUND).reason
        with pytest.raises(SlipstreamError, match="never builds|none is built"):
            provider.make(source, CALL, FIRST_USE, HostHooks())
    assert worker.builds == 0


def test_a_worker_finds_what_is_pushed_later(
    url, elsewhere, provider, source, worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = elsewhere(url, never_builds=True)
    assert ask(late, source, FIRST_USE).engine is None
    RemoteStore(url).push(provider.make(source, CALL, MANUAL, HostHooks()).entry, provider.store)
    assert ask(late, source, FIRST_USE).engine is None, "it was asked for a moment ago"
    monkeypatch.setattr(supply_module, "_ASKED_AGAIN_SECONDS", 0.0)
    assert run_once(late, source, FIRST_USE).engine is not None


def test_a_worker_needs_nothing_to_build_with(pushed, url, elsewhere, source, backend, monkeypatch) -> None:
    monkeypatch.setattr(backend, "why_cannot_build", lambda device: "no compiler")
    assert run_once(elsewhere(url, never_builds=True), source, FIRST_USE).engine is not None
    assert run_once(elsewhere(url), source, FIRST_USE).engine is not None


def test_a_strangers_engine_is_not_pulled(pushed, url, elsewhere, source, worker, tmp_path: Path, caplog) -> None:
    provider = elsewhere(url, keyring=Keyring(tmp_path / "keys"))
    assert run_once(provider, source, FIRST_USE).engine is not None
    assert worker.builds == 1 and "trust add" in caplog.text


@pytest.mark.parametrize("bad", ["nonsense://x", "http://127.0.0.1:9/engines"])
def test_a_remote_store_that_is_not_there_costs_no_engine(
    bad: str, elsewhere, source, worker, caplog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_store, "Retries", lambda: Retries(attempts=2, first_s=0.01))
    assert run_once(elsewhere(bad), source, FIRST_USE).engine is not None and worker.builds == 1
    assert "was not pulled" in caplog.text or "no address that fsspec knows" in caplog.text


def test_a_remote_store_that_does_not_answer_is_left_alone_for_a_while(
    elsewhere, source, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def silent(self: RemoteStore, digest: str, *_: object) -> None:
        asked.append(digest)
        raise RemoteError("no answer")

    monkeypatch.setattr(RemoteStore, "pull", silent)
    provider = elsewhere("memory://silent")
    for size in (8, 16):
        call = CallShape.of(make_inputs(size=size))
        provider.make(source, call, FIRST_USE, HostHooks())
    assert len(asked) == 1


@pytest.mark.parametrize("settings", [FIRST_USE, BACKGROUND])
def test_another_engine_is_built_in_the_place_of_one_that_nobody_signed(provider, source, worker, settings) -> None:
    _unsigned(provider.make(source, CALL, MANUAL, HostHooks()).entry)
    wait_until(lambda: run_once(provider, source, settings).engine is not None)
    (entry,) = provider.store.list()
    assert worker.builds == 2 and entry.why_untrusted() is None


def test_an_unsigned_engine_that_is_not_to_be_built_is_refused_with_the_way_out(provider, source, worker) -> None:
    _unsigned(provider.make(source, CALL, MANUAL, HostHooks()).entry)
    offer = ask(provider, source, MANUAL)
    assert offer.engine is None and "trust adopt" in offer.reason and worker.builds == 1
    assert provider.make(source, CALL, MANUAL, HostHooks()).entry.why_untrusted() is None and worker.builds == 2
    assert run_once(provider, source, MANUAL).engine is not None


def test_an_unsigned_engine_of_another_user_is_refused(provider, source, worker, monkeypatch) -> None:
    _unsigned(provider.make(source, CALL, MANUAL, HostHooks()).entry)
    monkeypatch.setattr(Entry, "is_of_this_user", False)
    assert "trust adopt" in ask(provider, source, FIRST_USE).reason and worker.builds == 1


def _unsigned(entry: Entry) -> None:
    path = entry.directory / MANIFEST_NAME
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "seal": None, "signature": None}))


def test_the_environment_says_where_to_pull_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REMOTE_VARIABLE, " s3://a/b  /mnt/engines ")
    monkeypatch.setenv(WORKER_VARIABLE, "1")
    found = Supply.configured()
    assert found.urls == ("s3://a/b", "/mnt/engines") and found.never_builds
    for text in ("", "0", "off"):
        monkeypatch.setenv(WORKER_VARIABLE, text)
        assert not Supply.configured().never_builds


_SERVER = """
import json, os, runpy, sys, time
runpy.run_path(sys.argv[1] + "/__main__.py")["register"]()
import torch
from slipstream.compile_backend import AOTInductorBackend
from slipstream.engine_cache import EngineStore
from slipstream.runtime.provider import EngineProvider
from slipstream.tests.fakes import FIRST_USE, FakeSource, make_inputs, ask
began = time.monotonic()
provider = EngineProvider(EngineStore(sys.argv[2]), [AOTInductorBackend()])
source = FakeSource()
offer = ask(provider, source, FIRST_USE)
assert offer.engine is not None, offer.reason
inputs = make_inputs(seed=5)
error = (offer.engine.engine(**inputs)["out"] - source.eager(inputs)["out"]).abs().max().item()
print(json.dumps({"seconds": time.monotonic() - began, "error": error, "digest": offer.engine.entry.digest}))
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_a_new_process_serves_within_five_seconds_what_another_built(
    store: EngineStore, source: FakeSource, root: Path, tmp_path: Path
) -> None:
    """Its store, compiler caches and home are empty; a real compiled engine comes from an S3 server on loopback."""
    pytest.importorskip("moto")
    pytest.importorskip("s3fs")
    from slipstream.tests.unit.engine_cache.travel.servers import BUCKET, s3_server

    builder = EngineProvider(store, [AOTInductorBackend()], supply=Supply())
    entry = builder.make(source, CALL, FIRST_USE, HostHooks()).entry
    with s3_server() as address:
        reach = {
            "AWS_ENDPOINT_URL": address,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        with pytest.MonkeyPatch.context() as patch:
            for name, value in reach.items():
                patch.setenv(name, value)
            RemoteStore(f"s3://{BUCKET}/cold").push(entry, store)
        empty = {
            name: str(tmp_path / name) for name in ("HOME", "TORCHINDUCTOR_CACHE_DIR", "TMPDIR", "SLIPSTREAM_KEYS")
        }
        for folder in empty.values():
            Path(folder).mkdir()
        environment = {
            **os.environ, **reach, **empty,
            REMOTE_VARIABLE: f"s3://{BUCKET}/cold",
            WORKER_VARIABLE: "1",
            "SLIPSTREAM_TRUSTED_KEYS": store.keyring.public_key(),
        }  # fmt: skip
        command = [sys.executable, "-c", _SERVER, str(root), str(tmp_path / "empty")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    logging.getLogger(__name__).info("served after %.2f s", found["seconds"])
    assert found["digest"] == entry.digest and found["error"] < 1e-5
    assert found["seconds"] < 5.0


def test_why_an_engine_cannot_be_had_names_the_store(url, elsewhere, source) -> None:
    provider = elsewhere(url, never_builds=True)
    offer = ask(provider, source, FIRST_USE)
    assert url in offer.reason and "none is built" in offer.reason
