"""Skipped steps in diffusers: the same as in ComfyUI, for every kind of scheduler, prediction and pipeline."""

from __future__ import annotations

import copy
import gc
import inspect
import itertools
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("diffusers", reason="no diffusers")

import diffusers
import torch
from diffusers import UNet2DModel
from torch import Tensor

from slipstream.core.errors import UnsupportedModel
from slipstream.demo import canny, scenes
from slipstream.demo import model as demo_model
from slipstream.demo.pipeline import Pipeline
from slipstream.engine_cache import EngineStore
from slipstream.hosts.diffusers import accelerate_unet, skip_steps
from slipstream.hosts.diffusers.schedulers import Terms, Timeline, sampler_name
from slipstream.runtime.provider import EngineProvider
from slipstream.runtime.settings.model_settings import BuildPolicy, Settings
from slipstream.sampling.metrics import latent_psnr
from slipstream.sampling.presets import PRESETS, Preset, Selection, Use, custom
from slipstream.sampling.reuse import Reuse
from slipstream.sampling.run import Skipped, SkippingRun
from slipstream.sampling.samplers import SamplerKind, kind_of, rule_for
from slipstream.sampling.saved_preset import SavedPreset
from slipstream.tests.diffusers.support import FIRST_USE, Built, make_unet
from slipstream.tests.tensors import distance

pytestmark = pytest.mark.diffusers

BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
LISTED = (0, 1, 2, 4, 7, 8, 11, 15)
STEPS = 16
EVERYTHING = custom(Selection(share=1.0))
BALANCED = PRESETS["balanced"]

Scheduler = Any


def listed(rule: Reuse | None = None, steps: tuple[int, ...] = LISTED) -> Preset:
    return custom(Selection(listed=" ".join(map(str, steps))), rule)


def make(name: str, **config: Any) -> Scheduler:
    betas = {} if name.startswith("FlowMatch") else BETAS
    if name == "DDIMScheduler":
        betas = betas | {"clip_sample": False, "set_alpha_to_one": False, "steps_offset": 1}
    return getattr(diffusers, f"{name}")(**betas, **config)


def denoise(x: Tensor, sigma: float, prompt: Tensor) -> Tensor:
    """A denoiser [B, ...] that is as good as any: what it finds depends on everything, and not in a straight line."""
    return torch.tanh(1.3 * x / (1 + sigma) + prompt.view(-1, 1, 1, 1)) + 0.2 * torch.sin(3 * x.roll(1, -1))


class Network(torch.nn.Module):
    """Predicts what the scheduler of its pipeline wants, from `denoise`. Counts its calls."""

    def __init__(self, pipeline: TinyPipeline, sign: float = 1.0) -> None:
        super().__init__()
        self.pipeline = [pipeline]  # no submodule
        self.sign, self.calls = sign, 0

    def forward(self, sample: Tensor, timestep: Any, prompt: Tensor, residual: Any = None, **options: Any) -> Any:
        self.calls += 1
        (pipeline,) = self.pipeline
        terms = pipeline.terms_now()
        signal = max(terms.signal, 1e-3)
        found = denoise(sample.double() / signal, terms.noise / signal, prompt)
        found = found if residual is None else found + residual
        out = self.sign * terms.predicted(sample.double(), found).to(sample.dtype)
        return (out,) if not options.get("return_dict", True) else {"sample": out}


class Guide(torch.nn.Module):
    """A ControlNet: what it gives depends on the time too."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, sample: Tensor, timestep: Any, controlnet_cond: Tensor, conditioning_scale: float = 1.0) -> Any:
        self.calls += 1
        return ([conditioning_scale * controlnet_cond * torch.cos(sample)],)


@dataclass
class Options:
    """What a picture is made of, beside the noise."""

    steps: int = STEPS
    cfg: float = 3.0
    batch: int = 2
    in_two_calls: bool = False
    hint: Tensor | None = None
    strengths: Callable[[int], float] = lambda step: 1.0
    prompts: Callable[[int], Tensor] = lambda step: torch.tensor([0.3, -0.5])
    begin: int = 0
    latents: Tensor | None = None
    timesteps: dict[str, Any] | None = None
    step_options: dict[str, Any] | None = None
    stop_at: int = 10_000


class TinyPipeline:
    """The loop of diffusers' pipelines around `Network`."""

    def __init__(self, scheduler: Scheduler, sign: float = 1.0) -> None:
        self.scheduler = scheduler
        self.unet: Any = Network(self, sign)
        self.transformer: Any = None
        self.controlnet: Any = Guide()
        self.sign = sign
        self.time: Any = None

    def terms_now(self) -> Terms:
        scheduler = self.scheduler
        index = getattr(scheduler, "step_index", None)
        if index is None:
            index = next(at for at, time in enumerate(scheduler.timesteps) if time == self.time)
        return Timeline(scheduler).terms[index]

    @torch.no_grad()
    def __call__(self, seed: int = 0, **options: Any) -> Tensor:
        o = Options(**options)
        set_to = o.timesteps or {"num_inference_steps": o.steps}
        self.scheduler.set_timesteps(**set_to)
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(o.batch, 4, 6, 6, generator=generator)
        x = noise * getattr(self.scheduler, "init_noise_sigma", 1.0) if o.latents is None else o.latents
        more = dict(o.step_options or {})
        if "generator" in inspect.signature(self.scheduler.step).parameters:
            more["generator"] = generator
        if o.begin and hasattr(self.scheduler, "set_begin_index"):
            self.scheduler.set_begin_index(o.begin)
        for step, time in enumerate(self.scheduler.timesteps[o.begin :]):
            self.time = time
            if step == o.stop_at:
                raise KeyboardInterrupt
            predicted = self._guided(x, time, step, o)
            x = self.scheduler.step(predicted, time, x, **more, return_dict=False)[0]
        return x

    def _guided(self, x: Tensor, time: Any, step: int, o: Options) -> Tensor:
        scaled = self.scheduler.scale_model_input(x, time) if hasattr(self.scheduler, "scale_model_input") else x
        prompt = o.prompts(step)[: o.batch]
        if o.cfg == 1:
            return self.sign * self._predict(scaled, time, prompt, step, o)
        if o.in_two_calls:
            out, without = (self._predict(scaled, time, each, step, o) for each in (prompt, 0 * prompt))
        else:
            both = torch.cat([0 * prompt, prompt])
            without, out = self._predict(torch.cat([scaled, scaled]), time, both, step, o).chunk(2)
        return self.sign * (without + o.cfg * (out - without))

    def _predict(self, scaled: Tensor, time: Any, prompt: Tensor, step: int, o: Options) -> Tensor:
        residual = None
        if o.hint is not None:
            ((residual,),) = self.controlnet(scaled, time, o.hint, conditioning_scale=o.strengths(step))
        network = self.transformer if self.unet is None else self.unet
        return network(scaled, time, prompt, residual=residual, return_dict=False)[0]


