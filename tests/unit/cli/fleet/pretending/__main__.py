"""The real command line, runtime and store in a process of its own, with a model and a backend that compile nothing.

In the folder `PRETENDED` each build leaves a file. A build that finds a file `doomed-<model>` there removes it, and
ends with the process that started it, as where a machine is lost.
"""

from __future__ import annotations

import functools
import os
import runpy
import signal
import sys
import uuid
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[5]
runpy.run_path(str(ROOT / "__main__.py"))["register"]()

from slipstream.cli import build, sharing  # noqa: E402
from slipstream.cli.commands import run  # noqa: E402
from slipstream.engine_cache.travel.lease import Lease  # noqa: E402
from slipstream.runtime import provider as providers  # noqa: E402
from slipstream.runtime.building import build as building  # noqa: E402
from slipstream.tests.unit.cli.support import FakeBackend, fake_model  # noqa: E402

FOLDER = Path(os.environ["PRETENDED"])


class Counted(FakeBackend):
    def run_build(self, *arguments: Any, **named: Any) -> Any:
        model = sys.argv[sys.argv.index("--model") + 1]
        doomed = FOLDER / f"doomed-{model}"
        if doomed.exists():
            doomed.unlink()
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        (FOLDER / f"built-{uuid.uuid4().hex}").touch()
        return super().run_build(*arguments, **named)


backend = Counted()
building.run_build = backend.run_build
build.load_model = lambda *_: fake_model()
providers.EngineProvider = functools.partial(providers.EngineProvider, backends=[backend])
sharing.Lease = functools.partial(Lease, seconds=2.0)
sys.exit(run(sys.argv[1:]))
