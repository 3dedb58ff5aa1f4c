"""Skip Calibrate on the demo model: what it proposes and saves, its chart, cancel, and what it refuses."""

from __future__ import annotations

import asyncio
import gc
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import comfy.model_management
import comfy.sample
import folder_paths
import pytest
import torch
from comfy.patcher_extension import WrappersMP

from slipstream.core.errors import UnsupportedModel
from slipstream.hosts.comfy.models.demo_model import encode_demo_prompt, load_demo_controlnet, load_demo_model
from slipstream.hosts.comfy.skip import saved_presets
from slipstream.hosts.comfy.skip.calibrate import Wish, calibrate_model
from slipstream.hosts.comfy.skip.calibration_chart import draw_chart
from slipstream.hosts.comfy.skip.calibration_pictures import CalibrationPictures, Job, Picture
from slipstream.hosts.comfy.skip.step_skip import skip_steps
from slipstream.nodes.skip_calibrate import SkipCalibrate
from slipstream.sampling import saved
from slipstream.sampling.calibration.calibrated import Calibration, Candidate, Choice
from slipstream.sampling.metrics import latent_psnr
from slipstream.sampling.presets import PRESETS
from slipstream.sampling.run import Skipped
from slipstream.sampling.schedule import power_law

ROOT = Path(__file__).resolve().parents[3]
STEPS, CFG = 12, 4.0
NAME = "Shapes"
PROMPTS = ("a red circle on a blue background", "a yellow star left of a black ring")

Cancelled = comfy.model_management.InterruptProcessingException


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The engine store's."""
    patch, folder = pytest.MonkeyPatch(), tmp_path_factory.mktemp("home")
    patch.setenv("SLIPSTREAM_HOME", str(folder))
    yield folder
    patch.undo()


@pytest.fixture(scope="module")
def model() -> Any:
    return load_demo_model()


@pytest.fixture(scope="module")
def prompts() -> list[Any]:
    return [encode_demo_prompt(text) for text in (*PROMPTS, "")]


def latent(**more: Any) -> dict[str, Any]:
    return {"samples": torch.zeros(1, 4, 8, 8), **more}


def job(model: Any, prompts: list[Any], sampler: str = "euler", scheduler: str = "normal", **changes: Any) -> Job:
    steps, picture = changes.pop("steps", STEPS), changes.pop("latent", None) or latent()
    return Job(model, prompts[-1], picture, steps, CFG, sampler, scheduler, **changes)


def sampled(
    model: Any,
    prompts: list[Any],
    steps: int = STEPS,
    sampler: str = "euler",
    seed: int = 77,
    scheduler: str = "normal",
    cfg: float = CFG,
    denoise: float = 1.0,
) -> torch.Tensor:
    """As KSampler does it."""
    image = latent()["samples"]
    noise = comfy.sample.prepare_noise(image, seed)
    arguments = (steps, cfg, sampler, scheduler, prompts[1], prompts[-1], image)
    with torch.inference_mode():
        return comfy.sample.sample(model, noise, *arguments, denoise=denoise, seed=seed, disable_pbar=True)


@dataclass
class Executed:
    """By ComfyUI's own function: outputs, and what is sent to the page."""

    model: Any
    report: str
    chart: torch.Tensor
    shown: dict[str, Any]


def execute(**inputs: Any) -> Executed:
    import execution

    values = {name: [value] for name, value in inputs.items()}
    patch = pytest.MonkeyPatch()
    patch.setattr(SkipCalibrate, "hidden", SimpleNamespace(unique_id="1"))
    try:
        with torch.inference_mode():
            outputs, shown, *_ = asyncio.run(execution.get_output_data("prompt", "1", SkipCalibrate, values))
    finally:
        patch.undo()
    (made,), (report,), (chart,) = outputs
    return Executed(made, report, chart, shown)


