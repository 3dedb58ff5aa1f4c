"""The demonstration's own way through ComfyUI: what its table is made of is true."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from slipstream.demo.run import Case, Sample, Teller, Variant
from slipstream.demo.through_comfyui import ComfyUIHost, PromptFailed
from slipstream.sampling.presets import PRESETS

EAGER, ACCELERATED = Variant("eager", accelerate=False), Variant("accelerated", accelerate=True)
SKIPPING = replace(ACCELERATED, name="accelerated+fast", preset="fast")
PLAIN_SKIPPING = replace(EAGER, name="eager+fast", preset="fast")
CASE = Case("a red circle on a blue background", width=64, height=64, steps=4)

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Start:
    """What came of one start of ComfyUI: the plain picture, the accelerated one, and a prompt that cannot run.

    Attributes:
        skipping, plain_skipping: of 12 steps, accelerated and not.
    """

    name: str
    eager: Sample
    accelerated: Sample
    skipping: Sample
    plain_skipping: Sample
    problem: str
    log: str


@pytest.fixture(scope="module")
def start(comfyui_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Start:
    folder = tmp_path_factory.mktemp("demo")
    with ComfyUIHost(comfyui_dir, folder / "engines", folder / "log.txt", Teller()) as host:
        samples = [host.sample(CASE, variant, seed=5) for variant in (EAGER, ACCELERATED)]
        samples += [host.sample(replace(CASE, steps=12), variant, seed=5) for variant in (SKIPPING, PLAIN_SKIPPING)]
        with pytest.raises(PromptFailed) as caught:
            host.sample(replace(CASE, prompt="a striped zebra"), EAGER, seed=1)
    return Start(host.name, *samples, str(caught.value), (folder / "log.txt").read_text())


def test_every_step_is_counted_where_it_ran(start: Start) -> None:
    assert (start.eager.engine_calls, start.eager.eager_calls) == (0, 4)
    assert (start.accelerated.engine_calls, start.accelerated.eager_calls) == (4, 0)
    assert start.accelerated.reasons == []


def test_skipped_steps_call_nothing(start: Start) -> None:
    computed = len(PRESETS["fast"].selection.computed(12))
    assert (start.skipping.engine_calls, start.skipping.eager_calls) == (computed, 0)
    assert (start.plain_skipping.engine_calls, start.plain_skipping.eager_calls) == (0, computed)
    for sample in (start.skipping, start.plain_skipping):
        assert sample.computed_steps == computed < 12 and sample.reasons == []
    assert np.abs(start.skipping.picture.astype(int) - start.plain_skipping.picture.astype(int)).max() <= 1


def test_the_pictures_are_the_same(start: Start) -> None:
    wanted, found = start.eager, start.accelerated
    assert wanted.picture.shape == (64, 64, 3) and wanted.picture.std() > 1
    assert np.linalg.norm(found.latent - wanted.latent) < 1e-4 * np.linalg.norm(wanted.latent)
    assert np.abs(found.picture.astype(int) - wanted.picture.astype(int)).max() <= 1


def test_the_log_tells_of_the_build(start: Start) -> None:
    assert start.log.count("Slipstream: built") == 1


def test_steps_are_timed(start: Start) -> None:
    for sample in (start.eager, start.accelerated):
        assert len(sample.step_seconds) == CASE.steps - 1 and min(sample.step_seconds) > 0


def test_the_host_is_named_with_its_version(start: Start, comfyui_version: tuple[int, ...]) -> None:
    assert start.name == f"ComfyUI {'.'.join(map(str, comfyui_version))}"


def test_a_prompt_that_cannot_run_is_said(start: Start) -> None:
    assert "Demo" in start.problem and "zebra" in start.problem