class Told(list[Skipped]):
    """Collects what `skip_steps` tells."""

    __call__ = list.append


ONE_CALL = {
    "ddim": make("DDIMScheduler"),
    "euler": make("EulerDiscreteScheduler"),
    "euler karras": make("EulerDiscreteScheduler", use_karras_sigmas=True),
    "euler_ancestral": make("EulerAncestralDiscreteScheduler"),
    "dpmpp_2m": make("DPMSolverMultistepScheduler"),
    "dpmpp_2m karras": make("DPMSolverMultistepScheduler", use_karras_sigmas=True),
    "dpmpp_2m_sde": make("DPMSolverMultistepScheduler", algorithm_type="sde-dpmsolver++"),
    "uni_pc": make("UniPCMultistepScheduler"),
    "uni_pc flow": make("UniPCMultistepScheduler", use_flow_sigmas=True, prediction_type="flow_prediction"),
    "deis": make("DEISMultistepScheduler"),
    "ipndm": make("PNDMScheduler", skip_prk_steps=True),
    "euler flow": make("FlowMatchEulerDiscreteScheduler", shift=3.0),
}
UNKNOWN = {name: make(name) for name in ("DDPMScheduler", "LCMScheduler", "TCDScheduler")}
SEVERAL_CALLS = {"heun": make("HeunDiscreteScheduler"), "dpm_2": make("KDPM2DiscreteScheduler")}
STOCHASTIC = (SamplerKind.ANCESTRAL, SamplerKind.STOCHASTIC_MULTISTEP)
ALL = {**ONE_CALL, **UNKNOWN, **SEVERAL_CALLS}


# ----------------------------------------------------------------------------------------------- what is exact


@pytest.mark.parametrize("name", ALL)
def test_with_everything_computed_no_bit_differs(name: str) -> None:
    pipeline, told = TinyPipeline(copy.deepcopy(ALL[name])), Told()
    plain, calls = pipeline(), pipeline.unet.calls
    with skip_steps(pipeline, EVERYTHING, told):
        assert torch.equal(pipeline(), plain)
    assert pipeline.unet.calls == 2 * calls
    assert (told[0].skipped, bool(told[0].reason)) == (0, name in SEVERAL_CALLS)


SHORTER = {
    "euler": lambda scheduler, kept: {"timesteps": scheduler.timesteps[kept].tolist()},
    "euler flow": lambda scheduler, kept: {"sigmas": (scheduler.timesteps[kept] / 1000).tolist()},
}


@pytest.mark.parametrize("cfg", [1.0, 4.0])
@pytest.mark.parametrize("name", SHORTER)
def test_hold_is_the_shortened_schedule(name: str, cfg: float) -> None:
    scheduler = copy.deepcopy(ONE_CALL[name])
    if name == "euler flow":
        scheduler = make("FlowMatchEulerDiscreteScheduler")  # which would shift given sigmas a second time
    pipeline = TinyPipeline(scheduler)
    with skip_steps(pipeline, listed(Reuse.HOLD)):
        skipped = pipeline(cfg=cfg)
    assert pipeline.unet.calls == len(LISTED)
    shorter = pipeline(cfg=cfg, timesteps=SHORTER[name](pipeline.scheduler, list(LISTED)))
    assert distance(skipped, shorter) < 1e-5


@pytest.mark.parametrize("rule", [Reuse.HOLD, Reuse.HOLD_NOISE])
@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "sample"])
def test_hold_is_the_shortened_schedule_with_ddim(prediction: str, rule: Reuse) -> None:
    """DDIM takes no timesteps of one's own: its formula, with eta 0, on those of the computed steps."""
    pipeline = TinyPipeline(make("DDIMScheduler", prediction_type=prediction))
    with skip_steps(pipeline, listed(rule)):
        skipped = pipeline(cfg=1.0)
    scheduler = pipeline.scheduler
    times = scheduler.timesteps[list(LISTED)].tolist()
    left = [*(float(scheduler.alphas_cumprod[time]) for time in times), float(scheduler.final_alpha_cumprod)]
    x = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(0)).double()
    for here, after in itertools.pairwise(left):
        terms = Terms("noise", math.sqrt(here), math.sqrt(1 - here))
        found = denoise(terms.common(x), terms.sigma, torch.tensor([0.3, -0.5]))
        noise = terms.predicted(x, found)
        x = math.sqrt(after) * found + math.sqrt(1 - after) * noise
    assert distance(skipped, x.float()) < 1e-5


