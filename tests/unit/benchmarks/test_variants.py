"""The names of variants."""

from __future__ import annotations

import pytest

from slipstream.benchmarks.cases import CASES
from slipstream.benchmarks.variants import USUAL, Variant, describe


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
        ("eager+max", "'max' is not offered behind eager; there is nothing"),
        ("slipstream:compiled+channels_last", "'channels_last' is not offered behind slipstream:compiled"),
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


def test_the_usual_cases() -> None:
    usual = [case.name for case in CASES.values() if case.usual]
    assert usual == ["sd15-512-b2", "sdxl-1024-b2", "vae-decode-1024", "sd3-1024-b2"]
    assert {name for name, case in CASES.items() if not case.needs_gpu} == {
        "tiny-sd15-64-b2",
        "tiny-sd15-canny-64-3steps",
    }
