"""Keys to store engines under."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from slipstream.core.environment import Environment
from slipstream.core.shapes import ShapeProfile
from slipstream.core.spec import BackendConfig, EngineSpec, ModelFingerprint, Optimize, Precision, Role
from slipstream.engine_cache import EngineKey

WEIGHTS = "b" * 64


def make_spec(**changes: Any) -> EngineSpec:
    """An SD1.5-like UNet; `changes` replace fields of the spec."""
    fields: dict[str, Any] = {
        "role": Role.UNET,
        "fingerprint": ModelFingerprint("a" * 64, "SD15", WEIGHTS),
        "profile": ShapeProfile.static({"x": (2, 4, 64, 64), "timesteps": (2,), "context": (2, 77, 768)}),
        "dtypes": {"x": "float16", "timesteps": "float32", "context": "float16"},
        "output_dtype": "float16",
        "precision": Precision.FP16,
        "optimize": Optimize.BALANCED,
        "backend": BackendConfig("compiled", {"freezing": False, "level": 3, "factor": 0.5}),
    }
    return EngineSpec(**{**fields, **changes})


def make_environment(**changes: Any) -> Environment:
    fields: dict[str, Any] = {
        "device": "cpu",
        "os": "Linux",
        "machine": "x86_64",
        "torch": "2.12.0",
        "cpu": "AVX512",
        "threads": 1,
        "versions": {"triton": "3.6.0"},
    }
    return Environment(**{**fields, **changes})


def make_key(height: int = 64, **environment: Any) -> EngineKey:
    """A key of its own for each height."""
    shapes = {"x": (2, 4, height, 64), "timesteps": (2,), "context": (2, 77, 768)}
    return EngineKey(make_spec(profile=ShapeProfile.static(shapes)), make_environment(**environment))


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)
