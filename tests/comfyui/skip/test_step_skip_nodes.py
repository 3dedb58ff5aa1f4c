"""The step skipping nodes: what they ask for, what they refuse, and whole graphs in a running ComfyUI."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import comfy.samplers
import numpy as np
import pytest
import torch

import nodes
from slipstream.hosts.comfy.models.demo_model import load_demo_model
from slipstream.hosts.comfy.skip import saved_presets
from slipstream.hosts.comfy.skip.step_skip import skip_steps
from slipstream.nodes.ksampler_step_skip import KSamplerStepSkip
from slipstream.nodes.shared.skip_inputs import AUTO_RULE, preset_names, preset_of, preset_table
from slipstream.nodes.step_skip import SkipSigmas, StepSkip, StepSkipSampler
from slipstream.sampling import saved
from slipstream.sampling.closeness import closeness
from slipstream.sampling.presets import CUSTOM, DEFAULT, PRESETS, Selection, custom
from slipstream.sampling.reuse import Reuse
from slipstream.sampling.samplers import SamplerKind, kind_of
from slipstream.sampling.saved_preset import SavedPreset
from slipstream.sampling.schedule import Steps, shortened
from slipstream.sampling.task import Task
from slipstream.tests.comfyui.support.client import ComfyClient, Run
from slipstream.tests.comfyui.support.graph import Graph, Node
from slipstream.tests.comfyui.support.skipping import (
    PROMPT,
    empty,
    prompts,
    run_node,
    sampled,
    schedule_of,
    watched,
)
from slipstream.tests.tensors import distance

DOCS = Path(__file__).resolve().parents[3] / "web" / "js" / "docs"
NODES = (StepSkip, StepSkipSampler, KSamplerStepSkip, SkipSigmas)
CUSTOM_INPUTS = {"share": 0.6, "computed_steps": 0, "power": 2.0, "step_list": ""}
SIZE = 128
CHOICES = {
    "backend": "compiled",
    "precision": "auto",
    "optimize": "fast build",
    "build": "first use",
    "resolutions": "auto",
}
SAMPLER = {"seed": 5, "steps": 20, "cfg": 4.0, "sampler_name": "euler", "scheduler": "normal", "denoise": 1.0}


@pytest.fixture(scope="module")
def model() -> Any:
    return load_demo_model()


# ---- what they ask for


@pytest.mark.parametrize("node", NODES)
def test_presets_and_what_custom_takes(node: Any) -> None:
    schema = node.GET_SCHEMA()
    assert schema.node_id == f"Slipstream{node.__name__}" and schema.category == "Slipstream/step skipping"
    inputs = node.INPUT_TYPES()
    kind, settings = inputs["required"]["preset"]
    options = settings["options"] if kind == "COMBO" else kind
    assert options == preset_names() and options[: len(PRESETS) + 1] == [*PRESETS, CUSTOM]
    assert settings["default"] == DEFAULT == "balanced" and settings["tooltip"] == preset_table()
    defaults = {name: spec[1]["default"] for name, spec in inputs["optional"].items()}
    assert defaults == CUSTOM_INPUTS | ({} if node is SkipSigmas else {"rule": AUTO_RULE, "block_cache": ""})
    assert all(spec[1]["advanced"] for spec in inputs["optional"].values())


def test_the_ksampler_asks_for_what_comfyui_s_own_does() -> None:
    wanted, found = nodes.KSampler.INPUT_TYPES()["required"], KSamplerStepSkip.INPUT_TYPES()["required"]
    assert [*found] == [*wanted, "preset"]
    for name, (kind, *settings) in wanted.items():
        ours = found[name]
        assert (ours[1]["options"] if ours[0] == "COMBO" else ours[0]) == kind, name
        for setting in ("default", "min", "max", "step", "round", "control_after_generate"):
            assert ours[1].get(setting) == (settings[0] if settings else {}).get(setting), (name, setting)
    assert (KSamplerStepSkip.RETURN_TYPES, KSamplerStepSkip.RETURN_NAMES[1]) == (["LATENT", "STRING"], "report")


def test_the_table_is_that_of_the_presets() -> None:
    lines = preset_table().splitlines()
    assert "20, 30, 50" in lines[0] and lines[0].endswith("CFG 7.5:"), (
        "of what was measured, the nearest to the default"
    )
    for name, preset in PRESETS.items():
        counts = ", ".join(str(len(preset.selection.computed(steps))) for steps in (20, 30, 50))
        assert f"{name}: {counts} ({preset.note}); {closeness(preset, 20)} dB" in lines


@pytest.mark.parametrize("node", NODES)
def test_the_help_page_has_that_table_too(node: Any) -> None:
    page = (DOCS / node.GET_SCHEMA().node_id / "en.md").read_text(encoding="utf-8")
    if node is not StepSkip:
        assert "The help page of Step Skip" in page
        return
    for name, preset in PRESETS.items():
        assert f"| `{name}` | {' | '.join(closeness(preset, steps) for steps in (20, 30, 50))} |" in page
        counts = " | ".join(str(len(preset.selection.computed(steps))) for steps in (20, 30, 50))
        steps = " ".join(map(str, preset.selection.computed(20)))
        assert f"| `{name}` | {counts} | {steps} |" in page


STEP_SKIP_PAGE = (DOCS / "SlipstreamStepSkip" / "en.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "task",
    [
        Task("heun", 20),
        Task("euler", 20, is_distilled=True),
        Task("lcm", 20),
        Task("euler", 20, has_parts=True),
        Task("euler", 20, has_mask=True),
        Task("euler_cfg_pp", 20),
        Task("euler", 8),
    ],
    ids=lambda task: PRESETS[DEFAULT].why_not(task),
)
def test_the_help_page_quotes_each_reason_of_a_preset(task: Task) -> None:
    reason = PRESETS[DEFAULT].why_not(task)
    assert reason is not None
    assert f"| {re.sub(r'a run of [0-9]+ steps', 'a run of … steps', reason)} |" in STEP_SKIP_PAGE


@pytest.mark.parametrize(
    ("name", "task"),
    [
        (DEFAULT, Task("euler_ancestral", 20, guided=False)),
        ("quality", Task("dpmpp_2m", 20)),
        (DEFAULT, Task("uni_pc", 20, cfg=8.0)),
    ],
)
def test_the_help_page_quotes_what_is_said_of_measurements(name: str, task: Task) -> None:
    reason = PRESETS[name].why_not(task)
    assert reason is not None
    reason = re.sub(r"with \w+ samplers at CFG (1|above 1),", "with … samplers at CFG …,", reason)
    reason = re.sub(r"(?<![\w])[0-9][0-9.]*|; choose .*|\b" + name + r"\b", _left_open, reason)
    assert f"| {reason} |" in STEP_SKIP_PAGE


def _left_open(match: re.Match[str]) -> str:
    return "; choose …" if match[0].startswith(";") else "…"


@pytest.mark.parametrize("task", [Task("euler", 20), Task("dpmpp_2m", 30)], ids=["sampler", "steps"])
def test_the_help_page_quotes_each_reason_of_a_calibrated_preset(task: Task) -> None:
    reason = replace(calibrated((0, 19)), sampler="dpmpp_2m").preset().why_not(task)
    assert reason is not None and f"| {reason.replace('Mine was', '… was')} |" in STEP_SKIP_PAGE


def test_the_help_page_knows_the_kind_of_every_sampler() -> None:
    for name in comfy.samplers.SAMPLER_NAMES:
        kind = kind_of(name)
        rows = [line for line in STEP_SKIP_PAGE.splitlines() if line.startswith(f"| {kind.value} |")]
        if kind not in (SamplerKind.SEVERAL_CALLS, SamplerKind.UNKNOWN):
            _, samplers = rows  # where presets skip, and which samplers are of the kind
            assert f"`{name.removesuffix('_gpu')}`" in samplers or f"`{name}`" in samplers


def test_inputs_make_a_preset() -> None:
    assert preset_of("fast", share=0.9, step_list="nonsense") == PRESETS["fast"]
    assert preset_of(CUSTOM) == custom(Selection())
    made = preset_of(CUSTOM, share=0.5, computed_steps=7, power=1.5, step_list=" 0 3 ", rule="hold noise")
    assert made == custom(Selection(0.5, 7, 1.5, " 0 3 "), Reuse.HOLD_NOISE)
    with pytest.raises(ValueError, match="no preset 'slow' here. Choose one of quality, balanced"):
        preset_of("slow")


def calibrated(computed: Steps) -> SavedPreset:
    return SavedPreset("Mine", 20, computed, "SD15", "euler", "normal", 4.0, 33.3, "2025-11-30")


def test_what_was_saved_is_there_to_choose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path))
    mine = calibrated((0, 1, 2, 5, 19))
    assert "Mine" not in preset_names()
    saved.save(mine, saved_presets.folder())
    assert preset_names()[-2:] == [CUSTOM, "Mine"]
    assert preset_table().splitlines()[-1].startswith("Mine: calibrated 2025-11-30: 5 of 20 steps, SD15")
    assert "Mine" in StepSkip.INPUT_TYPES()["required"]["preset"][1]["options"]
    seen = watched(model)
    _, report = sampled_by_node(seen.patcher, preset="Mine")
    assert report.startswith("Mine: 5 of 20 steps computed (euler, ")
    assert seen.steps(schedule_of(model)) == [0, 1, 2, 5, 19]
    with pytest.raises(ValueError, match="calibrated for runs of 20 steps, and this one has 12"):
        run_node(SkipSigmas, sigmas=schedule_of(model, 12), preset="Mine")


@pytest.mark.parametrize("node", NODES)
def test_a_preset_that_was_calibrated_anew_is_another_input(
    node: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path))

    def fingerprints() -> list[str]:
        """Of a saved preset, of one of ours, and of one that comes by a link: its value is not known beforehand."""
        return [node.fingerprint_inputs(preset=name, share=0.6, model=None) for name in ("Mine", DEFAULT, None)]

    seen = []
    for computed in ((0, 1, 2, 5, 19), (0, 1, 2, 6, 19)):
        saved.save(calibrated(computed), saved_presets.folder())
        assert fingerprints() == fingerprints()
        seen.append(fingerprints())
    (mine, ours, linked), (mine_anew, ours_later, linked_anew) = seen
    assert mine != mine_anew and linked != linked_anew and ours == ours_later


def given(node: Any, model: Any) -> dict[str, Any]:
    """What a node is connected to."""
    if node is StepSkip:
        return {"model": model}
    if node is StepSkipSampler:
        return {"sampler": comfy.samplers.sampler_object("euler")}
    if node is SkipSigmas:
        return {"sigmas": schedule_of(model)}
    positive, negative = prompts()
    return {
        "model": model,
        "positive": positive,
        "negative": negative,
        "latent_image": {"samples": empty()},
        **SAMPLER,
    }


@pytest.mark.parametrize("node", NODES)
@pytest.mark.parametrize(
    "listed, why",
    [
        ("0 1 two", "is not a list of steps; write it as 19,18,17"),
        ("0 4 2", "neither rise nor fall throughout"),
        ("0 0 1", "neither rise nor fall throughout; name each once"),
        (",", "names no steps; write them as"),
    ],
)
def test_a_list_that_is_none_is_refused_at_once(node: Any, model: Any, listed: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        run_node(node, **given(node, model), preset=CUSTOM, step_list=listed)


# ---- what they do


def test_step_skip(model: Any) -> None:
    (skipping,) = run_node(StepSkip, model=model, preset="fast")
    assert torch.equal(sampled(skipping), sampled(skip_steps(model, PRESETS["fast"])))


def test_step_skip_sampler(model: Any) -> None:
    (sampler,) = run_node(StepSkipSampler, **given(StepSkipSampler, model), preset="fast")
    found = sampled(model, sampler, schedule_of(model))
    assert torch.equal(found, sampled(skip_steps(model, PRESETS["fast"])))


def test_skip_sigmas_is_the_schedule_of_the_computed_steps(model: Any) -> None:
    sigmas = schedule_of(model)
    (found,) = run_node(SkipSigmas, sigmas=sigmas, preset="hackathon")
    assert torch.equal(found, shortened(sigmas, PRESETS["hackathon"].selection.computed(20)))
    assert len(found) == 11 and found[-1] == 0 and len(sigmas) == 21
    (skipping,) = run_node(StepSkip, model=model, preset=CUSTOM, step_list="0 2 3 7 9 15", rule="hold")
    (listed,) = run_node(SkipSigmas, sigmas=sigmas, preset=CUSTOM, step_list="0 2 3 7 9 15")
    assert distance(sampled(skipping, sigmas=sigmas), sampled(model, sigmas=listed)) < 1e-5


@pytest.mark.parametrize("count", [0, 1, 2])
def test_skip_sigmas_leaves_schedules_of_no_steps_alone(count: int) -> None:
    sigmas = torch.linspace(1, 0, 2)[:count]
    (found,) = run_node(SkipSigmas, sigmas=sigmas, preset="fast")
    assert torch.equal(found, sigmas)


def sampled_by_node(model: Any, **changes: Any) -> tuple[torch.Tensor, str]:
    latent, report = run_node(KSamplerStepSkip, **(given(KSamplerStepSkip, model) | {"preset": "balanced"} | changes))
    return latent["samples"], report


def test_the_ksampler(model: Any) -> None:
    seen = watched(model)
    found, report = sampled_by_node(seen.patcher)
    assert report == "balanced: 14 of 20 steps computed (euler, measured with bend)"
    assert seen.steps(schedule_of(model)) == list(PRESETS["balanced"].selection.computed(20))
    latent = {"samples": empty()}
    sampler = [value for name, value in SAMPLER.items() if name != "denoise"]
    (wanted,) = nodes.KSampler().sample(skip_steps(model, PRESETS["balanced"]), *sampler, *prompts(), latent)
    assert torch.equal(found, wanted["samples"])


@pytest.mark.parametrize(
    "changes, report",
    [
        ({"sampler_name": "heun", "steps": 12}, "every step computed: this sampler calls the model several times"),
        ({"steps": 8}, "every step computed: a run of 8 steps is short"),
        ({"preset": CUSTOM, "computed_steps": 3, "steps": 8}, "custom: 3 of 8 steps computed (euler, measured"),
        ({"denoise": 0.0}, "nothing was sampled"),
        ({"denoise": 0.5}, "balanced: 14 of 20 steps computed (euler, measured with bend)"),
    ],
)
def test_the_ksampler_reports_what_happened(model: Any, changes: dict[str, Any], report: str) -> None:
    found, said = sampled_by_node(model, **changes)
    assert said.startswith(report) and found.isfinite().all()


def test_a_ksampler_behind_step_skip_has_its_own_preset(model: Any) -> None:
    (skipping,) = run_node(StepSkip, model=model, preset="extreme")
    found, report = sampled_by_node(skipping)
    assert report.startswith("balanced: 14 of 20") and torch.equal(found, sampled_by_node(model)[0])


# ---- in a running ComfyUI


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def client(server_of: Callable[..., Any], home: Path) -> Iterator[ComfyClient]:
    with server_of(home=home) as server, server.client() as client:
        yield client


class Workflow:
    """A picture of the demo model along an edge, with a preset or without, accelerated or plain."""

    def __init__(self, preset: str | None, fast: bool) -> None:
        self.graph, self._fast = Graph(), fast
        add = self.graph.add
        demo = add("SlipstreamDemoLoader")
        model, vae, control = (
            self._accelerated("Model", model=demo.out(0)),
            self._accelerated("VAE", vae=demo.out(1)),
            self._accelerated("ControlNet", control_net=demo.out(2)),
        )
        self.step_skip = add("SlipstreamStepSkip", model=model, preset=preset) if preset else None
        positive, negative = (add("SlipstreamDemoPrompt", text=text) for text in (PROMPT, ""))
        applied = add(
            "ControlNetApplyAdvanced", positive=positive, negative=negative, control_net=control, image=self._edges(),
            strength=0.9, start_percent=0.0, end_percent=1.0,
        )  # fmt: skip
        self.sampler = add(
            "KSampler", model=self.step_skip or model, positive=applied.out(0), negative=applied.out(1),
            latent_image=add("EmptyLatentImage", width=SIZE, height=SIZE, batch_size=1), **SAMPLER,
        )  # fmt: skip
        self.graph.save(self.sampler)
        made = add("VAEDecode", samples=self.sampler, vae=vae)
        add("SaveImage", images=made, filename_prefix="image")
        if fast:
            info = {"model": self.step_skip or model, "control_net": control, "vae": vae, "after": made}
            add("SlipstreamEngineInfo", **info)

    def _accelerated(self, what: str, **source: Any) -> Any:
        return self.graph.add(f"SlipstreamAccelerate{what}", **source, **CHOICES) if self._fast else source.popitem()[1]

    def _edges(self) -> Node:
        add = self.graph.add
        half, nothing = (
            add("SolidMask", value=1.0, width=SIZE // 2, height=SIZE // 2),
            add("SolidMask", value=0.0, width=SIZE, height=SIZE),
        )
        square = add("MaskComposite", destination=nothing, source=half, x=32, y=32, operation="add")
        return add("Canny", image=add("MaskToImage", mask=square), low_threshold=0.2, high_threshold=0.5)


def record_of(run: Run, node: Node) -> list[dict[str, Any]]:
    """What a picture says of a node's runs."""
    (record,) = {metadata["slipstream"] for metadata in run.metadata() if "slipstream" in metadata}
    return json.loads(record)[node.id]


