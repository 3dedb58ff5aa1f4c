"""What the store knows about one engine: a versioned JSON file beside the engine's own files."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

from ..core.errors import CorruptEngine, IncompatibleEngine
from ..core.shapes import ShapeProfile
from ..core.spec import Role

JsonText = str | bytes

SCHEMA_VERSION = 1
MANIFEST_NAME = "manifest.json"
VERIFICATIONS_KEPT = 256
"""An engine serves many checkpoints; the oldest of more verifications than this are forgotten."""

_DIGEST = re.compile(r"[0-9a-f]{64}")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._+-]{0,126}[A-Za-z0-9_])?")
_RESERVED_BY_WINDOWS = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.IGNORECASE)


@dataclass(frozen=True)
class FileRecord:
    """One file of an engine: its size and content digest (hex)."""

    bytes: int
    sha256: str

    def __post_init__(self) -> None:
        if self.bytes < 0 or not is_digest(self.sha256):
            raise ValueError(f"{self} is no file record: it takes a size and 64 hex digits")


@dataclass(frozen=True)
class BuildRecord:
    """How long a build took and its phases, in seconds."""

    seconds: float
    phases: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Verification:
    """One comparison of the engine with the eager module, on one set of weights.

    Attributes:
        relative_error: ‖engine − fp32‖/‖fp32‖, the largest over the cases.
        eager_error: the same for the host's own module in its precision; None where it was not measured.
        cases: how many inputs were compared.
        driver: GPU driver it ran on; another one asks for a new verification.
        when: ISO 8601 in UTC.
        note: one line for people, e.g. that the error is above twice eager's.
        device_bytes: device memory that the engine held itself, weights of the host not counted; 0 where unknown.
    """

    relative_error: float
    eager_error: float | None
    cases: int
    precision: str
    driver: str | None = None
    when: str = field(default_factory=lambda: utc_now())
    note: str = ""
    device_bytes: int = 0

    def __post_init__(self) -> None:
        for value in (self.relative_error, self.eager_error or 0.0):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{value!r} is no relative error: what gives NaN or Inf is never kept")


@dataclass(frozen=True)
class Speed:
    """How long a step of sampling takes in the server that makes the pictures, or a call of a VAE or ControlNet.

    Attributes:
        engine_ms, eager_ms: with the engine, and with the user's model without Slipstream: milliseconds, each the
            median of steps that were computed for pictures, once the model was warm.
        when: ISO 8601 in UTC.
        retired: versions of Slipstream, the host, torch and the driver with which the engine was slower than the model
            and is not used; empty where it is used.
    """

    engine_ms: float
    eager_ms: float
    when: str = field(default_factory=lambda: utc_now())
    retired: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for time in (self.engine_ms, self.eager_ms):
            if not 0 < time < math.inf:
                raise ValueError(f"{time!r} is no time of a step in milliseconds")

    @property
    def speedup(self) -> float:
        """The model's time by the engine's."""
        return self.eager_ms / self.engine_ms


@dataclass(frozen=True)
class Manifest:
    """Everything known about one stored engine.

    Attributes:
        digest: of the `EngineKey`; also the name of the entry's folder.
        factors: of the `EngineKey`, so that a later miss can be explained.
        label: one line for people.
        precision: what it computes in, large linear layers of a quantised one aside.
        files: name -> size and sha256. Names are plain: they cannot point outside the entry's folder.
        details: the backend's own facts, plain JSON data.
        created: ISO 8601 in UTC.
        slipstream: version that built the engine.
        signature: for other machines: the maker's public key and its Ed25519 signature of the engine; None where the
            maker's Python had no package for it, and in manifests from before engines were signed.
        verifications: weights digest -> comparison with the eager module on these weights.
        quantised: what its large linear layers multiply in, e.g. "fp8"; None where they compute as the rest does, and
            in manifests from before there were such engines.
        speed: None where it was not measured. Manifests of older versions hold times of single calls in their
            verifications, which are not read: the model was cold when they were taken.
        seal: the code by which the machine that built it knows it again; None in manifests from before engines were
            signed.
    """

    digest: str
    factors: Mapping[str, Any]
    label: str
    role: str
    profile: ShapeProfile
    precision: str
    optimize: str
    backend: str
    files: Mapping[str, FileRecord]
    slipstream: str
    build: BuildRecord
    details: Mapping[str, Any] = field(default_factory=dict)
    created: str = field(default_factory=lambda: utc_now())
    signature: str | None = None
    verifications: Mapping[str, Verification] = field(default_factory=dict)
    quantised: str | None = None
    speed: Speed | None = None
    seal: str | None = None

    def __post_init__(self) -> None:
        if not is_digest(self.digest):
            raise ValueError(f"{self.digest!r} is no digest: it takes 64 hex digits")
        check_file_names(self.files)

    @property
    def bytes(self) -> int:
        """Size of the engine's files on disk."""
        return sum(record.bytes for record in self.files.values())

    @property
    def precision_name(self) -> str:
        """For people, the word by which they chose what it computes in, e.g. "fp16" or "fp8"."""
        return self.quantised or self.precision

    @property
    def profiles(self) -> tuple[ShapeProfile, ...]:
        """All shapes that the engine takes."""
        more = self.factors.get("spec", {}).get("more_profiles", ())
        return self.profile, *(ShapeProfile.from_factors(profile) for profile in more)

    @property
    def worst_error(self) -> float | None:
        """The largest relative error of its verifications; None before the first."""
        return max((result.relative_error for result in self.verifications.values()), default=None)

    @property
    def timed_by(self) -> str:
        """What `speed` is the time of, for people: "step" of sampling, or "call" of a VAE or ControlNet."""
        return "step" if self.role == Role.UNET.value else "call"

    def with_verification(self, weights_digest: str, result: Verification) -> Manifest:
        """A copy that also knows `result`; it replaces an earlier one for the same weights."""
        others = {name: known for name, known in self.verifications.items() if name != weights_digest}
        kept = dict(list(others.items())[-(VERIFICATIONS_KEPT - 1) :])
        return replace(self, verifications={**kept, weights_digest: result})

    def to_json(self) -> str:
        """The text of the manifest file.

        Raises:
            TypeError: `details` or `factors` hold something other than plain data.
            ValueError: they hold a number that is not finite.
        """
        data = {"schema_version": SCHEMA_VERSION, **{name: getattr(self, name) for name in _PLAIN_FIELDS}}
        data["profile"] = self.profile.to_json()
        data["files"] = {name: asdict(record) for name, record in self.files.items()}
        data["build"] = {"seconds": self.build.seconds, "phases": dict(self.build.phases)}
        data["verifications"] = {name: asdict(result) for name, result in self.verifications.items()}
        data["speed"] = None if self.speed is None else {**vars(self.speed), "retired": dict(self.speed.retired)}
        return json.dumps(data, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: JsonText, source: str = "manifest") -> Manifest:
        """Read a manifest file.

        Args:
            source: what the text was read from, for messages.

        Raises:
            IncompatibleEngine: written by a newer Slipstream.
            CorruptEngine: not a manifest, or a field is missing, of the wrong type or out of range.
        """
        try:
            data = json.loads(text, parse_float=_finite, parse_constant=_finite)
        except (ValueError, RecursionError) as error:
            raise CorruptEngine(f"{source} is not readable JSON ({error}). {_REBUILD}") from error
        if not isinstance(data, dict):
            raise CorruptEngine(f"{source} holds no manifest. {_REBUILD}")
        _check_schema(data.get("schema_version"), source)
        try:
            return _from_data(data)
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise CorruptEngine(f"{source} is not a valid manifest: {error}. {_REBUILD}") from error


