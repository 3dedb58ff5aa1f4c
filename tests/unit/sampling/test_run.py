"""One run, step by step: when the model is computed, and whole runs of samplers on a model known in closed form."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.sampling.reuse import Reuse
from slipstream.sampling.run import Skipped, SkippingRun
from slipstream.sampling.schedule import Steps, countdown_law, power_law, shortened

SIGMAS = (10.0, 8.0, 6.0, 4.0, 3.0, 2.0, 1.0, 0.5, 0.0)

each_rule = pytest.mark.parametrize("rule", Reuse)


class Model:
    """Gives another latent at each call, and counts."""

    def __init__(self) -> None:
        self.given: list[Tensor] = []

    def __call__(self) -> Tensor:
        self.given.append(torch.full((1, 4, 2, 2), float(len(self.given) + 1)))
        return self.given[-1]


def latent(value: float = 0.0, shape: tuple[int, ...] = (1, 4, 2, 2)) -> Tensor:
    return torch.full(shape, value)


def giving(denoised: Tensor) -> Callable[[], Tensor]:
    return lambda: denoised


def never() -> Tensor:
    raise AssertionError("this step was to be skipped")


def run_of(computed: Steps = (0, 7), rule: Reuse = Reuse.HOLD, sigmas: Sequence[float] = SIGMAS) -> SkippingRun:
    return SkippingRun(sigmas, computed, rule)


def is_computed(run: SkippingRun, sigma: float, conditions: Any = None, x: Tensor | None = None) -> bool:
    """Whether a call reaches the model; the call is made."""
    before = run.computed_calls + run.skipped_calls
    called: list[bool] = []

    def compute() -> Tensor:
        called.append(True)
        return torch.zeros_like(x if x is not None else latent())

    run(x if x is not None else latent(), sigma, compute, conditions)
    assert run.computed_calls + run.skipped_calls == before + 1
    return bool(called)


# ---- which calls are computed


@each_rule
def test_a_run_with_everything_computed_is_the_models_own(rule: Reuse) -> None:
    run, model = run_of(tuple(range(8)), rule), Model()
    results = [run(latent(), sigma, model) for sigma in SIGMAS[:-1]]
    assert all(result is given for result, given in zip(results, model.given, strict=True))
    assert (run.computed_calls, run.skipped_calls) == (8, 0)


@each_rule
@pytest.mark.parametrize("computed", [(0, 7), (0, 1, 2, 5), (0, 3, 4), (0,)])
def test_chosen_steps_are_computed_and_no_others(rule: Reuse, computed: Steps) -> None:
    run = run_of(computed, rule)
    assert tuple(step for step, sigma in enumerate(SIGMAS[:-1]) if is_computed(run, sigma)) == computed
    assert (run.computed_calls, run.skipped_calls) == (len(computed), 8 - len(computed))


@pytest.mark.parametrize("computed", [(), (3, 6), (7,)])
def test_the_first_step_is_computed_even_if_left_out(computed: Steps) -> None:
    run = run_of(computed)
    assert tuple(step for step, sigma in enumerate(SIGMAS[:-1]) if is_computed(run, sigma)) == (0, *computed)


def test_a_run_that_begins_later_computes_its_first_step() -> None:
    run = run_of((0, 6))
    assert [is_computed(run, sigma) for sigma in SIGMAS[3:-1]] == [True, False, False, True, False]


@pytest.mark.parametrize("share", [1 - 9e-4, 1 - 1e-5, 1 + 1e-5, 1 + 9e-4])
def test_a_step_is_known_by_its_sigma_up_to_rounding(share: float) -> None:
    run = run_of((0, 3))
    computed = [is_computed(run, share * sigma) for sigma in SIGMAS[:-1]]
    assert computed == [True, False, False, True, False, False, False, False]


@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e4])
def test_steps_of_flow_and_of_large_sigmas_are_told_apart(scale: float) -> None:
    sigmas = [scale * (1 - step / 50) for step in range(51)]
    run = run_of((0, 20, 49), sigmas=sigmas)
    in_float32 = torch.tensor(sigmas).tolist()
    assert [step for step in range(50) if is_computed(run, in_float32[step])] == [0, 20, 49]


@pytest.mark.parametrize("between", [9.0, 5.0, 8.02, 7.98, 11.0, 0.0])
@each_rule
def test_a_call_between_steps_is_computed_and_not_remembered(rule: Reuse, between: float) -> None:
    plain, disturbed = run_of((0, 1, 3), rule), run_of((0, 1, 3), rule)
    for step, sigma in enumerate(SIGMAS[:-1]):
        x, denoised = latent(5.0 + step), latent(float(step**2))
        wanted = plain(x, sigma, giving(denoised))
        assert disturbed(x, sigma, giving(denoised)).equal(wanted)
        wild = latent(1e9)
        assert disturbed(latent(-1e9), between, giving(wild)) is wild
    assert (plain.computed_calls, plain.skipped_calls) == (3, 5)
    assert (disturbed.computed_calls, disturbed.skipped_calls) == (11, 5)


@pytest.mark.parametrize("share", [1.0, 1 - 5e-4, 1 + 5e-4])
def test_a_repeated_step_is_computed_and_begins_anew(share: float) -> None:
    run, model = run_of((0, 1), Reuse.LINEAR), Model()
    first, second = run(latent(), 10.0, model), run(latent(), 8.0, model)
    assert run(latent(), 6.0, never).equal(2 * second - first)
    again = run(latent(), 6.0 * share, model)
    assert again is model.given[2]
    assert run(latent(), 4.0, never).equal(again), "no line through what was before"


@pytest.mark.parametrize(("back_to", "follows"), [(10.0, 6.0), (8.0, 6.0), (4.0, 3.0)])
def test_where_sigma_rises_the_step_is_computed_and_begins_anew(back_to: float, follows: float) -> None:
    run, model = run_of((0, 1), Reuse.LINEAR), Model()
    for sigma in (10.0, 8.0):
        run(latent(), sigma, model)
    for sigma in (6.0, 4.0, 3.0):
        run(latent(), sigma, never)
    again = run(latent(), back_to, model)
    assert again is model.given[2]
    assert run(latent(), follows, never).equal(again), "no line through what was before"


@each_rule
def test_a_second_run_knows_nothing_of_the_first(rule: Reuse) -> None:
    used, fresh = run_of((0, 1, 2, 5), rule), run_of((0, 1, 2, 5), rule)
    for step, sigma in enumerate(SIGMAS[:-1]):
        used(latent(7.0), sigma, giving(latent(100.0 * (-1) ** step)))
    for step, sigma in enumerate(SIGMAS[:-1]):
        x, denoised = latent(float(step)), latent(float(step % 3))
        found, wanted = (run(x, sigma, giving(denoised)) for run in (used, fresh))
        assert found.equal(wanted)
    assert used.computed_calls == 2 * fresh.computed_calls == 8


@pytest.mark.parametrize("sigmas", [(0.0, 0.5, 1, 2, 4, 8, 10), (1.0, 2, 4, 8)])
def test_a_schedule_that_rises_is_computed_throughout(sigmas: tuple[float, ...]) -> None:
    """As FlipSigmas makes them, for unsampling."""
    for rule in Reuse:
        run = run_of((0,), rule, sigmas)
        assert all(is_computed(run, sigma) for sigma in sigmas[:-1])


def test_a_schedule_with_a_sigma_twice() -> None:
    sigmas = (10.0, 8.0, 8.0, 6.0, 0.0)
    for rule in Reuse:
        run = run_of((0,), rule, sigmas)
        assert [is_computed(run, sigma) for sigma in sigmas[:-1]] == [True, False, True, False]


@pytest.mark.parametrize("sigmas", [(), (3.0,)])
def test_a_schedule_without_steps_is_computed(sigmas: tuple[float, ...]) -> None:
    run = run_of((), sigmas=sigmas)
    assert is_computed(run, 3.0) and is_computed(run, 2.0) and run.skipped_calls == 0


def test_a_schedule_is_as_it_was_at_the_beginning() -> None:
    sigmas = list(SIGMAS)
    run = run_of((0, 4), sigmas=sigmas)
    sigmas[:] = [99.0] * len(sigmas)  # UniPC writes into its sigmas
    assert [is_computed(run, sigma) for sigma in SIGMAS[:5]] == [True, False, False, False, True]


# ---- what else ends reuse


def test_another_situation_is_computed_and_begins_anew() -> None:
    run, model = run_of((0, 1), Reuse.LINEAR), Model()
    for sigma in (10.0, 8.0):
        run(latent(), sigma, model, "canny")
    run(latent(), 6.0, never, "canny")
    without = run(latent(), 4.0, model, None)
    assert without is model.given[2]
    assert run(latent(), 3.0, never, None).equal(without)
    back = run(latent(), 2.0, model, "canny")
    assert back is model.given[3], "what was known of it before is too long ago"
    assert run(latent(), 1.0, never, "canny").equal(back)


@pytest.mark.parametrize(
    "other",
    [
        latent(shape=(2, 4, 2, 2)),
        latent(shape=(1, 4, 4, 1)),
        latent(shape=(1, 4, 1, 2, 2)),
        latent().half(),
        latent().to("meta"),
    ],
    ids=["batch", "shape", "dimensions", "dtype", "device"],
)
def test_another_latent_is_computed_and_begins_anew(other: Tensor) -> None:
    run = run_of((0,))
    assert [is_computed(run, sigma) for sigma in (10.0, 8.0)] == [True, False]
    assert is_computed(run, 6.0, x=other)
    assert not is_computed(run, 4.0, x=other)
    expected = run(other, 3.0, never)
    assert (expected.shape, expected.dtype, expected.device) == (other.shape, other.dtype, other.device)
    assert is_computed(run, 2.0)


def test_situations_are_compared_by_value() -> None:
    run = run_of((0,))
    assert is_computed(run, 10.0, ("a", (1, 2)))
    assert not is_computed(run, 8.0, tuple(["a", (1, 2)]))
    assert is_computed(run, 6.0, ("a", (1, 3)))


def test_forgotten_steps_are_computed() -> None:
    run = run_of((0,))
    assert [is_computed(run, sigma) for sigma in (10.0, 8.0)] == [True, False]
    run.forget()
    assert [is_computed(run, sigma) for sigma in (6.0, 4.0)] == [True, False]
    assert (run.computed_calls, run.skipped_calls) == (2, 2)


def test_a_step_that_failed_is_computed_when_it_is_tried_again() -> None:
    def cancelled() -> Tensor:
        raise InterruptedError

    run = run_of((0, 2))
    assert [is_computed(run, sigma) for sigma in (10.0, 8.0)] == [True, False]
    with pytest.raises(InterruptedError):
        run(latent(), 6.0, cancelled)
    assert is_computed(run, 6.0)
    assert not is_computed(run, 4.0)


# ---- tensors


class Watched(Tensor):
    """A tensor of which all copies are known."""

    copies: list[weakref.ref[Tensor]] = []

    def clone(self, **options: Any) -> Tensor:
        copy = super().clone(**options)
        self.copies.append(weakref.ref(copy))
        return copy


@each_rule
def test_tensors_are_let_go(rule: Reuse, monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[weakref.ref[Tensor]] = []
    monkeypatch.setattr(Watched, "copies", copies)
    run, given = run_of(tuple(range(8)), rule), []

    def alive() -> int:
        return sum(copy() is not None for copy in copies)

    for count, sigma in enumerate(SIGMAS[:-1], 1):
        x, denoised = (latent(float(count)).as_subclass(Watched) for _ in range(2))
        given += [weakref.ref(x), weakref.ref(denoised)]
        run(x, sigma, giving(denoised))
        del x, denoised
        most = {Reuse.HOLD_NOISE: 4, Reuse.BENT: 3}
        assert 1 <= alive() <= most.get(rule, 2), "of two steps at most, of three where a bend is followed"
    assert all(tensor() is None for tensor in given), "copies are kept, not the sampler's own"
    run.forget()
    assert copies and alive() == 0


@each_rule
def test_writing_into_tensors_changes_no_later_step(rule: Reuse) -> None:
    plain, written = run_of((0, 1, 3, 5), rule), run_of((0, 1, 3, 5), rule)
    for step, sigma in enumerate(SIGMAS[:-1]):
        x, denoised = latent(10.0 + step), latent(math.sin(step))
        wanted = plain(x, sigma, denoised.clone).clone()
        mine = x.clone()
        found = written(mine, sigma, denoised.clone)
        assert found.equal(wanted) and mine.equal(x)
        found.fill_(math.nan)
        mine.fill_(math.nan)


# ---- whole runs of a model known in closed form

Denoiser = Callable[[Tensor, float], Tensor]


@dataclass(frozen=True)
class Mixture:
    """Data from several Gaussians, each item [1, 1, n]; what a perfect model predicts from such data with noise."""

    means: Tensor
    deviations: Tensor
    weights: Tensor

    def clean(self, noisy: Tensor, signal: float, sigma: float) -> Tensor:
        """The mean of all data that `noisy = signal * data + sigma * noise` may have come from."""
        variances = (signal * self.deviations) ** 2 + sigma**2
        away = noisy.flatten(1)[:, None] - signal * self.means  # [B, Gaussian, n]
        size = self.means.shape[1]
        logits = self.weights.log() - 0.5 * (away**2).sum(2) / variances - 0.5 * size * variances.log()
        each = self.means + (signal * self.deviations**2 / variances)[:, None] * away
        return (logits.softmax(1)[..., None] * each).sum(1).reshape(noisy.shape)


def mixture(size: int = 6) -> Mixture:
    generator = torch.Generator().manual_seed(11)
    means = 1.5 * torch.randn(5, size, generator=generator, dtype=torch.float64)
    return Mixture(
        means, torch.tensor([0.2, 0.3, 0.5, 0.3, 0.6]).double(), torch.tensor([3.0, 1, 2, 2, 1]).double() / 9
    )


MIXTURE = mixture()


def denoise(x: Tensor, sigma: float) -> Tensor:
    return MIXTURE.clean(x, 1.0, sigma)


def as_eps(x: Tensor, sigma: float) -> Tensor:
    """The denoised latent of a network that predicts the noise in `alpha * data + s * noise`, alpha² + s² = 1."""
    alpha = 1 / math.sqrt(1 + sigma**2)
    s = sigma * alpha
    noisy = alpha * x
    eps = (noisy - alpha * MIXTURE.clean(noisy, alpha, s)) / s
    return x - sigma * eps


def as_v(x: Tensor, sigma: float) -> Tensor:
    """Of one that predicts `v = alpha * noise - s * data`."""
    angle = math.atan(sigma)
    alpha, s = math.cos(angle), math.sin(angle)
    noisy = alpha * x
    clean = MIXTURE.clean(noisy, alpha, s)
    v = alpha * (noisy - alpha * clean) / s - s * clean
    return x / (sigma**2 + 1) - v * sigma / math.sqrt(sigma**2 + 1)


def flow(noisy: Tensor, time: float) -> Tensor:
    """Of one that predicts `noise - data` from `(1 - t) * data + t * noise`; t in sigma's place."""
    clean = MIXTURE.clean(noisy, 1 - time, time)
    velocity = (noisy - (1 - time) * clean) / time - clean
    return noisy - time * velocity


