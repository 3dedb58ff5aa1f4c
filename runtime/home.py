"""Where engines are kept."""

from __future__ import annotations

import os
from pathlib import Path


def store_home(host_default: Path | None = None) -> Path:
    """`SLIPSTREAM_HOME`, else the host's own place for models, else the user's cache folder."""
    if configured := os.environ.get("SLIPSTREAM_HOME"):
        return Path(configured).expanduser()
    return host_default or Path.home() / ".cache" / "slipstream" / "engines"
