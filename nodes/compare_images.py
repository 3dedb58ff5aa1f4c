"""Compare Images: how far pictures are from their reference, in figures and side by side."""

from __future__ import annotations

import torch
from comfy_api.latest import io, ui
from torch import Tensor

from .shared.search import COMPARING, found_by
from .shared.skip_inputs import CATEGORY

SLIDER = "slipstream_ab"
"""Of what the page is told: the first picture and its reference, for the slider."""


class CompareImages(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SlipstreamCompareImages",
            display_name="Compare Images",
            category=CATEGORY,
            description="Measures how close pictures are to a reference, such as those of a faster workflow to those "
            "of the slower one with the same seed. Shows both under a slider, and side by side with a map of their "
            "difference.",
            **found_by(COMPARING),
            inputs=[
                io.Image.Input("image", tooltip="What is judged. One picture is compared with each reference."),
                io.Image.Input("reference", tooltip="What it should be. One reference serves every picture."),
                io.Float.Input(
                    "amplify",
                    default=8.0,
                    min=1.0,
                    max=255.0,
                    step=1.0,
                    tooltip="Makes the difference map brighter. It changes no figure.",
                ),
            ],
            outputs=[
                io.Image.Output(
                    display_name="side_by_side", tooltip="The picture, its reference and the map of their difference."
                ),
                io.Image.Output(display_name="difference", tooltip="Black where both are the same."),
                io.String.Output(display_name="report", tooltip="The figures, a line for each picture."),
            ],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, image: Tensor, reference: Tensor, amplify: float = 8.0) -> io.NodeOutput:
        image, reference = _paired(image, reference)
        # What is not a number would be shown as black, which means no difference.
        difference = ((image - reference).abs() * amplify).nan_to_num(nan=1.0).clamp(0.0, 1.0)
        side_by_side = torch.cat([image, reference, difference], dim=2)
        report = _report(image.movedim(-1, 1), reference.movedim(-1, 1))
        shown = ui.PreviewImage(side_by_side).as_dict() | ui.PreviewText(report).as_dict()
        shown[SLIDER] = [ui.PreviewImage(each[:1]).as_dict()["images"][0] for each in (image, reference)]
        return io.NodeOutput(side_by_side, difference, report, ui=shown)


def _paired(image: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Two batches [B, H, W, C] of the same shape; a single picture is repeated for the other's batch.

    Raises:
        ValueError: they do not fit together.
    """
    if image.shape[1:3] != reference.shape[1:3]:
        raise ValueError(
            f"Compare Images: image is {_size(image)} and reference {_size(reference)}. Bring one to the other's size, "
            "with Upscale Image say"
        )
    if image.shape[3] != reference.shape[3]:
        raise ValueError(
            f"Compare Images: image has {image.shape[3]} channels and reference {reference.shape[3]}. Remove the alpha "
            "channel of one, with Split Image with Alpha say"
        )
    if image.shape[0] != reference.shape[0] and 1 not in (image.shape[0], reference.shape[0]):
        raise ValueError(
            f"Compare Images: image is a batch of {image.shape[0]} and reference one of {reference.shape[0]}. Give as "
            "many of both, or a single one to compare with each"
        )
    batch = max(image.shape[0], reference.shape[0])
    return image.expand(batch, -1, -1, -1), reference.to(image.device).expand(batch, -1, -1, -1)


def _size(image: Tensor) -> str:
    return f"{image.shape[2]}x{image.shape[1]}"


def _report(image: Tensor, reference: Tensor) -> str:
    """A line for each picture of [B, C, H, W], and one for the mean of several."""
    from ..sampling.metrics import capped, high_frequency_energy, psnr, spectral_error, ssim

    decibels = psnr(image, reference)
    rest = [ssim(image, reference), high_frequency_energy(image, reference), *spectral_error(image, reference).T]
    rows = list(zip(*(figures.tolist() for figures in (decibels, *rest)), strict=True))
    lines = [_line(f"picture {number}", *row) for number, row in enumerate(rows, start=1)]
    if len(rows) > 1:
        # One identical picture would make the mean infinite.
        lines.append(_line("mean", *(figures.mean().item() for figures in (capped(decibels), *rest))))
    return "\n".join([*lines, "Higher PSNR and SSIM, and high frequencies nearer to 1: closer to the reference."])


def _line(name: str, decibels: float, similarity: float, sharpness: float, *bands: float) -> str:
    if decibels != decibels:
        return f"{name}: cannot be compared, since there is NaN or Inf in a picture or its reference"
    ratio = "identical" if decibels == float("inf") else f"{decibels:.2f} dB"
    errors = ", ".join(f"{100 * band:.3g} %" for band in bands)
    return (
        f"{name}: PSNR {ratio}, SSIM {similarity:.4f}, high frequencies {sharpness:.3f}, "
        f"error from low to high frequencies {errors}"
    )
