"""One command's servers, one after another: rows are written as they are measured, whatever becomes of the server."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from ..measuring.deadline import Deadline, OutOfTime
from ..patching.patches import PATCHES, Patch
from ..subjects.rows import Row, append
from .block import Bench, Pictures
from .client import Client, PictureFailed
from .plan import Block, ServerRun
from .process import Installation, Server, ServerDied
from .rows import complete, result_file
from .variants import flags_text


@dataclass
class Session:
    """Measures a plan.

    Attributes:
        installation: prepared.
        out: the folder of results.
        common: fields of all rows: commit, run, versions of Slipstream.
        say: hears of progress.
        troubles: what went wrong, a line each.
        free_gb: of the GPU's memory, where another process holds the rest: rows name such a GPU as one of its own.
    """

    installation: Installation
    bench: Bench
    deadline: Deadline
    picture_limit: float
    out: Path
    common: Row
    say: Callable[[str], None]
    free_gb: int | None = None
    troubles: list[str] = field(default_factory=list)
    _given_up: set[Any] = field(default_factory=set)
    _starts: int = 0
    _machine: Row = field(default_factory=dict)

    def measure(self, runs: Iterable[ServerRun]) -> None:
        """Measure a plan's servers, until all is done or the time is over."""
        waiting = deque(runs)
        while waiting:
            run = waiting.popleft()
            blocks = deque(block for block in run.blocks if block.subject not in self._given_up)
            try:
                self._measure_run(run, blocks)
            except OutOfTime:
                left = [*blocks, *(block for later in waiting for block in later.blocks)]
                if left:
                    self.troubles.append(f"the time was over before these began: {'; '.join(map(_words, left))}")
                return

    def _measure_run(self, run: ServerRun, blocks: deque[Block]) -> None:
        """Measure a server's blocks; after a death or failure a new server goes on with what is left."""
        while blocks:
            try:
                self._measure_in_one_server(run, blocks)
            except ServerDied as error:  # before any picture: the flags are wrong, or the machine is
                self._did_not_start(blocks, error)
                return

    def _measure_in_one_server(self, run: ServerRun, blocks: deque[Block]) -> None:
        """Measure blocks until none is left, or one has ended badly; those that were measured are taken off.

        Raises:
            ServerDied: the server does not start.
            OutOfTime: the time is over.
        """
        self._starts += 1
        self.deadline.check()
        with Server(self.installation, run.flags, f"{self._starts:02}-{_file_name(run)}") as server:
            self.say(f"starting ComfyUI, flags {flags_text(run.flags)}; its log is {server.log_file}")
            server.start(self.deadline)
            with Client(server, self.deadline, self.picture_limit) as client:
                self._machine = self._read_machine(client.system_stats())
                common = {**self.common, **self._machine}
                pictures = Pictures(client, self.installation.work / "output")
                self._take_off_unknown(blocks, client)
                while blocks:
                    if not self._measure_block(blocks.popleft(), pictures, common, server):
                        return

    def _take_off_unknown(self, blocks: deque[Block], client: Client) -> None:
        """Take off the blocks of patches whose nodes the server does not have, or has from elsewhere, and say so."""
        for name in dict.fromkeys(block.patch for block in blocks if block.patch):
            if (reason := _why_unknown(PATCHES[name], client)) is not None:
                self.say(f"{name} is left out: {reason}")
                left = [block for block in blocks if block.patch != name]
                blocks.clear()
                blocks.extend(left)

    def _measure_block(self, block: Block, pictures: Pictures, common: Row, server: Server) -> bool:
        """Measure a block and write its row; False where the server may not be used any more."""
        if block.subject in self._given_up or (block.patch and block.compared_with in self._given_up):
            self.say(f"{_words(block)}: not tried again")
            return True
        row, error = self.bench.measure(block, pictures)
        if row is not None and not block.is_reference_only:
            self._write({**row, **common})
        if isinstance(error, OutOfTime):
            self.troubles.append(f"{_words(block)}: the time was over")
            raise error
        if error is not None:
            self._given_up.add(block.subject)
        trouble = str(error) if error is not None else (row or {}).get("failed")
        if trouble is not None:
            self.troubles.append(f"{_words(block)}: {trouble}")
        return error is None

    def _did_not_start(self, blocks: Iterable[Block], error: ServerDied) -> None:
        for block in blocks:
            self._given_up.add(block.subject)
            self.troubles.append(f"{_words(block)}: {error}")
            if block.is_reference_only:
                continue
            facts = {"case": block.case, "flags": list(block.flags), "variant": block.variant, "turn": block.turn}
            facts |= {"patch": block.patch}
            more = {"comfyui": self.bench.comfyui, "pictures": 0, "samples": {}, "died": True, "failed": str(error)}
            self._write({**facts, **more, **self.common, **(self._machine or self._read_machine({}))})

    def _read_machine(self, stats: Mapping[str, Any]) -> Row:
        """The GPU and the versions, as far as driver and server tell them."""
        system, driver = stats.get("system", {}), self.bench.monitor.driver
        device: Mapping[str, Any] = next(iter(stats.get("devices", [])), {})
        gpu = None if device.get("type") == "cpu" else getattr(driver, "gpu", None) or _gpu_name(device)
        if gpu and self.free_gb is not None:
            gpu = f"{gpu}, {self.free_gb} GB free"
        python = str(system["python_version"]).split()[0] if "python_version" in system else None
        versions = {"torch": system.get("pytorch_version"), "python": python, "comfyui": self.bench.comfyui}
        known = {name: version for name, version in versions.items() if version is not None}
        on_gpu = getattr(driver, "version", None) if gpu else None
        return {"gpu": gpu, "driver": on_gpu, "versions": {**known, **self.common["versions"]}}

    def _write(self, row: Row) -> None:
        whole = complete(row)
        append(result_file(self.out, whole["gpu"], date.today()), [whole])
        self.say(line_of(whole))