def inputs_of(model: Any, prompts: list[Any], **changes: Any) -> dict[str, Any]:
    kept = {"positive": prompts[0], "positive_2": prompts[1], "negative": prompts[2], "latent_image": latent()}
    numbers = {
        "first_seed": 5,
        "seeds": 1,
        "steps": STEPS,
        "cfg": CFG,
        "denoise": 1.0,
        "computed_steps": 7,
        "seconds": 0.0,
    }
    return {"model": model, **kept, **numbers, "sampler_name": "euler", "scheduler": "normal", "name": "", **changes}


@pytest.fixture(scope="module")
def executed(model: Any, prompts: list[Any]) -> Executed:
    """Once for all tests: 7 of 12 steps, saved."""
    return execute(**inputs_of(model, prompts, name=f" {NAME} "))


# ---- what ComfyUI sees


def test_the_node_as_comfyui_sees_it() -> None:
    schema = SkipCalibrate.GET_SCHEMA()
    assert (schema.node_id, schema.display_name) == ("SlipstreamSkipCalibrate", "Skip Calibrate")
    assert schema.category == "Slipstream/step skipping"
    inputs = SkipCalibrate.INPUT_TYPES()
    assert list(inputs["optional"]) == ["positive_2", "positive_3", "positive_4"]
    assert inputs["required"]["sampler_name"][0] != "STRING" and inputs["required"]["seeds"][1]["default"] == 2
    assert inputs["required"]["computed_steps"][1]["default"] == inputs["required"]["seconds"][1]["default"] == 0
    assert not {"seed", "noise_seed"} & {*inputs["required"], *inputs["optional"]}, "the page makes new ones of these"
    assert "control_after_generate" not in str(inputs), "each queue would calibrate again"
    assert SkipCalibrate.RETURN_TYPES == ["MODEL", "STRING", "IMAGE"]
    assert SkipCalibrate.RETURN_NAMES == ["MODEL", "report", "chart"]
    assert SkipCalibrate.OUTPUT_NODE


def test_the_help_page_names_inputs_and_outputs() -> None:
    page = (ROOT / "web" / "js" / "docs" / "SlipstreamSkipCalibrate" / "en.md").read_text(encoding="utf-8")
    assert page.startswith("# Skip Calibrate\n")
    inputs = SkipCalibrate.INPUT_TYPES()
    for word in (*inputs["required"], *inputs["optional"], *SkipCalibrate.RETURN_NAMES):
        assert f"`{word}`" in page


# ---- what it gives


def test_the_report_says_what_was_measured(executed: Executed) -> None:
    conclusion, *lines = executed.report.splitlines()
    assert re.match(
        rf"Choose {NAME}: of 12 steps 7 are computed, and your picture|Do not skip steps here: ", conclusion
    )
    assert lines[0] == (
        "SD15, euler, normal, CFG 4, 12 steps. Pictures fitted on: 1; held out: 4, of a prompt that was not fitted on."
    )
    assert lines[1].startswith("Closeness to your 12-step pictures with 7 steps computed")
    for way in ("calibrated", "balanced (7 steps)", "shortened sigmas"):
        assert any(line.startswith(f"  {way}: ") and " held out" in line for line in lines)
    verdict = r"closer in \d of 4 held-out pictures|found nothing closer than balanced"
    assert any(re.search(verdict, line) for line in lines)
    assert lines[-1] == f"Saved as {NAME}: choose it as the preset of Step Skip, for runs of exactly 12 steps."
    assert "better" not in executed.report
    assert list(executed.shown["text"]) == [executed.report]


def test_the_chart_is_a_picture_and_shown(executed: Executed) -> None:
    assert executed.chart.ndim == 4 and executed.chart.shape[0] == 1 and executed.chart.shape[3] == 3
    assert 0 <= executed.chart.min() and executed.chart.max() == 1 and executed.chart.dtype == torch.float32
    (shown,) = executed.shown["images"]
    assert (Path(folder_paths.get_temp_directory()) / shown["subfolder"] / shown["filename"]).is_file()


