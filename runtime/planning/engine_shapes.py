"""The shapes that an engine is made for: those of one call, or all that the user's list of resolutions allows.

Profiles of the latter kind are made of the settings and of what is the same in every call of a model, so that each call
finds the engine that any other led to.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...core.shapes import UNET_AXES, Shape, ShapeProfile, ShapeRange, Shapes
from ..settings.model_settings import PIXELS, TOKENS, Resolution, Settings, ShapeChoice, latent_of, range_of


def profiles_wanted(shapes: Shapes, settings: Settings) -> tuple[ShapeProfile, ...]:
    """The profiles of the engine that a call wants.

    Args:
        shapes: of the call's inputs.

    Returns:
        One static profile for "one engine per size", for calls that are none of an ordinary UNet, and for those that
        lie outside of what the settings name; a batch above the largest does not, since it runs in parts.
    """
    if settings.shapes is not ShapeChoice.EACH and settings.resolutions and _is_unet_call(shapes):
        within = clip_batch(shapes, settings.max_batch)
        profiles = _profiles(shapes, settings)
        if any(profile.accepts(within) for profile in profiles):
            return profiles
    return (ShapeProfile.static(shapes),)


def largest_batch(profiles: Sequence[ShapeProfile]) -> int:
    """The most samples in one call of an engine for a UNet or decoder."""
    return max(latent_of(profile.inputs)[0].max for profile in profiles)


def batch_of(shapes: Shapes) -> int | None:
    """How many samples a call has: the first axis of all its inputs; None where they differ."""
    sizes = {shape[0] if shape else None for shape in shapes.values()}
    return sizes.pop() if len(sizes) == 1 else None


def clip_batch(shapes: Shapes, largest: int) -> dict[str, Shape]:
    """The shapes of the call's first `largest` samples."""
    return {name: (min(shape[0], largest), *shape[1:]) for name, shape in shapes.items()}


def _is_unet_call(shapes: Shapes) -> bool:
    known = all(len(shape) == len(UNET_AXES.get(name, ())) for name, shape in shapes.items())
    return known and "x" in shapes and batch_of(shapes) is not None


def _profiles(shapes: Shapes, settings: Settings) -> tuple[ShapeProfile, ...]:
    common = {
        "batch": ShapeRange(1, settings.max_batch, settings.max_batch),
        "tokens": ShapeRange(TOKENS, TOKENS, settings.max_tokens),
    }
    if settings.shapes is ShapeChoice.RANGE:
        sizes = [_range_of(settings.resolutions)]
    else:  # in one order, however the user wrote the list
        sizes = [_range_of((each,)) for each in sorted(set(settings.resolutions), key=_by_area)]
    return tuple(_profile(shapes, common | size) for size in sizes)


def _profile(shapes: Shapes, ranges: dict[str, ShapeRange]) -> ShapeProfile:
    def axes(name: str) -> tuple[ShapeRange, ...]:
        counted = zip(UNET_AXES[name], shapes[name], strict=True)
        return tuple(ranges[axis] if axis else ShapeRange.exactly(size) for axis, size in counted)

    return ShapeProfile({name: axes(name) for name in shapes})


def _range_of(resolutions: tuple[Resolution, ...]) -> dict[str, ShapeRange]:
    """From the smallest to the largest, tuned for the first."""
    smallest, largest = range_of(resolutions)
    heights = (size.height // PIXELS for size in (smallest, resolutions[0], largest))
    widths = (size.width // PIXELS for size in (smallest, resolutions[0], largest))
    return {"height": ShapeRange(*heights), "width": ShapeRange(*widths)}


def _by_area(resolution: Resolution) -> tuple[int, int]:
    return resolution.width * resolution.height, resolution.width
