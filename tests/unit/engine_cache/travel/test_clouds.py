"""Remote stores of Azure and Google, by the clients that users have: engines arrive whole, or not at all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slipstream.core.errors import CorruptEngine, UntrustedEngine
from slipstream.engine_cache import EngineStore, Entry
from slipstream.engine_cache.travel.lease import Lease
from slipstream.engine_cache.travel.remote_store import RemoteStore
from slipstream.engine_cache.travel.retries import RemoteError, Retries
from slipstream.tests.unit.engine_cache.support import make_key
from slipstream.tests.unit.engine_cache.travel import clouds
from slipstream.tests.unit.engine_cache.travel.servers import BUCKET, BadConnection
from slipstream.tests.unit.engine_cache.travel.test_lease import taken_at_once, taken_within

pytestmark = pytest.mark.slow

GET = "`python tools/test.py --everything` installs it"
Made = Callable[..., Entry]
Cloud = Callable[..., RemoteStore]
MIB = 1 << 20


@pytest.fixture(scope="module", params=["abfs", "gs"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The protocol, and the address of a server that speaks it."""
    if request.param == "gs":
        clouds.without_grpc()
        pytest.importorskip("gcsfs", reason=f"no gcsfs; {GET}")
        with clouds.google_storage() as address:
            yield "gs", address
        return
    pytest.importorskip("adlfs", reason=f"no adlfs; {GET}")
    if (program := clouds.find_azurite()) is None:
        pytest.skip(f"no azurite (npm); {GET} where there is npm")
    with clouds.azurite(program, tmp_path_factory.mktemp("azurite")) as address:
        yield "abfs", address


@pytest.fixture
def cloud(server: tuple[str, str], tmp_path: Path) -> Cloud:
    """A remote store of this test's own, seen through an address that leads to the server."""
    protocol, its_own = server

    def run(address: str = its_own, retries: Retries = Retries(first_s=0.01)) -> RemoteStore:  # noqa: B008
        options = clouds.azure_options(address) if protocol == "abfs" else clouds.google_options(address)
        return RemoteStore(f"{protocol}://{BUCKET}/{tmp_path.name}", options, retries)

    return run


def files_of(entry: Entry) -> dict[str, bytes]:
    return {name: entry.path(name).read_bytes() for name in entry.manifest.files}


def test_an_engine_goes_there_and_comes_back(maker: EngineStore, reader: EngineStore, made: Made, cloud: Cloud) -> None:
    remote, entry = cloud(), made(size=20 * MIB)  # more than the clients send in one request
    assert remote.digests() == [] and remote.pull(entry.digest, reader) is None
    assert remote.push(entry, maker) and not remote.push(entry, maker)
    assert remote.digests() == [entry.digest]
    pulled = remote.pull(entry.digest, reader)
    assert pulled is not None and files_of(pulled) == files_of(entry)


def test_a_strangers_engine_is_refused(maker: EngineStore, stranger: EngineStore, made: Made, cloud: Cloud) -> None:
    cloud().push(entry := made(), maker)
    with pytest.raises(UntrustedEngine, match="trust add"):
        cloud().pull(entry.digest, stranger)


def test_cut_connections_are_tried_again(
    server: tuple[str, str], maker: EngineStore, reader: EngineStore, made: Made, cloud: Cloud
) -> None:
    entry, retries = made(size=3 * MIB), Retries(attempts=8, first_s=0.01)
    for work in (lambda remote: remote.push(entry, maker), lambda remote: remote.pull(entry.digest, reader)):
        with BadConnection(server[1]) as line:
            cut: list[int] = []

            def spoil(number: int, piece: bytes, cut: list[int] = cut) -> bytes | None:
                if len(cut) == 3:
                    return piece
                cut.append(number)
                return None

            line.spoil = spoil
            assert work(cloud(line.address, retries)) and len(cut) == 3
    found = reader.lookup(entry.digest)
    assert found is not None and files_of(found) == files_of(entry)


def test_wrong_bytes_are_never_taken(maker: EngineStore, reader: EngineStore, made: Made, cloud: Cloud) -> None:
    entry, remote = made(), cloud()
    remote.push(entry, maker)
    for wrong in (b"x" * 3000, b"x" * 10, b"x" * 9000, b""):
        remote.write_small(f"files/{entry.manifest.files['model.pt2'].sha256}", wrong)
        with pytest.raises((CorruptEngine, RemoteError)):
            remote.pull(entry.digest, reader)
    assert reader.list() == [] and not any((reader.root / "tmp").iterdir())
    assert remote.push(entry, maker, again=True) and remote.pull(entry.digest, reader) is not None


def test_one_of_many_gets_a_lease(cloud: Cloud) -> None:
    assert sorted(taken_at_once([Lease(cloud(), "a" * 64) for _ in range(8)])) == [False] * 7 + [True]


def test_a_lease_is_given_back_and_taken_from_the_dead(cloud: Cloud) -> None:
    first, second = Lease(cloud(), "b" * 64, 0.5), Lease(cloud(), "b" * 64, 0.5)
    assert first.try_take() and not second.try_take()
    assert taken_within(30, second)
    with second.kept():
        assert not first.try_take()
    assert first.try_take()


def test_a_server_that_is_gone_is_said_to_be_gone_soon(
    server: tuple[str, str], reader: EngineStore, cloud: Cloud
) -> None:
    """The clients' own patience, half a minute to a minute for each question, is not waited for."""
    with BadConnection(server[1]) as line:
        line.spoil = lambda number, piece: None
        started = time.monotonic()
        with pytest.raises(RemoteError, match="failed 3 times.*Check the network"):
            cloud(line.address, Retries(attempts=3, first_s=0.01)).pull(make_key().digest, reader)
        assert time.monotonic() - started < 20