def test_the_proposed_steps_are_in_its_model(executed: Executed, prompts: list[Any], home: Path) -> None:
    preset = saved.load(NAME, home / "step_skipping")
    assert len(preset.sigmas) == STEPS + 1 and preset.sigmas[-1] == 0 and not preset.has_mask
    assert len(preset.computed) == 7 and preset.computed[0] == 0 and preset.computed[-1] == STEPS - 1
    assert f"steps {' '.join(map(str, preset.computed))}" in executed.report
    calls = Calls()
    assert torch.isfinite(sampled(calls.of(executed.model), prompts)).all()
    assert calls.count == 7


def test_what_was_saved_works_with_step_skip(executed: Executed, model: Any, prompts: list[Any]) -> None:
    (preset,) = saved_presets.saved_presets().values()
    assert preset.name == NAME and "7 of 12 steps" in preset.note
    runs: list[Skipped] = []
    skipping = skip_steps(model, preset, runs.append)
    found = sampled(skipping, prompts)
    assert torch.equal(found, sampled(executed.model, prompts))
    assert 10 < latent_psnr(found, sampled(model, prompts)).item() < 100
    assert torch.equal(sampled(skipping, prompts, steps=16), sampled(model, prompts, steps=16))
    assert (runs[0].computed, runs[0].skipped, runs[0].preset) == (7, 5, NAME)
    assert runs[1].computed == 16 and "calibrated for runs of 12 steps, and this one has 16" in runs[1].reason


def test_the_held_out_figure_is_that_of_real_runs(executed: Executed, model: Any, prompts: list[Any]) -> None:
    """Sampled here as KSampler does it, on the seeds and the prompt that were held out."""
    found = [
        latent_psnr(sampled(executed.model, prompts, seed=seed), sampled(model, prompts, seed=seed)).item()
        for seed in range(6, 10)
    ]
    (preset,) = saved_presets.saved_presets().values()
    saved_figure = saved.load(preset.name, saved_presets.folder()).held_out_db
    assert sum(found) / 4 == pytest.approx(saved_figure, abs=1e-3)


# ---- how it samples


