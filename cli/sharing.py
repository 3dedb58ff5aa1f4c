"""A build that many machines may want: pulled where it is there, else made by one of them and sent to the others."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from ..core.progress import Progress
from ..engine_cache import Entry
from ..engine_cache.travel.lease import Lease
from ..engine_cache.travel.remote_store import RemoteStore
from ..runtime.planning.plan import CallShape
from ..runtime.provider import EngineProvider
from ..runtime.requests.make_engines import LoadedModel
from ..runtime.settings.model_settings import Settings
from .output import progress_bar

_PAUSE_SECONDS = 1.0


class Sharing:
    """Sends what was made to a remote store; does nothing where there is none."""

    def __init__(self, provider: EngineProvider, remote: RemoteStore | None) -> None:
        self._provider, self._remote = provider, remote

    def push(self, entry: Entry) -> None:
        """Send an engine, unless it is there.

        Raises:
            SlipstreamError: it could not be sent.
        """
        if self._remote is not None:
            with progress_bar(entry.manifest.label) as progress:
                self._remote.push(entry, self._provider.store, progress)


@contextlib.contextmanager
def shared(
    provider: EngineProvider, model: LoadedModel, call: CallShape, settings: Settings, url: str | None
) -> Iterator[Sharing]:
    """Before the block, pull the engine or become the one machine that builds it.

    Raises:
        SlipstreamError: the remote store cannot be used.
    """
    if url is None:
        yield Sharing(provider, None)
        return
    remote, plan = RemoteStore(url), provider.plans(model.source, call, settings)[0]
    digest, store = plan.key.digest, provider.store
    lease = Lease(remote, digest)
    sharing = Sharing(provider, remote)
    with progress_bar(str(plan)) as progress, contextlib.ExitStack() as kept:
        while store.lookup(digest) is None and remote.pull(digest, store, progress) is None:
            if lease.try_take():
                kept.enter_context(lease.kept())
                remote.pull(digest, store, progress)  # its last holder may have sent it a moment ago
                break
            progress(Progress("waiting", None, "another machine is building this engine"))
            time.sleep(_PAUSE_SECONDS)
        yield sharing
