"""Precompiled C++ headers of torch: seconds of a build where they are there, and more seconds to make."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_OPTION = "aot_inductor.precompile_headers"


@contextmanager
def headers_with_the_cache() -> Iterator[None]:
    """Let torch make precompiled headers only where the next build finds them: in a compiler cache that is kept.

    Left alone, torch puts them into the folder for temporary files, which goes with the build: making them takes longer
    than one build gains by them. Older and newer torches that do otherwise are left alone.
    """
    from torch._inductor import codecache, config
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    if not hasattr(codecache, "_HEADER_DIR") or _OPTION not in config.get_config_copy():
        yield
        return
    cache = Path(cache_dir())
    if Path(tempfile.gettempdir()) in cache.parents:
        with config.patch({_OPTION: False}):
            yield
        return
    before = codecache._HEADER_DIR, codecache._HEADER_LOCK_DIR
    codecache._HEADER_DIR = str(cache / "precompiled_headers")
    codecache._HEADER_LOCK_DIR = os.path.join(codecache._HEADER_DIR, "locks")
    try:
        yield
    finally:
        codecache._HEADER_DIR, codecache._HEADER_LOCK_DIR = before