class Calls:
    """How many steps were computed. Does not hold the model: ComfyUI takes a model in a cycle for a leak."""

    def __init__(self) -> None:
        self.count = 0

    def of(self, model: Any) -> Any:
        """A clone of `model` whose computed steps are counted."""
        clone = model.clone()
        clone.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, "counts", self._counted)
        return clone

    def _counted(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return executor(*args, **kwargs)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("sampler", ["euler", "dpmpp_2m", "uni_pc", "euler_ancestral", "ddim", "deis"])
def test_what_is_known_is_not_computed_again(sampler: str, model: Any, prompts: list[Any]) -> None:
    calls = Calls()
    pictures = [Picture(prompts[0], 3), Picture(prompts[1], 4)]
    known = CalibrationPictures(job(calls.of(model), prompts, sampler), pictures, again=True)
    plain = CalibrationPictures(job(model, prompts, sampler), pictures)
    with torch.inference_mode():
        full = known.sample(None)
        assert torch.equal(full, plain.sample(None))
        steps, whole = len(known.job.sigmas()) - 1, calls.count
        computed = (0, 1, 2, 3, 4, 7, 8, steps - 1)
        calls.count = 0
        assert torch.equal(known.sample(computed), plain.sample(computed))
        assert calls.count == whole - (steps - 8) * 2 - 5 * 2, "without the 5 that begin it and those skipped"
        assert torch.equal(known.sample(tuple(range(steps))), full)


def test_a_picture_is_what_ksampler_makes(model: Any, prompts: list[Any]) -> None:
    calibration_pictures = CalibrationPictures(job(model, prompts), [Picture(prompts[1], 77)])
    with torch.inference_mode():
        assert torch.equal(calibration_pictures.sample(None), sampled(model, prompts))
        assert (
            calibration_pictures.sample((0, 5, 11)).shape
            == calibration_pictures.shortened((0, 5, 11)).shape
            == (1, 4, 8, 8)
        )
    assert (
        calibration_pictures.measured[None].computed == STEPS and calibration_pictures.measured[0, 5, 11].computed == 3
    )


@torch.inference_mode()
def test_a_controlnet_that_ends_within_the_run(model: Any, prompts: list[Any]) -> None:
    from nodes import ControlNetApplyAdvanced

    hint = torch.rand(1, 64, 64, 3, generator=torch.Generator().manual_seed(2)).round()
    given = (prompts[0], prompts[-1], load_demo_controlnet(), hint, 1.0, 0.0, 0.5)
    positive, negative = ControlNetApplyAdvanced().apply_controlnet(*given)
    work = job(model, [prompts[0], negative])
    known, plain = (CalibrationPictures(work, [Picture(positive, 1)], again=again) for again in (True, False))
    full, computed = known.sample(None), (0, 1, 2, 3, 11)
    assert torch.equal(full, plain.sample(None))
    assert not torch.equal(full, CalibrationPictures(job(model, prompts), [Picture(prompts[0], 1)]).sample(None))
    assert torch.equal(known.sample(computed), plain.sample(computed))
    assert plain.measured[computed].computed == 6, "one more where it ends"


def test_inpainting_and_batches_are_sampled_as_they_are(model: Any, prompts: list[Any]) -> None:
    mask = torch.zeros(1, 1, 64, 64)
    mask[..., :32] = 1.0
    picture = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    given = {"samples": picture, "noise_mask": mask, "batch_index": [0, 3]}
    calibration_pictures = CalibrationPictures(job(model, prompts, latent=given, denoise=0.7), [Picture(prompts[0], 1)])
    with torch.inference_mode():
        found = calibration_pictures.sample((0, 3, 6, 11))
    assert found.shape == (2, 4, 8, 8) and not torch.equal(found[0], found[1])
    torch.testing.assert_close(found[..., 4:], picture[..., 4:])


def test_steps_that_were_skipped_before_are_computed(model: Any, prompts: list[Any]) -> None:
    calls, skipping = Calls(), skip_steps(model, PRESETS["extreme"])
    with torch.inference_mode():
        CalibrationPictures(job(calls.of(skipping), prompts), [Picture(prompts[0], 1)]).sample(None)
    assert calls.count == STEPS


# ---- cancel


class Interrupts:
    """A model whose user cancels during one of its computed steps."""

    def __init__(self, model: Any) -> None:
        self.at, self.calls = 0, 0
        self.model = model.clone()
        self.model.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, "interrupts", self._interrupt)

    def _interrupt(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls == self.at:
            comfy.model_management.interrupt_current_processing()
        return executor(*args, **kwargs)


@pytest.fixture(scope="module")
def interrupts(model: Any) -> Interrupts:
    """Outlives the tests, as models in ComfyUI's cache do."""
    return Interrupts(model)


@pytest.mark.parametrize("at", [1, 5, 25])
def test_a_cancel_ends_it_and_leaves_no_file(at: int, interrupts: Interrupts, prompts: list[Any], home: Path) -> None:
    """In the midst of the first run; in others later on."""
    before = files(home)
    interrupts.at, interrupts.calls = at, 0
    try:
        execute(**inputs_of(interrupts.model, prompts, name="Cancelled"))
    except Cancelled:
        pass
    else:
        pytest.fail("it went on")
    assert interrupts.calls == at, "not even one further step is computed"
    assert files(home) == before
    gc.collect()
    assert not any(loaded.is_dead() for loaded in comfy.model_management.current_loaded_models)


def files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


# ---- what it refuses


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a sampler of several calls": ({"sampler_name": "heun"}, UnsupportedModel, "for heun: .*several times a step"),
    "a short run": ({"steps": 8}, UnsupportedModel, "a run of 8 steps is short"),
    "no run": ({"denoise": 0.0}, UnsupportedModel, "a run of 0 steps is short"),
    "all steps": ({"computed_steps": 12}, ValueError, "12 of 12 steps cannot be chosen"),
    "a name of ours": ({"name": "balanced"}, ValueError, "that Slipstream brings"),
    "a name that is a path": ({"name": "../x"}, ValueError, "cannot be saved"),
    "too few seconds": ({"seconds": 1e-6}, ValueError, "s are too few for 12 steps"),
    "enough seconds": ({"seconds": 3600.0}, ValueError, "leave nothing to skip"),
}


