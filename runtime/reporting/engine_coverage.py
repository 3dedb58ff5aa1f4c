"""Would an engine serve pictures of this size? And if not, why not, in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ...core.shapes import ShapeProfile, ShapeRange
from ...core.spec import Role
from ...engine_cache import Manifest
from ..planning.plan import say_sizes
from ..settings.model_settings import PIXELS, latent_of
from .engine_info import ANY_SIZE, say_sizes_of_blocks, why_not_used


@dataclass(frozen=True)
class Asked:
    """Calls of a UNet.

    Attributes:
        width, height: of the picture, in pixels.
        batch: samples in one call: 2 for one picture with CFG.
        tokens: length of the text.
    """

    width: int
    height: int
    batch: int
    tokens: int


def engine_coverage(manifests: Iterable[Manifest], asked: Asked) -> dict[str, list[dict[str, Any]]]:
    """Which engines for UNets take calls of this size on this machine, whatever model they are for.

    Returns:
        As plain data: `hits`; `near`, which are all others with the reasons, the fewest first; and `blocks`, the
        engines of blocks that take any size. Of which part of which models these are is not recorded.
    """
    manifests = list(manifests)
    unets = [manifest for manifest in manifests if manifest.role == Role.UNET.value]
    found = [
        {"digest": manifest.digest, "label": manifest.label, "why": why_not(manifest, asked)} for manifest in unets
    ]
    return {
        "hits": [{"digest": engine["digest"], "label": engine["label"]} for engine in found if not engine["why"]],
        "near": sorted((engine for engine in found if engine["why"]), key=lambda engine: len(engine["why"])),
        "blocks": [{"digest": each.digest, "label": each.label} for each in manifests if _is_block_of_any_size(each)],
    }


def _is_block_of_any_size(manifest: Manifest) -> bool:
    if manifest.role != Role.BLOCK.value or say_sizes_of_blocks(manifest.profile) != ANY_SIZE:
        return False
    return not why_not_used(manifest)


def is_for(manifest: Manifest, asked: Asked) -> bool:
    """Whether an engine takes calls of this size, on whatever machine."""
    return any(not list(_misfits(profile, asked, manifest.profiles)) for profile in manifest.profiles)


def why_not(manifest: Manifest, asked: Asked) -> list[str]:
    """Why an engine would not serve; empty where it would, for a model of its architecture."""
    misfits = [list(_misfits(profile, asked, manifest.profiles)) for profile in manifest.profiles]
    return [*min(misfits, key=len), *why_not_used(manifest)]


def _misfits(profile: ShapeProfile, asked: Asked, all_of_engine: tuple[ShapeProfile, ...]) -> Iterator[str]:
    latent = latent_of(profile.inputs)
    batch, (height, width) = latent[0], latent[-2:]
    if not (width.accepts(asked.width // PIXELS) and height.accepts(asked.height // PIXELS)):
        yield f"it is for {say_sizes(all_of_engine)}, not for {asked.width}×{asked.height}"
    # An engine for several shapes computes a larger batch in parts.
    splits = not (profile.is_static and len(all_of_engine) == 1)
    if not batch.accepts(min(asked.batch, batch.max) if splits else asked.batch):
        yield f"it is for batch {batch}, not {asked.batch}"
    tokens = _tokens(profile)
    if tokens is not None and not tokens.accepts(asked.tokens):
        yield f"it is for texts of {tokens} tokens, not {asked.tokens}"


def _tokens(profile: ShapeProfile) -> ShapeRange | None:
    """How long a text may be; None for models without one."""
    context = profile.inputs.get("context", ())
    return context[1] if len(context) == 3 else None
