"""What enters an engine's key, and how differences are told."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from slipstream.core.environment import Environment
from slipstream.core.shapes import ShapeProfile, ShapeRange
from slipstream.core.spec import (
    NOT_IN_KEY,
    BackendConfig,
    EngineSpec,
    ModelFingerprint,
    Optimize,
    Precision,
    Quantised,
    Role,
)
from slipstream.engine_cache import EngineKey, canonical, canonical_json, describe_differences, digest_of, key, key_of
from slipstream.tests.unit.engine_cache.support import make_environment, make_key, make_spec

OUT_OF_KEY = {
    "spec.fingerprint.architecture_name",
    "spec.fingerprint.layers",
    "spec.fingerprint.parameters",
    "spec.fingerprint.weights",
    "environment.driver",
}


def differences(one: EngineKey, other: EngineKey) -> list[str]:
    return describe_differences(one.factors, other.factors)


FURTHER = ShapeProfile.static({"x": (1, 4, 96, 64), "timesteps": (1,), "context": (1, 77, 768)})


def changes(value: Any, path: str) -> Iterator[tuple[str, bool, Any]]:
    """(path, whether it is in the key, `value` with that one field changed) for every field, however deep."""
    if not dataclasses.is_dataclass(value):
        for index, changed in enumerate(change(value)):
            yield (path if index == 0 else f"{path}#{index}"), True, changed
        return
    for field in dataclasses.fields(value):
        in_key = field.metadata.get("in_key", True)
        for where, inner, changed in changes(getattr(value, field.name), f"{path}.{field.name}"):
            yield where, in_key and inner, dataclasses.replace(value, **{field.name: changed})


def change(value: Any) -> list[Any]:
    """Other values of the same kind."""
    if isinstance(value, Enum):
        return [other for other in type(value) if other is not value]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, str):
        return [value + "~"]
    if isinstance(value, int):
        return [value + 1]
    if value is None:
        return ["something"]
    if isinstance(value, Mapping):
        return list(mapping_changes(value))
    if isinstance(value, tuple):
        return [(*value, FURTHER)]
    raise AssertionError(f"tell this test how to change a {type(value).__name__}")


def mapping_changes(value: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    first = next(iter(value))
    item = value[first]
    if isinstance(item, tuple) and isinstance(item[0], ShapeRange):
        axis = item[0]
        for other in (
            ShapeRange(1, axis.opt, axis.max),
            ShapeRange(1, 1, axis.max),
            ShapeRange(axis.min, axis.opt, axis.max + 1),
        ):
            yield {**value, first: (other, *item[1:])}
        yield {**value, first: item[1:]} if len(item) > 1 else {**value, first: (*item, axis)}
    else:
        yield {**value, first: change(item)[0] if not isinstance(item, float) else item / 3}
    yield {**value, f"{first}_": item}
    yield {name: held for name, held in value.items() if name != first}


def spec_changes() -> list[Any]:
    return [pytest.param(*row, id=row[0]) for row in changes(make_spec(), "spec")]


def environment_changes() -> list[Any]:
    return [pytest.param(*row, id=row[0]) for row in changes(make_environment(), "environment")]


@pytest.mark.parametrize(("path", "in_key", "changed"), spec_changes())
def test_every_field_of_the_spec_enters_unless_marked(path: str, in_key: bool, changed: EngineSpec) -> None:
    base, other = (
        EngineKey(make_spec(), make_environment()),
        EngineKey(changed, make_environment()),
    )
    assert (base.digest != other.digest) is in_key
    assert bool(differences(base, other)) is in_key


@pytest.mark.parametrize(("path", "in_key", "changed"), environment_changes())
def test_every_field_of_the_environment_enters_unless_marked(path: str, in_key: bool, changed: Environment) -> None:
    base, other = EngineKey(make_spec(), make_environment()), EngineKey(make_spec(), changed)
    assert (base.digest != other.digest) is in_key
    assert bool(differences(base, other)) is in_key


def test_a_key_that_was_asked_for_lately_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key, "_KEPT", 32)
    known = key_of(make_spec(), make_environment())
    assert key_of(make_spec(), make_environment()) is known
    others = [(changed, make_environment()) for _, _, changed in changes(make_spec(), "spec")]
    others += [(make_spec(), changed) for _, _, changed in changes(make_environment(), "environment")]
    others += [(make_spec(backend=BackendConfig("compiled", {"odd": odd})), make_environment()) for odd in (1, True)]
    for spec, environment in others:
        found = key_of(spec, environment)
        assert (found.spec, found.environment) == (spec, environment)
        assert found.factors == EngineKey(spec, environment).factors
        assert found.digest == EngineKey(spec, environment).digest
    assert len(key._recent) == key._KEPT < len(others)


def test_only_the_agreed_fields_are_marked_out() -> None:
    rows = [*changes(make_spec(), "spec"), *changes(make_environment(), "environment")]
    assert {path.split("#")[0] for path, in_key, _ in rows if not in_key} == OUT_OF_KEY


def test_further_profiles_enter_each_and_in_their_order() -> None:
    """The order is that of the profiles inside of the artifact."""
    wider = ShapeProfile({**FURTHER.inputs, "timesteps": (ShapeRange(1, 1, 2),)})
    choices = [(), (FURTHER,), (wider,), (FURTHER, wider), (wider, FURTHER), (FURTHER, FURTHER)]
    keys = {EngineKey(make_spec(more_profiles=chosen), make_environment()).digest for chosen in choices}
    assert len(keys) == len(choices)


def test_engines_from_before_quantised_ones_are_still_found() -> None:
    """The digest is that of a spec without such a field."""
    plain, *quantised = (EngineKey(make_spec(quantised=chosen), make_environment()) for chosen in (None, *Quantised))
    assert "quantised" not in plain.factors["spec"] and plain == EngineKey(make_spec(), make_environment())
    assert len({plain.digest, *(key.digest for key in quantised)}) == 3
    assert [differences(plain, key) for key in quantised] == [
        ["quantisation: none → fp8"],
        ["quantisation: none → int8"],
    ]


def test_engines_from_before_further_profiles_are_still_found() -> None:
    assert "more_profiles" not in EngineKey(make_spec(), make_environment()).factors["spec"]
    assert "more_profiles" in EngineKey(make_spec(more_profiles=(FURTHER,)), make_environment()).factors["spec"]


def with_weights(weights: str | None, inside: bool) -> EngineSpec:
    fingerprint = ModelFingerprint("a" * 64, weights=weights)
    return make_spec(fingerprint=fingerprint, backend=BackendConfig("tensorrt", {}, contains_weights=inside))


def test_weights_enter_only_where_the_artifact_contains_them() -> None:
    inside = [EngineKey(with_weights(letter * 64, True), make_environment()) for letter in "cd"]
    outside = [EngineKey(with_weights(letter * 64, False), make_environment()) for letter in "cd"]
    assert inside[0] != inside[1]
    assert differences(*inside) == ["weights: cccccccccccc → dddddddddddd"]
    assert outside[0] == outside[1]
    assert "weights" not in outside[0].factors["spec"]["fingerprint"]


def test_contained_weights_must_be_known() -> None:
    with pytest.raises(ValueError, match=r"SD15|unet.*tensorrt stores the weights.*weights_digest\(\)"):
        EngineKey(with_weights(None, True), make_environment())
    EngineKey(with_weights(None, False), make_environment())


@pytest.mark.parametrize("value", [torch.float16, Path("x"), object(), b"bytes", 1j, Precision, ShapeProfile])
def test_an_unknown_type_raises_and_names_its_path(value: Any) -> None:
    spec = make_spec(backend=BackendConfig("compiled", {"odd": value}))
    with pytest.raises(TypeError, match=r"^spec\.backend\.options\.odd is a "):
        EngineKey(spec, make_environment())


def test_a_name_that_is_no_text_raises() -> None:
    with pytest.raises(TypeError, match=r"^spec\.backend\.options has the name 7"):
        EngineKey(make_spec(backend=BackendConfig("compiled", {7: 1})), make_environment())  # type: ignore[dict-item]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_must_be_finite(value: float) -> None:
    with pytest.raises(ValueError, match=r"^spec\.backend\.options\.odd is .*finite"):
        EngineKey(make_spec(backend=BackendConfig("compiled", {"odd": value})), make_environment())


def test_equal_looking_options_are_told_apart() -> None:
    values = [1, 1.0, True, "1", None, 0, -0.0, 0.0, "none", False, [], "", 0.1, 0.1 + 1e-17, 0.1 + 2e-17]
    keys = {
        EngineKey(make_spec(backend=BackendConfig("compiled", {"odd": value})), make_environment()).digest  # type: ignore[dict-item]
        for value in values
    }
    assert len(keys) == len(values) - 1  # 0.1 + 1e-17 is 0.1


def test_canonical_form_does_not_depend_on_order_or_subclasses() -> None:
    class Colour(Enum):
        RED = ("r", 1)

    class Text(str):
        def __str__(self) -> str:
            return "other"

    one = canonical({"b": {3, 1, 2}, "a": (1, [2]), "c": Colour.RED, "d": Text("x")}, "it")
    other = canonical(MappingProxyType({"d": "x", "c": ["r", 1], "a": [1, (2,)], "b": frozenset([2, 3, 1])}), "it")
    assert one == other == {"a": [1, [2]], "b": [1, 2, 3], "c": ["r", 1], "d": "x"}
    assert type(one["d"]) is str
    assert list(one) == ["a", "b", "c", "d"]
    assert canonical_json(one) == canonical_json(other)


def test_the_real_environment_has_a_key() -> None:
    key = EngineKey(make_spec(), Environment.current("cpu", ("filelock", "no-such-package")))
    assert json.loads(canonical_json(key.factors)) == key.factors
    assert type(key.factors["environment"]["torch"]) is str
    assert list(key.factors["environment"]["versions"]) == ["filelock"]


def test_the_digest_survives_json() -> None:
    key = make_key()
    assert digest_of(json.loads(json.dumps(key.factors))) == key.digest
    assert key.short == key.digest[:12]
    assert {key: 1}[make_key()] == 1


def test_the_digest_is_the_same_in_every_process(python: Callable[..., Any]) -> None:
    code = "print(EngineKey(make_spec(), make_environment()).digest)"
    processes = [python(code, PYTHONHASHSEED=seed) for seed in ("1", "2")]
    digests = {process.communicate()[0].strip() for process in processes}
    assert digests == {EngineKey(make_spec(), make_environment()).digest}


def test_differences_in_words() -> None:
    profile = ShapeProfile(
        {
            "x": (ShapeRange(1, 2, 4), *map(ShapeRange.exactly, (4, 128, 64))),
            "timesteps": (ShapeRange.exactly(2),),
            "context": tuple(map(ShapeRange.exactly, (2, 154, 768))),
            "y": tuple(map(ShapeRange.exactly, (2, 2816))),
        }
    )
    spec = make_spec(
        role=Role.CONTROLNET,
        fingerprint=ModelFingerprint("c" * 64, "SDXL", lora="none"),
        profile=profile,
        dtypes={"x": "float32", "timesteps": "float32", "y": "float16"},
        precision=Precision.FP32,
        optimize=Optimize.MAX,
        backend=BackendConfig("tensorrt", {"freezing": True, "level": 3, "new.one": 1}),
    )
    environment = make_environment(
        torch="2.13.0", threads=2, cpu=None, gpu="NVIDIA H200", versions={"triton": "3.7.0", "onnx": "1"}
    )
    assert differences(make_key(), EngineKey(spec, environment)) == [
        "role: unet → controlnet",
        "architecture: aaaaaaaaaaaa → cccccccccccc",
        "LoRA: live → none",
        "context tokens: 77 → 154",
        "x batch: 2 → 1..4 (tuned for 2)",
        "x height: 64 → 128",
        "y shape: none → 2×2816",
        "precision: fp16 → fp32",
        "optimize: balanced → max",
        "backend: compiled → tensorrt",
        "GPU: none → NVIDIA H200",
        "torch: 2.12.0 → 2.13.0",
        "CPU instructions: AVX512 → none",
        "CPU threads: 1 → 2",
        "onnx: none → 1",
        "triton: 3.6.0 → 3.7.0",
        "option factor: 0.5 → none",
        "option freezing: off → on",
        "option new.one: none → 1",
        "context dtype: float16 → none",
        "x dtype: float16 → float32",
        "y dtype: none → float16",
    ]


def test_an_unknown_factor_is_told_by_its_path() -> None:
    assert describe_differences({"future": {"a": [1, {"b": 2}]}}, {"future": {"a": [1, {"b": 3}]}}) == [
        "future.a.1.b: 2 → 3"
    ]
    assert describe_differences({"a": 1}, {"a": 1.0}) == ["a: 1 → 1.0"]


def test_odd_factors_of_a_foreign_manifest_do_not_stop_the_explanation() -> None:
    odd: dict[str, Any] = {"spec": {"profile": {"inputs": {"x": "what", "context": [7]}}, "role": []}}
    assert any(line.startswith("x shape: what → 2×4×64×64") for line in describe_differences(odd, make_key().factors))


def test_the_closest_engine_has_the_fewest_differences_and_is_of_the_same_model() -> None:
    wanted = make_key(128, torch="2.13.0")
    far, near = make_key(64, threads=4), make_key(128)
    other_model = EngineKey(
        dataclasses.replace(wanted.spec, fingerprint=ModelFingerprint("c" * 64)), wanted.environment
    )
    assert wanted.explain_miss([other_model, far, near]).endswith("differs in torch: 2.12.0 → 2.13.0")
    assert "CPU threads" in wanted.explain_miss([other_model, far]), "one difference, but it is another model"


def test_a_miss_is_explained_from_what_is_there_to_what_is_wanted() -> None:
    wanted = make_key(128, torch="2.13.0")
    stranger = EngineKey(make_spec(fingerprint=ModelFingerprint("c" * 64)), make_environment())
    assert wanted.explain_miss([]) == "no engine has been built yet"
    assert wanted.explain_miss([stranger]) == "no engine has been built for this model yet"
    assert (
        wanted.explain_miss([stranger, make_key()])
        == "the closest engine differs in x height: 64 → 128, torch: 2.12.0 → 2.13.0"
    )


def test_marks_other_than_the_agreed_one_do_not_take_a_field_out() -> None:
    @dataclasses.dataclass
    class Odd:
        a: int = dataclasses.field(default=1, metadata={"unit": "mm"})
        b: int = dataclasses.field(default=2, metadata=NOT_IN_KEY)
        c: int = dataclasses.field(default=3, metadata={"in_key": True})

    assert canonical(Odd(), "it") == {"a": 1, "c": 3}
