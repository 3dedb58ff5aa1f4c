"""The language of ComfyUI's page, as its settings on disk say."""

from __future__ import annotations

import json
from pathlib import Path

_known: list[tuple[int, str | None]] = []


def page_language() -> str | None:
    """That the first user chose, such as `zh`; None where nobody chose one, and each browser goes by its own."""
    import folder_paths

    file = Path(folder_paths.get_user_directory()) / "default" / "comfy.settings.json"
    try:
        changed = file.stat().st_mtime_ns
        if not _known or _known[0][0] != changed:
            _known[:] = [(changed, _read(file))]
    except (OSError, ValueError):
        return None
    return _known[0][1]


def _read(file: Path) -> str | None:
    settings = json.loads(file.read_bytes())
    chosen = settings.get("Comfy.Locale") if isinstance(settings, dict) else None
    return chosen if isinstance(chosen, str) else None
