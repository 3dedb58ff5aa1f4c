"""The command: servers, prompts, and what came of them in `benchmarks/results/soak.json`."""

from __future__ import annotations

import json
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from ...runtime.checking.measure import commit
from ..in_server.cases import forget_references
from ..in_server.command import MODELS, version_of
from ..in_server.process import Installation
from ..measuring.deadline import Deadline
from ..model_files.checkpoints import make, missing
from ..subjects.cases import enter
from .account import Account, Report
from .servers import SoakServers
from .subjects import SUBJECTS, Subject
from .wishes import wish_of

RESULTS = Path(__file__).resolve().parents[1] / "results" / "soak.json"
ON_GPU = RESULTS.with_name("soak-cuda.json")
AGAIN = RESULTS.with_name("soak-again.json")
"""Of prompts that are repeated: the accounts of all stay."""
PROGRAM = Path(__file__).resolve().parents[1] / "soak.py"
FLAGS = {"cpu": ("--cpu", "--use-pytorch-cross-attention"), "cuda": ()}
OPTIMIZE = {"cpu": "fast build", "cuda": None}
TOLERANCE = 4 / 255
"""By which a picture, from 0 to 1, may differ from that of the same prompt without Slipstream: on the CPU any value of
it, on a GPU, which computes in half precision, the root mean square."""
RSS_GROWTH_MB, HANDLES_GROWTH = 5.0, 1.0
"""By which memory, beyond what ComfyUI's grows by itself, and open files may grow in 100 prompts of the second half."""
_CHECK_EVERY, _COUNT_EVERY = 100, 25
"""Prompts after which the store is verified, and objects are counted."""


def main(words: list[str]) -> int:
    """Run a soak; status 0 where every picture was right, no server died, and memory was flat."""
    options = _options(words)
    subject = SUBJECTS[options.subject](options.optimize or OPTIMIZE[options.device])
    if options.make_models:
        return _make_models_here(options, subject)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # whoever ends the command ends its servers, too
    numbers, out = _numbers(options), _out(options)
    account = Account(
        options.seed, options.commit or commit() or "unknown", options.device, options.subject,
        version_of(options.comfyui), len(numbers), round(options.tolerance, 4), RSS_GROWTH_MB, HANDLES_GROWTH,
        options.plain, options.host_growth,
    )  # fmt: skip
    report = Report(account, out, options.rows or out.with_suffix(".jsonl"))
    began, deadline = time.monotonic(), Deadline(options.limit)
    with ExitStack() as ending:
        work = Path(options.work or ending.enter_context(tempfile.TemporaryDirectory(prefix="slipstream-soak-")))
        installation = _installation(options, subject, work)
        try:
            servers = SoakServers(installation, _flags(options), subject, account, ending)
            for number in numbers:
                if not deadline.seconds_left:
                    break
                row = servers.run(wish_of(options.seed, number, subject))
                if account.prompts % _COUNT_EVERY == 1:
                    row["objects"] = servers.objects()
                report.add(row, time.monotonic() - began)
                if account.prompts % _CHECK_EVERY == 0 or account.prompts == len(numbers):
                    account.stale_engines = max(account.stale_engines, servers.stale_engines())
        finally:
            report.write()
    print(json.dumps(asdict(account), indent=1))
    for failure in (failures := account.failures()):
        print(f"FAILED {failure}", file=sys.stderr)
    if account.prompts < account.wanted:
        print(f"ended by --limit after {account.prompts} of {account.wanted} prompts", file=sys.stderr)
    return 1 if failures else 0