def as_flow(x: Tensor, sigma: float) -> Tensor:
    return flow(x / (1 + sigma), sigma / (1 + sigma))


def euler(model: Denoiser, x: Tensor, sigmas: Sequence[float]) -> Tensor:
    """dx/dsigma = (x - D) / sigma, Karras et al. 2022."""
    for sigma, after in zip(sigmas, sigmas[1:], strict=False):
        x = x + (after - sigma) * (x - model(x, sigma)) / sigma
    return x


def dpmpp_2m(model: Denoiser, x: Tensor, sigmas: Sequence[float]) -> Tensor:
    """DPM-Solver++(2M), Lu et al. 2022, algorithm 2, with alpha = 1: x' = s'/s · x - (exp(-h) - 1) · D."""
    before: tuple[Tensor, float] | None = None
    for sigma, after in zip(sigmas, sigmas[1:], strict=False):
        denoised = model(x, sigma)
        if after == 0:
            return denoised
        h = math.log(sigma / after)
        mixed = denoised
        if before is not None:
            r = before[1] / h
            mixed = (1 + 1 / (2 * r)) * denoised - before[0] / (2 * r)
        x = after / sigma * x - math.expm1(-h) * mixed
        before = denoised, h
    return x


SAMPLERS = {"euler": euler, "dpmpp_2m": dpmpp_2m}
each_sampler = pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)