def counted(run: Run) -> list[tuple[int, int]]:
    """Engine and eager calls of model, VAE and ControlNet, as Engine Info shows them."""
    text = "\n".join(text for output in run.outputs.values() for text in output.get("text", ()))
    return [(int(one), int(other)) for one, other in re.findall(r"calls on engines: (\d+), on your model: (\d+)", text)]


@pytest.mark.slow
def test_with_accelerated_model_controlnet_and_vae(client: ComfyClient) -> None:
    fast, plain, whole = Workflow("balanced", True), Workflow("balanced", False), Workflow(None, False)
    previews, events = len(client.previews), len(client.events)
    run = client.run(fast.graph, timeout=600)
    assert run.ok, run.error
    assert counted(run) == [(14, 0), (1, 0), (14, 0)], "model, VAE and ControlNet"
    assert len(client.previews) - previews == 20
    assert progress_of(client, events, fast.sampler) == list(range(1, 21))
    ((made,),) = [record_of(run, fast.step_skip)]
    assert made["step_skipping"] == {
        "preset": "balanced", "sampler": "euler", "steps": 20, "computed": 14, "skipped": 6,
        "rule": "measured with bend", "reason": "", "remark": "", "caching": "",
    }  # fmt: skip
    (found,), (wanted,) = run.latents(), client.run(plain.graph).latents()
    assert np.linalg.norm(found - wanted) < 1e-3 * np.linalg.norm(wanted)
    (reference,) = client.run(whole.graph).latents()
    assert 1e-3 < np.linalg.norm(found - reference) / np.linalg.norm(reference) < 0.5