_TEXTS = ("digest", "label", "role", "precision", "optimize", "backend", "slipstream", "created")
_OPTIONAL_TEXTS = ("signature", "quantised", "seal")
_PLAIN_FIELDS = (*_TEXTS, *_OPTIONAL_TEXTS, "factors", "details")
_REBUILD = "The engine is rebuilt when it is next asked for."


def is_digest(text: object) -> bool:
    return isinstance(text, str) and _DIGEST.fullmatch(text) is not None


def utc_now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def check_file_names(names: Mapping[str, Any] | tuple[str, ...]) -> None:
    """Refuse names that could leave the entry's folder, or that some operating system cannot hold.

    Raises:
        ValueError: names the offender.
    """
    seen: set[str] = set()
    for name in names:
        plain = isinstance(name, str) and _PLAIN_NAME.fullmatch(name) and not _RESERVED_BY_WINDOWS.fullmatch(name)
        if not plain or name.lower() == MANIFEST_NAME:
            raise ValueError(f"{name!r} is not allowed as the name of an engine's file")
        if name.lower() in seen:
            raise ValueError(f"{name!r} occurs twice among an engine's files (upper and lower case count as one)")
        seen.add(name.lower())


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no finite number")
    return value


def _check_schema(version: object, source: str) -> None:
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise CorruptEngine(f"{source} has no valid schema_version ({version!r}). {_REBUILD}")
    if version > SCHEMA_VERSION:
        raise IncompatibleEngine(
            f"{source} has schema {version}, this Slipstream reads up to {SCHEMA_VERSION}: a newer one wrote "
            f"it. Update Slipstream to use this engine, or let this version build its own."
        )


