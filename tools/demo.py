"""The main job on the built-in tiny model: build engines, sample with and without them, compare.

    python tools/demo.py [--json FILE] [--open]

Sets up `.venv` on its first run. Works in ComfyUI where one is found or can be cloned, else through diffusers. The
engines are built anew at each call (they lie in `demo/out/engines`); a second process then finds them. Writes
`demo/out/report.html`, prints a table, and ends with 1 where something is not as it should be.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import runpy
import shutil
import subprocess
import sys
import time
import webbrowser
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from bootstrap import CACHE, ROOT, SetupError, comfyui_python, find_comfyui, project_python

OUT = ROOT / "demo" / "out"
COMFYUI_URL = "https://github.com/comfyanonymous/ComfyUI"
CLONE_SECONDS = 90
REPEATS = {"cold": 1, "warm": 4}  # the first one of "warm" loads the engine


@dataclass(frozen=True)
class Host:
    """Where to sample: a ComfyUI, or diffusers where `checkout` is None."""

    python: Path
    checkout: Path | None = None


def main(arguments: Sequence[str]) -> int:
    """Run the demonstration and return the exit status."""
    options = _parse(arguments)
    if options.session:
        return _session(json.loads(options.session))
    try:
        python = project_python()
        if Path(sys.prefix).resolve() != python.parent.parent.resolve():
            return subprocess.run([str(python), __file__, *arguments], check=False).returncode
        host = _choose_host(options.host, python)
    except SetupError as why:
        print(why, file=sys.stderr)
        return 1
    return _demonstrate(host, options)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="demo.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--open", action="store_true", help="show the report in a browser")
    parser.add_argument("--host", choices=("auto", "comfyui", "diffusers"), default="auto", help="where to sample")
    parser.add_argument("--session", help=argparse.SUPPRESS)  # internal: one start of the host, in its own Python
    return parser.parse_args(arguments)


# --------------------------------------------------------------------------------------------------- the host


def _choose_host(wanted: str, python: Path) -> Host:
    if wanted == "diffusers":
        return Host(python)
    try:
        checkout = _newest(find_comfyui()) or _clone()
        return Host(comfyui_python(checkout), checkout)
    except SetupError as why:
        if wanted == "comfyui":
            raise
        print(f"[demo] no ComfyUI, so the demo goes through diffusers: {str(why).strip().splitlines()[-1]}")
        return Host(python)


def _newest(checkouts: Sequence[Path]) -> Path | None:
    return max(checkouts, key=_version, default=None)


def _version(checkout: Path) -> list[int]:
    file = checkout / "comfyui_version.py"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    return [int(part) for part in re.findall(r"\d+", text.split("=")[-1])]


def _clone() -> Path:
    """Clone ComfyUI into the cache.

    Raises:
        SetupError: it cannot be had; the last line says why.
    """
    print(f"[demo] cloning {COMFYUI_URL} (at most {CLONE_SECONDS} s)", flush=True)
    target, partial = CACHE / "ComfyUI", CACHE / "ComfyUI.partial"
    shutil.rmtree(partial, ignore_errors=True)
    CACHE.mkdir(parents=True, exist_ok=True)
    command = ["git", "clone", "--quiet", "--depth", "1", COMFYUI_URL, str(partial)]
    try:
        quiet = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
        subprocess.run(command, env=quiet, timeout=CLONE_SECONDS, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise SetupError("git is not installed") from None
    except subprocess.TimeoutExpired:
        raise SetupError(f"cloning ComfyUI took longer than {CLONE_SECONDS} s") from None
    except subprocess.CalledProcessError as error:
        raise SetupError(f"ComfyUI cannot be cloned: {(error.stderr or 'git failed').strip()}") from None
    finally:
        if not (partial / "main.py").is_file():
            shutil.rmtree(partial, ignore_errors=True)
    partial.rename(target)
    return target


# ------------------------------------------------------------------------------------------------ the parent


def _demonstrate(host: Host, options: argparse.Namespace) -> int:
    started = time.monotonic()
    from rich.console import Console

    report, console = _ours("demo.report"), Console()
    try:
        figures, pictures = _measure(host, console)
    except SetupError as why:
        print(why, file=sys.stderr)
        return 1
    console.print("\n" + report.legend(figures), highlight=False, soft_wrap=True)
    console.print(report.table(figures))
    seconds = time.monotonic() - started
    file = OUT / "report.html"
    made = f"Made by tools/demo.py on {time.strftime('%Y-%m-%d %H:%M')} in {seconds:.0f} s"
    file.write_text(report.page(figures, pictures, made), encoding="utf-8")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures.to_json(), indent=1), encoding="utf-8")
    if options.open:
        webbrowser.open(file.as_uri())
    print(f"\nThe pictures: {file}\n{report.summary(figures, seconds)}")
    return 1 if figures.failures() else 0


def _measure(host: Host, console: Any) -> tuple[Any, list[Any]]:
    """Both starts of the host: the figures, and each variant's picture of each case.

    Raises:
        SetupError: a start failed; what it printed says why.
    """
    figures = _ours("demo.figures")
    for name in ("engines", "sessions"):
        shutil.rmtree(OUT / name, ignore_errors=True)
    console.print("First start: the engines are built, about a minute each on two cores.")
    _start(host, "cold")
    built = figures.engines_in(OUT / "engines")
    console.print("Second start, a new process: it finds the engines on disk.")
    _start(host, "warm")
    built_again = figures.engines_in(OUT / "engines") - built
    cold, warm = (figures.Session(OUT / "sessions" / name) for name in REPEATS)
    pictures = [warm.pictures(case) for case in range(len(warm.cases))]
    return figures.figures(cold, warm, built, built_again), pictures


def _start(host: Host, name: str) -> None:
    """Start the host in a process of its own and wait for its pictures."""
    folder = OUT / "sessions" / name
    folder.mkdir(parents=True)
    session = {
        "folder": str(folder),
        "home": str(OUT / "engines"),
        "checkout": str(host.checkout or ""),
        "repeats": REPEATS[name],
    }
    command = [str(host.python), __file__, "--session", json.dumps(session)]
    if subprocess.run(command, env={**os.environ, "PYTHONUTF8": "1"}, check=False).returncode:
        raise SetupError(f"The {name} start failed: the lines above and {folder / 'log.txt'} say why.")


# ----------------------------------------------------------------------------------------- one start of a host


def _session(session: dict[str, Any]) -> int:
    folder, repeats, run = Path(session["folder"]), session["repeats"], _ours("demo.run")
    try:
        with run.Teller() as teller, _host(session, folder / run.LOG, teller) as host:
            run.run_session(host, folder, repeats, teller)
    except (OSError, RuntimeError) as why:
        print(why, file=sys.stderr)
        return 1
    return 0


def _host(session: dict[str, Any], log: Path, teller: Any) -> Any:
    home = Path(session["home"])
    if not session["checkout"]:
        return nullcontext(_diffusers_host(home, log, teller))
    return _ours("demo.through_comfyui").ComfyUIHost(Path(session["checkout"]), home, log, teller)


def _diffusers_host(home: Path, log: Path, teller: Any) -> Any:
    logging.basicConfig(filename=log, level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    logging.captureWarnings(True)
    runtime, settings = _ours("runtime.provider"), _ours("runtime.settings.model_settings")
    accelerate_unet = _ours("hosts.diffusers").accelerate_unet
    provider = runtime.EngineProvider(_ours("engine_cache").EngineStore(home))
    first_use = settings.Settings(policy=settings.BuildPolicy.FIRST_USE)

    def tell(update: Any) -> None:
        teller.now(f"building the engine: {update.fraction or 0:.0%} {update.message}")

    hooks = runtime.HostHooks(progress=tell)
    presets, skip_steps = _ours("sampling.presets").PRESETS, _ours("hosts.diffusers").skip_steps
    return _ours("demo.through_diffusers").DiffusersHost(
        lambda unet: accelerate_unet(unet, provider, first_use, hooks),
        lambda pipeline, preset, tell: skip_steps(pipeline, presets[preset], tell),
    )


def _ours(module: str) -> Any:
    """A module of this checkout, whatever its folder is called."""
    if "slipstream" not in sys.modules:
        runpy.run_path(str(ROOT / "__main__.py"), run_name="slipstream_main")["register"]()
    return import_module(f"slipstream.{module}")


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
