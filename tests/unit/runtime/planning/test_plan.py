"""Which engine a call wants."""

from __future__ import annotations

import pytest
import torch

from slipstream.core.errors import BackendUnavailable
from slipstream.core.spec import EngineSpec, Optimize, Precision, Quantised, Role
from slipstream.engine_cache import describe_differences
from slipstream.runtime.planning.plan import CallShape, Plan, plans
from slipstream.runtime.settings.model_settings import BackendChoice, Settings, ShapeChoice, parse_resolutions
from slipstream.tests.fakes import CPU, FakeArchitecture, FakeSource, NullBackend, make_inputs, make_model


def plan_for(
    inputs: dict[str, torch.Tensor], host: Precision = Precision.FP32, role: Role = Role.UNET, **settings: object
) -> Plan:
    chosen = Settings(**settings)  # type: ignore[arg-type]
    (plan,) = plans(FakeArchitecture(role=role), CallShape.of(inputs), host, CPU, chosen, [NullBackend()])
    return plan


def test_equal_calls_are_one_shape_and_one_key() -> None:
    first, second = make_inputs(seed=1), make_inputs(seed=2)
    assert CallShape.of(first) == CallShape.of(second)
    assert hash(CallShape.of(first)) == hash(CallShape.of(second))
    assert plan_for(first).key == plan_for(second).key


def test_the_order_of_the_inputs_makes_no_other_engine() -> None:
    inputs = make_inputs()
    turned = dict(reversed(inputs.items()))
    assert plan_for(inputs).key == plan_for(turned).key
    assert CallShape.of(inputs) == CallShape.of(turned)


def test_each_shape_and_dtype_has_an_engine_of_its_own() -> None:
    calls = [make_inputs(8), make_inputs(16), make_inputs(8, batch=1), make_inputs(8, dtype=torch.float16)]
    missing = {name: tensor for name, tensor in make_inputs(8).items() if name != "context"}
    keys = {plan_for(inputs).key.digest for inputs in [*calls, missing]}
    assert len({CallShape.of(inputs) for inputs in [*calls, missing]}) == len(keys) == 5


@pytest.mark.parametrize("host", list(Precision))
@pytest.mark.parametrize("wanted", [None, *Precision])
def test_an_engine_computes_in_the_precision_that_was_chosen(host: Precision, wanted: Precision | None) -> None:
    dtypes = {Precision.FP32: torch.float32, Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16}
    plan = plan_for(make_inputs(dtype=dtypes[host]), host, precision=wanted)
    expected = str(dtypes[wanted or host]).removeprefix("torch.")
    assert dict(plan.spec.dtypes) == {"x": expected, "timesteps": "float32", "context": expected}
    assert (plan.spec.output_dtype, plan.spec.precision) == (expected, wanted or host)


@pytest.mark.parametrize("role", [Role.UNET, Role.CONTROLNET])
@pytest.mark.parametrize("quantised", list(Quantised))
def test_a_quantised_engine_takes_and_gives_what_the_model_does(role: Role, quantised: Quantised) -> None:
    inputs = make_inputs(dtype=torch.bfloat16)
    plan, plain = (plan_for(inputs, Precision.BF16, role, precision=chosen) for chosen in (quantised, None))
    assert (plan.spec.quantised, plan.spec.precision, plan.spec.output_dtype) == (quantised, Precision.BF16, "bfloat16")
    assert plan.spec.dtypes == plain.spec.dtypes and plan.key != plain.key
    assert describe_differences(plan.key.factors, plain.key.factors) == [f"quantisation: {quantised.value} → none"]
    assert plan.serves(CallShape.of(inputs), Settings(precision=quantised))


@pytest.mark.parametrize("role", [Role.VAE_ENCODE, Role.VAE_DECODE])
def test_of_a_vae_nothing_is_quantised(role: Role) -> None:
    inputs = make_inputs(dtype=torch.bfloat16)
    plan, plain = (plan_for(inputs, Precision.BF16, role, precision=chosen) for chosen in (Quantised.FP8, None))
    assert plan.key == plain.key and plan.spec.precision is Precision.BF16


@pytest.mark.parametrize("name", ["timesteps", "time_ids"])
@pytest.mark.parametrize("wanted", [Precision.FP16, Precision.BF16])
def test_whole_numbers_stay_fp32(name: str, wanted: Precision) -> None:
    """999 is no number in bf16."""
    call = CallShape.of({"x": torch.ones(1, 4, 8, 8), name: torch.tensor([999.0])})
    assert call.dtypes(Precision.FP32, wanted)[name] == torch.float32


