"""How far pictures or latents are from a reference: one figure per item of the batch.

Computed on the tensors' device, in fp32, or in fp64 where they come in it. An item that holds NaN or Inf, or whose
reference does, gets NaN and never a good score. LPIPS is left out: no wheel brings its weights small enough.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

PSNR_CAP = 100.0
"""In dB, what `capped` makes of identical pictures; the demonstration's table has the same."""

_WINDOW, _SIGMA = 11, 1.5
_C1, _C2 = 0.01**2, 0.03**2  # (K1·L)² and (K2·L)² with the range L = 1
_ROUNDING = 1e-12  # share of an item's energy below which a band holds nothing but the FFT's rounding in fp32


def psnr(images: Tensor, reference: Tensor) -> Tensor:
    """Peak signal-to-noise ratio of pictures with values from 0 to 1: 10·log10(1 / mean squared error).

    Args:
        images: [B, ...] floats, such as [B, C, H, W] or [B, H, W, C].
        reference: of the same shape.

    Returns:
        [B] in dB, larger is closer; +inf where nothing differs: see `capped`.

    Raises:
        ValueError: the tensors cannot be compared.
    """
    found, wanted = _pair(images, reference)
    return _decibels(found, wanted, wanted.new_tensor(1.0))


def latent_psnr(latents: Tensor, reference: Tensor) -> Tensor:
    """PSNR of latents, which have no largest value: the reference's own range, max − min per item, is the peak.

    Args:
        latents: [B, ...] floats.
        reference: of the same shape.

    Returns:
        [B] in dB, larger is closer; +inf where nothing differs, −inf where something does from a constant reference.

    Raises:
        ValueError: the tensors cannot be compared.
    """
    found, wanted = _pair(latents, reference)
    values = wanted.flatten(1)
    return _decibels(found, wanted, values.amax(1) - values.amin(1))


def capped(decibels: Tensor) -> Tensor:
    """PSNRs limited to ±`PSNR_CAP` dB, for means, intervals and JSON, which know no infinity. NaN stays NaN."""
    return decibels.clamp(-PSNR_CAP, PSNR_CAP)


def ssim(images: Tensor, reference: Tensor) -> Tensor:
    """Structural similarity, the mean over channels and over all windows that lie inside the picture.

    Wang, Bovik, Sheikh and Simoncelli, "Image Quality Assessment: From Error Visibility to Structural Similarity", IEEE
    TIP 13(4), 2004: Gaussian window of 11×11 with sigma 1.5, K1 0.01, K2 0.03. Pictures are not made smaller before.

    Args:
        images: [B, C, H, W] floats from 0 to 1.
        reference: of the same shape.

    Returns:
        [B], at most 1: that is where nothing differs.

    Raises:
        ValueError: the tensors cannot be compared, or a side is shorter than the window.
    """
    found, wanted = _pair(images, reference)
    if found.ndim != 4 or min(found.shape[-2:]) < _WINDOW:
        raise ValueError(
            f"SSIM takes pictures as batch×channels×height×width with sides of at least {_WINDOW}, got "
            f"{_times(found)}. Move channels to the front with movedim(-1, 1); enlarge smaller pictures, or use psnr"
        )
    # One picture at a time: five maps of each are held at once.
    scores = torch.stack([_ssim_map(*pair).mean() for pair in zip(found, wanted, strict=True)])
    return _nan_unless_finite(scores, found, wanted)


def spectral_error(latents: Tensor, reference: Tensor, bands: int = 4) -> Tensor:
    """Energy of the error in each band of frequencies, relative to the reference's energy in that band.

    Band k of n holds the radial frequencies above (k − 1)/n and up to k/n of Nyquist (0.5 cycles per sample), so that
    the mean (DC) belongs to none: a shift of the whole item shows in PSNR alone. The corners of the spectrum, beyond
    Nyquist, count to the last band: a checkerboard lies there. Channels, and frames, are added up.

    Args:
        latents: [B, ..., H, W] floats, pictures as well as latents.
        reference: of the same shape.
        bands: how many.

    Returns:
        [B, bands] from low to high frequencies: 0 where nothing differs, 1 where the error is as large as the
        reference, inf where the reference has nothing in that band.

    Raises:
        ValueError: the tensors cannot be compared, or are too small for so many bands.
    """
    found, wanted = _spectral_pair(latents, reference)
    error = _band_energy(found - wanted, bands)
    return _nan_unless_finite(_ratio(error, _band_energy(wanted, bands), neither=0.0), found, wanted)


def high_frequency_energy(latents: Tensor, reference: Tensor) -> Tensor:
    """Energy above half of Nyquist (0.25 cycles per sample, in any direction), relative to the reference's.

    Args:
        latents: [B, ..., H, W] floats, pictures as well as latents.
        reference: of the same shape.

    Returns:
        [B]: 1 where there is as much as in the reference, or none in both; less where it is blurred; more where there
        is more detail or more noise, which it cannot tell apart.

    Raises:
        ValueError: the tensors cannot be compared, or are too small.
    """
    found, wanted = _spectral_pair(latents, reference)
    energies = _band_energy(found, 2)[:, 1], _band_energy(wanted, 2)[:, 1]
    return _nan_unless_finite(_ratio(*energies, neither=1.0), found, wanted)


# ----------------------------------------------------------------------------------------------- what is compared


