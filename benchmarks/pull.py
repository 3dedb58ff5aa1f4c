"""Time the first picture of a new ComfyUI server whose engines are pulled: `python benchmarks/pull.py --help`."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

if __name__ == "__main__":
    # Python put this folder on the path, where our modules would shadow others of their names.
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != HERE]
    runpy.run_path(str(HERE.parent / "__main__.py"), run_name="slipstream_main")["register"]()
    from slipstream.benchmarks.pulling.command import main

    sys.exit(main(sys.argv[1:]))