def test_inputs_in_another_dtype_than_the_hosts_stay_as_they_are() -> None:
    call = CallShape.of({"x": torch.ones(1, 4, 8, 8).half(), "mask": torch.ones(1, dtype=torch.bool)})
    assert call.dtypes(Precision.FP16, Precision.BF16) == {"x": torch.bfloat16, "mask": torch.bool}


def test_weights_are_no_part_of_the_key() -> None:
    first, second = FakeSource(make_model(1)), FakeSource(make_model(2))
    assert first.weights_digest() != second.weights_digest()
    keys = [
        plans(source.architecture, CallShape.of(make_inputs()), source.precision, CPU, Settings(), [NullBackend()])
        for source in (first, second)
    ]
    assert keys[0][0].key == keys[1][0].key


def test_what_shapes_the_code_is_part_of_the_key() -> None:
    plain = plan_for(make_inputs())
    assert plan_for(make_inputs(), optimize=Optimize.MAX).key != plain.key
    assert plan_for(make_inputs(), precision=Precision.FP16).key != plain.key
    call = CallShape.of(make_inputs())
    (other,) = plans(FakeArchitecture("b" * 64), call, Precision.FP32, CPU, Settings(), [NullBackend()])
    assert other.key != plain.key


def test_resolutions_and_policy_are_no_part_of_the_key() -> None:
    assert plan_for(make_inputs(), backend=BackendChoice.COMPILED).key == plan_for(make_inputs()).key


def test_one_plan_a_backend_in_their_order() -> None:
    backends = [NullBackend("first"), NullBackend("second")]
    wanted = plans(FakeArchitecture(), CallShape.of(make_inputs()), Precision.FP32, CPU, Settings(), backends)
    assert [plan.backend for plan in wanted] == backends
    assert len({plan.key for plan in wanted}) == 2


def test_no_backend_at_all() -> None:
    with pytest.raises(BackendUnavailable):
        plans(FakeArchitecture(), CallShape.of(make_inputs()), Precision.FP32, CPU, Settings(), [])


def test_a_plan_tells_people_what_it_is() -> None:
    assert str(plan_for(make_inputs(size=8, batch=2))) == "Tiny 64×64 batch 2"


# ------------------------------------------------------------------------------- engines of several sizes

SIZES = parse_resolutions("512x512, 768x512, 1024x1024")


def call_of(size: int = 64, batch: int = 2) -> dict[str, torch.Tensor]:
    return make_inputs(size, batch, tokens=77)


class OneSizeOnly(NullBackend):
    """A compiler of exact shapes."""

    def why_unsupported(self, spec: EngineSpec) -> str | None:
        return None if spec.is_static else "one size only"


@pytest.mark.parametrize("choice", [ShapeChoice.RANGE, ShapeChoice.PROFILES])
def test_calls_of_all_listed_sizes_have_one_key(choice: ShapeChoice) -> None:
    chosen = {"shapes": choice, "resolutions": SIZES}
    wanted = [plan_for(call_of(size, batch), **chosen) for size in (64, 128) for batch in (1, 2, 8)]
    assert len({plan.key.digest for plan in wanted}) == 1
    assert wanted[0].key != plan_for(call_of()).key
    assert plan_for(call_of(), **chosen, max_batch=4).key != wanted[0].key


def test_a_plan_of_several_sizes_tells_people_what_it_is() -> None:
    spans = plan_for(call_of(), shapes=ShapeChoice.RANGE, resolutions=SIZES)
    assert str(spans) == "Tiny 512×512…1024×1024 batch 1…2"
    several = plan_for(call_of(), shapes=ShapeChoice.PROFILES, resolutions=SIZES, max_batch=1)
    assert str(several) == "Tiny 512×512, 768×512, 1024×1024 batch 1"


def test_a_backend_of_exact_shapes_makes_an_engine_for_each() -> None:
    chosen = Settings(shapes=ShapeChoice.RANGE, resolutions=SIZES)
    call = CallShape.of(call_of(batch=4))
    (plan,) = plans(FakeArchitecture(), call, Precision.FP32, CPU, chosen, [OneSizeOnly()])
    assert plan.spec.is_static and plan.spec.profile.opt == call.shapes


def test_a_backend_that_makes_what_was_asked_for_comes_first() -> None:
    backends = [OneSizeOnly("first"), NullBackend("second"), OneSizeOnly("third")]

    def order(inputs: dict[str, torch.Tensor]) -> list[str]:
        chosen = Settings(shapes=ShapeChoice.RANGE, resolutions=SIZES)
        found = plans(FakeArchitecture(), CallShape.of(inputs), Precision.FP32, CPU, chosen, backends)
        return [plan.backend.name for plan in found]

    assert order(call_of()) == ["second", "first", "third"]
    assert order(make_inputs(64, tokens=3)) == ["first", "second", "third"], "a call outside of the range"
