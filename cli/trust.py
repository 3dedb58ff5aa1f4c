"""The command `trust`: whose engines are loaded here, and the key by which others know this user's."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from pathlib import Path

from ..core.formatting import SHOWN
from ..engine_cache import EngineStore, Entry, PublicKey
from ..engine_cache.keyring import TRUSTED_VARIABLE
from .engines import resolve
from .errors import FAILED, OK, CommandError
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
    text = f"Engines signed by {key} are loaded no more"
    if is_left := key in store.keyring.trusted():
        text = f"{key} is removed, but engines signed by it are still loaded: {TRUSTED_VARIABLE} names it too"
    output.show({"removed": key, "still_trusted": is_left}, lambda: output.line(text))
    return OK


def _adopt(store: EngineStore, output: Output, options: Namespace) -> int:
    """Sign engines from before engines were signed, once a person says that this machine built them.

    Those that are named by their ids may also be of a key that was lost.
    """
    entries, wrong = _named(store, options.values) if options.values else (_unsigned(store), {})
    if entries and not options.yes:
        _confirm(entries)
    adopted = store.adopt(entries, lambda entry, error: wrong.update({entry.digest: str(error)}))

    def tell() -> None:
        for entry in adopted:
            output.line(f"{entry.digest[:SHOWN]}  {entry.manifest.label}")
        for digest, reason in wrong.items():
            output.line(f"{digest[:SHOWN]}  not adopted: {reason}")
        is_nothing = not entries and not wrong
        output.line("There are no unsigned engines to adopt" if is_nothing else f"Engines adopted: {len(adopted)}")

    output.show({"adopted": [entry.digest for entry in adopted], **({"wrong": wrong} if wrong else {})}, tell)
    return FAILED if wrong else OK


def _unsigned(store: EngineStore) -> list[Entry]:
    own = [entry for entry in store.list() if not entry.is_in_base]
    return [entry for entry in own if entry.manifest.seal is None and entry.manifest.signature is None]


def _named(store: EngineStore, names: list[str]) -> tuple[list[Entry], dict[str, str]]:
    """The engines of these ids that are not trusted yet, and why others cannot be adopted."""
    entries, wrong = [], {}
    for digest in dict.fromkeys(resolve(store, name) for name in names):
        entry = store.lookup(digest)
        if entry is None:
            wrong[digest] = store.damaged.get(digest, "it cannot be read; delete it, and it is built anew")
        elif entry.why_untrusted():
            entries.append(entry)
    return entries, wrong


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
