"""The engine store shared by several processes, some of which die."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable

import pytest

from slipstream.core.errors import BuildCancelled, StoreError
from slipstream.core.progress import CancelToken
from slipstream.core.protocols import Artifact
from slipstream.engine_cache import EngineStore, Entry
from slipstream.tests.unit.engine_cache.support import make_key

Start = Callable[..., "subprocess.Popen[str]"]

PUT = """
store = EngineStore(sys.argv[1])
folder = pathlib.Path(sys.argv[2])
artifact = Artifact(folder, ("model.pt2", "constants.json"))
def put():
    return store.put(make_key(), artifact, label=f"by {os.getpid()}", build=BuildRecord(1))
"""


def say(process: subprocess.Popen[str], line: str = "go") -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def hear(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("moment", ["copy_durably", "write_durably", "sync_folder"])
def test_a_process_killed_while_storing_leaves_nothing_visible(
    store: EngineStore, artifact: Artifact, python: Start, put: Callable[..., Entry], moment: str
) -> None:
    code = f"""{PUT}
from slipstream.engine_cache import store as module
original = module.{moment}
def stop(*arguments):
    original(*arguments)
    print("there", flush=True)
    time.sleep(600)
module.{moment} = stop
put()
"""
    process = python(code, store.root, artifact.directory)
    assert hear(process) == "there"
    (making,) = (store.root / "tmp").iterdir()
    assert any(making.iterdir()), "it was in the middle"
    assert store.lookup(make_key().digest) is None and store.list() == []
    assert store.clean() == 0, "it is alive"
    process.kill()
    process.wait()
    assert store.lookup(make_key().digest) is None
    put().verify_files()
    assert list((store.root / "tmp").iterdir()) == [], "the next put cleans up after the dead one"
    assert list((store.root / "in_use").iterdir()) == []


def test_a_process_killed_with_the_store_lock_does_not_block_it(
    store: EngineStore, artifact: Artifact, python: Start, put: Callable[..., Entry]
) -> None:
    code = f"""{PUT}
from slipstream.engine_cache import store as module
def stop(*arguments):
    print("there", flush=True)
    time.sleep(600)
module.replace = stop
put()
"""
    process = python(code, store.root, artifact.directory)
    assert hear(process) == "there"
    process.kill()
    process.wait()
    begin = time.monotonic()
    put().verify_files()
    assert time.monotonic() - begin < 10


def test_two_processes_store_the_same_engine(store: EngineStore, artifact: Artifact, python: Start) -> None:
    code = f"""{PUT}
print("ready", flush=True)
input()
entry = put()
entry.verify_files()
print(entry.manifest.label)
"""
    processes = [python(code, store.root, artifact.directory) for _ in range(3)]
    for process in processes:
        assert hear(process) == "ready"
    for process in processes:
        say(process)
    labels = {process.communicate()[0].strip() for process in processes}
    assert len(labels) == 1, "all got the entry of the first"
    (entry,) = store.list()
    assert entry.manifest.label in labels
    entry.verify_files()
    assert list((store.root / "tmp").iterdir()) == []
    assert list((store.root / "quarantine").iterdir()) == []


_CROWD = """
import json, random, traceback
from slipstream.core.errors import SlipstreamError, StoreError
root, folder, many = sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3])
DOINGS = ("put", "use", "put", "use", "delete", "prune", "adopt", "use")