@pytest.mark.parametrize("cfg", [1.0, 5.0])
@pytest.mark.parametrize("rule", list(Reuse))
def test_a_skipped_step_is_what_sampling_expects_of_the_guided_latent(rule: Reuse, cfg: float) -> None:
    pipeline = TinyPipeline(make("EulerDiscreteScheduler"))
    with skip_steps(pipeline, listed(rule)):
        found = pipeline(cfg=cfg)
    sigmas = pipeline.scheduler.sigmas.tolist()
    run, prompt = SkippingRun(sigmas, LISTED, rule), torch.tensor([0.3, -0.5])
    x = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(0)).double()
    x *= float(pipeline.scheduler.init_noise_sigma)
    for sigma, after in itertools.pairwise(sigmas):

        def guided(x: Tensor = x, sigma: float = sigma) -> Tensor:
            without = denoise(x, sigma, 0 * prompt)
            return without + cfg * (denoise(x, sigma, prompt) - without)

        denoised = run(x, sigma, guided)
        x = denoised + after / sigma * (x - denoised)
    assert distance(found, x.float()) < 1e-4


@pytest.mark.parametrize("name", ["DDIMScheduler", "EulerDiscreteScheduler", "DPMSolverMultistepScheduler"])
def test_predictions_of_noise_velocity_and_latent_agree(name: str) -> None:
    kinds = ["epsilon", "v_prediction", *(["sample"] if name != "EulerDiscreteScheduler" else [])]
    pipelines = [TinyPipeline(make(name, prediction_type=kind)) for kind in kinds]
    results = []
    for pipeline in pipelines:
        with skip_steps(pipeline, listed(Reuse.MEASURED)):
            results.append(pipeline())
        assert pipeline.unet.calls == len(LISTED)
    assert all(distance(result, results[0]) < 1e-4 for result in results[1:])


def test_flow_and_noise_agree() -> None:
    """The same denoiser and shares of noise; where both hold, both follow the same lines."""
    shares = torch.linspace(0.95, 0.05, STEPS).tolist()
    flow, noise = TinyPipeline(make("FlowMatchEulerDiscreteScheduler")), TinyPipeline(make("EulerDiscreteScheduler"))
    latents = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(1))
    with skip_steps(flow, listed(Reuse.HOLD)), skip_steps(noise, listed(Reuse.HOLD)):
        found = flow(timesteps={"sigmas": shares}, latents=latents)
        sigmas = [share / (1 - share) for share in shares]
        wanted = noise(timesteps={"sigmas": [*sigmas, 0.0]}, latents=latents / (1 - shares[0]))
    assert flow.unet.calls == noise.unet.calls == len(LISTED)
    assert distance(found, wanted) < 1e-4


@pytest.mark.parametrize("terms", [Terms("noise", 0.6, 0.8), Terms("velocity", 0.6, 0.8), Terms("flow", 0.3, 0.7)])
def test_terms_are_the_models_own(terms: Terms) -> None:
    """`latent = signal * D + noise * n`, and what each kind of model predicts of it."""
    denoised, n = torch.randn(2, 1, 3, 4, 4, generator=torch.Generator().manual_seed(1)).double()
    latent = terms.signal * denoised + terms.noise * n
    velocity = terms.signal * n - terms.noise * denoised
    predicted = {"noise": n, "velocity": velocity, "flow": n - denoised}[terms.prediction]
    torch.testing.assert_close(terms.denoised(latent, predicted), denoised)
    torch.testing.assert_close(terms.predicted(latent, denoised), predicted)
    slope = (terms.common(latent) - denoised) / terms.sigma  # what stays as it is along Euler's step
    torch.testing.assert_close(slope, n - denoised if terms.prediction == "flow" else n)


# --------------------------------------------------------------------------------------------- which schedulers


@pytest.mark.parametrize("name", ONE_CALL)
def test_schedulers_are_known_by_their_method(name: str) -> None:
    pipeline, told = TinyPipeline(copy.deepcopy(ONE_CALL[name])), Told()
    plain = pipeline()
    calls, pipeline.unet.calls = pipeline.unet.calls, 0
    with skip_steps(pipeline, custom(BALANCED.selection), told):
        found = pipeline()
    (skipped,) = told
    kind = kind_of(name.split()[0])
    assert (skipped.sampler, skipped.steps, skipped.reason) == (name.split()[0], STEPS, "")
    assert skipped.rule == rule_for(kind).value
    wanted = len(BALANCED.selection.computed(STEPS))
    assert skipped.computed == pipeline.unet.calls == (wanted + 1 if name == "ipndm" else wanted)
    assert skipped.computed + skipped.skipped == calls
    assert 0 < distance(found, plain) < (0.8 if kind in STOCHASTIC else 0.5)


