"""Slipstream's command line: `python -m slipstream`, or uninstalled `python <folder of the pack>`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

PACKAGE = "slipstream"
ROOT = Path(__file__).resolve().parent


def register() -> None:
    """Make the folder that holds this file importable as `slipstream`, whatever its name is."""
    # Python put the folder itself on the path, where our `nodes` would shadow ComfyUI's.
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]
    spec = importlib.util.spec_from_file_location(PACKAGE, ROOT / "__init__.py", submodule_search_locations=[str(ROOT)])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE] = module
    spec.loader.exec_module(module)


def main() -> int:
    """Run the command line and return its exit status."""
    if __package__ != PACKAGE:
        register()
    from slipstream.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
