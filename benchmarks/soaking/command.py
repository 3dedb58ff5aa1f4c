"""The command: servers, prompts, and what came of them in `benchmarks/results/soak.json`."""

from __future__ import annotations

import io
import json
import shutil
import sys
import tempfile
import time
import urllib.parse
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...runtime.checking.measure import commit
from ..in_server.client import Client, Picture, PictureFailed, calls_of
from ..in_server.graph import OUR_NODES, required_defaults
from ..in_server.process import Installation, Server, ServerDied
from ..measuring.deadline import Deadline
from .wishes import SoakWish, prompt_of, wish_of

RESULTS = Path(__file__).resolve().parents[1] / "results" / "soak.json"
CPU_FLAGS = ("--cpu", "--use-pytorch-cross-attention")
TOLERANCE = 4 / 255
"""By which no value of a picture, from 0 to 1, may differ from that of the same prompt without Slipstream."""
WARM = 0.2
"""The share of the prompts after which memory is looked at first: until then engines come into it."""
_PICTURE_SECONDS = 900.0


@dataclass
class Account:
    """What came of a soak. `wrong` pictures differ from those without Slipstream; `errors` are prompts that failed.

    Attributes:
        rss_first_mb, rss_last_mb: memory of the first server's process, once it is warm and at the end.
        handles_first, handles_last: its open files then.
        deaths: of servers.
        worst: the largest difference of a value of a picture, from 0 to 1.
        problems: numbers of prompts with what was wrong, to be repeated with --only.
    """

    seed: int
    commit: str
    prompts: int = 0
    wrong: int = 0
    errors: int = 0
    rss_first_mb: float = 0.0
    rss_last_mb: float = 0.0
    handles_first: int = 0
    handles_last: int = 0
    engine_calls: int = 0
    eager_calls: int = 0
    deaths: int = 0
    stale_engines: int = 0
    cancelled: int = 0
    freed: int = 0
    deleted: int = 0
    on_second_server: int = 0
    seconds: float = 0.0
    worst: float = 0.0
    tolerance: float = round(TOLERANCE, 4)
    problems: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)


def main(words: list[str]) -> int:
    """Run a soak; status 0 where every picture was right and no server died."""
    options = _options(words)
    numbers = options.only or range(options.first, options.first + options.prompts)
    account = Account(options.seed, commit() or "unknown")
    with ExitStack() as ending:
        work = Path(options.work or ending.enter_context(tempfile.TemporaryDirectory(prefix="slipstream-soak-")))
        soak = _Soak(options, work, account, ending)
        started = time.monotonic()
        try:
            for place, number in enumerate(numbers):
                soak.run(wish_of(options.seed, number))
                if place == int(WARM * len(numbers)):
                    account.rss_first_mb, account.handles_first = soak.footprint()
                account.rss_last_mb, account.handles_last = soak.footprint()
                account.seconds = round(time.monotonic() - started, 1)
                _write(account, options.out)
            account.stale_engines = soak.stale_engines()
        finally:
            _write(account, options.out)
    print(json.dumps(asdict(account), indent=1))
    return 1 if account.wrong or account.errors or account.deaths or account.stale_engines else 0


def _options(words: list[str]) -> Namespace:
    parser = ArgumentParser(
        prog="soak.py", description="Runs random prompts in a real ComfyUI and checks each picture."
    )
    add = parser.add_argument
    add("--comfyui", type=Path, required=True, metavar="DIR", help="the ComfyUI to run")
    add("--python", type=Path, default=Path(sys.executable), help="that starts it; default: this one")
    add("--prompts", type=int, default=1000, metavar="N", help="default: %(default)s")
    add("--seed", type=int, default=20261, help="of the whole soak; default: %(default)s")
    add("--first", type=int, default=0, metavar="N", help="number of the first prompt; default: %(default)s")
    add("--only", type=int, nargs="+", metavar="N", help="these prompts alone, by their numbers")
    add("--gpu", action="store_true", help="on the GPU instead of the CPU")
    add("--work", type=Path, metavar="DIR", help="keep the servers' files here")
    add("--out", type=Path, default=RESULTS, metavar="FILE", help="default: %(default)s")
    return parser.parse_args(words)


def _write(account: Account, out: Path) -> None:
    part = out.with_suffix(".part")
    part.write_text(json.dumps(asdict(account), indent=1) + "\n", encoding="utf-8")
    part.replace(out)


