"""A ComfyUI server as a process of its own, with Slipstream, the probe and named packs as its only custom nodes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..measuring.deadline import Deadline
from ..model_files.families import FOLDERS
from ..patching.patches import FACES, LENT
from .variants import Flags

PACK = Path(__file__).resolve().parents[2]
PROBE = Path(__file__).resolve().with_name("probe")
WINDOWS = os.name == "nt"

_START_SECONDS = 300.0
_STOP_SECONDS = 15.0
_LAST_LINES, _LINE_LENGTH = 12, 300
_PROGRESS = "%|"
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the server is this machine
_NOT_COPIED = (".git", ".venv", ".*_cache", "__pycache__", "test-results", "tests")


class ServerDied(Exception):
    """The server's process ended, or did not start; the message says how, with the last lines of its log."""


@dataclass(frozen=True)
class Installation:
    """What a server is started from.

    Attributes:
        checkout: ComfyUI's folder, which holds main.py.
        python: that starts it.
        models: a folder with ComfyUI's folders of model files.
        engines: Slipstream's store of engines.
        work: an empty folder for the servers' own files.
        logs: a folder for their logs.
        common_flags: of every server, besides those that are measured.
        variables: of the servers' environment, besides this process's.
        packs: folders of other authors' packs that the servers load.
    """

    checkout: Path
    python: Path
    models: Path
    engines: Path
    work: Path
    logs: Path
    common_flags: Flags = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    packs: tuple[Path, ...] = ()

    def prepare(self) -> None:
        """Lay out the folders that the servers share: custom nodes, models and an empty page."""
        for name in ("custom_nodes", "input", "output", "temp", "user/default", "page"):
            (self.work / name).mkdir(parents=True, exist_ok=True)
        for folder in (self.logs, self.engines):
            folder.mkdir(parents=True, exist_ok=True)
        _link(PACK, self.work / "custom_nodes" / "slipstream")
        for pack in self.packs:
            _add_pack(pack.resolve(), self.work / "custom_nodes" / pack.name)
        shutil.copytree(PROBE, self.work / "custom_nodes" / "slipstream_benchmark_probe")
        (self.work / "page" / "index.html").write_text("<!doctype html>\n", encoding="utf-8")
        lines = ["slipstream_benchmark:", f"  base_path: {json.dumps(self.models.resolve().as_posix())}"]
        lines += [f"  {name}: {name}" for name in FOLDERS]
        (self.work / "models.yaml").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def command(self, port: int, flags: Flags) -> list[str]:
        """Return the command that starts a server."""
        database = (self.work / "user" / "comfyui.db").as_posix()
        return [
            str(self.python), "main.py", "--listen", "127.0.0.1", "--port", str(port), "--disable-auto-launch",
            "--disable-api-nodes", "--front-end-root", str(self.work / "page"), "--base-directory", str(self.work),
            "--database-url", f"sqlite:///{database}", "--extra-model-paths-config", str(self.work / "models.yaml"),
            *self.common_flags, *flags,
        ]  # fmt: skip

    def environment(self) -> dict[str, str]:
        """Return the servers' environment."""
        own = {"SLIPSTREAM_HOME": str(self.engines.resolve()), "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"}
        inherited = {name: value for name, value in os.environ.items() if name != "COMFYUI_DIR"}
        return {**inherited, "HF_HUB_OFFLINE": "1", **own, **self.variables}


class Server:
    """One server; as a context it is stopped at the end, and at once by force where an exception ends it.

    Args:
        name: of its log file.
    """

    def __init__(self, installation: Installation, flags: Flags, name: str) -> None:
        self._installation, self._flags = installation, flags
        self.log_file = installation.logs / f"{name}.log"
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.stop()
        else:
            self.kill()

    @property
    def address(self) -> str:
        """The address of the running server, such as http://127.0.0.1:8188."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The id of the running server's process."""
        assert self._process is not None, "the server is not running"
        return self._process.pid

    def start(self, deadline: Deadline) -> None:
        """Start the server and wait until it answers.

        Raises:
            ServerDied: it does not start.
            OutOfTime: it has not answered when the command's time is over.
        """
        self.port = _free_port()
        made, given_up = self._installation, time.monotonic() + _START_SECONDS
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                made.command(self.port, self._flags), cwd=made.checkout, env=made.environment(),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=not WINDOWS,
            )  # fmt: skip
        while not self._answers():
            deadline.check()
            if reason := self.why_ended():
                raise ServerDied(reason)
            if time.monotonic() > given_up:
                raise ServerDied(self._with_log(f"the server did not answer in {_START_SECONDS:.0f} s"))
            time.sleep(0.1)

    def why_ended(self, wait_seconds: float = 0.0) -> str | None:
        """Return how the process ended, with the end of its log; None while it runs.

        Args:
            wait_seconds: how long it is waited for where it runs still.
        """
        if self._process is None:
            return "the server was not started"
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(wait_seconds)
        status = self._process.poll()
        return None if status is None else self._with_log(f"the server ended with {_words_of(status)}")

    def stop(self) -> None:
        """Stop the server as Ctrl-C does, and by force where that is not enough."""
        if self._process is not None and self._process.poll() is None and not WINDOWS:
            self._process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End the server at once, and what it has started."""
        if self._process is None:
            return
        if WINDOWS:
            self._process.kill()
        else:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)  # it leads a session of its own
        self._process.wait(30)
        self._process = None

    def _answers(self) -> bool:
        try:
            with _OPENER.open(f"{self.address}/system_stats", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _with_log(self, what: str) -> str:
        text = _COLOURS.sub("", self.log_file.read_text(encoding="utf-8", errors="replace"))
        lines = [line.strip() for line in text.splitlines() if line.strip() and _PROGRESS not in line]
        return " | ".join([what, *(line[:_LINE_LENGTH] for line in lines[-_LAST_LINES:])])


def _words_of(status: int) -> str:
    if status >= 0:
        return f"status {status}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-status).name
    return f"signal {-status}"


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _add_pack(source: Path, target: Path) -> None:
    """Link a pack, or copy it with lines in front that lend it what it asks for in vain."""
    calls = [f"stand_ins.lend({name!r})" for name in LENT.get(source.name, ())]
    calls += ["stand_ins.lend_faces()"] if source.name in FACES else []
    if not calls:
        _link(source, target)
        return
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(*_NOT_COPIED))
    shutil.copy(PROBE / "stand_ins.py", target / "slipstream_stand_ins.py")
    start = target / "__init__.py"
    lines = ["from . import slipstream_stand_ins as stand_ins", *calls, start.read_text(encoding="utf-8")]
    start.write_text("\n".join(lines), encoding="utf-8")


def _link(source: Path, target: Path) -> None:
    """Link a folder, or copy it where links are not allowed."""
    try:
        target.symlink_to(source, target_is_directory=True)
    except OSError:
        shutil.copytree(source, target, ignore=shutil.ignore_patterns(*_NOT_COPIED))
