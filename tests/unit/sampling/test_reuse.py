"""What stands in for the model: cases in which it is known what the model would have given."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from slipstream.sampling.reuse import History, Reuse

HOLD, HOLD_NOISE, LINEAR, MEASURED = Reuse.HOLD, Reuse.HOLD_NOISE, Reuse.LINEAR, Reuse.MEASURED
SHAPES = [(2, 4, 8, 6), (2, 16, 3, 4, 5), (1, 1, 300), (1, 4, 8, 8)]
SPACINGS = [(4.0, 3.0, 2.0), (14.6, 9.1, 3.3), (1.0, 0.97, 0.9), (80.0, 5.0, 0.4)]

each_rule = pytest.mark.parametrize("rule", Reuse)
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def told(
    rule: Reuse, sigmas: Sequence[float], denoised: Sequence[Tensor], x: Sequence[Tensor] | None = None
) -> History:
    """A history of these computed steps; x does not matter where it is not given."""
    history = History(rule)
    for step, (sigma, each) in enumerate(zip(sigmas, denoised, strict=True)):
        history.add(sigma, x[step] if x else torch.full_like(each, math.nan), each)
    return history


def number(value: float) -> Tensor:
    return torch.tensor([[value]], dtype=torch.float64)


def ahead(sigmas: Sequence[float], ratio: float) -> float:
    """The sigma that lies so many of the last gaps after the last."""
    return sigmas[-1] + ratio * (sigmas[-1] - sigmas[-2])


def ways(*sizes: float, shape: tuple[int, ...] = (1, 4, 8, 6)) -> list[Tensor]:
    """Denoised latents that go along one direction, from one to the next by these sizes."""
    start, direction = noise(*shape, seed=3), noise(*shape, seed=4)
    return [start + total * direction for total in itertools.accumulate(sizes, initial=0.0)]


# ---- what each rule says


@each_shape
def test_hold_keeps_the_last(shape: tuple[int, ...]) -> None:
    denoised = [noise(*shape, seed=seed) for seed in range(4)]
    for count in range(1, 5):
        history = told(HOLD, (8, 4, 2, 1)[:count], denoised[:count])
        for sigma in (0.9, 0.5, 0.01):
            assert history.expect(sigma, noise(*shape)).equal(denoised[count - 1])


@each_shape
def test_hold_noise_is_exact_where_the_noise_stays(shape: tuple[int, ...]) -> None:
    """x = D + sigma · n with one n and a D that moves as it likes."""
    n = noise(*shape, seed=9)
    denoised = [noise(*shape, seed=seed) for seed in range(6)]
    history = History(HOLD_NOISE)
    for sigma, each in zip((14.6, 7.0, 2.5), denoised, strict=False):
        history.add(sigma, each + sigma * n, each)
    for sigma, wanted in zip((2.0, 0.8, 0.03), denoised[3:], strict=True):
        torch.testing.assert_close(history.expect(sigma, wanted + sigma * n), wanted)


@each_shape
@pytest.mark.parametrize(("rule", "needed"), [(LINEAR, 2), (MEASURED, 3)])
@pytest.mark.parametrize("sigmas", SPACINGS, ids=str)
def test_a_line_over_sigma_is_followed_exactly(
    rule: Reuse, needed: int, sigmas: tuple[float, ...], shape: tuple[int, ...]
) -> None:
    start, slope = noise(*shape, seed=5), noise(*shape, seed=6)
    known = sigmas[-needed:]
    history = told(rule, known, [start + sigma * slope for sigma in known])
    for ratio in (0.01, 0.3, 0.77, 1.0):
        sigma = ahead(sigmas, ratio)
        torch.testing.assert_close(history.expect(sigma, noise(*shape)), start + sigma * slope)


@pytest.mark.parametrize("rule", [LINEAR, MEASURED])
@pytest.mark.parametrize("sigmas", SPACINGS[:3], ids=str)
def test_a_line_is_followed_no_farther_than_the_last_gap(rule: Reuse, sigmas: tuple[float, ...]) -> None:
    start, slope = noise(2, 4, 8, 8, seed=5), noise(2, 4, 8, 8, seed=6)
    history = told(rule, sigmas, [start + sigma * slope for sigma in sigmas])
    farthest = start + ahead(sigmas, 1) * slope
    for ratio in (1.001, 1.5, 20):
        torch.testing.assert_close(history.expect(ahead(sigmas, ratio), start), farthest)


@pytest.mark.parametrize(("rule", "needed"), [(HOLD, 1), (LINEAR, 2), (MEASURED, 3)])
def test_until_enough_is_known_the_last_is_held(rule: Reuse, needed: int) -> None:
    sigmas, denoised = (4.0, 3.0, 2.0), ways(1, 1)
    for count in range(1, needed):
        history = told(rule, sigmas[:count], denoised[:count])
        assert history.expect(0.5, denoised[0]).equal(denoised[count - 1])


@each_rule
@each_shape
def test_what_stays_is_expected_to_stay(rule: Reuse, shape: tuple[int, ...]) -> None:
    denoised, n = noise(*shape, seed=2), noise(*shape, seed=3)
    history = History(rule)
    for sigma, after in itertools.pairwise((14.0, 9.0, 4.0, 2.0, 1.0, 0.3)):
        history.add(sigma, denoised + sigma * n, denoised)
        for skipped in (after, (sigma + after) / 2):
            torch.testing.assert_close(history.expect(skipped, denoised + skipped * n), denoised, rtol=0, atol=1e-12)


# ---- by how much MEASURED goes on


@pytest.mark.parametrize("sigmas", SPACINGS[:3], ids=str)
@pytest.mark.parametrize(
    ("share", "gain"),
    [
        (0.0, 0.0),
        (0.4, 0.4),
        (1, 1),
        (1.3, 1.3),
        (1.5, 1.5),
        (2, 1.5),
        (50, 1.5),
        (-0.2, -0.2),
        (-0.5, -0.5),
        (-3, -0.5),
    ],
)
def test_the_share_of_the_line_that_was_right_is_the_share_that_is_gone(
    sigmas: tuple[float, ...], share: float, gain: float
) -> None:
    """A third step `share` as far along the line as the line said: limited to -0.5 to 1.5."""
    ratio = (sigmas[2] - sigmas[1]) / (sigmas[1] - sigmas[0])
    denoised = ways(1, share * ratio)
    history = told(MEASURED, sigmas, denoised)
    for far in (0.2, 0.9, 1.0):
        wanted = denoised[2] + far * gain * (denoised[2] - denoised[1])
        torch.testing.assert_close(history.expect(ahead(sigmas, far), denoised[0]), wanted)


@pytest.mark.parametrize("factor", [-0.5, -0.1, 0.25, 0.8, 1.2, 1.5])
def test_steps_that_grow_or_shrink_by_one_factor_are_exact(factor: float) -> None:
    sizes = [factor**k for k in range(6)]
    denoised = ways(*sizes)
    history = History(MEASURED)
    for step, each in enumerate(denoised[:-1]):
        history.add(9.0 - step, each, each)
        if step >= 2:
            torch.testing.assert_close(history.expect(8.0 - step, each), denoised[step + 1])


def test_back_and_forth_is_damped() -> None:
    """D goes w up and w down by turns: where LINEAR overshoots, MEASURED expects the middle."""
    denoised = ways(1, -1, 1, -1, 1)
    middle = (denoised[0] + denoised[1]) / 2
    for count in range(3, 6):
        sigmas = tuple(9.0 - step for step in range(count))
        expected = {
            rule: told(rule, sigmas, denoised[:count]).expect(9.0 - count, middle) for rule in (LINEAR, MEASURED)
        }
        torch.testing.assert_close(expected[MEASURED], middle)
        torch.testing.assert_close(expected[LINEAR] - middle, 3 * (denoised[count - 1] - middle))


def test_a_turn_at_right_angles_is_held() -> None:
    one = torch.zeros(1, 4, 2, 2, dtype=torch.float64)
    one[0, 0] = 1
    denoised = [torch.zeros_like(one), one, one + one.roll(1, 1)]
    assert told(MEASURED, (3, 2, 1), denoised).expect(0.5, one).equal(denoised[2])


@pytest.mark.parametrize("seed", range(5))
def test_the_gain_is_the_least_squares_answer(seed: int) -> None:
    sigmas = (7.0, 4.0, 2.5)
    base, way = noise(1, 4, 8, 8, seed=seed), noise(1, 4, 8, 8, seed=100 + seed)
    denoised = [base, base + way, base + way + 0.2 * way + 0.1 * noise(1, 4, 8, 8, seed=200 + seed)]
    history = told(MEASURED, sigmas, denoised)
    line = ((4.0 - 2.5) / (7.0 - 4.0) * way).reshape(-1, 1)
    gain = torch.linalg.lstsq(line, (denoised[2] - denoised[1]).reshape(-1, 1)).solution.item()
    assert 0.2 < gain < 0.6
    wanted = denoised[2] + 0.5 * gain * (denoised[2] - denoised[1])
    torch.testing.assert_close(history.expect(ahead(sigmas, 0.5), base), wanted)


def test_the_newest_gain_counts() -> None:
    denoised = ways(1, 1, 0.5, 0.5)  # right, then half right, then right again
    gains = {3: 1.0, 4: 0.5, 5: 1.0}
    for count, gain in gains.items():
        history = told(MEASURED, (9, 8, 7, 6, 5)[:count], denoised[:count])
        wanted = denoised[count - 1] + gain * (denoised[count - 1] - denoised[count - 2])
        torch.testing.assert_close(history.expect(9 - count, denoised[0]), wanted)


# ---- batches


@each_rule
def test_items_of_a_batch_are_as_alone(rule: Reuse) -> None:
    """One goes straight on, one back and forth, one stays, one has larger numbers."""
    items = [ways(1, 1, 1), ways(1, -1, 1), ways(0, 0, 0), [1000 * each for each in ways(1, 0.3, 0.1)]]
    sigmas = (8.0, 5.0, 3.0, 2.0)
    x = [noise(4, 4, 8, 6, seed=20 + step).float() for step in range(5)]
    together = told(rule, sigmas, [torch.cat(each).float() for each in zip(*items, strict=True)], x[:4])
    expected = together.expect(1.3, x[4])
    for index, item in enumerate(items):
        of_it = slice(index, index + 1)
        alone = told(rule, sigmas, [each.float() for each in item], [each[of_it] for each in x[:4]])
        assert alone.expect(1.3, x[4][of_it]).equal(expected[of_it])


# ---- no NaN


@each_rule
@pytest.mark.parametrize("pattern", list(itertools.product((0.0, 1.0), repeat=4)), ids=str)
def test_repeated_latents_give_no_nan(rule: Reuse, pattern: tuple[float, ...]) -> None:
    denoised = ways(*pattern)
    for zeros in (False, True):
        steps = [each - denoised[0] for each in denoised] if zeros else denoised
        history = History(rule)
        for step, each in enumerate(steps):
            history.add(9.0 - step, each, each)
            expected = history.expect(8.5 - step, each)
            assert expected.isfinite().all()
            if step and pattern[step - 1] == 0 and rule is not HOLD_NOISE:
                assert expected.equal(each), "no way to go on along"


each_dtype = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)


def error(rule: Reuse, dtype: torch.dtype, scale: float) -> float:
    """Of SDXL's 65,536 numbers, relative to the rule in float64 for the same numbers."""
    shape, sigmas = (1, 4, 128, 128), (4.0, 3.0, 2.0)
    exact, n = [(scale * each).to(dtype).double() for each in ways(1, 0.6, shape=shape)], noise(*shape, seed=8)
    x = [(each + scale * sigma * n).to(dtype).double() for sigma, each in zip(sigmas, exact, strict=True)]
    wanted = told(rule, sigmas, exact, x).expect(1.25, x[2])
    history = told(rule, sigmas, [each.to(dtype) for each in exact], [each.to(dtype) for each in x])
    expected = history.expect(1.25, x[2].to(dtype))
    assert expected.dtype == dtype and expected.shape == shape
    return float((expected.double() - wanted).norm() / wanted.norm())