def karras(steps: int, low: float = 0.03, high: float = 14.6, rho: float = 7.0) -> list[float]:
    ends = high ** (1 / rho), low ** (1 / rho)
    return [*((ends[0] + k / (steps - 1) * (ends[1] - ends[0])) ** rho for k in range(steps)), 0.0]


def start(count: int = 64, size: int = 6, high: float = 14.6) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return high * torch.randn(count, 1, size, generator=generator, dtype=torch.float64)


def skipped(model: Denoiser, sigmas: Sequence[float], computed: Steps, rule: Reuse) -> tuple[Denoiser, SkippingRun]:
    run = SkippingRun(sigmas, computed, rule)
    return (lambda x, sigma: run(x, sigma, lambda: model(x, sigma))), run


def off(found: Tensor, reference: Tensor) -> float:
    """Root mean square."""
    return float((found - reference).square().mean().sqrt())


def test_the_mixture_is_denoised_as_tweedie_says() -> None:
    """D = x + sigma² · the gradient of the log of the density of noisy data."""
    for sigma in (0.1, 1.0, 5.0):
        x = (start(8) / 14.6 * sigma).requires_grad_()
        variances = MIXTURE.deviations**2 + sigma**2
        scales = variances.sqrt()[:, None].expand(-1, 6)
        parts = torch.distributions.Independent(torch.distributions.Normal(MIXTURE.means, scales), 1)
        chosen = torch.distributions.Categorical(MIXTURE.weights)
        density = torch.distributions.MixtureSameFamily(chosen, parts).log_prob(x.flatten(1)).sum()
        (slope,) = torch.autograd.grad(density, x)
        torch.testing.assert_close(denoise(x, sigma), x + sigma**2 * slope)