def progress_of(client: ComfyClient, since: int, node: Node) -> list[int]:
    """The steps that a node's progress bar went through."""
    shown = [event["data"] for event in client.events[since:] if event["type"] == "progress"]
    return [data["value"] for data in shown if str(data["node"]) == node.id and data["max"] == 20]


def custom_sampling(how: str) -> tuple[Graph, Node | None]:
    """SamplerCustomAdvanced with one of our nodes in it; and the node."""
    graph = Graph()
    add = graph.add
    model = add("SlipstreamDemoLoader")
    positive, negative = (add("SlipstreamDemoPrompt", text=text) for text in (PROMPT, ""))
    sampler: Node = add("KSamplerSelect", sampler_name="euler")
    sigmas: Node = add("BasicScheduler", model=model, scheduler="normal", steps=20, denoise=1.0)
    skipping = {"preset": "custom", "computed_steps": 9, "power": 1.5}
    node = None
    if how == "model":
        node = model = add("SlipstreamStepSkip", model=model, **skipping, rule="hold")
    elif how == "sampler":
        node = sampler = add("SlipstreamStepSkipSampler", sampler=sampler, **skipping, rule="hold")
    elif how == "sigmas":
        node = sigmas = add("SlipstreamSkipSigmas", sigmas=sigmas, **skipping)
    guider = add("CFGGuider", model=model, positive=positive, negative=negative, cfg=4.0)
    latent = add("EmptyLatentImage", width=64, height=64, batch_size=1)
    noise = add("RandomNoise", noise_seed=5)
    parts = {"noise": noise, "guider": guider, "sampler": sampler, "sigmas": sigmas, "latent_image": latent}
    graph.save(add("SamplerCustomAdvanced", **parts), vae=graph.add("SlipstreamDemoLoader").out(1))
    return graph, node


