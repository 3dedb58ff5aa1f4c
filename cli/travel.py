"""Commands by which engines leave and arrive: export, import, push, pull."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..core.errors import SlipstreamError
from ..core.formatting import SHOWN, say_bytes
from ..engine_cache import EngineStore, Entry
from ..engine_cache.travel.archive import export_file, export_folder, import_engines
from ..engine_cache.travel.remote_store import RemoteStore
from ..runtime.building.supply import REMOTE_VARIABLE
from .engines import resolve
from .errors import FAILED, OK, CommandError
from .output import Output, progress_bar


def export_engines(store: EngineStore, output: Output, options: Namespace) -> int:
    """Write engines into one file, or into a folder that can be the base of other stores."""
    entries = chosen(store, options.ids)
    target: Path = options.target
    with progress_bar(str(target)) as progress:
        if options.folder:
            export_folder(store, entries, target, progress)
        else:
            export_file(store, entries, target, progress)
    size = sum(entry.bytes for entry in entries)
    data = {"target": str(target), "engines": [entry.digest for entry in entries], "bytes": size}
    output.show(data, lambda: output.line(f"{len(entries)} engines, {say_bytes(size)}, are in {target}"))
    return OK


def import_from(store: EngineStore, output: Output, options: Namespace) -> int:
    """Take in the engines of a file or folder; fails where one of them is left out."""
    outcomes: dict[str, Entry | SlipstreamError] = {}
    with progress_bar(str(options.source)) as progress:
        import_engines(store, options.source, outcomes.__setitem__, progress)
    return _tell_outcomes(store, output, outcomes, "imported")


def push(store: EngineStore, output: Output, options: Namespace) -> int:
    """Send engines to a remote store."""
    remote, sent = remote_of(options), dict[str, bool]()
    for entry in chosen(store, options.ids):
        with progress_bar(entry.manifest.label) as progress:
            sent[entry.digest] = remote.push(entry, store, progress, again=options.again)

    def tell() -> None:
        for digest, new in sent.items():
            output.line(f"{digest[:SHOWN]}  {'sent' if new else 'was there'}")
        output.line(f"{len(sent)} engines are in {remote}")

    output.show({"remote": str(remote), "sent": [digest for digest, new in sent.items() if new]}, tell)
    return OK


def pull(store: EngineStore, output: Output, options: Namespace) -> int:
    """Bring engines from a remote store; fails where one of them is left out."""
    remote = remote_of(options)
    outcomes: dict[str, Entry | SlipstreamError] = {}
    for digest in _chosen_there(remote, options.ids):
        with progress_bar(digest[:SHOWN]) as progress:
            try:
                found = store.lookup(digest) or remote.pull(digest, store, progress)
                outcomes[digest] = found or CommandError(f"{remote} has no engine {digest[:SHOWN]}")
            except SlipstreamError as error:
                outcomes[digest] = error
    return _tell_outcomes(store, output, outcomes, "pulled")


def remote_of(options: Namespace) -> RemoteStore:
    """The remote store that the user named, else the first of the environment.

    Raises:
        CommandError: there is none.
        BackendUnavailable: a package for its address is missing.
    """
    urls = [options.remote] if options.remote else os.environ.get(REMOTE_VARIABLE, "").split()
    if not urls:
        raise CommandError(f"Name a remote store: --remote URL, such as s3://bucket/engines, or set {REMOTE_VARIABLE}")
    return RemoteStore(urls[0])


def chosen(store: EngineStore, ids: Sequence[str]) -> list[Entry]:
    """The engines that a user named, or all that this machine would load.

    Raises:
        CommandError: there are none, or one that was named cannot be read.
    """
    if not ids:
        entries = [entry for entry in store.list() if entry.why_untrusted() is None]
        if not entries:
            raise CommandError(f"No engines in {store.root}. Build one: slipstream build --model FILE")
        return entries
    found = {digest: store.lookup(digest) for digest in (resolve(store, prefix) for prefix in ids)}
    if bad := [digest[:SHOWN] for digest, entry in found.items() if entry is None]:
        raise CommandError(f"{', '.join(bad)} cannot be read; build it anew")
    return [entry for entry in found.values() if entry]


def _chosen_there(remote: RemoteStore, prefixes: Sequence[str]) -> list[str]:
    whole = [prefix for prefix in prefixes if len(prefix) == 64]
    if prefixes and len(whole) == len(prefixes):
        return whole  # a web server cannot list what it has
    there = remote.digests()
    found = [digest for digest in there if not prefixes or any(digest.startswith(prefix) for prefix in prefixes)]
    if not found:
        raise CommandError(f"{remote} has no such engines: {', '.join(prefixes) or 'it is empty, or cannot list them'}")
    return found


def _tell_outcomes(store: EngineStore, output: Output, outcomes: dict[str, Entry | SlipstreamError], done: str) -> int:
    rows: list[dict[str, Any]] = [
        {"digest": digest, "ok": isinstance(each, Entry), "reason": None if isinstance(each, Entry) else str(each)}
        for digest, each in outcomes.items()
    ]
    good = sum(row["ok"] for row in rows)

    def tell() -> None:
        for row in rows:
            output.line(f"{row['digest'][:SHOWN]}  {row['reason'] or 'ok'}")
        output.line(f"{good} of {len(rows)} engines {done} into {store.root}")

    output.show({"store": str(store.root), "engines": rows}, tell)
    return OK if good == len(rows) else FAILED
