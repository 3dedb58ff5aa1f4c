"""What is measured in which server, and in which order."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..patching.patches import PATCHES
from .cases import CASES
from .variants import PLAIN, Flags, ServerVariant

DEFAULT: Flags = ()


@dataclass(frozen=True)
class Block:
    """One variant's turn at a case: warm-up pictures, then timed ones.

    Attributes:
        flags: of the server.
        turn: from 1.
        is_reference_only: no picture is timed; the case's reference is made.
        patch: a key of `PATCHES`; empty: what those are compared with; None: patches have nothing to do with it.
    """

    flags: Flags
    case: str
    variant: str
    turn: int = 1
    is_reference_only: bool = False
    patch: str | None = None

    @property
    def subject(self) -> tuple[Flags, str, str, str | None]:
        """What is measured, in whichever turn."""
        return self.flags, self.case, self.variant, self.patch

    @property
    def compared_with(self) -> tuple[Flags, str, str, str | None]:
        """The subject whose picture it is compared with, of those with a patch."""
        return self.flags, self.case, PLAIN, self.patch


@dataclass(frozen=True)
class ServerRun:
    """One start of a server, and the blocks that are measured in it."""

    flags: Flags
    blocks: tuple[Block, ...]


def plan(
    flag_sets: Sequence[Flags],
    cases: Sequence[str],
    variants: Sequence[ServerVariant],
    turns: int,
    lacking: Iterable[str] = (),
    patches: Sequence[str] = (),
) -> list[ServerRun]:
    """Return the servers in the order in which they are started.

    With one set of flags there is one server, in which the variants of a case take turns: plain, compiled, ours, plain
    and so on. With several, the servers take turns, and each variant has one turn in each start of its server. Rivals
    that are flags have a server with these flags alone. The plain workflow with default flags comes first, since the
    others are compared with it.

    Args:
        lacking: cases of which there is no reference yet.
        patches: keys of `PATCHES`; each turn of a case is made without any of them first, then with each that is for
            its family.
    """
    with_patches: Sequence[str | None] = ["", *patches] if patches else [None]
    sets = _by_flags(flag_sets, variants)
    starts = [(turn,) for turn in range(1, turns + 1)] if len(sets) > 1 else [tuple(range(1, turns + 1))]
    runs = [
        ServerRun(flags, tuple(_blocks(flags, cases, found, each, with_patches)))
        for each in starts
        for flags, found in sets.items()
    ]
    runs = [run for run in runs if run.blocks]
    return [*_references(runs, cases, lacking, patches), *runs]


def left_out(cases: Sequence[str], variants: Sequence[ServerVariant]) -> list[str]:
    """Return a line for each variant that means nothing for a case: why."""
    pairs = [(case, variant, variant.why_left_out(CASES[case])) for case in cases for variant in variants]
    return [f"{case}: {variant.name} is left out: {reason}" for case, variant, reason in pairs if reason]


def _by_flags(flag_sets: Sequence[Flags], variants: Sequence[ServerVariant]) -> dict[Flags, list[ServerVariant]]:
    """The variants of each server; no workflow twice in the same server, and the one to compare with at the front."""
    found: dict[Flags, list[ServerVariant]] = {}
    for flags in flag_sets:
        for variant in variants:
            others = found.setdefault(variant.flags or flags, [])
            if not any(_workflow(other) == _workflow(variant) for other in others):
                others.append(variant)
    ordered = {flags: sorted(each, key=lambda one: one.kind != PLAIN) for flags, each in found.items()}
    is_late = {flags: flags != DEFAULT or each[0].kind != PLAIN for flags, each in ordered.items()}
    return {flags: ordered[flags] for flags in sorted(ordered, key=lambda flags: is_late[flags])}


def _workflow(variant: ServerVariant) -> tuple[object, ...]:
    return variant.kind, variant.precision, variant.preset, variant.by_blocks


def _blocks(
    flags: Flags,
    cases: Sequence[str],
    variants: Sequence[ServerVariant],
    turns: Iterable[int],
    patches: Sequence[str | None],
) -> Iterable[Block]:
    for case, turn, patch, variant in itertools.product(cases, turns, patches, variants):
        if _is_meant(patch, case) and variant.why_left_out(CASES[case]) is None:
            yield Block(flags, case, variant.name, turn, patch=patch)


def _is_meant(patch: str | None, case: str) -> bool:
    return not patch or PATCHES[patch].is_for(CASES[case].family, CASES[case].has_control)


def _references(
    runs: Sequence[ServerRun], cases: Sequence[str], lacking: Iterable[str], patches: Sequence[str]
) -> list[ServerRun]:
    """A first server for references that are lacking, as those with a patch always are, unless the plan's first server
    makes them anyway."""
    has_plain = any(
        run.flags == DEFAULT and ServerVariant.of(block.variant).kind == PLAIN for run in runs for block in run.blocks
    )
    wanted: list[tuple[str, str | None]] = [(case, None) for case in cases if case in set(lacking)]
    wanted += [(case, patch) for case in cases for patch in patches if _is_meant(patch, case)]
    blocks = [Block(DEFAULT, case, PLAIN, is_reference_only=True, patch=patch) for case, patch in wanted]
    return [ServerRun(DEFAULT, tuple(blocks))] if blocks and not has_plain else []