def test_custom_sampling_by_model_sampler_or_sigmas_is_the_same(client: ComfyClient) -> None:
    made: dict[str, np.ndarray] = {}
    for how in ("model", "sampler", "sigmas", "plain"):
        graph, node = custom_sampling(how)
        run = client.run(graph)
        assert run.ok, run.error
        (made[how],) = run.latents()
        if node is not None:
            ((what,),) = [list(each.values()) for each in record_of(run, node)]
            assert (what["preset"], what["steps"], what["computed"]) == ("custom", 20, 9)
    assert np.array_equal(made["model"], made["sampler"])
    assert np.linalg.norm(made["model"] - made["sigmas"]) < 1e-5 * np.linalg.norm(made["sigmas"])
    assert np.linalg.norm(made["model"] - made["plain"]) > 1e-2 * np.linalg.norm(made["plain"])


def one_node(**changes: Any) -> Graph:
    """KSampler (Step Skip), whose report is shown."""
    graph = Graph()
    add = graph.add
    inputs = {**SAMPLER, "preset": "balanced", **changes}
    inputs.setdefault("model", add("SlipstreamDemoLoader"))
    positive, negative = (add("SlipstreamDemoPrompt", text=text) for text in (PROMPT, ""))
    latent = add("EmptyLatentImage", width=64, height=64, batch_size=1)
    sampler = add("SlipstreamKSamplerStepSkip", positive=positive, negative=negative, latent_image=latent, **inputs)
    add("PreviewAny", source=sampler.out(1))
    graph.save(sampler)
    return graph