@each_rule
@each_dtype
@pytest.mark.parametrize("scale", [0.3, 0.8])
def test_rounding_is_all_that_a_dtype_changes(rule: Reuse, dtype: torch.dtype, scale: float) -> None:
    assert error(rule, dtype, scale) < 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("scale", [1e-4, 1.5, 30.0])
def test_sums_of_squares_that_16_bits_do_not_hold(dtype: torch.dtype, scale: float) -> None:
    assert error(MEASURED, dtype, scale) < 4 * torch.finfo(dtype).eps


# ---- whose tensors


@each_rule
@each_shape
@each_dtype
def test_an_expectation_is_a_tensor_of_its_own(rule: Reuse, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    history, untouched = History(rule), History(rule)
    latent = noise(*shape, seed=50).to(dtype)
    for step, sigma in enumerate((8.0, 5.0, 3.0, 2.0)):
        x, denoised = (noise(*shape, seed=seed + step).to(dtype) for seed in (30, 40))
        untouched.add(sigma, x.clone(), denoised.clone())
        history.add(sigma, x, denoised)
        for tensor in (x, denoised):
            tensor.fill_(math.nan)  # as samplers do
        wanted = untouched.expect(sigma - 0.5, latent)
        for _ in range(2):
            given = latent.clone()
            expected = history.expect(sigma - 0.5, given)
            assert expected.equal(wanted) and expected.shape == shape and expected.dtype == dtype
            expected.fill_(math.nan)
            assert given.equal(latent)
            given.fill_(math.nan)


@each_rule
def test_views_and_strides_do_not_matter(rule: Reuse) -> None:
    denoised, x = ways(1, 0.7, 0.2, shape=(2, 4, 8, 6)), [noise(2, 4, 8, 6, seed=seed) for seed in range(5)]
    wanted = told(rule, (8, 5, 3, 2), denoised, x[:4]).expect(1.3, x[4])
    last = [tensor.contiguous(memory_format=torch.channels_last) for tensor in (*denoised, *x)]
    found = told(rule, (8, 5, 3, 2), last[:4], last[4:8]).expect(1.3, last[8])
    torch.testing.assert_close(found, wanted)


# ---- beginning and end


@each_rule
def test_with_nothing_computed_there_is_nothing_to_expect(rule: Reuse) -> None:
    history = History(rule)
    empty = [history.is_empty]
    with pytest.raises(ValueError, match="No step was computed yet"):
        history.expect(1.0, noise(1, 4, 2, 2))
    history.add(1.0, noise(1, 4, 2, 2), noise(1, 4, 2, 2))
    empty.append(history.is_empty)
    history.clear()
    assert [*empty, history.is_empty] == [True, False, True]
    with pytest.raises(ValueError, match="No step was computed yet"):
        history.expect(1.0, noise(1, 4, 2, 2))


@each_rule
def test_a_cleared_history_is_a_new_one(rule: Reuse) -> None:
    cleared = told(rule, (8, 5, 3, 2), [noise(1, 4, 8, 8, seed=seed) for seed in range(4)])
    cleared.clear()
    fresh = History(rule)
    for step, each in enumerate(ways(1, -0.3, 0.8)):
        for history in (cleared, fresh):
            history.add(9.0 - step, 2 * each, each)
        assert cleared.expect(8.2 - step, each).equal(fresh.expect(8.2 - step, each))


def by_hand(rule: Reuse, known: list[tuple[float, float, float]], sigma: float, x: float) -> float:
    """The rules for a latent of one number, written from their descriptions. Known: sigma, x and D of each step."""
    (last, last_x, denoised), before = known[-1], known[:-1]
    if rule is HOLD_NOISE:
        return x - sigma * (last_x - denoised) / last
    if rule is HOLD or len(known) < (2 if rule is LINEAR else 3):
        return denoised
    slope = (denoised - before[-1][2]) / (last - before[-1][0])
    farthest = slope * max(sigma - last, last - before[-1][0])
    if rule is LINEAR:
        return denoised + farthest
    slope_before = (before[-1][2] - before[-2][2]) / (before[-1][0] - before[-2][0])
    return denoised + min(max(slope / slope_before, -0.5), 1.5) * farthest


@pytest.mark.parametrize("rule", [rule for rule in Reuse if rule is not Reuse.BENT])  # line and bend are one there
def test_a_latent_of_one_number_by_hand(rule: Reuse) -> None:
    values = noise(200, 2, seed=7).tolist()
    for start in range(0, 180, 6):
        sigmas = sorted((abs(x) + 0.05 * k for k, (x, _) in enumerate(values[start : start + 6])), reverse=True)
        history = History(rule)
        known: list[tuple[float, float, float]] = []
        for (sigma, after), (x, denoised) in zip(itertools.pairwise(sigmas), values[start:], strict=False):
            history.add(sigma, number(x), number(denoised))
            known.append((sigma, x, denoised))
            found = history.expect(after, number(x / 2)).item()
            assert found == pytest.approx(by_hand(rule, known, after, x / 2), rel=1e-9, abs=1e-9)


# ---- the bend


def test_a_bend_that_comes_again_is_followed_exactly() -> None:
    """D = a + sigma b + sigma^2 c on evenly spaced sigmas: each step goes by the same shares of line and bend."""
    a, b, c = (noise(2, 4, 8, 6, seed=seed) for seed in (11, 12, 13))
    history = History(Reuse.BENT)
    levels = [9.0, 8.0, 7.0, 6.0, 5.0, 4.0]
    for sigma in levels[:-1]:
        history.add(sigma, a, a + sigma * b + sigma**2 * c)
    wanted = a + levels[-1] * b + levels[-1] ** 2 * c
    found = history.expect(levels[-1], a)
    straight = History(Reuse.MEASURED)
    for sigma in levels[:-1]:
        straight.add(sigma, a, a + sigma * b + sigma**2 * c)

    assert (found - wanted).norm() < 0.1 * (straight.expect(levels[-1], a) - wanted).norm()


def test_without_a_bend_it_is_the_line() -> None:
    a, b = noise(2, 4, 8, 6, seed=14), noise(2, 4, 8, 6, seed=15)
    history = History(Reuse.BENT)
    for sigma in (8.0, 6.0, 5.0, 3.5):
        history.add(sigma, a, a + sigma * b)
    torch.testing.assert_close(history.expect(2.5, a), a + 2.5 * b, rtol=5e-3, atol=5e-3)
