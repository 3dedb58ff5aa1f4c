"""A ComfyUI server as a process of its own, with Slipstream and the testing pack as its custom nodes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from .client import ComfyClient

FOLDERS = "checkpoints", "controlnet", "diffusion_models", "loras", "text_encoders", "vae"
"""Of model files."""

ROOT = Path(__file__).resolve().parents[3]
TESTING_PACK = Path(__file__).resolve().parent / "testing_pack"
WINDOWS = os.name == "nt"
NOT_COPIED = (
    ".git",
    ".venv",
    ".whl",
    ".mypy_cache",
    ".pytest_cache",
    ".ruff_cache",
    "__pycache__",
    "test-results",
)


def on_gpu() -> bool:
    """Whether servers compute on the GPU: by SLIPSTREAM_TEST_DEVICE=cuda."""
    return os.environ.get("SLIPSTREAM_TEST_DEVICE") == "cuda"


class ComfyServer:
    """One ComfyUI, started and stopped at will; its folders and engine store outlive a restart."""

    def __init__(
        self,
        checkout: Path,
        base: Path,
        models: Path,
        *,
        home: Path | None = None,
        arguments: Sequence[str] = (),
        environment: dict[str, str] | None = None,
        pack_folder: str = "slipstream",
    ) -> None:
        """Lay out the server's folders.

        Args:
            checkout: The ComfyUI to run.
            base: An empty folder for its custom nodes, input, output and log.
            models: Folder of model files, with ComfyUI's subfolders.
            home: Engine store (`SLIPSTREAM_HOME`); by default one of its own in `base`.
            arguments: Further arguments of ComfyUI's `main.py`, such as `--lowvram`.
            environment: Further environment variables; an empty value removes one.
            pack_folder: Name of Slipstream's folder in `custom_nodes`.
        """
        self.checkout = checkout
        self.base = base
        self.home = home or base / "engines"
        self.log_file = base / "comfyui.log"
        self.arguments = list(arguments)
        self.environment = environment or {}
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None
        for name in ("custom_nodes", "models", "input", "output", "temp", "user/default"):
            (base / name).mkdir(parents=True, exist_ok=True)
        _link(ROOT, base / "custom_nodes" / pack_folder)
        _link(TESTING_PACK, base / "custom_nodes" / "slipstream-testing-pack")
        _write_settings(base, models)

    def __enter__(self) -> ComfyServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """Address of the running server."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        assert self._process is not None, "the server is not running"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process lives."""
        return self._process is not None and self._process.poll() is None

    def client(self) -> ComfyClient:
        """Return a new client of this server."""
        return ComfyClient(self.url)

    def start(self, timeout: float = 180) -> None:
        """Start the server and wait until it answers."""
        self.port = _free_port()
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                self._command(), cwd=self.checkout, env=self._environment(), stdout=log, stderr=log,
                stdin=subprocess.DEVNULL, start_new_session=not WINDOWS,
            )  # fmt: skip
        deadline = time.monotonic() + timeout
        while not self._answers():
            code = self._process.poll()
            if code is not None or time.monotonic() > deadline:
                self.kill()
                why = f"ended with {code}" if code is not None else f"did not answer in {timeout:.0f} s"
                raise RuntimeError(f"ComfyUI {why}; its log ends:\n{self.log()[-4000:]}")
            time.sleep(0.1)

    def stop(self) -> None:
        """Stop the server as Ctrl-C does; end it by force where that is not enough."""
        if self._process is None:
            return
        if not WINDOWS and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
        self.kill()

    def kill(self) -> None:
        """End the server at once, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(30)
            self._process = None

    def restart(self) -> None:
        """Stop the server and start it as a new process over the same folders."""
        self.stop()
        self.start()

    def log(self) -> str:
        """Return all that the server has printed, over its restarts."""
        return self.log_file.read_text(encoding="utf-8", errors="replace") if self.log_file.exists() else ""

    def _command(self) -> list[str]:
        # On a GPU with ComfyUI's own defaults, as users start it.
        device = () if on_gpu() else ("--cpu", "--use-pytorch-cross-attention", "--preview-method", "latent2rgb")
        return [
            sys.executable, "main.py", *device, "--listen", "127.0.0.1", "--port", str(self.port),
            "--disable-auto-launch", "--disable-api-nodes", "--base-directory", str(self.base),
            "--database-url", f"sqlite:///{(self.base / 'user' / 'comfyui.db').as_posix()}",
            "--extra-model-paths-config", str(self.base / "models.yaml"), *self.arguments,
        ]  # fmt: skip

    def _environment(self) -> dict[str, str]:
        changed = {
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "PYTHONIOENCODING": "utf-8",
            "HF_HUB_OFFLINE": "1",
            "SLIPSTREAM_HOME": str(self.home),
            "SLIPSTREAM_STEP_TIMES": "off",  # no test shall depend on how fast this machine is
            "COMFYUI_DIR": "",
            **self.environment,
        }
        return {name: value for name, value in {**os.environ, **changed}.items() if value}

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/system_stats", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _link(source: Path, target: Path) -> None:
    if WINDOWS:
        shutil.copytree(source, target, ignore=shutil.ignore_patterns(*NOT_COPIED))
    else:
        target.symlink_to(source, target_is_directory=True)


def _write_settings(base: Path, models: Path) -> None:
    lines = ["slipstream_tests:", f"  base_path: {json.dumps(models.as_posix())}"]
    lines += [f"  {name}: {name}" for name in FOLDERS]
    (base / "models.yaml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    # Else a first-run dialog covers the page when a browser opens it.
    settings = {"Comfy.TutorialCompleted": True, "Comfy.Notification.ShowVersionUpdates": False}
    path = base / "user" / "default" / "comfy.settings.json"
    path.write_text(json.dumps(settings), encoding="utf-8")
