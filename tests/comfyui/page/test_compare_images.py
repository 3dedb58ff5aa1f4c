"""Compare Images: its figures, its pictures, and what it says where it cannot compare."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import folder_paths
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from slipstream.nodes.compare_images import CompareImages

ROOT = Path(__file__).resolve().parents[3]


def pictures(batch: int = 1, height: int = 24, width: int = 32, seed: int = 1, channels: int = 3) -> Tensor:
    """As nodes hand them on: [B, H, W, C] from 0 to 1."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(batch, height, width, channels, generator=generator) * 0.6 + 0.2


def compare(image: Tensor, reference: Tensor, **options: float) -> tuple[Tensor, Tensor, list[str]]:
    """Side by side, the difference, and the report's lines about pictures."""
    side_by_side, difference, report = CompareImages.execute(image, reference, **options).result
    *lines, legend = report.splitlines()
    assert legend.endswith("closer to the reference.")
    return side_by_side, difference, lines


def run_as_comfyui_does(**inputs: Any) -> tuple[list[Any], dict[str, Any]]:
    """By the executor's own function: outputs, and what is sent to the page."""
    import execution

    values = {name: [value] for name, value in inputs.items()}
    outputs, shown, *_ = asyncio.run(execution.get_output_data("prompt", "1", CompareImages(), values))
    return [value for (value,) in outputs], shown


# ---- what ComfyUI sees


def test_the_node_as_comfyui_sees_it() -> None:
    schema = CompareImages.GET_SCHEMA()
    assert (schema.node_id, schema.display_name, schema.category) == (
        "SlipstreamCompareImages",
        "Compare Images",
        "Slipstream/step skipping",
    )
    inputs = CompareImages.INPUT_TYPES()["required"]
    assert {name: spec[0] for name, spec in inputs.items()} == {
        "image": "IMAGE",
        "reference": "IMAGE",
        "amplify": "FLOAT",
    }
    assert inputs["amplify"][1]["default"] == 8
    assert CompareImages.RETURN_TYPES == ["IMAGE", "IMAGE", "STRING"]
    assert CompareImages.RETURN_NAMES == ["side_by_side", "difference", "report"]
    assert CompareImages.OUTPUT_NODE


def test_the_help_page_names_inputs_and_outputs() -> None:
    page = (ROOT / "web" / "js" / "docs" / "SlipstreamCompareImages" / "en.md").read_text(encoding="utf-8")
    assert page.startswith("# Compare Images\n")
    for word in (*CompareImages.INPUT_TYPES()["required"], *CompareImages.RETURN_NAMES):
        assert f"`{word}`" in page


def test_the_page_gets_the_pictures_and_the_text() -> None:
    image, reference = pictures(2, seed=1), pictures(2, seed=2)
    (side_by_side, difference, report), shown = run_as_comfyui_does(image=image, reference=reference, amplify=2.0)
    assert shown["text"] == [report]
    assert side_by_side.shape == (2, 24, 96, 3) and difference.shape == (2, 24, 32, 3)
    assert len(shown["images"]) == 2
    for saved, wanted in zip(shown["images"], side_by_side, strict=True):
        assert saved["type"] == "temp"
        file = Path(folder_paths.get_temp_directory()) / saved["subfolder"] / saved["filename"]
        found = np.asarray(Image.open(file), dtype=np.float32) / 255
        assert np.abs(found - wanted.numpy()).max() <= 1 / 255


# ---- the pictures


def test_side_by_side_are_image_reference_and_difference() -> None:
    image, reference = pictures(seed=1), pictures(seed=2)
    side_by_side, difference, _ = compare(image, reference, amplify=1)
    for third, wanted in zip(side_by_side.split(32, dim=2), (image, reference, difference), strict=True):
        assert torch.equal(third, wanted)
    assert torch.equal(difference, (image - reference).abs())


@pytest.mark.parametrize(("amplify", "brightness"), [(1, 0.05), (8, 0.4), (255, 1.0)])
def test_the_difference_is_amplified_up_to_white(amplify: float, brightness: float) -> None:
    image = pictures()
    reference = image.clone()
    reference[:, :5, :7, 1] += 0.05
    wanted = torch.zeros_like(image)
    wanted[:, :5, :7, 1] = brightness
    _, difference, lines = compare(image, reference, amplify=amplify)
    torch.testing.assert_close(difference, wanted, rtol=0, atol=1e-4)
    assert lines == compare(image, reference)[2], "no figure depends on it"


