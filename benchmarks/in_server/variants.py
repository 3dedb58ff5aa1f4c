"""The ways in which a picture is made: as ComfyUI does it, by its rivals, and by Slipstream's nodes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...core.spec import Quantised
from ...runtime.settings.model_settings import AUTO, NUMBERS
from ...sampling.presets import PRESETS, why_too_short
from .cases import PictureCase

PLAIN, TORCH_COMPILE, OURS = "plain", "torch-compile", "slipstream"
BLOCKS = "blocks"
"""A lever of Slipstream's: engines of the model's blocks alone, none of the whole model."""

Flags = tuple[str, ...]
"""Flags of ComfyUI's `main.py`."""

FAST, CK_ATTENTION = "--fast", "--use-ck-attention"
RIVALS: dict[str, Flags] = {
    "fast": (FAST,),
    "ck-attention": (CK_ATTENTION,),
    "fast+ck-attention": (FAST, CK_ATTENTION),
}
"""Rivals that are the plain workflow in a server with flags of its own."""

_WORDS = {
    PLAIN: "the workflow of stock nodes",
    TORCH_COMPILE: "the same with ComfyUI's own node TorchCompileModel, backend inductor, behind the model's loader",
    OURS: "the same with Slipstream's Accelerate nodes, each with its default settings",
}


@dataclass(frozen=True)
class ServerVariant:
    """A variant's name, taken apart.

    Attributes:
        kind: the workflow: `PLAIN`, `TORCH_COMPILE` or `OURS`.
        flags: of the server, besides those of its flag set.
        precision: input of Slipstream's nodes.
        preset: of Slipstream's node Step Skip; None where every step is computed.
        by_blocks: whether model and ControlNet run by engines of their blocks alone.
    """

    name: str
    kind: str
    flags: Flags = ()
    precision: str = AUTO
    preset: str | None = None
    by_blocks: bool = False

    @classmethod
    def of(cls, name: str) -> ServerVariant:
        """Read a name such as "slipstream+fp8+balanced".

        Raises:
            ValueError: there is no such variant.
        """
        if name in RIVALS:
            return cls(name, PLAIN, RIVALS[name])
        kind, *levers = name.split("+")
        if kind not in _WORDS or (levers and kind != OURS):
            known = ", ".join([*_WORDS, *RIVALS])
            raise ValueError(f"{name!r} is no variant; there are {known}, and levers such as {OURS}+fp8")
        if strange := [lever for lever in levers if lever not in (*NUMBERS, *PRESETS, BLOCKS)]:
            raise ValueError(f"{name!r}: {strange[0]!r} is not one of {', '.join([*NUMBERS, *PRESETS, BLOCKS])}")
        precisions, presets = ([lever for lever in levers if lever in known] for known in (NUMBERS, PRESETS))
        if len(precisions) > 1 or len(presets) > 1:
            raise ValueError(f"{name!r}: choose one precision and one preset at most")
        precision = next(iter(precisions), AUTO)
        if BLOCKS in levers and isinstance(NUMBERS.get(precision), Quantised):
            raise ValueError(f"{name!r}: engines of blocks do not compute in 8 bits")
        return cls(name, kind, (), precision, next(iter(presets), None), BLOCKS in levers)

    @property
    def is_ours(self) -> bool:
        """Whether Slipstream's nodes are in the workflow."""
        return self.kind == OURS

    def why_left_out(self, case: PictureCase) -> str | None:
        """Return why the variant means nothing for a case; None where it does."""
        if self.preset is not None and (reason := why_too_short(case.steps)):
            return reason
        if case.is_decode_only and self.kind == TORCH_COMPILE:
            return "ComfyUI has no such node for a VAE"
        if case.is_encode_only and self.kind == TORCH_COMPILE:
            return "ComfyUI has no such node for a text encoder"
        if case.is_encode_only and (self.by_blocks or self.precision != AUTO):
            return "Accelerate Text Encoder has no such choice"
        return None


def described(name: str) -> str:
    """Return what a variant is, or was, in plain words."""
    try:
        variant = ServerVariant.of(name)
    except ValueError:
        return "no longer offered"
    parts = [_WORDS[variant.kind]]
    parts += [f"in a server with {flags_text(variant.flags)}"] if variant.flags else []
    parts += [f"with precision {variant.precision}"] if variant.precision != AUTO else []
    parts += ["with engines of the model's blocks alone"] if variant.by_blocks else []
    parts += [f"with the preset {variant.preset} of Step Skip"] if variant.preset else []
    return ", ".join(parts)


def flags_text(flags: Iterable[str]) -> str:
    """Return a server's flags as one types them, or "default"."""
    return " ".join(flags) or "default"
