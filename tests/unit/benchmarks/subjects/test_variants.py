"""The names of variants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.benchmarks.measuring.ours import provider_of, settings_of
from slipstream.benchmarks.subjects.cases import CASES
from slipstream.benchmarks.subjects.models import Model
from slipstream.benchmarks.subjects.plain_source import PlainSource
from slipstream.benchmarks.subjects.variants import (
    LADDER,
    SWITCHED,
    USUAL,
    Variant,
    describe,
    ladder_to_measure,
    of_tables,
)
from slipstream.compile_backend.inductor.options import JOINED_PERCENT, OURS, REWRITES
from slipstream.core.spec import Optimize, Precision, Quantised
from slipstream.engine_cache import EngineStore
from slipstream.runtime.settings.model_settings import BuildPolicy


def test_every_usual_variant_can_be_named_and_described() -> None:
    words = [describe(Variant.of(name).name) for name in USUAL]
    assert len(set(words)) == len(USUAL) and all(words)


def test_a_name_is_taken_apart() -> None:
    variant = Variant.of("torch.compile:max-autotune+channels_last")
    assert (variant.kind, variant.mode, variant.levers) == ("torch.compile", "max-autotune", ("channels_last",))
    assert variant.needs_graphs and not Variant.of("torch.compile+channels_last").needs_graphs
    assert Variant.of("eager+graph").needs_graphs and Variant.of("eager+graph").levers == ()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("egaer", "is no variant; there are eager, eager\\+graph"),
        ("torch.compile:fast", "is no variant"),
        ("slipstream", "is no variant"),
        ("slipstream:off", "is no variant"),
        ("eager:max-autotune", "is no variant"),
        ("eager+max", "'max' is not offered behind eager; there is balanced, bf16-math, cold, fast, fp32"),
        ("eager:fast+fp32", "'fp32' is not offered behind eager:fast; there is nothing"),
        ("torch.compile+fp8", "'fp8' is not offered behind torch.compile"),
        ("slipstream:tensorrt+fp8", "'fp8' is not offered behind slipstream:tensorrt"),
        ("slipstream:compiled+fp8+bf16", "choose one of bf16 and fp8"),
        ("slipstream:compiled+max+fast-build", "choose one of fast-build and max"),
        ("eager+quality+fast", "choose one of fast and quality"),
        ("slipstream:compiled+channels_last", "'channels_last' is not offered behind slipstream:compiled"),
        ("diffusers+int8", "'int8' is not offered behind diffusers; there is nothing"),
        ("diffusers:compile+fp8", "'fp8' is not offered behind diffusers:compile; there is int8"),
        ("diffusers:max-autotune", "is no variant"),
        ("eager+sage+bf16-math", "choose one of bf16-math and sage"),
        ("eager+switch-size+switch-batch", "choose one of switch-batch and switch-size"),
        ("eager+graph+switch-size", "'graph' is not offered behind eager"),
    ],
)
def test_a_wrong_name_is_explained(name: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Variant.of(name)


def test_levers_go_behind_our_engines_only() -> None:
    ours = Variant.of("slipstream:compiled").with_lever("max").with_lever("bf16")
    assert ours.name == "slipstream:compiled+max+bf16" and ours.levers == ("max", "bf16")
    assert ours.with_lever("max") is ours and ours.with_lever(None) is ours
    assert Variant.of("eager").with_lever("max").name == "eager"


def test_a_lever_that_is_named_is_not_put_beside_another_of_its_kind() -> None:
    """Options are for all of our engines; what a variant's own name says wins."""
    for name, lever in (("fast-build", "max"), ("fp8", "bf16"), ("int8", "fp8")):
        ours = Variant.of(f"slipstream:compiled+{name}")
        assert ours.with_lever(lever) is ours
    assert Variant.of("slipstream:compiled+fp8").with_lever("max").name == "slipstream:compiled+fp8+max"


def test_the_usual_cases() -> None:
    usual = [case.name for case in CASES.values() if case.usual]
    assert usual == ["sd15-512-b2", "sdxl-1024-b2", "vae-decode-1024", "sd3-1024-b2"]
    assert {name for name, case in CASES.items() if not case.needs_gpu} == {
        "tiny-sd15-64-b2",
        "tiny-sd15-canny-64-3steps",
    }


@pytest.mark.parametrize(
    ("levers", "precision", "optimize"),
    [
        ("+fp8", Quantised.FP8, Optimize.BALANCED),
        ("+int8+max", Quantised.INT8, Optimize.MAX),
        ("+fp16+fast-build", Precision.FP16, Optimize.FAST_BUILD),
        ("", None, Optimize.BALANCED),
    ],
)
def test_levers_are_what_an_engine_is_asked_for(levers: str, precision: object, optimize: Optimize) -> None:
    settings = settings_of(Variant.of(f"slipstream:compiled{levers}"), BuildPolicy.MANUAL)
    assert (settings.precision, settings.optimize) == (precision, optimize)


