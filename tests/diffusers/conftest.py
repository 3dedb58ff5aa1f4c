"""One engine for all tests of this folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from slipstream.tests.diffusers.support import Built


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    import torch

    from slipstream.engine_cache import EngineStore
    from slipstream.hosts.diffusers import accelerate_unet
    from slipstream.runtime.provider import EngineProvider
    from slipstream.tests.diffusers.support import FIRST_USE, Built, make_inputs, make_unet

    store = EngineStore(tmp_path_factory.mktemp("engines"))
    accelerated = accelerate_unet(make_unet(), EngineProvider(store), FIRST_USE)
    with torch.no_grad():
        accelerated(**make_inputs())
    (entry,) = store.list()
    return Built(store, entry, accelerated)
