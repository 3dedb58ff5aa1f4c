"""Properties of an engine's key, over drawn specs and environments."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.core.shapes import ShapeProfile
from slipstream.core.spec import BackendConfig, Optimize, Precision, Quantised, Role
from slipstream.engine_cache import EngineKey, canonical, canonical_json, describe_differences, digest_of, key_of
from slipstream.tests.unit.engine_cache.support import make_environment, make_spec

names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
set_ones = st.one_of(
    st.booleans(), st.integers(-(2**60), 2**60), st.floats(allow_nan=False, allow_infinity=False), names
)
plain = st.none() | set_ones
nested = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4), max_leaves=12
)
axes = st.integers(1, 4096)


@st.composite
def specs(draw: Any) -> Any:
    shape = (draw(st.integers(1, 8)), 4, draw(axes), draw(axes))
    return make_spec(
        role=draw(st.sampled_from(Role)),
        precision=draw(st.sampled_from(Precision)),
        optimize=draw(st.sampled_from(Optimize)),
        quantised=draw(st.none() | st.sampled_from(Quantised)),
        profile=ShapeProfile.static({"x": shape, "timesteps": shape[:1]}),
        backend=BackendConfig(draw(names), draw(st.dictionaries(names, set_ones, max_size=4))),
    )


environments = st.builds(
    make_environment,
    os=names,
    cpu=st.none() | names,
    threads=st.integers(0, 256),
    gpu=st.none() | names,
    versions=st.dictionaries(names, names, max_size=3),
)


@given(specs(), environments, specs(), environments)
@settings(max_examples=150, deadline=None)
def test_two_keys_are_equal_only_where_everything_is(spec: Any, environment: Any, other: Any, elsewhere: Any) -> None:
    one, two = EngineKey(spec, environment), EngineKey(other, elsewhere)
    assert (one.digest == two.digest) == (canonical_json(one.factors) == canonical_json(two.factors))
    assert bool(describe_differences(one.factors, two.factors)) == (one.digest != two.digest)
    assert one == EngineKey(spec, environment) == key_of(spec, environment)


@given(specs(), environments)
@settings(max_examples=100, deadline=None)
def test_a_digest_survives_the_disk_and_the_order_of_names(spec: Any, environment: Any) -> None:
    key = EngineKey(spec, environment)
    read = json.loads(json.dumps(key.factors))
    assert digest_of(read) == key.digest
    assert digest_of(dict(reversed(read.items()))) == key.digest


@given(nested, nested)
@settings(max_examples=300, deadline=None)
def test_values_that_differ_have_different_texts(one: Any, other: Any) -> None:
    same = repr(canonical(one, "x")) == repr(canonical(other, "x"))
    texts_equal = canonical_json(canonical(one, "x")) == canonical_json(canonical(other, "x"))
    assert texts_equal or not same
    if texts_equal:
        assert one == other