def _options(words: list[str]) -> Namespace:
    parser = ArgumentParser(
        prog="soak.py", description="Runs random prompts in a real ComfyUI and checks each picture."
    )
    add = parser.add_argument
    add("--comfyui", type=Path, required=True, metavar="DIR", help="the ComfyUI to run")
    add("--python", type=Path, default=Path(sys.executable), help="that starts it; default: this one")
    add("--device", choices=sorted(FLAGS), default="cpu", help="that computes; default: %(default)s")
    add("--subject", choices=list(SUBJECTS), default="demo", help="the model; default: %(default)s")
    add("--optimize", metavar="WORDS", help="how engines are built; default: fast build on a CPU, else the nodes' own")
    add("--flags", default="", metavar="WORDS", help='further flags of ComfyUI, as in --flags="--front-end-root DIR"')
    add("--prompts", type=int, default=1000, metavar="N", help="default: %(default)s")
    add("--seed", type=int, default=20261, help="of the whole soak; default: %(default)s")
    add("--first", type=int, default=0, metavar="N", help="number of the first prompt; default: %(default)s")
    add("--only", type=int, nargs="+", metavar="N", help="these prompts alone, by their numbers")
    add("--any", type=int, metavar="N", help="so many of them alone, drawn by chance each time")
    add("--limit", type=float, metavar="SECONDS", help="after which no further prompt begins; default: there is none")
    add("--tolerance", type=float, default=TOLERANCE, help="of pictures, from 0 to 1; default: 4/255")
    add("--plain", action="store_true", help="without Slipstream's nodes, to see how much ComfyUI's memory grows")
    add("--host-growth", type=float, default=0.0, metavar="MB", help="the rss_growth_mb that --plain has found")
    add("--models", type=Path, default=MODELS, metavar="DIR", help="of model files, made where they are missing")
    add("--work", type=Path, metavar="DIR", help="keep engines and the servers' files here")
    others = f"on a GPU {ON_GPU.name} there, of --only, --any and --first {AGAIN.name}"
    add("--out", type=Path, metavar="FILE", help=f"default: {RESULTS}; {others}")
    add("--rows", type=Path, metavar="FILE", help="a line of JSON for each prompt; default: beside --out")
    add("--commit", help="of the code that runs, where its folder is no git clone")
    add("--make-models", action="store_true", help="make the subject's model files, and run nothing")
    options = parser.parse_args(words)
    if options.any is not None and not 1 <= options.any <= options.prompts:
        parser.error(f"--any takes a number from 1 to {options.prompts}")
    return options


def _numbers(options: Namespace) -> list[int]:
    """Of the prompts to run."""
    all_of_them = range(options.first, options.first + options.prompts)
    return list(options.only or (sorted(random.sample(all_of_them, options.any)) if options.any else all_of_them))


def _out(options: Namespace) -> Path:
    """Where the account goes."""
    is_again = options.only or options.any or options.first
    return options.out or (AGAIN if is_again else ON_GPU if options.device == "cuda" else RESULTS)


def _flags(options: Namespace) -> tuple[str, ...]:
    return (*FLAGS[options.device], *shlex.split(options.flags))


def _installation(options: Namespace, subject: Subject, work: Path) -> Installation:
    """The servers' folders, with all model files.

    Raises:
        SystemExit: a model file could not be made; its process has said why.
    """
    if missing(subject.files, options.models):
        command = [str(options.python), str(PROGRAM), *sys.argv[1:], "--make-models"]
        if subprocess.run(command).returncode:  # in a process of its own, which leaves no memory behind
            raise SystemExit("not all model files could be made")
    options.models.mkdir(parents=True, exist_ok=True)
    folders = {name: work.resolve() / name for name in ("engines", "servers", "logs")}
    shutil.rmtree(folders["servers"], ignore_errors=True)
    made = Installation(
        options.comfyui.resolve(), options.python, options.models, folders["engines"], folders["servers"],
        folders["logs"],
    )  # fmt: skip
    made.prepare()
    return made


def _make_models_here(options: Namespace, subject: Subject) -> int:
    enter(options.comfyui.resolve())
    for file in missing(subject.files, options.models):
        make(file, options.models)
        forget_references(file, options.models)
    return 0
