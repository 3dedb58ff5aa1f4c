"""A provider whose builds are pretended, in this process."""

from slipstream.tests.unit.engine_cache.conftest import artifact, put, store  # noqa: F401
from slipstream.tests.unit.runtime.conftest import _quick_polls, backend, provider, source, worker  # noqa: F401