def test_the_all_in_one_node_shows_its_report_and_previews(client: ComfyClient) -> None:
    before = len(client.previews)
    run = client.run(one_node(sampler_name="dpmpp_2m"))
    assert run.ok, run.error
    assert ["balanced: 14 of 20 steps computed (dpmpp_2m, measured with bend)"] in [
        output["text"] for output in run.outputs.values() if "text" in output
    ]
    assert len(client.previews) - before == 20


@pytest.mark.parametrize(
    ("sampler", "said"),
    [
        ("euler", ["step skipping: balanced: 14 of 20 steps computed (euler, measured with bend)"]),
        ("heun", ["step skipping: every step computed: this sampler calls the model several times a step"]),
        (None, []),
    ],
)
def test_engine_info_behind_step_skip_says_how_many_steps_were_computed(
    client: ComfyClient, sampler: str | None, said: list[str]
) -> None:
    graph = Graph()
    add = graph.add
    model = loader = add("SlipstreamDemoLoader")
    if sampler is not None:
        model = add("SlipstreamStepSkip", model=loader, preset="balanced")
    positive, negative = (add("SlipstreamDemoPrompt", text=text) for text in (PROMPT, ""))
    latent = add("EmptyLatentImage", width=64, height=64, batch_size=1)
    inputs = {**SAMPLER, "sampler_name": sampler or "euler"}
    made = add("KSampler", model=model, positive=positive, negative=negative, latent_image=latent, **inputs)
    info = add("SlipstreamEngineInfo", model=model, after=made)
    run = client.run(graph)
    assert run.ok, run.error
    lines = "\n".join(run.outputs[info.id]["text"]).splitlines()
    found = [line for line in lines if line.startswith("step skipping")]
    assert len(found) == len(said) and all(line.startswith(words) for line, words in zip(found, said, strict=True))


