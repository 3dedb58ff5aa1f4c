"""The command `trust`: whose engines are loaded here, and the key by which others know this user's."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from pathlib import Path

from ..core.formatting import SHOWN
from ..engine_cache import EngineStore, Entry, PublicKey
from .engines import resolve
from .errors import OK, CommandError
from .output import Output


def trust(store: EngineStore, output: Output, options: Namespace) -> int:
    """Carry out one action on the keys."""
    actions = {"list": _list, "show": _show, "add": _add, "remove": _remove, "adopt": _adopt}
    actions |= {"export-key": _export_key, "import-key": _import_key}
    return actions[options.action](store, output, options)


def _list(store: EngineStore, output: Output, options: Namespace) -> int:
    keys, own = store.keyring.trusted(), store.keyring.own_key()

    def tell() -> None:
        output.line(f"{own}  this user's own" if own else "This user has made no key yet")
        for key, name in keys.items():
            output.line(f"{key}  {name}".rstrip())

    data = {"folder": str(store.keyring.folder), "own": own, "trusted": dict(keys)}
    output.show(data, tell)
    return OK


def _show(store: EngineStore, output: Output, options: Namespace) -> int:
    key = store.keyring.public_key()
    output.show({"key": key}, lambda: output.line(key))
    return OK


def _add(store: EngineStore, output: Output, options: Namespace) -> int:
    key = _key(options)
    store.keyring.trust(key, options.name)
    output.show({"trusted": key}, lambda: output.line(f"Engines signed by {key} are loaded from now on"))
    return OK


def _remove(store: EngineStore, output: Output, options: Namespace) -> int:
    key = _key(options)
    if not store.keyring.distrust(key):
        raise CommandError(
            f"{key} is not in {store.keyring.folder / 'trusted_keys'}; `slipstream trust list` shows all"
        )
    output.show({"removed": key}, lambda: output.line(f"Engines signed by {key} are loaded no more"))
    return OK


def _adopt(store: EngineStore, output: Output, options: Namespace) -> int:
    """Sign engines from before engines were signed, once a person says that this machine built them.

    Those that are named by their ids may also be of a key that was lost.
    """
    names = options.values
    found = [store.lookup(resolve(store, name)) for name in names] if names else store.list()
    own = [entry for entry in found if entry and not entry.is_in_base]
    entries = [entry for entry in own if (entry.why_untrusted() if names else _is_unsigned(entry))]
    if entries and not options.yes:
        _confirm(entries)
    for entry in entries:
        store.adopt(entry)

    def tell() -> None:
        for entry in entries:
            output.line(f"{entry.digest[:SHOWN]}  {entry.manifest.label}")
        output.line(f"{len(entries)} engines adopted" if entries else "There are no unsigned engines to adopt")

    output.show({"adopted": [entry.digest for entry in entries]}, tell)
    return OK


def _is_unsigned(entry: Entry) -> bool:
    return entry.manifest.seal is None and entry.manifest.signature is None


def _confirm(entries: list[Entry]) -> None:
    names = ", ".join(f"{entry.digest[:SHOWN]} ({entry.manifest.label})" for entry in entries)
    question = (
        f"These engines hold native code and are of no key that is trusted: {names}. Did this machine build them all?"
    )
    if not sys.stdin.isatty():
        raise CommandError(f"Nothing was adopted. {question} Then add --yes")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise CommandError("Nothing was adopted")


def _export_key(store: EngineStore, output: Output, options: Namespace) -> int:
    """Write the secret key to a new file that only this user can read."""
    file = _file(options)
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise CommandError(f"{file} is there already: choose another name, or remove it first") from None
    with os.fdopen(descriptor, "w", encoding="ascii") as target:
        target.write(store.keyring.export_secret() + "\n")
    warning = f"{file} holds the secret key: whoever has it can sign engines that this user's machines load"
    output.show({"file": str(file)}, lambda: output.line(warning))
    return OK


def _import_key(store: EngineStore, output: Output, options: Namespace) -> int:
    file = _file(options)
    try:
        store.keyring.import_secret(file.read_text(encoding="ascii"))
    except ValueError as error:
        raise CommandError(f"{file}: {error}") from None
    output.show({"folder": str(store.keyring.folder)}, lambda: output.line(f"The key is in {store.keyring.folder}"))
    return OK


def _key(options: Namespace) -> PublicKey:
    try:
        return PublicKey(_one(options, "a public key, as `slipstream trust show` prints it"))
    except ValueError as error:
        raise CommandError(str(error)) from None


def _file(options: Namespace) -> Path:
    return Path(_one(options, "a file")).expanduser()


def _one(options: Namespace, what: str) -> str:
    if len(options.values) != 1:
        raise CommandError(f"`slipstream trust {options.action}` takes {what}")
    return str(options.values[0])
