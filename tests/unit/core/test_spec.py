"""Specs and environments: values that cannot change once made."""

from __future__ import annotations

import dataclasses
import importlib
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.core import environment as module
from slipstream.core.environment import Environment
from slipstream.core.shapes import ShapeProfile
from slipstream.core.spec import BackendConfig, EngineSpec, ModelFingerprint, Optimize, Precision, Quantised, Role


def spec(**changes: Any) -> EngineSpec:
    fields: dict[str, Any] = {
        "role": Role.UNET,
        "fingerprint": ModelFingerprint("0123456789abcdef", "SD15"),
        "profile": ShapeProfile.static({"x": (2, 4, 64, 64)}),
        "dtypes": {"x": "float16", "context": "float16"},
        "output_dtype": "float16",
        "precision": Precision.FP16,
        "optimize": Optimize.BALANCED,
        "backend": BackendConfig("compiled", {"b": 1, "a": 2}),
    }
    return EngineSpec(**{**fields, **changes})


def test_order_of_options_and_dtypes_does_not_count() -> None:
    other = spec(dtypes={"context": "float16", "x": "float16"}, backend=BackendConfig("compiled", {"a": 2, "b": 1}))
    assert other == spec()
    assert list(spec().dtypes) == ["context", "x"] and list(spec().backend.options) == ["a", "b"]


def test_a_spec_does_not_change_with_the_dictionary_it_was_made_of() -> None:
    options = {"a": 1}
    config = BackendConfig("compiled", options)
    options["a"] = 2
    assert config.options["a"] == 1
    with pytest.raises(TypeError):
        config.options["a"] = 3  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec().precision = Precision.FP32  # type: ignore[misc]


def test_in_words() -> None:
    assert spec().describe() == "SD15 unet fp16 (x 2×4×64×64)"
    unnamed = spec(fingerprint=ModelFingerprint("0123456789abcdef"), role=Role.VAE_DECODE)
    assert unnamed.describe() == "01234567 vae_decode fp16 (x 2×4×64×64)"


def test_a_quantised_engine_goes_by_the_word_that_was_chosen() -> None:
    quantised = spec(quantised=Quantised.FP8)
    assert (quantised.precision_name, quantised.precision, spec().precision_name) == ("fp8", Precision.FP16, "fp16")
    assert quantised.describe() == "SD15 unet fp8 (x 2×4×64×64)"


def test_the_environment_of_this_machine() -> None:
    found = Environment.current("cpu", ("filelock", "no-such-package"))
    assert found == Environment.current(torch.device("cpu"), ("no-such-package", "filelock"))
    assert found.device == "cpu" and found.threads == torch.get_num_threads() and found.cpu
    assert found.torch == torch.__version__
    assert list(found.versions) == ["filelock"]
    assert (found.gpu, found.cuda, found.compute_capability) == (None, None, None)


def test_a_package_that_is_installed_later_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    assert not Environment.current("cpu", ("come-later",)).versions
    metadata = tmp_path / "come_later-1.2.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: come-later\nVersion: 1.2\n", encoding="utf-8")
    importlib.invalidate_caches()
    assert Environment.current("cpu", ("come-later",)).versions == {"come-later": "1.2"}


def test_a_gpu_counts_instead_of_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"card {device.index}")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(module, "driver_version", lambda: "580.1")
    found = Environment.current("cuda:1")
    assert (found.device, found.gpu, found.compute_capability, found.cuda) == ("cuda", "card 1", "9.0", "13.0")
    assert (found.threads, found.driver) == (0, "580.1")
    assert found.cpu == Environment.current("cpu").cpu, "a GPU engine's own host code is compiled for this CPU too"


@pytest.mark.parametrize("changed", ["avx512_vnni", "fma"])
def test_code_for_this_cpu_is_not_for_one_that_lacks_an_instruction(
    monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    """Packages are compiled for the very machine: others of the same vector level may not run them."""
    flags = ["fpu", "fma", "avx512f", "avx512_vnni", "ibrs"]

    def cpu(*without: str) -> str | None:
        module._instructions.cache_clear()
        monkeypatch.setattr(module, "_cpu_flags", lambda: [flag for flag in flags if flag not in without])
        return Environment.current().cpu

    try:
        assert cpu() != cpu(changed)
        assert cpu() == cpu("ibrs"), "what no compiler asks for comes and goes with kernels"
    finally:
        module._instructions.cache_clear()


@pytest.mark.gpu
def test_the_environment_of_this_gpu() -> None:
    found = Environment.current("cuda")
    assert found.device == "cuda" and found.gpu and found.compute_capability and found.cuda and found.driver
    assert found.driver.split(".")[0].isdigit()


def test_specs_and_environments_reach_another_process() -> None:
    for value in (spec(), spec(quantised=Quantised.INT8), Environment.current("cpu", ("filelock",))):
        assert pickle.loads(pickle.dumps(value)) == value
