"""The servers of a soak, and the prompts that they are given one by one."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..in_server.client import Client, Picture, PictureFailed
from ..in_server.graph import OUR_NODES, required_defaults
from ..in_server.process import Installation, Server, ServerDied
from ..in_server.variants import Flags
from ..measuring.deadline import Deadline
from .account import Account
from .pictures import largest, read, root_mean_square
from .subjects import Subject
from .wishes import SoakWish, prompt_of

FIRST, SECOND, EXACT = "first", "second", "exact"
_EXACT_FLAGS = ("--force-fp32", "--fp32-vae", "--fp32-text-enc")
_PICTURE_SECONDS = 900.0
_LATEST_CANCEL = 0.4
"""Seconds after which a prompt is interrupted at the latest."""
_BY_RMS = ("cuda",)
"""Devices that compute in half precision, where single values at edges differ more than a picture as a whole."""
_AS_NEAR = 3.0
"""Some prompts multiply the rounding of half precision until ComfyUI's own pictures are visibly off, and no two of them
alike. Such a picture is right where it is no farther from full precision than so many times ComfyUI's own."""


class SoakServers:
    """Two servers on one store of engines; and one that computes in full precision, once it is needed.

    Args:
        made: prepared.
        ending: where servers and clients are closed.
    """

    def __init__(self, made: Installation, flags: Flags, subject: Subject, account: Account, ending: ExitStack) -> None:
        self._made, self._flags, self._subject = made, flags, subject
        self._account, self._ending = account, ending
        self._servers: dict[str, tuple[Server, Client]] = {}
        self._defaults = {node: required_defaults(self._client(FIRST).node_info(node)) for node in OUR_NODES}

    def run(self, wish: SoakWish) -> dict[str, Any]:
        """Run one prompt with Slipstream and without, compare the pictures, and do what else it asks for.

        Returns:
            The prompt's row.
        """
        account, name = self._account, SECOND if wish.event == "second_server" else FIRST
        account.prompts += 1
        account.on_second_server += name == SECOND
        row: dict[str, Any] = {"number": wish.number, "event": wish.event}
        try:
            client = self._client(name)
            row |= self._before(wish, client)
            row |= self._pictures(wish, client)
        except PictureFailed as error:
            account.errors += 1
            account.problems[str(wish.number)] = str(error)[:300]
        except ServerDied as error:
            account.deaths += 1
            account.problems[str(wish.number)] = str(error)[:300]
            self._servers.pop(name, None)
        memory, handles = self._footprint(FIRST)
        return {**row, "rss_mb": memory, "handles": handles, "second_rss_mb": self._footprint(SECOND)[0]}

    def objects(self) -> dict[str, float]:
        """What the first server's process holds, as its probe counts it."""
        return dict(json.loads(self._client(FIRST).fetch("/slipstream_benchmark/objects")))

    def stale_engines(self) -> int:
        """Engines in the store that are damaged, or would not be used on this machine now."""
        client = self._client(FIRST)
        problems = client.post("/slipstream/v1/engines/verify", {})["problems"]
        engines = json.loads(client.fetch("/slipstream/v1/engines"))["engines"]
        damaged = [digest for digest, problem in problems.items() if problem is not None]
        return len(damaged) + len([each for each in engines if each["state"] != "ok"])

    def _client(self, name: str) -> Client:
        if name not in self._servers:
            flags = (*self._flags, *_EXACT_FLAGS) if name == EXACT else self._flags
            server = self._ending.enter_context(Server(self._made, flags, name))
            server.start(Deadline(None))
            client = self._ending.enter_context(Client(server, Deadline(None), _PICTURE_SECONDS))
            self._servers[name] = server, client
        return self._servers[name][1]

    def _footprint(self, name: str) -> tuple[float, int]:
        """Memory in MB and open files of a server's process; zeros where the system does not tell."""
        pid = self._servers[name][0].pid if name in self._servers else 0
        try:
            status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
            memory = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
            return round(memory / 1024, 1), len(list(Path(f"/proc/{pid}/fd").iterdir()))
        except (OSError, StopIteration):
            return 0.0, 0

    def _before(self, wish: SoakWish, client: Client) -> dict[str, Any]:
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
            was_amid = self._cancel(wish, client)
            self._account.cancelled += was_amid
            return {"cancelled": was_amid}
        return {}

    def _cancel(self, wish: SoakWish, client: Client) -> bool:
        """Queue the prompt with many steps and interrupt it; whether that came before its end."""
        prompt = prompt_of(wish.cancelled, self._subject, None if self._account.is_plain else self._defaults)
        name = client.post("/prompt", {"prompt": prompt})["prompt_id"]
        time.sleep(wish.seed % 1000 / 1000 * _LATEST_CANCEL)
        client.post("/interrupt", {})
        while name not in (history := json.loads(client.fetch(f"/history/{name}"))):
            time.sleep(0.02)
        return any(kind == "execution_interrupted" for kind, _ in history[name]["status"]["messages"])

    def _pictures(self, wish: SoakWish, client: Client) -> dict[str, Any]:
        """Have the prompt's picture made with Slipstream and without; or two pictures, both without."""
        if self._account.is_plain:
            seeds = (wish.seed, wish.seed ^ 1)  # another one, since ComfyUI remembers what it has computed
            for seed in seeds:
                client.run(prompt_of(replace(wish, seed=seed), self._subject, None))
            return {}
        fast, plain = (client.run(prompt_of(wish, self._subject, given)) for given in (self._defaults, None))
        seconds = {"fast_s": round(fast.client_s, 3), "plain_s": round(plain.client_s, 3)}
        return {**seconds, **self._compare(wish, client, fast, plain)}

    def _compare(self, wish: SoakWish, client: Client, fast: Picture, plain: Picture) -> dict[str, Any]:
        account = self._account
        (found, calls), (wanted, _) = read(client, fast), read(client, plain)
        for reason, count in calls.reasons.items():
            account.reasons[reason] = account.reasons.get(reason, 0) + count
        account.engine_calls += calls.engine
        account.eager_calls += calls.eager
        if len(found) != wish.batch or len(wanted) != wish.batch:
            account.wrong += 1
            account.problems[str(wish.number)] = f"{len(found)} pictures, {len(wanted)} without Slipstream"
            return {}
        worst, rms = largest(found, wanted), root_mean_square(found, wanted)
        account.worst, account.worst_rms = max(account.worst, round(worst, 4)), max(account.worst_rms, round(rms, 4))
        row = {"worst": round(worst, 4), "rms": round(rms, 4), "engine_calls": calls.engine, "eager_calls": calls.eager}
        by_rms = account.device in _BY_RMS
        is_right = (rms if by_rms else worst) <= account.tolerance
        if by_rms and not is_right and (exact := self._from_exact(wish, found, wanted)):
            row |= exact
            is_right = exact["from_exact"] <= max(account.tolerance, _AS_NEAR * exact["plain_from_exact"])
        if not is_right:
            account.wrong += 1
            account.problems[str(wish.number)] = f"differs by {worst:.4f} at most, {rms:.4f} in the mean square"
        return row

    def _from_exact(self, wish: SoakWish, found: list[Any], wanted: list[Any]) -> dict[str, float]:
        """How far the pictures with Slipstream and without are from those of full precision; nothing without these."""
        self._account.compared_with_exact += 1
        try:
            client = self._client(EXACT)
            exact, _ = read(client, client.run(prompt_of(wish, self._subject, None)))
        except (PictureFailed, ServerDied):
            self._servers.pop(EXACT, None)
            return {}
        distances = {"from_exact": found, "plain_from_exact": wanted}
        return {name: round(root_mean_square(values, exact), 4) for name, values in distances.items()}