def work(number):
    store, chance, done = EngineStore(root), random.Random(number), {"wrong": 0}
    for step in range(max(8, 48 // many)):
        key, what = make_key(64 + 8 * chance.randrange(4)), DOINGS[(step + number) % len(DOINGS)]
        done[what] = done.get(what, 0) + 1
        try:
            if what == "put":
                store.put(key, Artifact(folder, ("model.pt2", "constants.json")), label="x", build=BuildRecord(1))
            elif what == "use" and (entry := store.lookup(key.digest)):
                with entry.hold():
                    entry.verify_files(again=True)
                    done["wrong"] += any(not entry.path(name).is_file() for name in entry.manifest.files)
            elif what == "delete":
                store.delete(key.digest)
            elif what == "prune":
                store.prune(limit_bytes=chance.choice((0, 9000)))
            elif what == "adopt":
                store.adopt(store.list())
        except StoreError as error:  # removed by another, or in use
            assert "removed" in str(error) or "in use" in str(error) or "meanwhile" in str(error), error
        except SlipstreamError as error:
            assert "in use" in str(error), error
    return done

children = []
for number in range(many):
    if (pid := os.fork()) == 0:
        try:
            os.write(1, (json.dumps(work(number)) + "\\n").encode())
            os._exit(0)
        except BaseException:
            os.write(1, traceback.format_exc().encode())
            os._exit(1)
    children.append(pid)
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks, so that what is imported is imported once")
@pytest.mark.parametrize("many", [2, 8])
def test_processes_that_do_all_at_once_on_one_store(
    store: EngineStore, artifact: Artifact, python: Start, many: int
) -> None:
    """They store, use, delete, prune and adopt the same four engines: nobody ever sees a half or a damaged one."""
    crowd = python(_CROWD, store.root, artifact.directory, many)
    told = crowd.communicate(timeout=240)[0]
    assert crowd.returncode == 0, told
    done = [json.loads(line) for line in told.splitlines()]
    assert len(done) == many and all(each["wrong"] == 0 for each in done)
    assert all(sum(each.get(what, 0) for each in done) for what in ("put", "use", "delete", "prune", "adopt"))
    assert all(problem is None for problem in store.verify_all().values()) and store.damaged == {}
    store.clean()
    assert not any((store.root / "tmp").iterdir()) and not any((store.root / "quarantine").iterdir())
    assert not (store.root / "adopting").exists()


HOLD_LOCK = """
store = EngineStore(sys.argv[1])
with store.reserve(make_key().digest) as waited:
    print(waited, flush=True)
    input()
"""


def test_only_one_process_builds_an_engine(store: EngineStore, python: Start) -> None:
    other = python(HOLD_LOCK, store.root)
    assert hear(other) == "False"
    with pytest.raises(StoreError, match=r"Another process is building the engine .* after 0 s.*Wait for it"):
        with store.reserve(make_key().digest, timeout=0.3):
            pytest.fail("reserved twice")
    with store.reserve(make_key(128).digest, timeout=0) as waited:
        assert waited is False, "another engine is another lock"
    seconds: list[float] = []

    def wait(waited: float) -> None:
        seconds.append(waited)
        if len(seconds) == 3:
            say(other)

    with store.reserve(make_key().digest, wait=wait) as waited:
        assert waited is True
    assert len(seconds) >= 3 and seconds == sorted(seconds)


def test_waiting_for_another_build_can_be_cancelled(store: EngineStore, python: Start) -> None:
    other = python(HOLD_LOCK, store.root)
    assert hear(other) == "False"
    cancel = CancelToken()
    threading.Timer(0.3, cancel.cancel).start()
    begin = time.monotonic()
    with pytest.raises(BuildCancelled, match="stopped: cancelled by the user"):
        with store.reserve(make_key().digest, wait=lambda _: cancel.raise_if_cancelled("The build")):
            pytest.fail("reserved twice")
    assert time.monotonic() - begin < 5
    assert other.poll() is None, "the other build goes on"


def test_a_killed_builder_frees_its_lock(store: EngineStore, python: Start) -> None:
    other = python(HOLD_LOCK, store.root)
    assert hear(other) == "False"
    other.kill()
    with store.reserve(make_key().digest, timeout=10):
        pass


def test_an_error_inside_the_block_is_passed_on_and_frees_the_lock(store: EngineStore) -> None:
    with pytest.raises(FileNotFoundError), store.reserve(make_key().digest):
        raise FileNotFoundError("the builder's own")
    with store.reserve(make_key().digest, timeout=0) as waited:
        assert waited is False


HOLD_ENTRY = """
store = EngineStore(sys.argv[1])
hold = store.lookup(make_key().digest).hold()
print(store.is_used(make_key().digest), flush=True)
input()
hold.release()
print("released", flush=True)
input()
"""


def test_an_engine_in_use_elsewhere_is_never_removed(
    store: EngineStore, put: Callable[..., Entry], python: Start
) -> None:
    entry = put()
    other = python(HOLD_ENTRY, store.root)
    assert hear(other) == "True"
    assert store.prune(0) == []
    with pytest.raises(StoreError, match="in use"):
        store.delete(entry.digest)
    say(other)
    assert hear(other) == "released"
    assert store.prune(0) == [entry.digest]


def test_a_killed_user_no_longer_holds_its_engine(store: EngineStore, put: Callable[..., Entry], python: Start) -> None:
    entry = put()
    other = python(HOLD_ENTRY, store.root)
    assert hear(other) == "True"
    assert len(list((store.root / "in_use").iterdir())) == 1
    other.kill()
    other.wait()
    assert store.prune(0) == [entry.digest]
    assert list((store.root / "in_use").iterdir()) == []


@pytest.mark.parametrize("count", [3, pytest.param(8, marks=pytest.mark.slow)])
def test_processes_that_store_use_and_prune_at_once(
    count: int, store: EngineStore, artifact: Artifact, python: Start
) -> None:
    code = """
import random
from slipstream.core.errors import StoreError
chance = random.Random(int(sys.argv[3]))
store = EngineStore(sys.argv[1], limit_bytes=8000)
artifact = Artifact(pathlib.Path(sys.argv[2]), ("model.pt2", "constants.json"))
for _ in range(12):
    key = make_key(64 * chance.randint(1, 4))
    entry = store.lookup(key.digest) or store.put(key, artifact, label="x", build=BuildRecord(1))
    try:
        with entry.hold():
            entry.verify_files(again=True)
            assert entry.artifact.files and store.lookup(key.digest) is not None, "removed while held"
            store.record_verification(entry, "b" * 64, Verification(1e-4, None, 1, "fp16"))
    except StoreError as error:
        assert "removed from the store meanwhile" in str(error), error
    if chance.random() < 0.3:
        store.prune(limit_bytes=4000)
print("fine")
"""
    processes = [python(code, store.root, artifact.directory, seed) for seed in range(count)]
    assert [process.communicate(timeout=200)[0].strip() for process in processes] == ["fine"] * count
    assert all(why is None for why in store.verify_all().values())
    assert store.size_bytes() <= 4000 * count, "only engines in use outlast the limit"
    for folder in ("tmp", "in_use", "quarantine"):
        assert list((store.root / folder).iterdir()) == []


def test_a_reader_never_sees_half_an_entry(store: EngineStore, artifact: Artifact, python: Start) -> None:
    code = f"""{PUT}
for _ in range(40):
    put()
    store.delete(make_key().digest)
"""
    other = python(code, store.root, artifact.directory)
    seen = 0
    while other.poll() is None:
        seen += store.lookup(make_key().digest) is not None
    assert other.returncode == 0
    assert seen > 0, "the test looked away"
    assert list((store.root / "quarantine").iterdir()) == []
