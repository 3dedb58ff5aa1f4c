"""The demonstration's own way through ComfyUI: what its table is made of is true."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from slipstream.demo.run import Case, Sample, Teller, Variant
from slipstream.demo.through_comfyui import ComfyUIHost, PromptFailed

EAGER, ACCELERATED = Variant("eager", accelerate=False), Variant("accelerated", accelerate=True)
CASE = Case("a red circle on a blue background", width=64, height=64, steps=4)


def start(checkout: Path, folder: Path, name: str) -> ComfyUIHost:
    return ComfyUIHost(checkout, folder / "engines", folder / f"{name}.txt", Teller())


@pytest.fixture(scope="module")
def starts(comfyui_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Sample], list[str], str]:
    """The plain picture and two accelerated ones, each from a start of its own; the logs; what the host is called."""
    folder = tmp_path_factory.mktemp("demo")
    with start(comfyui_dir, folder, "cold") as host:
        samples = [host.sample(CASE, variant, seed=5) for variant in (EAGER, ACCELERATED)]
    with start(comfyui_dir, folder, "warm") as host:
        samples.append(host.sample(CASE, ACCELERATED, seed=5))
    return samples, [(folder / f"{name}.txt").read_text() for name in ("cold", "warm")], host.name


def test_every_step_is_counted_where_it_ran(starts) -> None:
    samples, _, _ = starts
    assert [(sample.engine_calls, sample.eager_calls) for sample in samples] == [(0, 4), (4, 0), (4, 0)]
    assert [sample.reasons for sample in samples] == [[], [], []]


def test_the_pictures_are_the_same(starts) -> None:
    (eager, cold, warm), _, _ = starts
    assert eager.picture.shape == (64, 64, 3) and eager.picture.std() > 1
    for sample in (cold, warm):
        assert np.linalg.norm(sample.latent - eager.latent) < 1e-4 * np.linalg.norm(eager.latent)
        assert np.abs(sample.picture.astype(int) - eager.picture.astype(int)).max() <= 1


def test_only_the_cold_start_builds(starts) -> None:
    _, (cold, warm), _ = starts
    assert cold.count("Slipstream: built") == 1
    assert "Slipstream: built" not in warm and "Slipstream: cache hit" in warm


def test_steps_are_timed(starts) -> None:
    samples, _, _ = starts
    assert all(len(sample.step_seconds) == CASE.steps - 1 and min(sample.step_seconds) > 0 for sample in samples)


def test_the_host_is_named_with_its_version(starts, comfyui_version) -> None:
    assert starts[2].startswith("ComfyUI ") and starts[2].split()[1][0].isdigit()


def test_a_prompt_that_cannot_run_is_said(comfyui_dir: Path, tmp_path: Path) -> None:
    with start(comfyui_dir, tmp_path, "wrong") as host, pytest.raises(PromptFailed, match=r"Demo.*zebra"):
        host.sample(Case("a striped zebra", width=64, height=64, steps=1), EAGER, seed=1)
