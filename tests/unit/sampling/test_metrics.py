"""How far off: figures against closed forms and against the definitions written out as loops."""

from __future__ import annotations

import cmath
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from slipstream.sampling.metrics import (
    PSNR_CAP,
    capped,
    high_frequency_energy,
    latent_psnr,
    psnr,
    spectral_error,
    ssim,
)

METRICS = {
    "psnr": psnr,
    "latent_psnr": latent_psnr,
    "ssim": ssim,
    "spectral_error": spectral_error,
    "high_frequency_energy": high_frequency_energy,
}
each_metric = pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)
NAN, INF = math.nan, math.inf


def pictures(batch: int = 2, channels: int = 3, height: int = 24, width: int = 20, seed: int = 1) -> Tensor:
    """Noise from 0.2 to 0.8, so that more noise stays a picture."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(batch, channels, height, width, generator=generator) * 0.6 + 0.2


def noise_like(image: Tensor, seed: int = 7) -> Tensor:
    return torch.randn(image.shape, generator=torch.Generator().manual_seed(seed))


def wave(down: int, across: int, height: int = 32, width: int = 32) -> Tensor:
    """A cosine with so many periods down and across, energy (height·width)/2: [1, 1, height, width]."""
    y, x = torch.arange(height)[:, None] / height, torch.arange(width)[None, :] / width
    return torch.cos(2 * math.pi * (down * y + across * x))[None, None]


def blurred(image: Tensor) -> Tensor:
    return torch.nn.functional.avg_pool2d(image, 3, stride=1, padding=1, count_include_pad=False)


# ---- PSNR


@pytest.mark.parametrize("shape", [(2, 3, 8, 6), (2, 8, 6, 3), (2, 5)])
def test_psnr_of_a_shift_is_known(shape: tuple[int, ...]) -> None:
    reference = torch.zeros(shape)
    found = reference + torch.tensor([0.1, 0.01]).view(-1, *[1] * (len(shape) - 1))
    torch.testing.assert_close(psnr(found, reference), torch.tensor([20.0, 40.0]))


def test_psnr_is_what_its_definition_says() -> None:
    found, reference = pictures(seed=1), pictures(seed=2)
    for index, decibels in enumerate(psnr(found, reference).tolist()):
        pairs = list(zip(found[index].flatten().tolist(), reference[index].flatten().tolist(), strict=True))
        assert decibels == pytest.approx(10 * math.log10(len(pairs) / sum((x - y) ** 2 for x, y in pairs)), rel=1e-5)


def test_the_peak_of_latents_is_the_range_of_each_reference() -> None:
    reference = torch.stack([torch.linspace(-2, 3, 64), torch.linspace(0, 50, 64)]).view(2, 1, 8, 8)
    found = reference + 0.5
    torch.testing.assert_close(latent_psnr(found, reference), torch.tensor([20.0, 40.0]))
    torch.testing.assert_close(latent_psnr(found * 9, reference * 9), torch.tensor([20.0, 40.0]))


def test_where_nothing_differs_psnr_is_infinite() -> None:
    same = pictures()
    assert psnr(same, same).tolist() == latent_psnr(same, same.clone()).tolist() == [INF, INF]
    assert psnr(torch.stack([same[0], same[1] + 0.1]), same).tolist() == [INF, pytest.approx(20, abs=1e-4)]


def test_a_constant_reference_has_no_range() -> None:
    constant = torch.full((1, 4, 8, 8), 0.3)
    assert latent_psnr(constant, constant).tolist() == [INF]
    assert latent_psnr(constant + 0.01, constant).tolist() == [-INF]


def test_capped_psnrs_are_finite_but_for_nan() -> None:
    found = capped(torch.tensor([INF, 31.5, -INF, NAN, 120.0]))
    torch.testing.assert_close(found, torch.tensor([PSNR_CAP, 31.5, -PSNR_CAP, NAN, PSNR_CAP]), equal_nan=True)


# ---- SSIM


def naive_ssim(x: Tensor, y: Tensor) -> float:
    """The mean over windows of one channel, each window by itself, variances by their definition, in fp64."""
    falloff = [math.exp(-((index - 5) ** 2) / (2 * 1.5**2)) for index in range(11)]
    weights = torch.tensor([[a * b for b in falloff] for a in falloff], dtype=torch.float64)
    weights /= weights.sum()
    scores = []
    for top, left in itertools.product(range(x.shape[0] - 10), range(x.shape[1] - 10)):
        u, v = (image[top : top + 11, left : left + 11].double() for image in (x, y))
        mean_u, mean_v = (weights * u).sum(), (weights * v).sum()
        variance_u, variance_v = (weights * (u - mean_u) ** 2).sum(), (weights * (v - mean_v) ** 2).sum()
        covariance = (weights * (u - mean_u) * (v - mean_v)).sum()
        above = (2 * mean_u * mean_v + 0.0001) * (2 * covariance + 0.0009)
        scores.append(above / ((mean_u**2 + mean_v**2 + 0.0001) * (variance_u + variance_v + 0.0009)))
    return float(torch.stack(scores).mean())


@pytest.mark.parametrize("seed", [2, 3])
def test_ssim_is_what_its_definition_says(seed: int) -> None:
    reference = pictures(height=17, width=14)
    found = reference + 0.1 * noise_like(reference, seed)
    wanted = [sum(naive_ssim(found[i, c], reference[i, c]) for c in range(3)) / 3 for i in range(2)]
    assert ssim(found, reference).tolist() == pytest.approx(wanted, abs=1e-5)
    assert 0.1 < min(wanted) < max(wanted) < 0.99, "neither all nor nothing"


def test_ssim_of_flat_pictures_is_known() -> None:
    found, reference = torch.full((1, 3, 16, 16), 0.25), torch.full((1, 3, 16, 16), 0.5)
    luminance = (2 * 0.25 * 0.5 + 0.0001) / (0.25**2 + 0.5**2 + 0.0001)
    assert ssim(found, reference).tolist() == pytest.approx([luminance], abs=1e-4)


def test_ssim_of_the_same_picture_is_one_and_of_its_negative_is_low() -> None:
    same = pictures()
    assert ssim(same, same).tolist() == pytest.approx([1, 1], abs=1e-6)
    assert max(ssim(1 - same, same).tolist()) < 0


@pytest.mark.parametrize("shape", [(1, 3, 10, 64), (1, 3, 64, 10), (1, 64, 64, 3), (3, 64, 64), (1, 3, 2, 64, 64)])
def test_ssim_says_what_it_takes(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"at least 11, got .*movedim.*or use psnr"):
        ssim(torch.zeros(shape), torch.zeros(shape))


# ---- spectra


def naive_band_energy(image: Tensor, bands: int) -> list[float]:
    """By the definition of the discrete Fourier transform, one channel, bands by comparison of whole numbers."""
    height, width = image.shape
    energy = [0.0] * bands
    for v, u in itertools.product(range(height), range(width)):
        if u == v == 0:
            continue
        coefficient = sum(
            image[y, x].item() * cmath.exp(-2j * cmath.pi * (v * y / height + u * x / width))
            for y, x in itertools.product(range(height), range(width))
        )
        down, across = min(v, height - v), min(u, width - u)
        # r ≤ band / (2·bands), squared and without fractions
        radius = (down * width) ** 2 + (across * height) ** 2
        inside = [4 * bands**2 * radius <= (band * height * width) ** 2 for band in range(1, bands)]
        energy[inside.index(True) if any(inside) else bands - 1] += abs(coefficient) ** 2
    return energy


@pytest.mark.parametrize(("height", "width", "bands"), [(8, 8, 4), (9, 7, 3), (6, 12, 3), (5, 8, 1)])
def test_spectral_error_is_what_its_definition_says(height: int, width: int, bands: int) -> None:
    found, reference = (pictures(2, 2, height, width, seed) for seed in (1, 2))
    for index, errors in enumerate(spectral_error(found, reference, bands).tolist()):
        wanted = [
            [sum(parts) for parts in zip(*(naive_band_energy(channel, bands) for channel in item), strict=True)]
            for item in (found[index] - reference[index], reference[index])
        ]
        assert errors == pytest.approx([a / b for a, b in zip(*wanted, strict=True)], rel=1e-4)


@pytest.mark.parametrize(
    ("down", "across", "band"),
    [(1, 0, 0), (0, 4, 0), (5, 0, 1), (0, 8, 1), (6, 6, 2), (0, 12, 2), (13, 0, 3), (16, 0, 3), (16, 16, 3)],
)
def test_an_error_of_one_frequency_lies_in_one_band(down: int, across: int, band: int) -> None:
    """With sides of 32 Nyquist is 16 periods and each of 4 bands 4 wide, its upper end within."""
    reference = wave(2, 0) + wave(6, 0) + wave(10, 0) + wave(14, 0)
    wanted = torch.zeros(1, 4)
    wanted[0, band] = 1e-4 * (2 if 16 in (down, across) else 1)  # at Nyquist a cosine has twice the energy
    found = spectral_error(reference + 0.01 * wave(down, across), reference)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-9)


def test_a_shift_of_the_whole_is_no_spectral_error() -> None:
    reference = pictures()
    assert spectral_error(reference + 0.1, reference).max() < 1e-10
    assert max(psnr(reference + 0.1, reference).tolist()) < 21


def test_bands_without_a_reference() -> None:
    flat = torch.full((1, 3, 32, 32), 0.3)
    assert spectral_error(flat, flat).tolist() == spectral_error(flat + 0.1, flat).tolist() == [[0, 0, 0, 0]]
    assert spectral_error(flat + 0.1 * wave(6, 0), flat).tolist() == [[0, INF, 0, 0]]


def test_the_scale_of_latents_does_not_count() -> None:
    found, reference = pictures(seed=1).double(), pictures(seed=2).double()
    wanted = spectral_error(found, reference)
    for scale in (1e-20, 1e20):
        scaled = [(image * scale).float() for image in (found, reference)]
        torch.testing.assert_close(spectral_error(*scaled).double(), wanted, rtol=1e-4, atol=0)


def test_frames_and_channels_are_added_up() -> None:
    found, reference = pictures(2, 12, seed=1), pictures(2, 12, seed=2)
    frames = [image.view(2, 4, 3, 24, 20) for image in (found, reference)]
    torch.testing.assert_close(spectral_error(*frames), spectral_error(found, reference))


@pytest.mark.parametrize(("shape", "bands"), [((1, 4, 7, 6), 4), ((1, 4, 64, 64), 33), ((1, 4, 64, 64), 0)])
def test_too_many_bands_are_refused(shape: tuple[int, ...], bands: int) -> None:
    with pytest.raises(ValueError, match=f"has 1 to {max(shape) // 2} bands.*got {bands}"):
        spectral_error(torch.zeros(shape), torch.zeros(shape), bands)


@pytest.mark.parametrize("size", range(2, 40))
def test_no_band_is_empty(size: int) -> None:
    impulse = torch.zeros(1, 1, 2, size)
    impulse[..., 0, 0] = 1  # as much energy at every frequency
    assert spectral_error(torch.zeros_like(impulse), impulse, size // 2).tolist() == [
        pytest.approx([1] * (size // 2), rel=1e-4)
    ]


@pytest.mark.parametrize(("down", "across", "counts"), [(8, 0, False), (9, 0, True), (6, 6, True), (5, 5, False)])
def test_high_frequencies_are_those_above_half_of_nyquist(down: int, across: int, counts: bool) -> None:
    reference = wave(2, 0) + wave(10, 0)
    found = high_frequency_energy(reference + 2 * wave(down, across), reference)
    assert found.tolist() == pytest.approx([1 + 4 * counts], rel=1e-3)


def test_high_frequency_energy_of_more_and_less_contrast() -> None:
    reference = pictures()
    assert high_frequency_energy(reference, reference).tolist() == [1, 1]
    assert high_frequency_energy(reference / 2, reference).tolist() == pytest.approx([0.25, 0.25], rel=1e-4)
    assert high_frequency_energy(reference * 2 + 0.1, reference).tolist() == pytest.approx([4, 4], rel=1e-4)


def test_blur_lowers_it_and_noise_raises_it() -> None:
    reference = pictures()
    once, twice = blurred(reference), blurred(blurred(reference))
    energies = [high_frequency_energy(image, reference).max().item() for image in (reference, once, twice)]
    assert energies[0] > 3 * energies[1] > 3 * energies[2] > 0
    assert high_frequency_energy(reference + 0.1 * noise_like(reference), reference).min() > 1


def test_flat_pictures_have_no_high_frequencies() -> None:
    flat, other = torch.full((1, 3, 37, 41), 0.3), torch.full((1, 3, 37, 41), 0.7)
    assert high_frequency_energy(flat, other).tolist() == [1]
    assert high_frequency_energy(flat, pictures(1, 3, 37, 41)).tolist() == [0]
    assert high_frequency_energy(pictures(1, 3, 37, 41), flat).tolist() == [INF]


# ---- all of them


@pytest.mark.parametrize(("metric", "sign"), [(psnr, -1), (latent_psnr, -1), (ssim, -1), (spectral_error, 1)])
def test_more_noise_is_further_off(metric: Callable[..., Tensor], sign: int) -> None:
    reference = pictures()
    noise = noise_like(reference)
    levels = [metric(reference + size * noise, reference) for size in (0.003, 0.01, 0.03, 0.1)]
    assert all((sign * (more - less) > 0).all() for less, more in itertools.pairwise(levels))


@each_metric
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("side", ["found", "reference", "both"])
def test_what_is_not_finite_has_no_score_and_others_keep_theirs(
    metric: Callable[..., Tensor], bad: float, side: str
) -> None:
    found, reference = pictures(3, seed=1), pictures(3, seed=2)
    wanted = metric(found, reference)
    for name, image in {"found": found, "reference": reference}.items():
        if side in (name, "both"):
            image[1, 2, 3, 4] = bad
    scores = metric(found, reference)
    assert scores[1].isnan().all()
    assert torch.equal(scores[[0, 2]], wanted[[0, 2]])


@each_metric
def test_items_of_a_batch_do_not_mix(metric: Callable[..., Tensor]) -> None:
    found, reference = pictures(3, seed=1), pictures(3, seed=2)
    alone = torch.cat([metric(found[i : i + 1], reference[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(metric(found, reference), alone)


@each_metric
def test_dtypes(metric: Callable[..., Tensor]) -> None:
    found, reference = pictures(seed=1).half(), pictures(seed=2).half()
    wanted = metric(found.double(), reference.double())
    assert wanted.dtype == torch.float64
    for pair in ((found, reference), (found, reference.float())):
        scores = metric(*pair)
        assert scores.dtype == torch.float32
        torch.testing.assert_close(scores.double(), wanted, rtol=1e-4, atol=1e-4)


@each_metric
def test_inputs_stay_as_they_are(metric: Callable[..., Tensor]) -> None:
    found, reference = (
        pictures(seed=1).movedim(1, -1).contiguous().movedim(-1, 1),
        pictures(1, seed=2).expand(2, 3, -1, -1),
    )
    before = found.clone(), reference.clone()
    metric(found, reference)
    assert torch.equal(found, before[0]) and torch.equal(reference, before[1])


@each_metric
@pytest.mark.parametrize(
    ("found", "reference", "said"),
    [
        (torch.zeros(1, 3, 16, 16), torch.zeros(1, 3, 16, 15), "1×3×16×16 and 1×3×16×15.*same size and batch"),
        (torch.zeros(2, 3, 16, 16), torch.zeros(1, 3, 16, 16), "same size and batch"),
        (torch.zeros(0, 3, 16, 16), torch.zeros(0, 3, 16, 16), "not be empty"),
        (torch.tensor(1.0), torch.tensor(1.0), "batch first.*a scalar"),
        (torch.zeros(1, 3, 16, 16).byte(), torch.zeros(1, 3, 16, 16).byte(), "divide 8-bit pictures by 255"),
        (torch.zeros(1, 3, 16, 16), torch.zeros(1, 3, 16, 16, device="meta"), "move both to one device"),
    ],
    ids=["size", "batch", "empty", "scalar", "bytes", "device"],
)
def test_what_cannot_be_compared(metric: Callable[..., Tensor], found: Tensor, reference: Tensor, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        metric(found, reference)


def test_a_spectrum_needs_height_and_width() -> None:
    with pytest.raises(ValueError, match="got 2×64: give height and width back"):
        spectral_error(torch.zeros(2, 64), torch.zeros(2, 64))


@pytest.mark.gpu
@each_metric
def test_on_a_gpu(metric: Callable[..., Tensor]) -> None:
    found, reference = pictures(seed=1), pictures(seed=2)
    scores = metric(found.cuda(), reference.cuda())
    assert scores.is_cuda
    torch.testing.assert_close(scores.cpu(), metric(found, reference), rtol=1e-4, atol=1e-5)
