"""Engines of blocks that are the traced program itself, "built" in this process: for tests of what goes on around them.

What is real: kinds, forms, sizes that programs leave open, keys, the store, weights as arguments, comparisons.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.compile_backend.blocks.backend import BlockBackend
from slipstream.compile_backend.blocks.engine import BlockEngine
from slipstream.compile_backend.blocks.program import SIGNATURE, BlockSignature, export_block
from slipstream.compile_backend.rewrites.traced_module import module_of
from slipstream.core.protocols import Artifact
from slipstream.core.spec import Role
from slipstream.engine_cache import EngineStore
from slipstream.runtime.blocks import block_engines
from slipstream.runtime.building import build
from slipstream.runtime.building.job_file import as_plain, from_plain
from slipstream.runtime.building.worker_process import Built
from slipstream.runtime.provider import EngineProvider

PROGRAM = "program"
_alone = threading.RLock()
"""torch traces one program at a time, while no other thread makes a module of one, calls that, or writes a tensor as a
text."""
_programs: dict[str, tuple[Any, BlockSignature]] = {}
"""By what the build process would be asked for, as the file `PROGRAM` has it: each is traced once, whichever store it
is for, and torch does not read all programs again that it wrote. Code that a test patches is no part of that."""


class QuickBlockBackend(BlockBackend):
    """Loads what `build_here` made.

    Attributes:
        calls: of all engines that it loaded.
        factor: by which engines' results are wrong.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.factor = 1.0

    def why_cannot_build(self, device: torch.device) -> str | None:
        return None

    def load_block(self, artifact: Artifact, device: torch.device) -> BlockEngine:
        signature = BlockSignature.read(artifact.directory)
        with _alone:
            program, _ = _programs[(artifact.directory / PROGRAM).read_text()]
            module = module_of(program)
        count = len(signature.dtypes)

        def run(given: list[torch.Tensor]) -> Any:
            self.calls += 1
            with _alone:
                results = module(given[:count], given[count:])
            return [result * self.factor for result in results]

        return BlockEngine(signature, run)


def build_here(job: Any, progress: Any, cancel: Any, **_: Any) -> Built:
    """In the place of the build process."""
    asked = json.dumps(as_plain(replace(job, directory=Path(), keep=None)))
    with _alone:
        if asked not in _programs:
            crossed = from_plain(json.loads(asked))  # as it does to the build process
            _programs[asked] = export_block(crossed, crossed.architecture)
    _, signature = _programs[asked]
    signature.save(job.directory)
    (job.directory / PROGRAM).write_text(asked)
    return Built(Artifact(job.directory, (PROGRAM, SIGNATURE), {"nodes": signature.nodes}), {"export": 0.1})


@contextmanager
def quick_block_provider(store: EngineStore) -> Iterator[EngineProvider]:
    """A provider whose engines of blocks take no compiler; builds run one at a time."""
    with pytest.MonkeyPatch.context() as patch:
        others = build.run_build

        def run_build(job: Any, *args: Any, **options: Any) -> Built:
            make = build_here if job.spec.role is Role.BLOCK else others
            return make(job, *args, **options)

        patch.setattr(build, "run_build", run_build)
        patch.setattr(block_engines, "builds_at_once", lambda **_: 1)
        provider = EngineProvider(store)
        provider.blocks.backend = QuickBlockBackend()
        yield provider
        provider.end_builds("the test is over", 5)
