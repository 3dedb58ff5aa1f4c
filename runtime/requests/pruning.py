"""Giving back what the store takes of the disk."""

from __future__ import annotations

from datetime import timedelta

from ...engine_cache import EngineStore, Entry


def prune(store: EngineStore, limit_bytes: int | None = None, older_than: timedelta | None = None) -> list[Entry]:
    """Remove the least recently used engines until the rest fits, and what builds that were killed left behind.

    Args:
        limit_bytes: instead of the store's own limit.
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