def _from_data(data: dict[str, Any]) -> Manifest:
    verifications = _take(data, "verifications", dict)
    return Manifest(
        **{name: _take(data, name, str) for name in _TEXTS},
        **{name: _take(data, name, dict) for name in ("factors", "details")},
        **{name: _take_or_none(data, name, str) for name in _OPTIONAL_TEXTS},
        profile=ShapeProfile.from_json(_take(data, "profile", dict)),
        files={
            name: FileRecord(_take(record, "bytes", int), _take(record, "sha256", str))
            for name, record in _take(data, "files", dict).items()
        },
        build=_build(_take(data, "build", dict)),
        verifications={name: _verification(_take(verifications, name, dict)) for name in verifications},
        speed=None if data.get("speed") is None else _speed(_take(data, "speed", dict)),
    )


def _speed(data: Mapping[str, Any]) -> Speed:
    retired = _take(data, "retired", dict)
    return Speed(
        engine_ms=_take(data, "engine_ms", float),
        eager_ms=_take(data, "eager_ms", float),
        when=_take(data, "when", str),
        retired={name: _take(retired, name, str) for name in retired},
    )


def _verification(data: Mapping[str, Any]) -> Verification:
    return Verification(
        relative_error=_take(data, "relative_error", float),
        eager_error=_take_or_none(data, "eager_error", float),
        cases=_take(data, "cases", int),
        precision=_take(data, "precision", str),
        driver=_take_or_none(data, "driver", str),
        when=_take(data, "when", str),
        note=_take(data, "note", str),
        device_bytes=_take_or_none(data, "device_bytes", int) or 0,
    )


def _build(data: Mapping[str, Any]) -> BuildRecord:
    phases = _take(data, "phases", dict)
    return BuildRecord(_take(data, "seconds", float), {name: _take(phases, name, float) for name in phases})


def _take(data: Mapping[str, Any], name: str, kind: type) -> Any:
    value = data.get(name)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        found = f"is a {type(value).__name__}" if name in data else "is missing"
        raise ValueError(f"its {name!r} {found}, expected a {kind.__name__}")
    return value


def _take_or_none(data: Mapping[str, Any], name: str, kind: type) -> Any:
    return None if data.get(name) is None else _take(data, name, kind)
