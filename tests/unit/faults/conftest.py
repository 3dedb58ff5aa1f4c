"""A provider whose builds are pretended, in this process."""

from slipstream.tests.unit.engine_cache.conftest import artifact, put, store  # noqa: F401
from slipstream.tests.unit.runtime.conftest import (  # noqa: F401
    _quick_polls,
    _shared_compiler_cache,
    backend,
    provider,
    source,
    worker,
)