@pytest.mark.parametrize(
    ("scheduler", "words"),
    [
        *((scheduler, "several times a step") for scheduler in SEVERAL_CALLS.values()),
        (UNKNOWN["DDPMScheduler"], "not measured with this sampler"),
        *((UNKNOWN[name], "distilled model") for name in ("LCMScheduler", "TCDScheduler")),
        (make("PNDMScheduler"), "several times a step"),
        (make("FlowMatchHeunDiscreteScheduler"), "several times a step"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_schedulers_that_compute_every_step_say_why(scheduler: Scheduler, words: str) -> None:
    pipeline, told = TinyPipeline(copy.deepcopy(scheduler)), Told()
    plain, calls = pipeline(), pipeline.unet.calls
    with skip_steps(pipeline, BALANCED, told):
        assert torch.equal(pipeline(), plain)
    assert pipeline.unet.calls == 2 * calls
    assert words in told[0].reason and told[0].skipped == 0 and told[0].computed == told[0].steps
    assert str(told[0]).startswith("every step computed: ")


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_choice_of_ones_own_skips_with_schedulers_that_were_not_measured(name: str) -> None:
    pipeline, told = TinyPipeline(copy.deepcopy(UNKNOWN[name])), Told()
    with skip_steps(pipeline, listed(), told):
        assert pipeline().isfinite().all()
    assert pipeline.unet.calls == told[0].computed == len(LISTED)


def test_schedulers_in_other_terms_compute_every_step() -> None:
    told, pipeline = Told(), TinyPipeline(diffusers.EDMEulerScheduler())
    pipeline.terms_now = lambda: Terms("noise", 0.6, 0.8)  # type: ignore[method-assign]
    with skip_steps(pipeline, listed(), told):
        pipeline()
    assert pipeline.unet.calls == STEPS and "EDMEulerScheduler" in told[0].reason


def test_kinds_that_hang_on_settings() -> None:
    flow = make("FlowMatchEulerDiscreteScheduler", stochastic_sampling=True)
    assert kind_of(sampler_name(flow)) is SamplerKind.ANCESTRAL
    assert kind_of(sampler_name(make("DDIMScheduler"), eta=1.0)) is SamplerKind.ANCESTRAL
    told, pipeline = Told(), TinyPipeline(make("DDIMScheduler"))
    with skip_steps(pipeline, BALANCED, told):
        pipeline(step_options={"eta": 1.0})
        pipeline()
    assert [each.rule for each in told] == [Reuse.MEASURED.value, Reuse.BENT.value]


def test_zero_terminal_snr() -> None:
    pipeline = TinyPipeline(
        make("DDIMScheduler", prediction_type="v_prediction", rescale_betas_zero_snr=True, timestep_spacing="trailing")
    )
    plain = pipeline()
    for rule in Reuse:
        with skip_steps(pipeline, listed(rule)):
            assert distance(pipeline(), plain) < 0.25


def test_short_pictures_are_computed() -> None:
    pipeline, told = TinyPipeline(make("DDIMScheduler")), Told()
    with skip_steps(pipeline, BALANCED, told):
        pipeline(steps=8)
    assert pipeline.unet.calls == 8 and "short" in told[0].reason


def test_a_picture_that_begins_late_counts_its_own_steps() -> None:
    for scheduler in (make("DDIMScheduler"), make("DPMSolverMultistepScheduler")):
        pipeline, told = TinyPipeline(scheduler), Told()
        with skip_steps(pipeline, replace(BALANCED, floor=0.0), told):
            pipeline(steps=30, begin=10)
            pipeline(steps=30, begin=12)
        assert [each.steps for each in told] == [20, 18] and told[1].reason.startswith("a run of 18 steps is short")
        assert pipeline.unet.calls == len(BALANCED.selection.computed(20)) + 18


# --------------------------------------------------------------------------------------------- which pipelines


def hint() -> Tensor:
    return 0.3 * torch.randn(1, 4, 6, 6, generator=torch.Generator().manual_seed(4))


def test_the_controlnet_is_skipped_too() -> None:
    pipeline = TinyPipeline(make("EulerDiscreteScheduler"))
    plain = pipeline(hint=hint())
    pipeline.unet.calls = pipeline.controlnet.calls = 0
    with skip_steps(pipeline, listed()):
        found = pipeline(hint=hint())
    assert pipeline.unet.calls == pipeline.controlnet.calls == len(LISTED)
    assert 0 < distance(found, plain) < 0.25 < distance(found, pipeline())


def computed_steps(pipeline: TinyPipeline, preset: Preset, **options: Any) -> list[int]:
    """Which steps of a picture call the network."""
    found: list[int] = []
    plain = Network.forward

    def forward(self: Network, *args: Any, **kwargs: Any) -> Any:
        found.append(pipeline.scheduler.timesteps.tolist().index(float(pipeline.time)))
        return plain(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Network, "forward", forward)
        with skip_steps(pipeline, preset):
            pipeline(**options)
    return sorted(set(found))


CHANGES: dict[str, dict[str, Any]] = {
    "strength of the ControlNet": {"hint": hint(), "strengths": lambda step: 1.0 if step < 10 else 0.0},
    "prompt": {"prompts": lambda step: torch.tensor([0.3, -0.5 if step < 10 else 0.5])},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_computes_the_step(change: str) -> None:
    pipeline = TinyPipeline(make("DDIMScheduler"))
    assert 10 not in LISTED
    assert computed_steps(pipeline, listed(), hint=hint()) == list(LISTED)
    assert computed_steps(pipeline, listed(), **CHANGES[change]) == sorted({*LISTED, 10})


def test_guidance_that_changes_computes_the_step() -> None:
    pipeline = TinyPipeline(make("DDIMScheduler"))

    def prompts(step: int) -> Tensor:
        pipeline._guidance_scale = 3.0 if step < 10 else 1.0
        return torch.tensor([0.3, -0.5])

    assert computed_steps(pipeline, listed(), prompts=prompts) == sorted({*LISTED, 10})


def test_a_controlnet_that_begins_or_ends_computes_the_step() -> None:
    pipeline = TinyPipeline(make("DDIMScheduler"))
    plain = pipeline._predict

    def predict(scaled: Tensor, time: Any, prompt: Tensor, step: int, o: Options) -> Tensor:
        o.hint = hint() if 5 <= step < 10 else None
        return plain(scaled, time, prompt, step, o)

    pipeline._predict = predict  # type: ignore[method-assign]
    assert computed_steps(pipeline, listed()) == sorted({*LISTED, 5, 10})


def test_conditions_that_are_always_new_are_told() -> None:
    pipeline, told = TinyPipeline(make("DDIMScheduler")), Told()
    with skip_steps(pipeline, listed(), told):
        pipeline(prompts=lambda step: torch.tensor([0.3, 0.01 * step]))
    assert pipeline.unet.calls == STEPS and "new in each step" in told[0].reason


def test_guidance_in_two_calls() -> None:
    pipeline = TinyPipeline(make("FlowMatchEulerDiscreteScheduler"))
    with skip_steps(pipeline, listed()):
        found, calls = pipeline(in_two_calls=True), pipeline.unet.calls
        assert distance(found, pipeline()) < 1e-6
    assert calls == 2 * len(LISTED)


def test_a_network_of_the_other_sign() -> None:
    """Some transformers give the negative of what their scheduler takes; the pipeline turns it round."""
    results = []
    for sign in (1.0, -1.0):
        pipeline = TinyPipeline(make("FlowMatchEulerDiscreteScheduler"), sign)
        pipeline.transformer, pipeline.unet = pipeline.unet, None
        with skip_steps(pipeline, listed()):
            results.append(pipeline())
        assert pipeline.transformer.calls == len(LISTED)
    assert torch.equal(*results)


def test_inpainting_computes_every_step_by_preset() -> None:
    class TinyInpaintPipeline(TinyPipeline):
        pass

    told = Told()
    pipeline = TinyInpaintPipeline(make("DDIMScheduler"))
    for preset in (BALANCED, listed()):
        with skip_steps(pipeline, preset, told):
            pipeline()
    assert [each.computed for each in told] == [STEPS, len(LISTED)]
    assert "with a mask for inpainting" in told[0].reason and told[1].rule == Reuse.BENT.value


@pytest.mark.parametrize("in_two_calls", [False, True])
def test_guided_is_who_asks_twice_for_each_sample(in_two_calls: bool) -> None:
    """Whatever the pipeline calls it: a scale that the network is given guides by no negative prompt."""
    told, pipeline = Told(), TinyPipeline(make("EulerAncestralDiscreteScheduler"))
    pipeline._guidance_scale = pipeline.guidance_scale = 3.5
    fast = replace(PRESETS["fast"], floor=0.0)  # which is for ancestral samplers with guidance only
    with skip_steps(pipeline, fast, told):
        for cfg in (1.0, 3.5):
            pipeline(cfg=cfg, in_two_calls=in_two_calls, steps=20)
    assert [each.skipped for each in told] == [0, 10]
    assert told[0].reason.startswith("with ancestral samplers at CFG 1, ")


def test_a_calibrated_preset_in_a_run_of_another_schedule(caplog: pytest.LogCaptureFixture) -> None:
    told, pipeline = Told(), TinyPipeline(make("EulerDiscreteScheduler"))
    sigmas = (*(float(sigma) for sigma in range(STEPS, 0, -1)), 0.0)
    mine = SavedPreset("mine", STEPS, LISTED, "SD15", "euler", "simple", 3.0, 40.0, "2025-11-30", sigmas=sigmas)
    with skip_steps(pipeline, mine.preset(), told):
        pipeline(seed=1)
        pipeline(seed=2)
        pipeline(cfg=1.0)
    assert [each.computed for each in told] == [len(LISTED), len(LISTED), STEPS]
    assert str(told[0]).endswith("(euler, measured with bend); calibrated with another schedule (simple)")
    assert caplog.text.count("calibrated with another schedule (simple)") == 1, "said once"
    assert "calibrated at CFG above 1, and this is CFG 1" in told[2].reason and not told[2].remark


def test_a_network_with_several_results_is_computed() -> None:
    pipeline, told = TinyPipeline(make("DDIMScheduler")), Told()
    network = pipeline.unet
    pipeline.unet = lambda *args, **kwargs: (*network(*args, **kwargs), torch.zeros(1))
    with skip_steps(pipeline, listed(), told):
        pipeline()
    assert network.calls == STEPS and "one tensor" in told[0].reason


def test_a_pipeline_that_steps_a_copy_is_left_alone() -> None:
    pipeline, told = TinyPipeline(make("EulerDiscreteScheduler")), Told()
    plain, guided = pipeline(), pipeline._guided

    def through_a_copy(x: Tensor, time: Any, step: int, o: Options) -> Tensor:
        out = guided(x, time, step, o)
        copy.deepcopy(pipeline.scheduler).step(out, time, x)
        return out

    pipeline._guided = through_a_copy  # type: ignore[method-assign]
    with skip_steps(pipeline, EVERYTHING, told):
        assert torch.equal(pipeline(), plain)
    assert told[0].computed == STEPS


def test_steps_in_several_parts_are_refused() -> None:
    pipeline = TinyPipeline(make("DDIMScheduler"))

    def twice(x: Tensor, time: Any, step: int, o: Options) -> Tensor:
        out = TinyPipeline._guided(pipeline, x, time, step, o)
        pipeline.scheduler.step(out, time, x)
        return TinyPipeline._guided(pipeline, x, time, step, o)

    pipeline._guided = twice  # type: ignore[method-assign]
    with pytest.raises(UnsupportedModel, match="one after another"), skip_steps(pipeline, listed(steps=(0, 2, 15))):
        pipeline()


# --------------------------------------------------------------------------------------------- state


def test_pictures_do_not_leak_into_each_other() -> None:
    pipeline = TinyPipeline(make("EulerDiscreteScheduler"))

    def alone(**options: Any) -> Tensor:
        with skip_steps(pipeline, listed()):
            return pipeline(**options)

    pictures: list[dict[str, Any]] = [{"seed": 1}, {"seed": 2, "batch": 1}, {"seed": 1}, {"seed": 3, "cfg": 1.0}]
    wanted = [alone(**options) for options in pictures]
    told = Told()
    with skip_steps(pipeline, listed(), told):
        found = [pipeline(**options) for options in pictures]
        assert len(told) == len(pictures) - 1
        pipeline.scheduler = make("DPMSolverMultistepScheduler")
        pipeline()
    assert all(map(torch.equal, found, wanted))
    assert [each.sampler for each in told] == ["euler"] * 4 + ["dpmpp_2m"]
    assert {each.computed for each in told} == {len(LISTED)}


@pytest.mark.parametrize("stop_at", [0, 1, 2, 4, 6, 15])
@pytest.mark.parametrize("name", ["DDIMScheduler", "DPMSolverMultistepScheduler"])
def test_a_picture_after_a_cancelled_one(name: str, stop_at: int) -> None:
    pipeline = TinyPipeline(make(name))
    with skip_steps(pipeline, listed()):
        wanted = pipeline(seed=2)
    with skip_steps(pipeline, listed()):
        with pytest.raises(KeyboardInterrupt):
            pipeline(seed=1, stop_at=stop_at)
        assert torch.equal(pipeline(seed=2), wanted)


def test_the_items_of_a_batch_do_not_leak() -> None:
    pipeline = TinyPipeline(make("EulerDiscreteScheduler"))
    latents = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(1)) * 14.6
    with skip_steps(pipeline, listed(Reuse.MEASURED)):
        both = pipeline(latents=latents)
        first = pipeline(latents=latents[:1], batch=1)
    torch.testing.assert_close(both[:1], first)


@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_all_is_put_back(error: type[Exception] | None) -> None:
    pipeline = TinyPipeline(make("DDIMScheduler"))
    plain, scheduler = pipeline(), pipeline.scheduler
    before = [(vars(each).copy(), type(each)) for each in (pipeline.unet, pipeline.controlnet)]
    try:
        with skip_steps(pipeline, listed()):
            assert "forward" not in vars(pipeline.unet) and isinstance(pipeline.unet, Network)
            pipeline(hint=hint())
            assert type(scheduler) is not diffusers.DDIMScheduler and isinstance(scheduler, diffusers.DDIMScheduler)
            if error:
                raise error
    except ZeroDivisionError:
        pass
    after = [(vars(each), type(each)) for each in (pipeline.unet, pipeline.controlnet)]
    assert [{**held, "calls": 0} for held, _ in after] == [{**held, "calls": 0} for held, _ in before]
    assert type(scheduler) is diffusers.DDIMScheduler and "step" not in vars(scheduler)
    assert torch.equal(pipeline(), plain)


def test_nothing_is_kept() -> None:
    pipeline, prompts = TinyPipeline(make("DDIMScheduler")), [torch.tensor([0.3, -0.5])]
    seen = weakref.ref(prompts[0])
    with skip_steps(pipeline, listed()):
        pipeline(cfg=1.0, prompts=lambda step: prompts[0])
    prompts.clear()
    gc.collect()
    assert seen() is None


def test_offloading_keeps_its_place() -> None:
    """accelerate puts a module's own `forward` back after each picture, and wraps it anew."""
    pipeline, moved = TinyPipeline(make("DDIMScheduler")), []
    unet = pipeline.unet
    with skip_steps(pipeline, listed()):
        for _ in range(2):
            inner = unet.forward
            unet.forward = lambda *args, inner=inner, **kwargs: moved.append(1) or inner(*args, **kwargs)
            pipeline()
            unet.forward = inner
    assert len(moved) == unet.calls == 2 * len(LISTED)
    pipeline()
    assert unet.calls == 2 * len(LISTED) + STEPS


@pytest.mark.parametrize("how", ["in place", "around"])
def test_a_compiled_network(how: str) -> None:
    pipeline, seen = TinyPipeline(make("DDIMScheduler")), []

    def backend(graph: Any, _: Any) -> Any:
        return lambda *args: seen.append(1) or graph(*args)

    network = Simple()
    plain = pipeline_of(network)()
    if how == "in place":
        network.compile(backend=backend)
    else:
        network = torch.compile(network, backend=backend)
    pipeline = pipeline_of(network)
    with skip_steps(pipeline, EVERYTHING):
        assert distance(pipeline(), plain) < 1e-6
    seen.clear()
    with skip_steps(pipeline, listed()):
        pipeline()
    assert len(seen) == len(LISTED)
    assert distance(pipeline(), plain) < 1e-6


class Simple(torch.nn.Module):
    def forward(self, sample: Tensor, timestep: Any, prompt: Tensor, residual: Any, return_dict: bool) -> Any:
        return (0.5 * sample.sin() + prompt.view(-1, 1, 1, 1),)


def pipeline_of(network: Any) -> TinyPipeline:
    pipeline = TinyPipeline(make("DDIMScheduler"))
    pipeline.unet = network
    return pipeline


def test_two_blocks_at_once_are_refused() -> None:
    pipeline = TinyPipeline(make("DDIMScheduler"))
    with skip_steps(pipeline, listed()):
        with pytest.raises(UnsupportedModel, match="already"), skip_steps(pipeline, listed()):
            pass
        pipeline()
    assert pipeline.unet.calls == len(LISTED)


def test_diffusers_own_caches_are_refused() -> None:
    pipeline = TinyPipeline(make("DDIMScheduler"))
    pipeline.unet.is_cache_enabled = True
    with pytest.raises(UnsupportedModel, match="disable_cache"), skip_steps(pipeline, listed()):
        pass


def test_without_a_network_nothing_can_be_skipped() -> None:
    with pytest.raises(UnsupportedModel, match="no unet or transformer"), skip_steps(object(), listed()):
        pass


def test_steps_that_are_not_in_the_picture_are_an_error() -> None:
    pipeline = TinyPipeline(make("DDIMScheduler"))
    with pytest.raises(ValueError, match="run of 8 steps"), skip_steps(pipeline, listed()):
        pipeline(steps=8)


# --------------------------------------------------------------------------------------------- real networks


OPTIONS: dict[str, Any] = {"height": 64, "width": 64, "steps": 20, "seed": 3}
PROMPT = "a red circle above a small blue square on a white background"


@pytest.fixture(scope="module")
def demo() -> Pipeline:
    if not (demo_model.WEIGHTS / "unet.safetensors").is_file():
        pytest.skip("the demo model is not trained")
    return Pipeline.load()


def counted(module: torch.nn.Module, calls: list[str], name: str) -> Any:
    """Notes each call of a network that is computed; ended by `remove()`."""
    return module.register_forward_hook(lambda *_: calls.append(name))


@pytest.mark.parametrize(
    ("scheduler", "preset"),
    [*itertools.product(["ddim", "euler"], ["balanced", "fast"]), ("DPMSolverMultistepScheduler", "balanced")],
)
def test_the_demo_model(demo: Pipeline, scheduler: str, preset: str) -> None:
    kind: Any = make(scheduler) if scheduler.endswith("Scheduler") else scheduler
    told, calls = Told(), []
    plain = demo(PROMPT, scheduler=kind, **OPTIONS)
    handle = counted(demo.unet, calls, "unet")
    with skip_steps(demo, replace(PRESETS[preset], floor=0.0), told):
        found = demo(PROMPT, scheduler=kind, **OPTIONS)
    handle.remove()
    (skipped,) = told
    assert skipped.computed == len(calls) == len(PRESETS[preset].selection.computed(20)) and skipped.skipped > 0
    assert 25 < float(latent_psnr(found.latents, plain.latents)) < 80
    assert torch.equal(demo(PROMPT, scheduler=kind, **OPTIONS).latents, plain.latents)


def test_the_demo_models_controlnet(demo: Pipeline) -> None:
    edges = canny.canny(scenes.draw(scenes.sample(1, 123), 64, 64)).float()
    options = {**OPTIONS, "hint": edges}
    calls: list[str] = []
    plain = demo(PROMPT, **options)
    handles = [counted(demo.unet, calls, "unet"), counted(demo.controlnet, calls, "controlnet")]
    with skip_steps(demo, BALANCED):
        found = demo(PROMPT, **options)
    for handle in handles:
        handle.remove()
    wanted = len(BALANCED.selection.computed(20))
    assert (calls.count("unet"), calls.count("controlnet")) == (wanted, wanted)
    assert float(latent_psnr(found.latents, plain.latents)) > 25


@pytest.mark.gpu
@pytest.mark.parametrize("scheduler", ["ddim", "euler"])
def test_the_demo_model_in_half_precision_on_a_gpu(scheduler: Any) -> None:
    demo, told = Pipeline.load(device="cuda", dtype=torch.float16, with_controlnet=False), Told()
    plain = demo(PROMPT, scheduler=scheduler, **OPTIONS)
    with skip_steps(demo, EVERYTHING):
        assert torch.equal(demo(PROMPT, scheduler=scheduler, **OPTIONS).latents, plain.latents)
    with skip_steps(demo, BALANCED, told):
        found = demo(PROMPT, scheduler=scheduler, **OPTIONS)
    assert told[0].computed == len(BALANCED.selection.computed(20))
    assert float(latent_psnr(found.latents, plain.latents)) > 25


def test_diffusers_own_pipeline() -> None:
    torch.manual_seed(1)
    unet = UNet2DModel(
        sample_size=8,
        in_channels=3,
        out_channels=3,
        block_out_channels=(16, 16),
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        norm_num_groups=4,
        layers_per_block=1,
    ).eval()
    pipe = diffusers.DDIMPipeline(unet, diffusers.DDIMScheduler())
    pipe.set_progress_bar_config(disable=True)

    def sample(eta: float = 0.0) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.from_numpy(pipe(generator=generator, num_inference_steps=20, eta=eta, output_type="np").images)

    plain, calls, told, quality = sample(), [], Told(), custom(PRESETS["quality"].selection)
    counted(unet, calls, "unet")
    with skip_steps(pipe, quality, told):
        found = sample()
        sample(eta=0.5)
    assert len(calls) == 2 * len(quality.selection.computed(20)) == 2 * told[0].computed
    assert [each.rule for each in told] == ["measured with bend", "measured"]
    assert 0 < distance(found, plain) < 0.4
    with skip_steps(pipe, EVERYTHING):
        assert torch.equal(sample(), plain)


class RealPipeline(TinyPipeline):
    """`TinyPipeline` around one of diffusers' UNets."""

    def __init__(self, unet: Any) -> None:
        super().__init__(make("DDIMScheduler"))
        self.unet = unet

    def _predict(self, scaled: Tensor, time: Any, prompt: Tensor, step: int, o: Options) -> Tensor:
        self.context = getattr(self, "context", torch.randn(4, 77, 32, generator=torch.Generator().manual_seed(9)))
        return self.unet(scaled, time, encoder_hidden_states=self.context[: len(scaled)], return_dict=False)[0]


def test_a_skipped_step_calls_no_engine(built: Built) -> None:
    unet = make_unet()
    accelerated = accelerate_unet(unet, EngineProvider(built.store), FIRST_USE)
    latents = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(1))
    results = []
    for network in (unet, accelerated):
        pipeline = RealPipeline(network)
        with accelerated.run(), skip_steps(pipeline, listed()):
            results.append(pipeline(latents=latents, batch=1))
    assert (accelerated.status.engine_calls, accelerated.status.eager_calls) == (len(LISTED), 0)
    assert distance(results[1], results[0]) < 1e-4


def test_an_accelerated_unet_that_stays_eager_is_skipped_too(tmp_path: Path) -> None:
    settings = Settings(policy=BuildPolicy.MANUAL)
    accelerated = accelerate_unet(make_unet(), EngineProvider(EngineStore(tmp_path)), settings)
    pipeline = RealPipeline(accelerated)
    latents = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(1))
    with accelerated.run(), skip_steps(pipeline, listed()):
        pipeline(latents=latents, batch=1)
    assert accelerated.status.eager_calls == len(LISTED)
    assert all("no engine" in reason for reason in accelerated.status.to_json()["reasons"])


# --------------------------------------------------------------------------------------------- whole pipelines


@pytest.fixture
def parts() -> dict[str, Any]:
    """Of a Stable Diffusion pipeline, with random weights."""
    transformers = pytest.importorskip("transformers", reason="no transformers")
    torch.manual_seed(2)
    config = transformers.CLIPTextConfig(
        hidden_size=32, intermediate_size=37, num_attention_heads=4, num_hidden_layers=1, vocab_size=99
    )
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    vae = diffusers.AutoencoderKL(**blocks, block_out_channels=(8, 8), norm_num_groups=4, latent_channels=4)
    rest = dict.fromkeys(("safety_checker", "feature_extractor", "image_encoder", "tokenizer"))
    text = transformers.CLIPTextModel(config)
    return {"unet": make_unet(), "vae": vae, "text_encoder": text, "scheduler": make("DDIMScheduler"), **rest}


def whole(pipe: Any, **options: Any) -> Tensor:
    pipe.set_progress_bar_config(disable=True)
    contexts = torch.randn(2, 1, 77, 32, generator=torch.Generator().manual_seed(5))
    given = {"prompt_embeds": contexts[0], "negative_prompt_embeds": contexts[1], "num_inference_steps": 20}
    sizes = {"height": 32, "width": 32} if "image" not in options else {}
    generator = torch.Generator().manual_seed(6)
    found: Tensor = pipe(**given, **sizes, generator=generator, output_type="latent", **options).images
    return found


def test_stable_diffusion(parts: dict[str, Any]) -> None:
    pipe = diffusers.StableDiffusionPipeline(**parts, requires_safety_checker=False)
    plain, calls, told = whole(pipe), [], Told()
    counted(parts["unet"], calls, "unet")
    with skip_steps(pipe, EVERYTHING):
        assert torch.equal(whole(pipe), plain)
    calls.clear()
    with skip_steps(pipe, BALANCED, told):
        assert 0 < distance(whole(pipe), plain) < 0.2
    assert len(calls) == told[0].computed == len(BALANCED.selection.computed(20))


@pytest.mark.parametrize("guess_mode", [False, True])
def test_stable_diffusion_with_a_controlnet(parts: dict[str, Any], guess_mode: bool) -> None:
    guide = diffusers.ControlNetModel.from_unet(parts["unet"], conditioning_embedding_out_channels=(16, 16)).eval()
    for parameter in guide.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    pipe = diffusers.StableDiffusionControlNetPipeline(**parts, controlnet=guide, requires_safety_checker=False)
    options = {"image": torch.rand(1, 3, 32, 32), "guess_mode": guess_mode}
    plain, calls = whole(pipe, **options), []
    counted(parts["unet"], calls, "unet")
    counted(guide, calls, "controlnet")
    with skip_steps(pipe, listed(steps=(0, 1, 2, 4, 8, 12, 19))):
        assert 0 < distance(whole(pipe, **options), plain) < 0.2
        assert (calls.count("unet"), calls.count("controlnet")) == (7, 7)
        calls.clear()
        whole(pipe, **options, control_guidance_end=0.5)  # ends with step 10
    assert (calls.count("unet"), calls.count("controlnet")) == (8, 8)


def test_flux_is_guided_by_a_negative_prompt_alone() -> None:
    """The scale that it is given otherwise goes into the network, which is asked once for each sample."""
    axes = {"attention_head_dim": 16, "axes_dims_rope": (4, 4, 8), "num_attention_heads": 2}
    sizes = {"in_channels": 4, "joint_attention_dim": 32, "pooled_projection_dim": 32}
    torch.manual_seed(3)
    flux = diffusers.FluxTransformer2DModel(num_layers=1, num_single_layers=1, guidance_embeds=True, **sizes, **axes)
    rest = dict.fromkeys(("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    pipe = diffusers.FluxPipeline(make("FlowMatchEulerDiscreteScheduler"), transformer=flux.eval(), **rest)
    pipe.set_progress_bar_config(disable=True)
    prompt = {"prompt_embeds": torch.ones(1, 7, 32), "pooled_prompt_embeds": torch.ones(1, 32)}
    negative = {f"negative_{name}": -tensor for name, tensor in prompt.items()}
    guided_only = Preset("guided", Selection(), "for a test", uses=frozenset({Use(SamplerKind.ONE_STEP, True)}))
    told, size = Told(), {"height": 32, "width": 32, "num_inference_steps": 20, "output_type": "latent"}
    with skip_steps(pipe, guided_only, told):
        pipe(**prompt, **size, guidance_scale=3.5)
        pipe(**prompt, **size, true_cfg_scale=2.0)
        pipe(**prompt, **negative, **size, true_cfg_scale=2.0)
    assert [each.skipped for each in told] == [0, 0, 8]
    assert all("with one step samplers at CFG 1, " in each.reason for each in told[:2])