def _why_unknown(patch: Patch, client: Client) -> str | None:
    """Why a server cannot make pictures with a patch: ComfyUI has a node of its own for some of other packs'."""
    try:
        found = {node: client.node_info(node) for node in patch.node.classes}
    except PictureFailed as error:
        return str(error)
    name = patch.node.class_type
    module = str(found[name].get("python_module"))
    is_its_own = not patch.pack or module == f"custom_nodes.{patch.pack}"
    return None if is_its_own else f"the server's node {name} is of {module}"


def line_of(row: Row) -> str:
    """Return a row for people."""
    patch = f" with {row['patch']}" if row["patch"] else ""
    head = f"{row['case']}  {row['variant']}{patch}  {flags_text(row['flags'])}  turn {row['turn']}"
    if not row["pictures"]:
        return f"{head}  {'died' if row['died'] else 'failed'}: {row.get('failed')}"
    names = {"client_s": "client", "sampler_s": "sampler", "decoder_s": "decoder", "encoder_s": "encoder"}
    figures = [f"{title} {row[name]:.3f} s" for name, title in names.items() if row[name] is not None]
    figures += [f"step {row['step_ms']:.2f} ms"] if row["step_ms"] is not None else []
    error = "unknown" if row["error"] is None else f"{row['error']:.1e}"
    ended = f"  {'died' if row['died'] else 'failed'}: {row['failed']}" if "failed" in row else ""
    effect = f", effect {row['effect']:.1e}" if row["effect"] is not None else ""
    blocks = f", {row['blocks_on_engines']} of {row['blocks']} blocks on engines" if row["blocks"] else ""
    return f"{head}  {', '.join(figures)}, error {error}{effect}{blocks}{ended}"


def _gpu_name(device: Mapping[str, Any]) -> str | None:
    """A GPU's name as ComfyUI has it, "cuda:0 NVIDIA H200 : cudaMallocAsync", without index and allocator."""
    return re.sub(r"^\w+:\d+ | : .*$", "", str(device["name"])) if "name" in device else None


def _words(block: Block) -> str:
    what = "reference" if block.is_reference_only else block.variant
    what += f" with {block.patch}" if block.patch else ""
    return f"{block.case}, {what}, flags {flags_text(block.flags)}, turn {block.turn}"


def _file_name(run: ServerRun) -> str:
    """The flags as a part of a file's name."""
    return "".join(letter if letter.isalnum() else "-" for letter in flags_text(run.flags)).strip("-")[:80]
