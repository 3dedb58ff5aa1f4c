"""Whole pictures: variants of them, how they are judged, what their rows say. ComfyUI is not needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slipstream.benchmarks.measuring.measure import Challenge, Contender
from slipstream.benchmarks.measuring.ours import levers_of, settings_of
from slipstream.benchmarks.pages.page import newest, report
from slipstream.benchmarks.subjects.cases import CASES
from slipstream.benchmarks.subjects.jobs import Job, _Judge
from slipstream.benchmarks.subjects.rows import FIELDS, complete
from slipstream.benchmarks.subjects.setup import Ready
from slipstream.benchmarks.subjects.subject import Example
from slipstream.benchmarks.subjects.variants import OF_JOBS, Variant, describe
from slipstream.benchmarks.subjects.weights import randomise_controlnet, randomise_unet
from slipstream.core.spec import Optimize, Precision, Quantised
from slipstream.runtime.settings.model_settings import BackendChoice, BuildPolicy, Levers, Parallel
from slipstream.tests.unit.benchmarks.support import row

CANNY = CASES["sd15-canny-512-20steps"]
DISTANCES = {"seed": {"latent": 1.4, "picture": 0.6}, "hint": {"latent": 0.2, "picture": 0.3}}
NOTHING_ON = Levers(hint_once=False, parallel="off", one_graph=False, first_step=False)


def job(device: str = "cuda") -> Job:
    made = object.__new__(Job)
    made.device, made.steps = torch.device(device), 20
    return made


# Variants


@pytest.mark.parametrize(
    ("name", "levers"),
    [
        ("slipstream:compiled", Levers()),
        ("slipstream:compiled+max", Levers()),
        ("slipstream:compiled+engines", NOTHING_ON),
        ("slipstream:tensorrt+engines+hint", Levers(True, "off", False, False)),
        ("slipstream:compiled+engines+hint+parallel", Levers(True, "on", False, False)),
        ("slipstream:compiled+engines+hint+parallel+graph", Levers(True, "on", True, False)),
        ("slipstream:compiled+engines+graph", Levers(False, "off", True, False)),
        ("slipstream:compiled+engines+graph+first", Levers(False, "off", True, True)),
    ],
)
def test_behind_engines_a_lever_is_on_where_it_is_named(name: str, levers: Levers) -> None:
    assert levers_of(Variant.of(name)) == levers


def test_a_lever_without_engines_is_added_to_the_products() -> None:
    product = Levers()
    assert levers_of(Variant.of("slipstream:compiled+parallel")) == Levers(
        product.hint_once, Parallel.ON, product.one_graph
    )


def test_settings_are_those_of_the_name() -> None:
    found = settings_of(Variant.of("slipstream:tensorrt+bake+max+bf16+engines"), BuildPolicy.FIRST_USE)
    assert (found.backend, found.precision, found.optimize) == (
        BackendChoice.TENSORRT,
        Precision.BF16,
        Optimize.MAX,
    )
    assert found.bake and found.levers == NOTHING_ON and found.policy is BuildPolicy.FIRST_USE


def test_every_lever_of_a_job_is_described_and_left_to_jobs() -> None:
    for lever in OF_JOBS:
        assert describe(f"slipstream:compiled+{lever}") != describe("slipstream:compiled")
        with pytest.raises(ValueError, match="is not offered behind torch.compile"):
            Variant.of(f"torch.compile+{lever}")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("slipstream:compiled+switch-size", "'switch-size' is about single calls"),
        ("diffusers", "diffusers' models are timed by single calls"),
        ("eager", None),
        ("torch.compile:reduce-overhead+channels_last", None),
        ("slipstream:compiled+engines", None),
        ("eager+graph", "no recording of a picture holds"),
        ("TorchCompileModel", "compiles the UNet alone"),
        ("eager+balanced", None),
        ("slipstream:compiled+fast", None),
        ("eager+fp32", "'fp32' is about single calls"),
    ],
)
def test_what_means_nothing_for_a_picture(name: str, why: str | None) -> None:
    found = Variant.of(name).why_left_out(CANNY, job())
    assert found is None if why is None else why in (found or "")
    if why is None and ":reduce-overhead" in name:
        assert Variant.of(name).why_left_out(CANNY, job("cpu")) == "CUDA graphs need a CUDA GPU"


def test_a_short_run_leaves_a_preset_nothing_to_skip() -> None:
    short = job()
    short.steps = 3
    assert "a run of 3 steps is short" in str(Variant.of("eager+balanced").why_left_out(CANNY, short))


# Judging


def judged(eager: float = 0.01) -> _Judge:
    return _Judge({"latent": eager, "picture": eager}, DISTANCES)


@pytest.mark.parametrize(
    ("eager", "precision", "limit"),
    [(0.0, Precision.FP32, 1e-3), (0.001, Precision.FP16, 5e-2), (0.04, Precision.FP16, 0.12)],
)
def test_the_limit_follows_from_the_plain_models_own_error(eager: float, precision: Precision, limit: float) -> None:
    assert judged(eager).limit("latent", precision, False) == pytest.approx(limit)


def test_a_floor_stays_below_what_other_pictures_are_apart() -> None:
    close = _Judge({"latent": 0.0}, {"hint": {"latent": 0.06}, "seed": {"latent": 1.0}})
    assert close.limit("latent", Precision.FP16, False) == pytest.approx(0.03)


def test_inputs_that_cannot_be_told_apart_are_named() -> None:
    assert judged(0.01).doubts(Precision.FP16) is None
    assert judged(0.07).doubts(Precision.FP16) is None  # told by the picture alone
    assert "another hint makes less of a difference" in str(judged(0.11).doubts(Precision.FP16))


def test_a_picture_of_skipped_steps_must_be_nearer_than_any_other() -> None:
    found = judged(0.001).limit("picture", Precision.FP16, True, skips=True)
    assert found == 0.3 > judged(0.001).limit("picture", Precision.FP16, True)


def test_where_the_plain_model_makes_another_picture_skipped_steps_may_too() -> None:
    assert judged(0.2).limit("picture", Precision.FP16, True, skips=True) == pytest.approx(0.6)


def contender(offset: float = 0.0, served: int = 7, reasons: str = "", **more: Any) -> Contender:
    """One that has made a single picture with engines of 7 calls a picture."""
    reference = {"latent": torch.ones(1, 4, 2, 2), "picture": torch.ones(1, 2, 2, 3)}

    def compute(inputs: Any) -> Any:
        return {"latent": reference["latent"], "picture": reference["picture"] + offset}

    ready = Ready(compute, Precision.FP16, engine_calls=lambda: served, reasons=lambda: reasons, **more)
    made = Contender("slipstream:compiled", ready, Challenge([Example(None, reference)], judged(), 7))
    made.check([0])
    return made


def test_a_good_picture_is_a_row() -> None:
    found = complete(contender(0.01).row([5.0, 7.0]) | {"steps": 3})
    assert "failed" not in found and found["ms"] == 6.0 and found["engine_calls"] == 7
    assert found["errors"] == {"latent": 0.0, "picture": pytest.approx(0.01)} and found["error"] == pytest.approx(0.01)
    assert found["distances"] == DISTANCES
    assert tuple(found) == (*FIELDS, "steps", "errors", "distances")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"offset": 0.1}, "differs from fp32 by 1.0e-01, allowed is 5.0e-02 in fp16"),
        ({"offset": float("nan")}, "differs from fp32 by inf"),
        ({"served": 6}, "the engine served 6 of 7 calls: no reason was given"),
        ({"served": 8}, "the engine served 8 of 7 calls"),
        ({"reasons": "no engine yet"}, "the engine served 7 of 7 calls: no engine yet"),
    ],
)
def test_a_picture_that_may_not_be_trusted_fails_its_row(given: dict[str, Any], why: str) -> None:
    assert why in contender(**given).row([5.0])["failed"]


def test_a_picture_of_skipped_steps_takes_fewer_calls() -> None:
    few = {"served": 4, "wanted_calls": 4, "skips": True}
    assert contender(0.2, **few).row([5.0])["failed"] is None
    assert "allowed is 3.0e-01" in contender(0.4, **few).row([5.0])["failed"]
    assert "served 7 of 4 calls" in contender(0.2, **{**few, "served": 7}).row([5.0])["failed"]


def test_a_row_says_what_large_linear_layers_multiply_in() -> None:
    assert contender().row([5.0])["precision"] == "fp16"
    assert contender(quantised=Quantised.INT8).row([5.0])["precision"] == "int8"


# The page


def test_pictures_have_a_table_of_their_own() -> None:
    fields = {"case": CANNY.name, "steps": 20, "errors": {"latent": 2e-2, "picture": 3e-2}, "distances": DISTANCES}
    jobs = [row("eager", 900.0, **fields), row("slipstream:compiled", 300.0, build_s=200.4, **fields)]
    broken = row("torch.compile", None, case=CANNY.name, steps=20, failed="RuntimeError: no")
    text, picture = report(newest([row("eager", 20.0), *jobs, broken]))
    calls, pictures = text.split("| case |")[1:]
    assert "sd15-512-b2" in calls and CANNY.name not in calls
    lines = [line for line in pictures.splitlines() if line.startswith(f"| {CANNY.name}")]
    assert lines[1] == (
        f"| {CANNY.name} | `slipstream:compiled` | 300.00 | 3.00× |  | 2.0e-02 | 3.0e-02 | 3.0e-01 | 200 |  |"
    )
    assert lines[2].split("|")[3].strip() == "failed" and lines[2].count("|") == lines[1].count("|")
    assert "median of 2 pictures after 1" in text and "median of 2 calls after 1" in text
    assert "nearest other" in text.split("## How it was measured")[1]
    assert "300.0 ms  slipstream:compiled" in picture


def test_skipped_steps_are_counted_in_their_rows() -> None:
    fields = {"case": CANNY.name, "steps": 20, "errors": {"latent": 2e-2, "picture": 3e-2}, "distances": DISTANCES}
    rows = [row("eager", 900.0, **fields), row("eager+balanced", 600.0, computed=14, **fields)]
    text, _ = report(newest([*rows, row("eager+fast", None, case=CANNY.name, steps=20, failed="no")]))
    lines = [
        [cell.strip() for cell in line.split("|")] for line in text.splitlines() if line.startswith(f"| {CANNY.name}")
    ]
    assert [line[3:5] for line in lines] == [["20", "900.00"], ["14 of 20", "600.00"], ["20", "failed"]]
    assert len({len(line) for line in lines}) == 1 and "Step Skip filled in the others" in text


def test_without_pictures_nothing_is_said_of_them() -> None:
    text, _ = report(newest([row("eager", 20.0)]))
    assert "per picture" not in text and text.count("| case |") == 1


# Weights


class Unet(torch.nn.Module):
    """The layers by which `randomise_unet` leads the input through, and nothing in between."""

    def __init__(self) -> None:
        super().__init__()
        self.out_channels = 4
        self.input_blocks = torch.nn.ModuleList([torch.nn.ModuleList([torch.nn.Conv2d(4, 32, 3, padding=1)])])
        block = torch.nn.Module()
        block.skip_connection = torch.nn.Conv2d(64, 32, 1)
        self.output_blocks = torch.nn.ModuleList([torch.nn.ModuleList([block])])
        self.out = torch.nn.Sequential(
            torch.nn.GroupNorm(32, 32), torch.nn.SiLU(), torch.nn.Conv2d(32, 4, 3, padding=1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.input_blocks[0][0](x)
        below = torch.zeros_like(h)
        return self.out(self.output_blocks[0][0].skip_connection(torch.cat([below, h], 1)))


def test_a_random_unet_predicts_its_own_input() -> None:
    unet, x = Unet(), torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(1))
    randomise_unet(unet, seed=1)
    with torch.no_grad():
        given = unet(x)
    likeness = torch.nn.functional.cosine_similarity(given.flatten(), x.flatten(), dim=0)
    assert 0.8 < likeness < 0.9999 and 0.5 < given.std() / x.std() < 1.5


def test_a_random_controlnets_hint_arrives() -> None:
    network = torch.nn.Module()
    layers = [
        part for i, o in ((3, 16), (16, 16), (16, 32), (32, 32)) for part in (torch.nn.Conv2d(i, o, 3), torch.nn.SiLU())
    ]
    network.input_hint_block = torch.nn.Sequential(*layers[:-1])
    network.zero_convs = torch.nn.ModuleList([torch.nn.Conv2d(4, 4, 1)])
    network.middle_block_out = torch.nn.ModuleList([torch.nn.Conv2d(4, 4, 1)])
    randomise_controlnet(network, seed=1)
    hints = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        one, other = network.input_hint_block(hints)
    assert 0.3 < (one - other).std() < 3
    assert all(parameter.abs().sum() > 0 for parameter in network.parameters())
