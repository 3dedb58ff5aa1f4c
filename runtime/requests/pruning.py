"""Freeing disk space that the engine store takes."""

from __future__ import annotations

from datetime import timedelta

from ...engine_cache import EngineStore, Entry


def prune(store: EngineStore, limit_bytes: int | None = None, older_than: timedelta | None = None) -> list[Entry]:
    """Remove the least recently used engines until the rest fits, and the leftovers of builds that were killed.

    Args:
        limit_bytes: size in bytes that the rest must fit into, instead of the store's own limit.
        older_than: also remove all that were last used longer ago than this.

    Returns:
        The entries that are gone.

    Raises:
        StoreError: the store cannot be written.
    """
    if store.root.is_dir():
        store.clean()
    known = {entry.digest: entry for entry in store.list()}
    removed = store.prune(limit_bytes=limit_bytes, older_than=older_than)
    return [known[digest] for digest in removed if digest in known]
