"""How build processes are started: the command, and the variables that all of them have in common."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch

from ...core.programs import NOTHING, PIPE, Program, Stream, start

ROOT = Path(__file__).resolve().parents[2]

INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"
"""The variable by which torch's compiler is told where to keep what it makes."""

_ONE_OF_MANY = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
"""Variables of processes of which there are as many as cores: as it is imported, torch's compiler would start a pool of
further processes in each."""


def start_worker(
    word: str,
    folder: Path,
    environment: Mapping[str, str],
    given: Stream = PIPE,
    output: Stream = PIPE,
    errors: Stream = NOTHING,
) -> Program:
    """Start a build process.

    Args:
        word: what it does, see `cli.main`.
        folder: where it runs.
        given, output, errors: its standard streams.

    Raises:
        OSError: it cannot be started.
    """
    command = [sys.executable, *_flags(), str(ROOT), "worker", word]
    return start(command, folder, environment, given=given, output=output, errors=errors, own_group=True)


def environment_of_workers() -> dict[str, str]:
    """This process's variables, and the number of threads for which CPU code is laid out: the host's."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    folders = sys.modules.get("torch._inductor.runtime.cache_dir_utils")
    if INDUCTOR in environment and folders is not None:
        with suppress(Exception):  # a user without a name, say
            if environment[INDUCTOR] == folders.default_cache_dir():
                del environment[INDUCTOR]  # torch wrote it there itself; the user has chosen none
    return environment


def environment_of_many() -> dict[str, str]:
    """The same, for processes that run side by side."""
    return {**environment_of_workers(), **_ONE_OF_MANY}


def _flags() -> list[str]:
    """Those of the host that decide which packages Python finds: ComfyUI's Windows portable starts with -s."""
    flags = {"-I": sys.flags.isolated, "-E": sys.flags.ignore_environment, "-s": sys.flags.no_user_site}
    return [flag for flag, is_set in flags.items() if is_set]
