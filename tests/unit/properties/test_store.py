"""A store against a model of it: a dict of what was put, deleted, damaged and pruned, in any order."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from slipstream.core.errors import EngineInUse
from slipstream.core.protocols import Artifact
from slipstream.engine_cache import BuildRecord, EngineStore, Hold
from slipstream.engine_cache.manifest import MANIFEST_NAME
from slipstream.tests.unit.engine_cache.support import make_key

KEYS = [make_key(height) for height in (64, 72, 80, 88)]
numbers = st.integers(0, len(KEYS) - 1)


class Store(RuleBasedStateMachine):
    """What is in the store is what was put there, and whole."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="slipstream-store-"))
        self.store = EngineStore(self.folder / "store")
        self.there: dict[str, bytes] = {}
        self.holds: dict[str, Hold] = {}

    def teardown(self) -> None:
        for hold in self.holds.values():
            hold.release()
        shutil.rmtree(self.folder, ignore_errors=True)

    @rule(number=numbers, content=st.binary(min_size=1, max_size=300))
    def put(self, number: int, content: bytes) -> None:
        build = self.folder / "build"
        build.mkdir(exist_ok=True)
        (build / "engine.bin").write_bytes(content)
        key = KEYS[number]
        entry = self.store.put(key, Artifact(build, ("engine.bin",)), label=str(number), build=BuildRecord(1.0))
        self.there.setdefault(key.digest, content)  # the first of two stays
        assert entry.digest == key.digest

    @rule(number=numbers)
    def delete(self, number: int) -> None:
        digest = KEYS[number].digest
        if digest in self.holds:
            try:
                assert not self.store.delete(digest)
            except EngineInUse:
                assert digest in self.there
        else:
            assert self.store.delete(digest) == (self.there.pop(digest, None) is not None)

    @precondition(lambda self: self.there)
    @rule(data=st.data(), manifest=st.booleans())
    def damage(self, data: st.DataObject, manifest: bool) -> None:
        digest = data.draw(st.sampled_from(sorted(self.there)))
        if digest in self.holds:
            return
        file = self.store.engines / digest / (MANIFEST_NAME if manifest else "engine.bin")
        file.write_bytes(file.read_bytes() + b"!")
        if manifest:
            file.write_bytes(b"{")
        assert self.store.lookup(digest) is None
        del self.there[digest]

    @precondition(lambda self: self.there)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        digest = data.draw(st.sampled_from(sorted(self.there)))
        entry = self.store.lookup(digest)
        assert entry is not None
        if digest not in self.holds:
            self.holds[digest] = entry.hold()

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.holds.pop(data.draw(st.sampled_from(sorted(self.holds)))).release()

    @rule(limit=st.integers(0, 900))
    def prune(self, limit: int) -> None:
        for digest in self.store.prune(limit_bytes=limit):
            assert digest not in self.holds
            del self.there[digest]
        left = sum(len(content) for digest, content in self.there.items() if digest not in self.holds)
        assert left <= limit

    @rule()
    def start_anew(self) -> None:
        self.store = EngineStore(self.folder / "store")

    @rule()
    def clean(self) -> None:
        self.store.clean()

    @invariant()
    def holds_what_was_put(self) -> None:
        assert self.store.digests() == sorted(self.there)
        for entry in self.store.list():
            assert entry.path("engine.bin").read_bytes() == self.there[entry.digest]
            assert entry.why_untrusted() is None
        tmp = self.store.root / "tmp"
        assert not tmp.exists() or not any(tmp.iterdir())


Store.TestCase.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
TestStore = Store.TestCase