class _Soak:
    """The servers, and the prompts one by one."""

    def __init__(self, options: Namespace, work: Path, account: Account, ending: ExitStack) -> None:
        self._flags = () if options.gpu else CPU_FLAGS
        self._account, self._ending = account, ending
        folders = {name: work / name for name in ("models", "engines", "servers", "logs")}
        shutil.rmtree(folders["servers"], ignore_errors=True)
        folders["models"].mkdir(parents=True, exist_ok=True)
        self._made = Installation(
            options.comfyui.resolve(), options.python, folders["models"], folders["engines"], folders["servers"],
            folders["logs"],
        )  # fmt: skip
        self._made.prepare()
        self._servers: dict[str, tuple[Server, Client]] = {}
        self._defaults = {node: required_defaults(self._client("first").node_info(node)) for node in OUR_NODES}

    def run(self, wish: SoakWish) -> None:
        """Run one prompt with Slipstream and without, compare the pictures, and do what else it asks for."""
        account, name = self._account, "second" if wish.event == "second_server" else "first"
        account.prompts += 1
        account.on_second_server += name == "second"
        try:
            client = self._client(name)
            self._before(wish, client)
            fast, plain = (client.run(prompt_of(wish, given)) for given in (self._defaults, None))
            self._compare(wish, client, fast, plain)
        except PictureFailed as error:
            account.errors += 1
            account.problems[str(wish.number)] = str(error)[:300]
        except ServerDied as error:
            account.deaths += 1
            account.problems[str(wish.number)] = str(error)[:300]
            self._servers.pop(name, None)

    def footprint(self) -> tuple[float, int]:
        """Memory in MB and open files of the first server's process; zeros where the system does not tell."""
        pid = self._servers["first"][0].pid if "first" in self._servers else 0
        try:
            status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
            memory = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
            return round(memory / 1024, 1), len(list(Path(f"/proc/{pid}/fd").iterdir()))
        except (OSError, StopIteration):
            return 0.0, 0

    def stale_engines(self) -> int:
        """Engines in the store that are damaged, or would not be used on this machine now."""
        client = self._client("first")
        problems = client.post("/slipstream/v1/engines/verify", {})["problems"]
        engines = json.loads(client.fetch("/slipstream/v1/engines"))["engines"]
        damaged = [digest for digest, problem in problems.items() if problem is not None]
        return len(damaged) + len([each for each in engines if each["state"] != "ok"])

    def _client(self, name: str) -> Client:
        if name not in self._servers:
            server = self._ending.enter_context(Server(self._made, self._flags, name))
            server.start(Deadline(None))
            client = self._ending.enter_context(Client(server, Deadline(None), _PICTURE_SECONDS))
            self._servers[name] = server, client
        return self._servers[name][1]

    def _before(self, wish: SoakWish, client: Client) -> None:
        if wish.event == "free":
            client.post("/free", {"unload_models": True, "free_memory": True})
            self._account.freed += 1
        elif wish.event == "delete":
            engines = json.loads(client.fetch("/slipstream/v1/engines"))["engines"]
            if engines:
                digest = engines[wish.seed % len(engines)]["digest"]
                try:
                    client.post(f"/slipstream/v1/engines/{digest}/delete", {})
                    self._account.deleted += 1
                except PictureFailed as error:  # one in use stays
                    if "in use" not in str(error):
                        raise
        elif wish.event == "cancel":
            self._cancel(wish, client)

    def _cancel(self, wish: SoakWish, client: Client) -> None:
        """Queue the prompt and interrupt it somewhere on its way."""
        name = client.post("/prompt", {"prompt": prompt_of(wish, self._defaults)})["prompt_id"]
        time.sleep(wish.seed % 1000 / 1000)
        client.post("/interrupt", {})
        while name not in json.loads(client.fetch(f"/history/{name}")):
            time.sleep(0.1)
        self._account.cancelled += 1

    def _compare(self, wish: SoakWish, client: Client, fast: Picture, plain: Picture) -> None:
        account = self._account
        worst = 0.0
        for one, other in zip(fast.files, plain.files, strict=True):
            (pixels, record), (wanted, _) = (_opened(client, file) for file in (one, other))
            worst = max(worst, float(abs(pixels - wanted).max()))
            if one is fast.files[0]:
                calls = calls_of(record)
                account.engine_calls += calls.engine
                account.eager_calls += calls.eager
                for reason, count in calls.reasons.items():
                    account.reasons[reason] = account.reasons.get(reason, 0) + count
        account.worst = max(account.worst, round(worst, 4))
        if worst > TOLERANCE or not fast.files:
            account.wrong += 1
            account.problems[str(wish.number)] = f"differs by {worst:.4f}"


def _opened(client: Client, file: Mapping[str, str]) -> tuple[Any, Mapping[str, Any]]:
    """A picture's values from 0 to 1, and what Slipstream wrote into it."""
    import numpy
    from PIL import Image

    with Image.open(io.BytesIO(client.fetch("/view?" + urllib.parse.urlencode(file)))) as image:
        values = numpy.asarray(image.convert("RGB"), dtype=numpy.float32) / 255
        return values, json.loads(image.info.get("slipstream", "{}"))