@each_rule
@each_sampler
def test_with_everything_computed_pictures_are_bit_for_bit_the_samplers_own(sampler: Any, rule: Reuse) -> None:
    sigmas = karras(20)
    model, run = skipped(denoise, sigmas, tuple(range(20)), rule)
    assert sampler(model, start(), sigmas).equal(sampler(denoise, start(), sigmas))
    assert (run.computed_calls, run.skipped_calls) == (20, 0)


@pytest.mark.parametrize("rule", [Reuse.HOLD, Reuse.HOLD_NOISE])
@pytest.mark.parametrize("steps", [12, 20, 50])
@pytest.mark.parametrize("last", [0.0, 0.03])
def test_euler_that_holds_is_euler_on_fewer_sigmas(rule: Reuse, steps: int, last: float) -> None:
    sigmas = [*karras(steps, low=0.05)[:-1], last]
    for computed in (power_law(steps, steps // 2, 2), power_law(steps, 5, 1), countdown_law(steps, steps // 2), (0, 3)):
        model, run = skipped(denoise, sigmas, computed, rule)
        found = euler(model, start(), sigmas)
        assert run.computed_calls == len(computed)
        wanted = euler(denoise, start(), shortened(torch.tensor(sigmas).double(), computed).tolist())
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
        assert off(wanted, euler(denoise, start(), sigmas)) > 1e-3, "skipping makes a difference"


def test_dpmpp_2m_that_holds_is_not() -> None:
    sigmas, computed = karras(20), power_law(20, 10, 2)
    model, _ = skipped(denoise, sigmas, computed, Reuse.HOLD)
    wanted = dpmpp_2m(denoise, start(), shortened(torch.tensor(sigmas).double(), computed).tolist())
    assert off(dpmpp_2m(model, start(), sigmas), wanted) > 1e-3


@each_rule
@each_sampler
@pytest.mark.parametrize("predicts", [as_eps, as_v, as_flow])
def test_what_a_network_predicts_does_not_matter(sampler: Any, rule: Reuse, predicts: Denoiser) -> None:
    sigmas, computed = karras(20), power_law(20, 12, 2)
    plain, _ = skipped(denoise, sigmas, computed, rule)
    other, run = skipped(predicts, sigmas, computed, rule)
    torch.testing.assert_close(sampler(other, start(), sigmas), sampler(plain, start(), sigmas), rtol=0, atol=1e-8)
    assert run.skipped_calls == 8


@pytest.mark.parametrize("rule", [Reuse.HOLD, Reuse.HOLD_NOISE])
def test_a_flow_model_in_its_own_time_gives_the_same_run(rule: Reuse) -> None:
    """x = (1 - t) · data + t · noise, t = sigma / (1 + sigma): Euler's steps are the same there."""
    sigmas, computed = karras(20), power_law(20, 12, 2)
    times = [sigma / (1 + sigma) for sigma in sigmas]
    plain, _ = skipped(denoise, sigmas, computed, rule)
    other, run = skipped(flow, times, computed, rule)
    found = euler(other, start() / (1 + sigmas[0]), times)
    torch.testing.assert_close(found, euler(plain, start(), sigmas), rtol=0, atol=1e-8)
    assert run.skipped_calls == 8


@each_sampler
@pytest.mark.parametrize("power", [1.0, 1.5, 2.0])
def test_measured_is_closer_to_the_whole_run_than_hold(sampler: Any, power: float) -> None:
    sigmas, computed = karras(20), power_law(20, 12, power)
    whole = sampler(denoise, start(256), sigmas)
    errors = {}
    for rule in (Reuse.HOLD, Reuse.MEASURED):
        model, run = skipped(denoise, sigmas, computed, rule)
        errors[rule] = off(sampler(model, start(256), sigmas), whole)
        assert (run.computed_calls, run.skipped_calls) == (12, 8)
    assert 0 < errors[Reuse.MEASURED] < 0.7 * errors[Reuse.HOLD]


@each_rule
@each_sampler
def test_pictures_of_a_batch_are_as_alone(sampler: Any, rule: Reuse) -> None:
    sigmas, computed, x = karras(20), power_law(20, 12, 2), start(4)

    def sampled(x: Tensor) -> Tensor:
        found: Tensor = sampler(skipped(denoise, sigmas, computed, rule)[0], x, sigmas)
        return found

    alone = torch.cat([sampled(x[index : index + 1]) for index in range(4)])
    torch.testing.assert_close(sampled(x), alone, rtol=0, atol=1e-6)


# ---- what is said of a run


def test_what_happened_in_words() -> None:
    skipped = Skipped("mine", "euler", 20, 12, 8, "measured", "")
    assert str(skipped) == "mine: 12 of 20 steps computed (euler, measured)"
    assert str(replace(skipped, remark="calibrated with CFG 7")) == f"{skipped}; calibrated with CFG 7"
    assert str(replace(skipped, reason="too short")) == "every step computed: too short"


# ---- inpainting


def half_painted(run: SkippingRun, part: slice, seed: int = 3) -> list[Tensor]:
    """The results of each step, [2, 4, 2, 6] or a part of their columns: the left half changes otherwise."""
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(2, 4, 2, 3, generator=generator) for _ in range(2))
    bend = torch.randn(2, 4, 2, 3, generator=generator)
    found = []
    for sigma in SIGMAS[:-1]:
        denoised = torch.cat([left * (1 + 20 / sigma), right + sigma * bend + 0.1 * sigma**2 * right], -1)[..., part]
        found.append(run(torch.randn(denoised.shape, generator=generator), sigma, giving(denoised.clone())).clone())
    return found


@each_rule
@pytest.mark.parametrize("shape", [(1, 1, 2, 6), (2, 4, 2, 6)])
def test_with_a_mask_the_part_that_changes_is_followed_as_if_it_were_alone(rule: Reuse, shape: tuple[int, ...]) -> None:
    mask = torch.zeros(shape)
    mask[..., 3:] = 0.25  # a soft edge changes, too
    computed = (0, 1, 2, 4, 6)
    masked = half_painted(SkippingRun(SIGMAS, computed, rule, mask), slice(0, 6))
    alone = half_painted(SkippingRun(SIGMAS, computed, rule), slice(3, 6))
    unmasked = half_painted(SkippingRun(SIGMAS, computed, rule), slice(0, 6))
    for step, (found, wanted) in enumerate(zip(masked, alone, strict=True)):
        if rule is not Reuse.HOLD_NOISE:  # which hangs on x, another one here
            torch.testing.assert_close(found[..., 3:], wanted)
        if step not in computed:
            last = max(each for each in computed if each < step)
            assert torch.equal(found[..., :3], masked[last][..., :3]), "what is kept stays"
    if rule in (Reuse.MEASURED, Reuse.BENT):
        assert any(not torch.equal(one[..., 3:], other[..., 3:]) for one, other in zip(masked, unmasked, strict=True))


def test_a_mask_of_another_size_is_left_out() -> None:
    computed = (0, 1, 2, 4, 6)
    for mask in (torch.zeros(1, 1, 2, 5), torch.zeros(2, 6), torch.zeros(3, 1, 2, 6)):
        found = half_painted(SkippingRun(SIGMAS, computed, Reuse.BENT, mask), slice(0, 6))
        wanted = half_painted(SkippingRun(SIGMAS, computed, Reuse.BENT), slice(0, 6))
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_a_run_with_a_mask_keeps_nothing_that_it_forgot() -> None:
    run = SkippingRun(SIGMAS, (0, 7), Reuse.HOLD, torch.ones(1, 1, 2, 2))
    kept = torch.ones(1, 4, 2, 2)
    run(latent(), SIGMAS[0], giving(kept))
    run.forget()
    assert is_computed(run, SIGMAS[1])
