"""Tests that hold for every TensorRT ask for `release`."""

from __future__ import annotations

import pytest

from slipstream.tests.unit.trt_backend.fakes.fake_tensorrt import RELEASES


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    """Each TensorRT."""
    return str(request.param)