def _pair(found: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Both in one dtype of at least 32 bits.

    Raises:
        ValueError: they cannot be compared.
    """
    if found.shape != wanted.shape or found.ndim < 2 or not found.numel():
        raise ValueError(
            f"What is compared must have one shape, batch first, and not be empty; got {_times(found)} and "
            f"{_times(wanted)}. Bring both to the same size and batch"
        )
    if found.device != wanted.device:
        raise ValueError(f"One is on {found.device}, the other on {wanted.device}: move both to one device")
    if not (found.is_floating_point() and wanted.is_floating_point()):
        raise ValueError(f"Floats are compared, got {found.dtype} and {wanted.dtype}: divide 8-bit pictures by 255")
    dtype = torch.promote_types(torch.promote_types(found.dtype, wanted.dtype), torch.float32)
    return found.to(dtype), wanted.to(dtype)


def _nan_unless_finite(scores: Tensor, found: Tensor, wanted: Tensor) -> Tensor:
    """Scores [B] or [B, n] with NaN for each item that is not finite, or whose reference is not."""
    bad = ~(found.isfinite() & wanted.isfinite()).flatten(1).all(1)
    return scores.masked_fill(bad.view(-1, *[1] * (scores.ndim - 1)), math.nan)


def _times(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "a scalar"


# ---------------------------------------------------------------------------------------------------------- PSNR


def _decibels(found: Tensor, wanted: Tensor, peak: Tensor) -> Tensor:
    error = (found - wanted).flatten(1).square().mean(1)
    decibels = 20 * peak.log10() - 10 * error.log10()
    return _nan_unless_finite(decibels.masked_fill(error == 0, math.inf), found, wanted)


# ---------------------------------------------------------------------------------------------------------- SSIM


def _ssim_map(x: Tensor, y: Tensor) -> Tensor:
    """The similarity of each window, equation 13 of the paper: [C, H, W] -> [C, H − 10, W − 10]."""
    mean_x, mean_y, mean_xx, mean_yy, mean_xy = _windowed(torch.stack([x, y, x * x, y * y, x * y]))
    variance_x, variance_y = mean_xx - mean_x.square(), mean_yy - mean_y.square()
    covariance = mean_xy - mean_x * mean_y
    luminance = (2 * mean_x * mean_y + _C1) / (mean_x.square() + mean_y.square() + _C1)
    similarity: Tensor = luminance * (2 * covariance + _C2) / (variance_x + variance_y + _C2)
    return similarity


def _windowed(maps: Tensor) -> Tensor:
    """Gaussian means of [..., H, W] over all whole windows: [..., H − 10, W − 10].

    Sums of shifted maps and no convolution: a GPU may round a convolution to TF32, which is coarser than the variances
    that are found here as small differences of large means.
    """
    distances = [index - _WINDOW // 2 for index in range(_WINDOW)]
    weights = [math.exp(-(distance**2) / (2 * _SIGMA**2)) for distance in distances]
    for axis in (-2, -1):
        size = maps.shape[axis] - _WINDOW + 1
        total = torch.zeros_like(maps.narrow(axis, 0, size))
        for start, weight in enumerate(weights):
            total.add_(maps.narrow(axis, start, size), alpha=weight / sum(weights))
        maps = total
    return maps


# ------------------------------------------------------------------------------------------------------- spectra


def _spectral_pair(found: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Both divided by the largest value of the two, per item: energies neither overflow nor vanish, ratios stay."""
    found, wanted = _pair(found, wanted)
    if found.ndim < 3:
        raise ValueError(f"A spectrum needs batch×…×height×width, got {_times(found)}: give height and width back")
    largest = torch.maximum(found.abs().flatten(1).amax(1), wanted.abs().flatten(1).amax(1))
    scale = largest.masked_fill(largest == 0, 1.0).view(-1, *[1] * (found.ndim - 1))
    return found / scale, wanted / scale


def _band_energy(items: Tensor, bands: int) -> Tensor:
    """Energy of [B, ..., H, W] in each band, without the mean: [B, bands]; exactly 0 where there is only rounding."""
    height, width = items.shape[-2:]
    band_of = _band_indices(height, width, bands).to(items.device)
    rows = []
    for item in items:  # one at a time: a spectrum takes twice the memory of what it is of
        power = torch.fft.fft2(item.reshape(-1, height, width)).abs().square().sum(0)
        energy = torch.stack([power[band_of == band].sum() for band in range(bands + 1)])
        rows.append(energy.masked_fill(energy <= _ROUNDING * energy.sum(), 0.0))
    return torch.stack(rows)[:, 1:]


def _band_indices(height: int, width: int, bands: int) -> Tensor:
    """The band of each frequency, counted from 1, and 0 for the mean (DC): int64 [H, W] on the CPU.

    Raises:
        ValueError: a band would be empty.
    """
    most = max(height, width) // 2
    if not 1 <= bands <= most:
        raise ValueError(f"A size of {height}×{width} has 1 to {most} bands of frequencies, got {bands}: ask for fewer")
    down, across = (torch.fft.fftfreq(size, dtype=torch.float64) for size in (height, width))
    radius = torch.hypot(down[:, None], across[None, :])
    # A frequency at a band's upper end belongs to it, whatever the last bit of its radius says.
    return (radius * 2 * bands - 1e-9).ceil().clamp(0, bands).long()


def _ratio(of: Tensor, to: Tensor, neither: float) -> Tensor:
    """`of / to`; inf where `to` alone is 0, `neither` where both are."""
    return (of / to).masked_fill((of == 0) & (to == 0), neither)
