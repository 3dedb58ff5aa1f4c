"""A maker of engines, a reader who trusts it, and servers between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slipstream.core.protocols import Artifact
from slipstream.engine_cache import BuildRecord, EngineStore, Entry, Keyring
from slipstream.engine_cache.travel.remote_store import RemoteStore
from slipstream.engine_cache.travel.retries import Retries
from slipstream.tests.unit.engine_cache.support import make_key
from slipstream.tests.unit.engine_cache.travel.servers import BUCKET, KEYS, s3_server

QUICK = Retries(first_s=0.01)


@pytest.fixture
def maker(tmp_path: Path) -> EngineStore:
    """The store of a machine that builds."""
    return EngineStore(tmp_path / "maker", keyring=Keyring(tmp_path / "keys" / "maker"))


@pytest.fixture
def reader(tmp_path: Path, maker: EngineStore) -> EngineStore:
    """An empty store of another user, who trusts the maker."""
    made = EngineStore(tmp_path / "reader", keyring=Keyring(tmp_path / "keys" / "reader"))
    made.keyring.trust(maker.keyring.public_key(), "maker")
    return made


@pytest.fixture
def stranger(tmp_path: Path) -> EngineStore:
    """An empty store of a user who trusts nobody."""
    return EngineStore(tmp_path / "stranger", keyring=Keyring(tmp_path / "keys" / "stranger"))


@pytest.fixture
def made(maker: EngineStore, tmp_path: Path) -> Callable[..., Entry]:
    """Stores an engine of the maker."""

    def run(height: int = 64, size: int = 3000) -> Entry:
        folder = tmp_path / f"build-{height}-{size}"
        folder.mkdir(exist_ok=True)
        (folder / "model.pt2").write_bytes(bytes(height + number % 7 for number in range(size)))
        (folder / "constants.json").write_bytes(b"{}")
        artifact = Artifact(folder, ("model.pt2", "constants.json"), {"nodes": 12})
        return maker.put(make_key(height), artifact, label=f"SD15 {height}", build=BuildRecord(1.0))

    return run


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """The address of a running S3 server."""
    pytest.importorskip("moto")
    pytest.importorskip("s3fs")
    with s3_server() as address:
        yield address


@pytest.fixture
def bucket(s3: str, tmp_path: Path) -> Callable[..., RemoteStore]:
    """A remote store of this test's own in the S3 server, seen through an address that leads there."""

    def run(address: str = s3, retries: Retries = QUICK) -> RemoteStore:
        options = {**KEYS, "endpoint_url": address, "client_kwargs": {"region_name": "us-east-1"}}
        return RemoteStore(f"s3://{BUCKET}/{tmp_path.name}", options, retries)

    return run
