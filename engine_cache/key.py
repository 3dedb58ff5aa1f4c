"""The identity of an engine: everything that shapes it, as one digest, and differences in words."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, Protocol

from ..core.environment import Environment
from ..core.spec import EngineSpec
from .key_differences import describe_differences

KEY_SCHEMA = 1
"""Raised when the meaning of a factor changes without its value changing."""

Factors = Mapping[str, Any]


class HasFactors(Protocol):
    """Whatever carries an engine's factors: a key, a manifest, an entry of the store."""

    @property
    def factors(self) -> Factors: ...


class EngineKey:
    """The identity of one engine: every field of its spec and environment.

    Attributes:
        factors: nested plain data: every field not marked `NOT_IN_KEY`.
        digest: sha256 of the factors, in hex.

    Raises:
        TypeError: a field holds something that has no canonical form.
        ValueError: the artifact contains weights but their digest is missing, or a number is not finite.
    """

    def __init__(self, spec: EngineSpec, environment: Environment) -> None:
        self.spec = spec
        self.environment = environment
        self.factors: dict[str, Any] = {
            "schema": KEY_SCHEMA,
            "spec": canonical(spec, "spec"),
            "environment": canonical(environment, "environment"),
        }
        if spec.backend.contains_weights:
            self.factors["spec"]["fingerprint"]["weights"] = _required_weights(spec)
        self.digest = digest_of(self.factors)

    @property
    def short(self) -> str:
        """The first 12 digits of the digest, for people."""
        return self.digest[:12]

    def explain_miss(self, candidates: Iterable[HasFactors]) -> str:
        """Why none of `candidates` is this engine: how the closest one differs, stored → needed.

        Engines of the same model and role come before all others.
        """
        closest = min((each.factors for each in candidates), key=self._distance, default=None)
        if closest is None:
            return "no engine has been built yet"
        if self._is_other_model(closest):
            return "no engine has been built for this model yet"
        changes = describe_differences(closest, self.factors)
        return f"the closest engine differs in {', '.join(changes)}" if changes else "this engine is there"

    def _distance(self, factors: Factors) -> tuple[bool, int]:
        return self._is_other_model(factors), len(describe_differences(factors, self.factors))

    def _is_other_model(self, factors: Factors) -> bool:
        return any(
            _at(factors, path) != _at(self.factors, path)
            for path in (("spec", "role"), ("spec", "fingerprint", "architecture"))
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EngineKey) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"EngineKey({self.short}: {self.spec.describe()})"


def key_of(spec: EngineSpec, environment: Environment) -> EngineKey:
    """`EngineKey(spec, environment)`, cached: every run asks for the same few keys."""
    asked = repr((spec, environment))  # unlike ==, tells 1 from True, as a key does
    known = _recent.get(asked)
    if known is None:
        known = _recent[asked] = EngineKey(spec, environment)
        for oldest in list(_recent)[:-_KEPT]:
            _recent.pop(oldest, None)
    return known


_KEPT = 128
_recent: dict[str, EngineKey] = {}


def digest_of(factors: Factors) -> str:
    """sha256 of the canonical JSON text of `factors`, in hex."""
    return hashlib.sha256(canonical_json(factors).encode("ascii")).hexdigest()


def canonical_json(data: Any) -> str:
    """One text for equal data. Floats appear as their `repr`, so that no digit is lost."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def canonical(value: Any, path: str) -> Any:
    """Reduce `value` to dicts, lists, strings, numbers, booleans and None, equal for equal values.

    Args:
        path: where the value stands, for error messages.

    Raises:
        TypeError: a type without canonical form; a guess could make two different engines share a key.
        ValueError: a number that is not finite.
    """
    if isinstance(value, Enum):
        return canonical(value.value, path)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # subclasses such as torch's version string become plain
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return _finite(value, path)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: canonical(getattr(value, field.name), f"{path}.{field.name}")
            for field in dataclasses.fields(value)
            if field.metadata.get("in_key", True)
            and (getattr(value, field.name) or not field.metadata.get("in_key_if_any"))
        }
    return _canonical_container(value, path)


def _canonical_container(value: Any, path: str) -> Any:
    if isinstance(value, Mapping):
        return {
            _canonical_name(name, path): canonical(value[name], f"{path}.{name}") for name in sorted(value, key=str)
        }
    if isinstance(value, (list, tuple)):
        return [canonical(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, (set, frozenset)):
        return sorted((canonical(item, f"{path}{{}}") for item in value), key=canonical_json)
    raise TypeError(
        f"{path} is a {type(value).__name__}, which has no canonical form in an engine's key: "
        f"give it as text, a number or a boolean, or mark its field NOT_IN_KEY"
    )


def _canonical_name(name: Any, path: str) -> str:
    plain = canonical(name, path)
    if not isinstance(plain, str):
        raise TypeError(f"{path} has the name {name!r}, a {type(name).__name__}: names in an engine's key are text")
    return plain


def _finite(value: float, path: str) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{path} is {value!r}: a number in an engine's key must be finite")
    return float(value)


def _required_weights(spec: EngineSpec) -> str:
    if spec.fingerprint.weights is None:
        raise ValueError(
            f"{spec.describe()}: {spec.backend.name} stores the weights inside the engine, so their digest "
            f"belongs to its key, but the fingerprint has none: set `ModelFingerprint.weights` to what "
            f"`ModelSource.weights_digest()` returns"
        )
    return spec.fingerprint.weights


def _at(factors: Factors, path: tuple[str, ...]) -> Any:
    node: Any = factors
    for name in path:
        node = node.get(name) if isinstance(node, Mapping) else None
    return node