@pytest.mark.parametrize(("changes", "kind", "why"), REFUSED.values(), ids=REFUSED)
def test_what_it_refuses(changes: dict[str, Any], kind: type, why: str, model: Any, prompts: list[Any]) -> None:
    with pytest.raises(kind, match=why):
        execute(**inputs_of(model, prompts, **changes))


def test_a_model_that_something_else_skips_in_is_refused(model: Any, prompts: list[Any]) -> None:
    other = model.clone()
    other.model_options["transformer_options"]["easycache"] = SimpleNamespace(name="EasyCache")
    with pytest.raises(UnsupportedModel, match="EasyCache and step skipping"):
        execute(**inputs_of(other, prompts))


# ---- wishes, with the search itself replaced: it was tested above


@pytest.fixture
def without_search(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """A report of what would be asked for, with every figure that is needed measured on real runs."""

    def calibrate(pictures: Any, steps: int, count: int, others: Any, after_run: Any) -> Calibration:
        computed = power_law(steps, count, 2.0)
        for way in (None, computed):
            pictures.held_out(way)
        found = Candidate("calibrated", computed, (30.0, 31.0), (32.0,))
        choice = Choice(found, Candidate("balanced (7 steps)", (0, 11), (29.0, 30.0), (29.0,)), found)
        return Calibration(steps, count, (choice,), 1, 2)

    monkeypatch.setattr("slipstream.hosts.comfy.skip.calibrate.calibrate", calibrate)
    yield lambda work, positives, wish: calibrate_model(work, positives, 0, 1, wish).report


@torch.inference_mode()
def test_seconds_choose_how_much_is_computed(without_search: Any, model: Any, prompts: list[Any]) -> None:
    work = job(model, prompts)
    calibration_pictures = CalibrationPictures(work, [Picture(prompts[0], 1)])
    for _ in range(3):
        calibration_pictures.sample(None)
    report = without_search(
        work, prompts[:1], Wish(computed_steps=3, seconds=0.6 * calibration_pictures.measured[None].seconds)
    )
    (found,) = re.findall(r"with (\d+) steps computed", report)
    assert 3 < int(found) < 11 and "in place of" in report


@torch.inference_mode()
def test_a_single_prompt_is_judged_on_other_seeds(without_search: Any, model: Any, prompts: list[Any]) -> None:
    report = without_search(job(model, prompts), prompts[:1], Wish())
    assert "held out: 4, of the same prompt with other seeds; connect positive_2" in report
    assert "with 8 steps computed" in report, "seven in ten"
    assert report.endswith("Not saved, since it has no name.")


OURS: dict[str, tuple[dict[str, Any], int, int]] = {
    "as it is": ({}, 14, 14),
    "another sampler": ({"sampler": "deis"}, 14, 20),
    "its greater share": ({"sampler": "dpmpp_2m", "scheduler": "karras", "cfg": 7.0}, 17, 17),
    "its smaller share": ({"sampler": "dpmpp_2m", "scheduler": "karras", "cfg": 7.0}, 14, 17),
    "a model for few steps": ({"file": "sdxl_turbo.safetensors"}, 14, 20),
    "short image to image": ({"steps": 12, "denoise": 0.5}, 8, 12),
}
"""A run, how many steps are computed by the law of `balanced`, and how many `balanced` computes in it by itself."""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("run", "count", "by_itself"), OURS.values(), ids=OURS)
@torch.inference_mode()
def test_what_is_a_preset_of_ours_is_not_saved_as_the_users(
    run: dict[str, Any],
    count: int,
    by_itself: int,
    model: Any,
    prompts: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    home: Path,
) -> None:
    """And is proposed by its name only where Step Skip then computes these very steps, not where it refuses."""

    def nothing_closer(pictures: Any, steps: int, count: int, others: Any, after_run: Any) -> Calibration:
        computed = power_law(steps, count, 1.5)
        for way in (None, computed):
            pictures.held_out(way)
        found = Candidate("calibrated", computed, (47.0, 48.0), (49.0,))
        choice = Choice(found, found, Candidate("shortened sigmas", computed, (30.0, 31.0)))
        return Calibration(steps, len(computed), (choice,), 1, 2)

    monkeypatch.setattr("slipstream.hosts.comfy.skip.calibrate.calibrate", nothing_closer)
    monkeypatch.setattr("slipstream.hosts.comfy.skip.calibrate._HELD_OUT", 1)
    before, sent = files(home), []
    monkeypatch.setattr("slipstream.hosts.comfy.skip.calibrate.send", lambda *event: sent.append(event))
    calls, seen, balanced = Calls(), list[Skipped](), PRESETS["balanced"]
    counted = calls.of(model)
    if "file" in run:
        counted.cached_patcher_init = (None, (run["file"],))
    how = {"sampler": "euler", "scheduler": "normal", "cfg": CFG, "steps": 20, "denoise": 1.0, **run}
    how.pop("file", None)
    work = Job(counted, prompts[-1], latent(), **how)
    report = calibrate_model(work, prompts[:2], 0, 1, Wish(computed_steps=count, name="mine")).report
    assert calls.count == work.steps + count, "a held-out picture, whole and in part"
    if by_itself == count:
        assert report.startswith("Choose balanced: no steps closer than its own were found")
    else:
        what = "every step" if by_itself == work.steps else f"{by_itself} steps"
        assert report.startswith("Choose custom with share 0.7 and power 1.5, the steps of balanced")
        assert f", which by itself computes {what} here: " in report
    assert "hard to tell from the one of all steps (48 dB)" in report
    assert report.endswith("Not saved: these are the steps of balanced.")
    assert files(home) == before and not sent
    sampled(skip_steps(counted, balanced, seen.append), prompts, **how)
    assert seen[0].computed == by_itself, "as Step Skip does it"


