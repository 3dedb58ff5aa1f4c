"""The command: one server builds engines, which are pushed into a folder, and a new one pulls them from there."""

from __future__ import annotations

import importlib.util
import json
import shlex
import site
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...engine_cache.keyring import FOLDER_VARIABLE, GET_CRYPTOGRAPHY, TRUSTED_VARIABLE
from ...runtime.building.supply import REMOTE_VARIABLE, WORKER_VARIABLE
from ...runtime.checking.measure import commit
from ...runtime.reporting.status import ON_PURPOSE
from ..in_server.client import Client
from ..in_server.command import version_of
from ..in_server.graph import OUR_NODES, Prompt, required_defaults
from ..in_server.process import PACK, Installation, Server
from ..measuring.deadline import Deadline
from ..soaking.command import FLAGS, OPTIMIZE, TOLERANCE
from ..soaking.pictures import largest, read, root_mean_square
from ..soaking.subjects import Subject
from ..soaking.wishes import SoakWish, prompt_of

LIMIT_S = 5.0
"""Seconds from queueing the first prompt to its picture, the loading of model and engines included."""
_WISH = SoakWish(
    number=0, seed=7, size=(64, 64), batch=1, sampler="euler", steps=6, text=0, lora_strength=0.0, has_control=False,
    has_skip=False, event="",
)  # fmt: skip
_EMPTY = (
    "HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR",
    FOLDER_VARIABLE,
)  # fmt: skip
"""Variables that name a folder which is empty for a new server."""
_PICTURE_SECONDS = 900.0


