"""Commands on the engines that are there: list, show, verify, prune, delete."""

from __future__ import annotations

import shutil
import sys
from argparse import Namespace
from typing import Any

from ..core.formatting import (
    SHOWN,
    say_backend,
    say_bytes,
    say_engine_error,
    say_seconds,
    say_share,
    say_speed,
    say_speedup,
    say_state,
    say_time,
    say_when,
)
from ..core.spec import Role
from ..engine_cache import EngineStore, Entry
from ..runtime.reporting.engine_info import ANY_SIZE, details, overview
from ..runtime.requests.pruning import prune
from .errors import FAILED, OK, CommandError
from .output import Output

_COLUMNS = ("id", "engine", "speed", "state")
_WIDE = ("id", "engine", "backend", "precision", "size", "built", "took", "last used", "error", "speed", "state")
_WIDTH = 80
"""Columns that a terminal is known to have."""


def list_engines(store: EngineStore, output: Output, options: Namespace) -> int:
    """Show every engine, the most recently used first."""
    data = overview(store)
    rows = data["engines"]

    def tell() -> None:
        if not rows:
            output.line(f"No engines in {store.root}.")
            output.line("Build one: slipstream build --model FILE --resolution 512x512")
            return
        if options.wide:
            output.table(_WIDE, [_wide_row(row) for row in rows])
        else:
            output.table(_COLUMNS, [_row(row) for row in rows], max(_WIDTH, shutil.get_terminal_size().columns))
        used = f"{say_bytes(data['bytes'])} of {say_bytes(store.limit_bytes)}"
        output.line(f"{len(rows)} engines, {used}, in {store.root}")

    output.show(data, tell)
    return OK


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    engine = f"{row['label']} {row['precision']}{_sizes(row)}"
    return row["digest"][:SHOWN], engine, say_speedup(row["speedup"]), say_state(row)


def _sizes(row: dict[str, Any]) -> str:
    """The sizes that an engine is for, where its label does not name them."""
    return f", {ANY_SIZE}" if row["resolution"] == ANY_SIZE else ""


def _wide_row(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["digest"][:SHOWN],
        row["label"] + _sizes(row),
        say_backend(row["backend"]),
        row["precision"],
        say_bytes(row["bytes"]),
        say_when(row["created"]),
        say_seconds(row["build_s"]),
        say_when(row["last_used"]),
        say_engine_error(row),
        say_speedup(row["speedup"]),
        say_state(row),
    )


def show_engine(store: EngineStore, output: Output, options: Namespace) -> int:
    """Show all that is known about one engine."""
    digest = resolve(store, options.id)
    entry = store.lookup(digest)
    if entry is None:
        raise CommandError(
            f"The engine {digest[:SHOWN]} in {store.root} is damaged or from a newer Slipstream; build it anew"
        )
    data = details(entry)
    output.show(data, lambda: _tell_details(entry, data, output))
    return OK


def _tell_details(entry: Entry, data: dict[str, Any], output: Output) -> None:
    shown = ("digest", "role", "backend", "precision", "optimize", "slipstream", "created", "directory")
    facts = [("engine", data["label"] + _sizes(data)), ("used now?", _say_use(data))]
    facts += [(name, str(data[name])) for name in shown]
    facts += [("last used", say_time(entry.last_used)), ("build", _say_build(data)), ("speed", say_speed(data))]
    facts += [(f"input {name}", "×".join(axes)) for name, axes in data["shapes"].items()]
    output.facts(facts)
    output.line("\nfiles")
    output.facts(
        [(name, f"{say_bytes(file['bytes'])}, sha256 {file['sha256']}") for name, file in data["files"].items()]
    )
    output.line("\naccuracy checks, one for each set of weights")
    checks = [(weights[:SHOWN], _say_check(check)) for weights, check in data["verifications"].items()]
    is_of_blocks = data["role"] == Role.BLOCK.value
    compared = "with its blocks in each process" if is_of_blocks else "with the model before it is first used"
    output.facts(checks or [("none", f"the engine is compared {compared}")])
    output.line("\nkey")
    output.facts(_flat(data["factors"]))


def _say_build(data: dict[str, Any]) -> str:
    phases = ", ".join(f"{name} {say_seconds(seconds)}" for name, seconds in data["build_phases"].items())
    return f"{say_seconds(data['build_s'])} ({phases})" if phases else say_seconds(data["build_s"])