def test_rungs_are_engines_of_other_graphs(tmp_path: Path) -> None:
    def options(lever: str) -> dict[str, Any]:
        variant = Variant.of(f"slipstream:compiled{lever}")
        backend = provider_of(variant, EngineStore(tmp_path)).backends[0]
        assert backend.name == "aotinductor"
        optimize = settings_of(variant, BuildPolicy.MANUAL).optimize
        return dict(backend.options(torch.device("cuda"), Precision.FP16, optimize))

    usual = options("")
    ours = {name: value for name, value in usual.items() if name.startswith(OURS)}
    plain = {name: value for name, value in usual.items() if name not in ours}
    assert options("+as-exported") == plain and ours[REWRITES] and 0 < ours[JOINED_PERCENT] < 100
    assert options("+unjoined") == {**usual, JOINED_PERCENT: 0}
    assert options("+joined") == {**usual, JOINED_PERCENT: 100}


def test_every_variant_of_a_table_means_something_in_its_case() -> None:
    for case in CASES.values():
        variants = [Variant.of(name) for name in of_tables(case)]
        assert len(set(variants)) == len(variants) and variants[0].name == "eager"
        assert all(bool(variant.steps) <= case.is_job for variant in variants)
        assert case.convolutional or not any("channels_last" in variant.levers for variant in variants)
        assert variants[-1].kind == "torch.compile", "what a time limit may lose comes last"
    assert "slipstream:compiled+max" in of_tables(CASES["vae-decode-1024"])
    assert set(of_tables(CASES["sdxl-1024-b8"])) < set(of_tables(CASES["sdxl-1024-b2"]))


def test_the_rungs_are_described_each_in_its_own_words() -> None:
    assert len({describe(name) for name in LADDER}) == len(LADDER)
    assert LADDER[0] == "eager+fp32" and LADDER[-1] == "slipstream:compiled+fp8"
    measured = ladder_to_measure()
    assert sorted(measured) == sorted(LADDER) and measured[-1] == "torch.compile:reduce-overhead+channels_last"


class _Source:
    device = torch.device("cpu")


class UNetModel(torch.nn.Module):
    """By this name a UNet is known."""


def model(source: object = None, network: torch.nn.Module | None = None, patcher: object = "a patcher") -> Model:
    return Model(source or _Source(), network or UNetModel(), lambda module, inputs: inputs, {}, patcher)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "subject", "why"),
    [
        ("eager+fp32", model(), None),
        ("eager+bf16-math", model(), None),
        ("eager+bf16-math", model(network=torch.nn.Identity()), "only a UNet's attention"),
        ("eager+fp32", model(patcher=None), "a VAE's decoder"),
        ("slipstream:compiled+fp8", model(patcher=None), "a VAE computes in its own precision"),
        ("slipstream:compiled+fp8", model(), None),
        ("eager:fast", model(), "about CUDA GPUs"),
        ("eager+balanced", model(), "'balanced' is about whole pictures"),
        ("slipstream:compiled+fast", model(), "'fast' is about whole pictures"),
        ("eager+sage", model(), "SageAttention computes on CUDA GPUs"),
        ("slipstream:compiled+switch-size", model(), None),
        ("diffusers:compile", model(), "CUDA graphs need a CUDA GPU"),
        ("diffusers:compile+int8", model(patcher=None), "CUDA graphs need a CUDA GPU"),
    ],
)
def test_what_means_nothing_for_a_single_call(name: str, subject: Model, why: str | None) -> None:
    found = Variant.of(name).why_left_out(CASES["sdxl-1024-b2"], subject)
    assert found is None if why is None else why in (found or "")


def test_what_computes_at_once_was_built_in_no_time() -> None:
    assert [
        name
        for name in ("eager", "eager+sage", "diffusers", "diffusers:compile", "torch.compile", "eager+graph")
        if Variant.of(name).is_plain
    ] == ["eager", "eager+sage", "diffusers"]


def test_rivals_and_changes_are_described_each_in_its_own_words() -> None:
    names = (*SWITCHED, "diffusers", "diffusers:compile", "diffusers:compile+int8", "eager+sage")
    assert len({describe(name) for name in names}) == len(names)


def test_engines_are_left_out_where_they_cannot_stand_for_a_model() -> None:
    source = object.__new__(PlainSource)
    source.device, source.why_no_engine = torch.device("cpu"), "no engines yet"
    case = CASES["pixart-1024-b2"]
    assert Variant.of("slipstream:compiled").why_left_out(case, model(source)) == "no engines yet"
    assert Variant.of("eager").why_left_out(case, model(source)) is None
