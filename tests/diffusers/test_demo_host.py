"""The demonstration's own way through diffusers: what its table is made of is true."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("diffusers", reason="no diffusers")
pytest.importorskip("rich", reason="no rich")

from slipstream.demo import model
from slipstream.demo.run import VARIANTS, Case, Sample
from slipstream.demo.through_diffusers import DiffusersHost
from slipstream.engine_cache import EngineStore
from slipstream.hosts.diffusers import accelerate_unet, skip_steps
from slipstream.runtime.provider import EngineProvider
from slipstream.runtime.settings.model_settings import BuildPolicy, Settings
from slipstream.sampling.presets import PRESETS

pytestmark = [
    pytest.mark.diffusers,
    pytest.mark.skipif(not (model.WEIGHTS / "unet.safetensors").is_file(), reason="the demo model is not trained"),
]

CASE = Case("a red circle on a blue background", width=64, height=64, steps=20)


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Sample]:
    """Of each variant; there is no engine, so accelerated ones stay eager."""
    provider = EngineProvider(EngineStore(tmp_path_factory.mktemp("engines")))
    host = DiffusersHost(
        lambda unet: accelerate_unet(unet, provider, Settings(policy=BuildPolicy.MANUAL)),
        lambda pipeline, preset, tell: skip_steps(pipeline, PRESETS[preset], tell),
    )
    assert host.name.startswith("diffusers ")
    return {variant.name: host.sample(CASE, variant, seed=5) for variant in VARIANTS}


def test_every_call_is_counted(samples: dict[str, Sample]) -> None:
    computed = len(PRESETS["balanced"].selection.computed(CASE.steps))
    for variant in VARIANTS:
        sample = samples[variant.name]
        calls, told = (computed, computed) if variant.preset else (CASE.steps, 0)
        assert (sample.engine_calls, sample.eager_calls, sample.computed_steps) == (0, calls, told)
        assert bool(sample.reasons) == variant.accelerate, "only the missing engine is a reason"
        assert len(sample.step_seconds) == CASE.steps - 1


def test_the_pictures(samples: dict[str, Sample]) -> None:
    plain, skipping = samples["eager"], samples["eager+balanced"]
    assert np.array_equal(samples["accelerated"].latent, plain.latent)
    assert np.array_equal(samples["accelerated+balanced"].latent, skipping.latent)
    assert 0 < np.linalg.norm(skipping.latent - plain.latent) < 0.2 * np.linalg.norm(plain.latent)
    assert plain.picture.shape == (64, 64, 3) and plain.picture.std() > 1