def _say_check(check: dict[str, Any]) -> str:
    eager = f", your model itself {say_share(check['eager_error'])}" if check["eager_error"] is not None else ""
    note = f" ({check['note']})" if check["note"] else ""
    return f"{say_share(check['relative_error'])} off fp32{eager}, {check['cases']} cases, {check['when']}{note}"


def _say_use(data: dict[str, Any]) -> str:
    reasons = "; ".join(data["reasons"])
    if data["retired"]:
        return f"no: {reasons}"
    if reasons:
        return f"no: {reasons}. An engine for this machine and version is built when it is asked for"
    if data["caution"]:
        return f"{data['caution']}. Delete it to have it built anew, or choose Try again on it in ComfyUI's sidebar"
    return "yes, for this architecture at these shapes, as long as the model's code is the same"


def _flat(node: Any, name: str = "") -> list[tuple[str, str]]:
    """Factors as dotted names and values; shapes are left out, since they are shown as inputs."""
    if isinstance(node, dict) and name != "spec.profile":
        return [pair for key, child in node.items() for pair in _flat(child, f"{name}.{key}" if name else key)]
    return [] if name == "spec.profile" else [(name, str(node))]


def verify_engines(store: EngineStore, output: Output, options: Namespace) -> int:
    """Read the files of some engines (of all when none is named) and compare them with their checksums."""
    if options.ids and not options.all:
        found = {digest: store.verify(digest) for digest in dict.fromkeys(resolve(store, id) for id in options.ids)}
    else:
        found = store.verify_all()
    bad = sum(reason is not None for reason in found.values())
    engines = [{"digest": digest, "ok": reason is None, "reason": reason} for digest, reason in found.items()]

    def tell() -> None:
        for digest, reason in found.items():
            output.line(f"{digest[:SHOWN]}  {reason or 'ok'}")
        output.line(f"{len(found)} engines checked, {bad} bad" if found else f"No engines in {store.root}.")

    output.show({"store": str(store.root), "bad": bad, "engines": engines}, tell)
    return FAILED if bad else OK


def prune_engines(store: EngineStore, output: Output, options: Namespace) -> int:
    """Remove the least recently used engines until the rest fits, and what builds that were killed left behind."""
    removed = prune(store, options.limit, options.older_than)
    freed = sum(entry.bytes for entry in removed)

    def tell() -> None:
        for entry in removed:
            output.line(f"{entry.digest[:SHOWN]}  {entry.manifest.label}")
        output.line(f"{len(removed)} engines removed, {say_bytes(freed)} freed, {say_bytes(store.size_bytes())} left")

    output.show({"store": str(store.root), "removed": [entry.digest for entry in removed], "freed_bytes": freed}, tell)
    return OK


def delete_engines(store: EngineStore, output: Output, options: Namespace) -> int:
    """Remove engines by their ids, once that is confirmed."""
    digests = list(dict.fromkeys(resolve(store, prefix) for prefix in options.ids))
    if not options.yes:
        _confirm(store, digests)
    removed = [digest for digest in digests if store.delete(digest)]

    def tell() -> None:
        for digest in removed:
            output.line(f"{digest[:SHOWN]}  deleted")

    output.show({"store": str(store.root), "deleted": removed}, tell)
    return OK


def _confirm(store: EngineStore, digests: list[str]) -> None:
    names = [_name(store, digest) for digest in digests]
    if not sys.stdin.isatty():
        raise CommandError(f"Nothing was deleted: add --yes to delete {', '.join(names)}")
    print(f"Delete {', '.join(names)}? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise CommandError("Nothing was deleted")


def _name(store: EngineStore, digest: str) -> str:
    entry = store.lookup(digest)
    return f"{digest[:SHOWN]} ({entry.manifest.label})" if entry else digest[:SHOWN]


def resolve(store: EngineStore, prefix: str) -> str:
    """The one digest in the store, readable or not, that begins with `prefix`.

    Raises:
        CommandError: none does, or several do.
    """
    found = [digest for digest in store.digests() if digest.startswith(prefix)]
    if not found:
        raise CommandError(
            f"No engine in {store.root} has an id that begins with {prefix}; `slipstream list` shows them"
        )
    if len(found) > 1:
        several = ", ".join(digest[: max(SHOWN, len(prefix) + 4)] for digest in found[:5])
        raise CommandError(f"{prefix} fits {len(found)} engines ({several}); give more digits")
    return found[0]