def test_the_page_is_told_how_long_it_takes_and_what_was_saved(
    model: Any, prompts: list[Any], monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    shown: list[tuple[str, str]] = []
    sent: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr("slipstream.hosts.comfy.process.server_events.show_text", lambda *text: shown.append(text))
    monkeypatch.setattr("slipstream.hosts.comfy.skip.calibrate.send", lambda *event: sent.append(event))
    execute(**inputs_of(model, prompts, computed_steps=10, name="Told"))
    assert sent == [("slipstream.presets", {"name": "Told"})] and "Told" in saved_presets.saved_presets()
    assert len({node for node, _ in shown}) == 1
    told = [
        re.fullmatch(r"(\d+) of at most (\d+) pictures, at most about (\d+ (?:s|min)) left", text) for _, text in shown
    ]
    assert all(told[:-1]) and len({match[2] for match in told if match}) == 1
    done = [int(match[1]) for match in told if match]
    assert done == sorted(done) and done[0] == 1 and done[-1] > done[0]


@torch.inference_mode()
def test_what_cannot_be_saved_is_not_lost(
    without_search: Any, model: Any, prompts: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path / "file"))
    report = without_search(job(model, prompts), prompts[:2], Wish(name="Lost"))
    assert "NOT saved: Saving the preset Lost failed" in report and "Proposed, calibrated" in report


# ---- the chart


def test_the_chart_of_equal_figures_is_drawn_too() -> None:
    same = Candidate("calibrated", (0, 11), (100.0,))
    chart = draw_chart(Calibration(12, 2, (Choice(same, same, same),), 1, 1))
    assert torch.isfinite(chart).all() and len(chart.unique()) > 10