def test_inputs_stay_as_they_are() -> None:
    image, reference = pictures(2, seed=1), pictures(1, seed=2)
    before = image.clone(), reference.clone()
    compare(image, reference)
    assert torch.equal(image, before[0]) and torch.equal(reference, before[1])


# ---- the report


def test_figures_of_a_known_difference() -> None:
    reference = pictures()
    _, _, (line,) = compare(reference + 0.1, reference)
    assert line.startswith("picture 1: PSNR 20.00 dB, SSIM 0.9")
    assert "high frequencies 1.000, " in line


def test_of_fine_detail_turned_over() -> None:
    """Stripes one pixel wide against their negative: all error, in the last band, 4 times the energy."""
    stripes = (torch.arange(32) % 2).float().view(1, 1, 32, 1).expand(1, 24, 32, 3) * 0.5 + 0.25
    _, _, (line,) = compare(1 - stripes, stripes)
    assert line.endswith("error from low to high frequencies 0 %, 0 %, 0 %, 400 %")
    assert f"PSNR {-20 * math.log10(0.5):.2f} dB, SSIM -0.9" in line


def test_identical_pictures_are_said_to_be() -> None:
    same = pictures(2)
    _, difference, lines = compare(same, same.clone())
    figures = "SSIM 1.0000, high frequencies 1.000, error from low to high frequencies 0 %, 0 %, 0 %, 0 %"
    assert lines == [
        f"picture 1: PSNR identical, {figures}",
        f"picture 2: PSNR identical, {figures}",
        f"mean: PSNR 100.00 dB, {figures}",
    ]
    assert difference.max() == 0


def test_the_mean_is_over_pictures() -> None:
    reference = pictures(2)
    _, _, lines = compare(reference + torch.tensor([0.1, 0.01]).view(2, 1, 1, 1), reference)
    assert [line.split(",")[0] for line in lines] == [
        "picture 1: PSNR 20.00 dB",
        "picture 2: PSNR 40.00 dB",
        "mean: PSNR 30.00 dB",
    ]


def test_no_picture_is_called_better() -> None:
    report = CompareImages.execute(pictures(2, seed=1), pictures(2, seed=2)).result[2]
    assert not any(word in report.lower() for word in ("better", "worse", "best"))


# ---- what does not fit, or is not a number


def test_one_picture_is_compared_with_each_of_a_batch() -> None:
    one, three = pictures(1, seed=1), pictures(3, seed=2)
    for image, reference in ((one, three), (three, one)):
        side_by_side, _, lines = compare(image, reference)
        repeated = compare(image.repeat(3 // len(image), 1, 1, 1), reference.repeat(3 // len(reference), 1, 1, 1))
        assert side_by_side.shape == (3, 24, 96, 3) and torch.equal(side_by_side, repeated[0])
        assert len(lines) == 4 and lines == repeated[2]


@pytest.mark.parametrize(
    ("image", "reference", "said"),
    [
        (pictures(1, 24, 32), pictures(1, 32, 24), "image is 32x24 and reference 24x32.*Upscale Image"),
        (pictures(channels=4), pictures(), "4 channels and reference 3. Remove the alpha channel.*Split Image"),
        (pictures(2), pictures(3), "a batch of 2 and reference one of 3. Give as many of both, or a single one"),
        (pictures(1, 8, 32), pictures(1, 8, 32), "at least 11.*enlarge"),
    ],
    ids=["size", "channels", "batch", "tiny"],
)
def test_what_does_not_fit_is_said(image: Tensor, reference: Tensor, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        CompareImages.execute(image, reference)


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_a_number_has_no_figures_and_is_white(bad: float) -> None:
    image, reference = pictures(2, seed=1), pictures(2, seed=2)
    image[1, 3, 4, :] = bad
    _, difference, lines = compare(image, reference)
    why = "cannot be compared, since there is NaN or Inf in a picture or its reference"
    assert lines[0].startswith("picture 1: PSNR ")
    assert lines[1:] == [f"picture 2: {why}", f"mean: {why}"]
    assert difference[1, 3, 4].tolist() == [1, 1, 1] and difference.isfinite().all()
