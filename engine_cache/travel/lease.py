"""Who of many machines builds an engine at this moment, by files in a remote store.

Each holder writes a file of the next number, which of several writers one can create. It renews its file while it
builds. One that has not changed for a while, by the clock of whoever looks, belongs to a dead machine: clocks of
different machines are never compared. Where two build all the same, the engine is built twice and nothing breaks.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
import uuid
from collections.abc import Iterator

from ...core.errors import SlipstreamError
from .remote_store import RemoteStore

LEASE_SECONDS = 60.0
_FOLDER = "leases"

log = logging.getLogger(__name__)


class Lease:
    """The right to build one engine, asked for by one machine.

    Args:
        seconds: after which a holder that renewed nothing counts as dead; it renews four times as often.
    """

    def __init__(self, remote: RemoteStore, digest: str, seconds: float = LEASE_SECONDS) -> None:
        self._remote, self._digest, self._seconds = remote, digest, seconds
        self._owner = uuid.uuid4().hex
        self._seen: tuple[str, bytes | None, float] | None = None

    def try_take(self) -> bool:
        """Take it where it is free, or where its holder has shown no life for long enough.

        Raises:
            RemoteError: the remote store cannot be asked.
        """
        number, content = self._latest()
        if number and not self._is_dead(str(number), content):
            return False
        self.name = f"{_FOLDER}/{self._digest}.{number + 1}.json"
        if self._remote.create_small(self.name, self._content(0)):
            return True
        # An answer may have been lost of an attempt that succeeded.
        return self._remote.read_small(self.name) == self._content(0)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Renew it during the block, after `try_take`; then give it back."""
        ended = threading.Event()
        thread = threading.Thread(target=self._renew, args=(ended,), daemon=True, name="slipstream-lease")
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(self._seconds)
            with contextlib.suppress(SlipstreamError):  # it ends by itself
                self._give_back()

    def _renew(self, ended: threading.Event) -> None:
        count = 0
        while not ended.wait(self._seconds / 4):
            count += 1
            try:
                self._remote.write_small(self.name, self._content(count))
            except SlipstreamError as error:
                log.info("The lease on the engine %s was not renewed: %s", self._digest[:12], error)

    def _give_back(self) -> None:
        mine = self.name.rpartition("/")[2]
        for name in self._names():
            if self._number(name) <= self._number(mine):
                self._remote.remove(f"{_FOLDER}/{name}")

    def _latest(self) -> tuple[int, bytes | None]:
        names = sorted(self._names(), key=self._number)
        return (self._number(names[-1]), self._remote.read_small(f"{_FOLDER}/{names[-1]}")) if names else (0, None)

    def _is_dead(self, name: str, content: bytes | None) -> bool:
        """Whether a holder's file is as it was, `seconds` of this machine's own time ago."""
        now = time.monotonic()
        if self._seen is None or self._seen[:2] != (name, content):
            self._seen = name, content, now
        return now - self._seen[2] >= self._seconds

    def _names(self) -> list[str]:
        return [name for name in self._remote.names(_FOLDER) if name.startswith(self._digest) and self._number(name)]

    def _number(self, name: str) -> int:
        number = name.removeprefix(f"{self._digest}.").removesuffix(".json")
        return int(number) if number.isdecimal() else 0

    def _content(self, count: int) -> bytes:
        return json.dumps({"owner": self._owner, "renewed": count}).encode()