def main(words: list[str]) -> int:
    """Build, push, pull and serve; 0: engines made the right picture in time, 1: not so, 2: engines stay unsigned."""
    options = _options(words)
    if importlib.util.find_spec("cryptography") is None:
        print(f"Engines for other machines are signed: {GET_CRYPTOGRAPHY}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="slipstream-pull-") as folder, ExitStack() as ending:
        found = _measure(options, Path(options.work or folder).resolve(), ending)
    text = json.dumps(found, indent=1)
    if options.out is not None:
        options.out.write_text(text + "\n", encoding="utf-8")
    print(text)
    for failure in (failed := failures(found)):
        print(f"FAILED {failure}", file=sys.stderr)
    return 1 if failed else 0


def failures(found: Mapping[str, Any]) -> list[str]:
    """Why pulled engines did not serve as they should, a line each; empty where they did."""
    eager = found["eager_calls"] - found["reasons"].get(ON_PURPOSE, 0)
    checks = {
        f"the first picture took {found['first_picture_s']} s, more than {LIMIT_S:g}": found["first_picture_s"]
        > LIMIT_S,
        f"it differs by {found['rms']} in the mean square": not found["rms"] <= TOLERANCE,
        "no engine served": not found["engine_calls"],
        f"the model itself made {eager} calls: {', '.join(found['reasons'])}": eager > 0,
    }
    return [failure for failure, has_failed in checks.items() if has_failed]


def _options(words: list[str]) -> Namespace:
    parser = ArgumentParser(
        prog="pull.py",
        description="Has one ComfyUI server build engines and push them into a folder, and times the first picture of "
        "another one whose engine store, compiler caches, home and keys are empty.",
    )
    add = parser.add_argument
    add("--comfyui", type=Path, required=True, metavar="DIR", help="the ComfyUI to run")
    add("--python", type=Path, default=Path(sys.executable), help="that starts it; default: this one")
    add("--device", choices=sorted(FLAGS), default="cpu", help="that computes; default: %(default)s")
    add("--optimize", metavar="WORDS", help="how engines are built; default: fast build on a CPU, else the nodes' own")
    add("--flags", default="", metavar="WORDS", help='further flags of ComfyUI, as in --flags="--front-end-root DIR"')
    add("--work", type=Path, metavar="DIR", help="keep engines and the servers' files here; it has to be empty")
    add("--out", type=Path, metavar="FILE", help="write what is printed here, too")
    add("--commit", help="of the code that runs, where its folder is no git clone")
    return parser.parse_args(words)


def _measure(options: Namespace, work: Path, ending: ExitStack) -> dict[str, Any]:
    """Run the three servers one after another: the builder, one without Slipstream's nodes, and the one that pulls."""
    remote = f"file://{(work / 'remote').as_posix()}"
    builder = _Machine(options, work / "builder", {FOLDER_VARIABLE: str(work / "builder" / "keys")})
    client = builder.start(ending)
    built = client.run(builder.prompt(client, is_fast=True))
    _push(options, builder.variables, remote)

    plain = _Machine(options, work / "plain", _empty(work / "plain"))
    client = plain.start(ending)
    without = client.run(plain.prompt(client, is_fast=False))

    places = _empty(work / "worker")
    trusted = _trusted(options, builder.variables)
    variables = {**places, **trusted, REMOTE_VARIABLE: remote, WORKER_VARIABLE: "1"}
    worker = _Machine(options, work / "worker", variables)
    client = worker.start(ending)
    first, second, wanted = (client.run(worker.prompt(client, is_fast, seed)) for is_fast, seed in _RUNS)
    (pixels, calls), (others, _) = read(client, first), read(client, wanted)
    worst, rms = largest(pixels, others), root_mean_square(pixels, others)
    engines = json.loads(client.fetch("/slipstream/v1/engines"))["engines"]
    return {
        "commit": options.commit or commit() or "unknown", "comfyui": version_of(options.comfyui),
        "device": _device(client), "first_picture_s": round(first.client_s, 2), "limit_s": LIMIT_S,
        "second_picture_s": round(second.client_s, 2), "plain_first_picture_s": round(without.client_s, 2),
        "with_builds_s": round(built.client_s, 2), "engines": len(engines),
        "megabytes": round(sum(each["bytes"] for each in engines) / 1e6, 1), "engine_calls": calls.engine,
        "eager_calls": calls.eager, "reasons": calls.reasons, "worst": round(worst, 4), "rms": round(rms, 4),
    }  # fmt: skip


_RUNS = ((True, 7), (True, 8), (False, 7))
"""Prompts of the server that pulls: with Slipstream or without, and the seed."""


class _Machine:
    """A server with folders of its own, as if it were the only one on its machine."""

    def __init__(self, options: Namespace, work: Path, variables: Mapping[str, str]) -> None:
        self._flags = (*FLAGS[options.device], *shlex.split(options.flags))
        self._subject = Subject(options.optimize or OPTIMIZE[options.device])
        models = work / "models"
        models.mkdir(parents=True)
        self._made = Installation(
            options.comfyui.resolve(), options.python, models, work / "engines", work / "server", work / "logs",
            variables=variables,
        )  # fmt: skip
        self._made.prepare()

    @property
    def variables(self) -> dict[str, str]:
        """Its server's environment."""
        return self._made.environment()

    def start(self, ending: ExitStack) -> Client:
        """Start it; it ends with `ending`."""
        server = ending.enter_context(Server(self._made, self._flags, "server"))
        server.start(Deadline(None))
        return ending.enter_context(Client(server, Deadline(None), _PICTURE_SECONDS))

    def prompt(self, client: Client, is_fast: bool, seed: int = _WISH.seed) -> Prompt:
        """A prompt, with Slipstream's nodes or without."""
        defaults = {node: required_defaults(client.node_info(node)) for node in OUR_NODES} if is_fast else None
        return prompt_of(replace(_WISH, seed=seed), self._subject, defaults)


def _empty(work: Path) -> dict[str, str]:
    """Variables with the empty folders that they name, and with what a new server needs of the home."""
    places = {name: work / "empty" / name.lower() for name in _EMPTY}
    for place in places.values():
        place.mkdir(parents=True)
    packages = {"PYTHONUSERBASE": site.getuserbase()}  # which lie in the home
    return {**packages, **{name: str(place) for name, place in places.items()}}


def _push(options: Namespace, variables: Mapping[str, str], remote: str) -> None:
    """Send the builder's engines into the folder, by the command that users have for it."""
    command = [str(options.python), str(PACK), "push", "--remote", remote]
    subprocess.run(command, env=dict(variables), check=True, stdout=subprocess.DEVNULL)


def _trusted(options: Namespace, variables: Mapping[str, str]) -> dict[str, str]:
    """The variable by which a new server trusts the builder's public key."""
    command = [str(options.python), str(PACK), "trust", "show"]
    done = subprocess.run(command, env=dict(variables), check=True, capture_output=True, text=True)
    return {TRUSTED_VARIABLE: next(word for word in done.stdout.split() if word.startswith("ed25519:"))}


def _device(client: Client) -> str:
    return str(client.system_stats()["devices"][0]["name"])
