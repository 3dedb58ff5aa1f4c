"""Engines that need not be built here: they are pulled from a remote store, or never built.

The environment says which: `SLIPSTREAM_REMOTE` names stores, separated by blanks, that are asked in turn, and
`SLIPSTREAM_WORKER` makes a process that never builds.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence

from ...core.errors import BuildCancelled, SlipstreamError, warn_once
from ...core.progress import CancelToken, ProgressCallback
from ...engine_cache import EngineStore, Entry
from ...engine_cache.travel.remote_store import RemoteStore
from ...engine_cache.travel.retries import RemoteError
from ..settings.model_settings import BuildPolicy

REMOTE_VARIABLE = "SLIPSTREAM_REMOTE"
WORKER_VARIABLE = "SLIPSTREAM_WORKER"
BUILD_IT = "build it with the Build Engine node or `slipstream build`"
NEVER_BUILDS = f"this process never builds ({WORKER_VARIABLE} is set)"

_ASKED_AGAIN_SECONDS = 60.0

log = logging.getLogger(__name__)


class Supply:
    """Where engines come from beside this machine's own builds.

    Args:
        urls: of remote stores; asked in turn.
        never_builds: whether this process only uses engines that are there.

    Attributes:
        only_pulled: engines that were asked for last with a policy by which they are not built.
    """

    def __init__(self, urls: Sequence[str] = (), never_builds: bool = False) -> None:
        self.urls = tuple(urls)
        self.never_builds = never_builds
        self._missed: dict[str, float] = {}
        self._silent: dict[RemoteStore, float] = {}
        """Remote stores that did not answer, and when."""
        self.only_pulled: set[str] = set()
        self._remotes: list[RemoteStore] | None = None
        self._lock = threading.Lock()

    @classmethod
    def configured(cls) -> Supply:
        """As the environment says."""
        worker = os.environ.get(WORKER_VARIABLE, "").strip().lower() not in ("", "0", "off", "false", "no")
        return cls(os.environ.get(REMOTE_VARIABLE, "").split(), worker)

    def may_build(self, policy: BuildPolicy) -> bool:
        """Whether engines are built here without being asked for by hand."""
        return policy is not BuildPolicy.MANUAL and not self.never_builds

    def note_asked(self, digest: str, may_build: bool) -> None:
        """An engine is asked for now."""
        if may_build:
            self.only_pulled.discard(digest)
        else:
            self.only_pulled.add(digest)

    def is_only_pulled(self, digest: str) -> bool:
        """Whether an engine that no remote store has is not to be built either, as it was asked for last."""
        return self.never_builds or digest in self.only_pulled

    def may_have(self, digest: str) -> bool:
        """Whether it is worth while to ask for an engine: there is a remote store that did not lack it just now."""
        return bool(self.urls) and not _is_recent(self._missed.get(digest))

    def pull(self, digest: str, store: EngineStore, progress: ProgressCallback, cancel: CancelToken) -> Entry | None:
        """Bring an engine into `store`; None where no remote store has one that this user may load.

        Raises:
            BuildCancelled: somebody cancelled it.
        """
        if not self.may_have(digest):
            return None
        for remote in self.remotes():
            if _is_recent(self._silent.get(remote)):
                continue
            try:
                entry = remote.pull(digest, store, progress, cancel)
            except BuildCancelled:
                raise
            except SlipstreamError as error:  # building, or the user's own model, must not fail for it
                warn_once(log, f"Slipstream: the engine {digest[:12]} was not pulled: {error}")
                if isinstance(error, RemoteError):  # which may have taken its time
                    self._silent[remote] = time.monotonic()
                continue
            if entry is not None:
                log.info("Slipstream: pulled %s from %s", entry.manifest.label, remote)
                return entry
        self._missed[digest] = time.monotonic()
        return None

    def remotes(self) -> list[RemoteStore]:
        """The remote stores that can be used here."""
        with self._lock:
            if self._remotes is None:
                self._remotes = []
                for url in self.urls:
                    try:
                        self._remotes.append(RemoteStore(url))
                    except SlipstreamError as error:
                        warn_once(log, f"Slipstream: {REMOTE_VARIABLE}: {error}")
            return self._remotes


def _is_recent(when: float | None) -> bool:
    """Whether a time, by `time.monotonic`, is so short ago that nothing is asked again."""
    return when is not None and time.monotonic() - when <= _ASKED_AGAIN_SECONDS
