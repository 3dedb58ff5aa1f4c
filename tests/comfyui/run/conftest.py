"""What tests of a sampling run share."""

from __future__ import annotations

from collections.abc import Iterator

import comfy.model_management as management
import pytest


@pytest.fixture
def nothing_loaded() -> Iterator[None]:
    """No model is loaded when a test begins, and ComfyUI knows of none when it has ended."""
    management.unload_all_models()
    management.current_loaded_models.clear()
    yield
    management.current_loaded_models.clear()