def test_a_preset_that_is_calibrated_anew_is_sampled_anew(client: ComfyClient, home: Path) -> None:
    def reports(graph: Graph) -> list[str]:
        run = client.run(graph)
        assert run.ok, run.error
        return [text for output in run.outputs.values() for text in output.get("text", ())]

    graph = one_node(preset="Mine")
    (sampler,) = [node for node in graph.prompt.values() if node["class_type"] == "SlipstreamKSamplerStepSkip"]
    sampler["inputs"]["seed"] = [graph.add("PrimitiveInt", value=5).id, 0]
    for computed in ((0, 1, 2, 5, 19), (0, 1, 2, 5, 8, 19)):
        saved.save(calibrated(computed), home / "step_skipping")
        assert reports(graph) == [f"Mine: {len(computed)} of 20 steps computed (euler, measured with bend)"]
    run = client.run(graph)
    assert set(graph.prompt) - set(run.cached) == set(), "nothing of it changed, so nothing is run"


def test_what_is_refused_says_what_to_do(client: ComfyClient) -> None:
    graph = custom_sampling("model")[0]
    (guider,) = [node for node in graph.prompt.values() if node["class_type"] == "CFGGuider"]
    cache = {"reuse_threshold": 0.2, "start_percent": 0.15, "end_percent": 0.95, "verbose": False}
    inputs = guider["inputs"]
    easy = graph.add("EasyCache", **cache)
    graph.prompt[easy.id]["inputs"]["model"], inputs["model"] = inputs["model"], [easy.id, 0]
    run = client.run(graph)
    assert "EasyCache and step skipping are in the same model" in run.error["exception_message"]
    run = client.run(one_node(preset="custom", step_list="0 5 3"))
    assert "name each once, in order" in run.error["exception_message"]
