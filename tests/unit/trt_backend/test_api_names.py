"""The stored names are those of the installed TensorRT, and the fake keeps to them."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from slipstream.tests.unit.trt_backend.fakes.fake_tensorrt import api_names, fake_tensorrt


def test_the_installed_tensorrt_has_these_names() -> None:
    trt: Any = pytest.importorskip("tensorrt_rtx_bindings", reason="no TensorRT for RTX", exc_type=ImportError)
    if not trt.__version__.startswith("1.7.1"):
        pytest.skip(f"TensorRT for RTX {trt.__version__} is not the one that was listed")
    stored = api_names()["rtx-1.7.1"]
    found = {name: [m for m in dir(getattr(trt, name)) if not m.startswith("_")] for name in stored}
    assert {name: members.split() for name, members in stored.items()} == found


def test_the_fakes_severities_are_the_real_ones() -> None:
    trt: Any = pytest.importorskip("tensorrt_rtx_bindings", reason="no TensorRT for RTX", exc_type=ImportError)
    fake = fake_tensorrt("rtx-1.7.1")
    for name in ("INTERNAL_ERROR", "ERROR", "WARNING", "INFO", "VERBOSE"):
        assert int(getattr(fake.ILogger.Severity, name)) == int(getattr(trt.ILogger.Severity, name))
    flag = "STRONGLY_TYPED"
    real = getattr(trt.NetworkDefinitionCreationFlag, flag)
    assert int(getattr(fake.NetworkDefinitionCreationFlag, flag)) == int(real)


@pytest.mark.parametrize(
    ("release", "owner", "member"),
    [
        ("8.6.1", "BuilderFlag", "STRIP_PLAN"),
        ("8.6.1", "DataType", "BF16"),
        ("8.6.1", "Refitter", "refit_cuda_engine_async"),
        ("10.0.1", "IExecutionContext", "set_device_memory"),
        ("11.4.0", "NetworkDefinitionCreationFlag", "EXPLICIT_BATCH"),
        ("11.4.0", "ICudaEngine", "device_memory_size"),
        ("11.4.0", "BuilderFlag", "FP16"),
        ("rtx-1.7.1", "BuilderFlag", "FP16"),
    ],
)
def test_what_a_release_lacks_is_not_there(release: str, owner: str, member: str) -> None:
    with pytest.raises(AttributeError, match=rf"{release} has no {owner}.{member}"):
        getattr(getattr(fake_tensorrt(release), owner), member)


def test_a_class_that_a_release_lacks() -> None:
    with pytest.raises(AttributeError, match=r"8.6.1 has no IProgressMonitor"):
        _ = fake_tensorrt("8.6.1").IProgressMonitor
    with pytest.raises(AttributeError, match=r"11.4.0 has no ComputeCapability"):
        _ = fake_tensorrt("11.4.0").ComputeCapability


def test_instances_are_as_strict() -> None:
    trt = fake_tensorrt("8.6.1")

    class Listener(trt.ILogger):  # type: ignore[misc,name-defined]
        def log(self, severity: Any, message: str) -> None:
            pass

    config = trt.Builder(Listener()).create_builder_config()
    config.builder_optimization_level = 4
    assert config.builder_optimization_level == 4
    with pytest.raises(AttributeError, match=r"8.6.1 has no IBuilderConfig.progress_monitor"):
        config.progress_monitor = None
    assert not hasattr(config, "progress_monitor") and hasattr(
        fake_tensorrt("10.0.1").IBuilderConfig, "progress_monitor"
    )


@pytest.mark.parametrize("name", ["tensorrt_rtx_bindings"])
def test_the_real_buffer_is_as_bare_as_the_fakes(name: str) -> None:
    pytest.importorskip(name, reason=f"no {name}", exc_type=ImportError)
    real, fake = importlib.import_module(name), fake_tensorrt("rtx-1.7.1")
    for made in (real.IHostMemory, fake.IHostMemory):
        assert getattr(made, "__len__", None) is None and getattr(made, "__getitem__", None) is None
