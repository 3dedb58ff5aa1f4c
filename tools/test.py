"""Lint, types and tests: the one command before a change is handed in.

    python tools/test.py [--everything] [arguments of pytest]

Of several Gradios and WebUIs it takes the newest. Of the ComfyUIs the newest runs all files of tests and an older one
those that are most about its version; tests marked `slow` are skipped. With `--everything` each host runs what it can,
slow tests too, which takes three times as long: before a release, and whenever a host's seam changes. The closing lines
say what was left out; slow tests count as skipped.

Sets up `.venv`, one environment per ComfyUI found, and one per Gradio on its first run. Arguments go to every pytest;
a test file or folder among them limits the run to it, and leaves out nothing of it. The last line reads
`N passed, N failed, N skipped`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from bootstrap import (
    GRADIOS,
    NEWEST_GRADIO,
    ROOT,
    WINDOWS,
    SetupError,
    comfyui_python,
    find_comfyui,
    find_webuis,
    gradio_python,
    project_python,
    why_no_gradio,
)

RESULTS = ROOT / "test-results"
COMFYUI_TESTS = ROOT / "tests" / "comfyui"
UI_TESTS = ROOT / "tests" / "ui"
WEBUI_TESTS = ROOT / "tests" / "webui"
PYTEST_FOUND_NOTHING = 5
CORES = os.cpu_count() or 1
_SETTING_UP = Lock()
"""Held while a tier's environment is set up, and the browser that several tiers need."""
EVERYTHING = "--everything"
WITHOUT_SLOW = "--without-slow"
"""An option of tests/conftest.py: slow tests are skipped."""
SLOW = "slow: "
"""How the reason of such a skip begins."""
ONCE = (
    "server/test_benchmarks.py", "server/test_cli.py", "models/test_tensorrt.py", "models/test_tensorrt_controlnet.py",
    "models/test_tensorrt_eight_bits.py",
)  # fmt: skip
"""Of the tests in ComfyUI: those that are not about its version. They take minutes, and run in the last one alone."""
SEAMS = (
    "live_model/test_live_model.py", "models/test_unet_engines.py", "run/test_one_step.py", "server/test_harness.py",
    "server/test_main_job.py", "server/test_node_texts.py", "server/test_route_guard.py", "server/test_routes.py",
    "server/test_whole_workflow.py", "skip/test_step_skip.py",
)  # fmt: skip
"""Those that older ComfyUIs run: where Slipstream takes hold of ComfyUI's code."""
UNIT_PARTS = {
    "unit runtime": ("runtime", "faults", "engine_cache"),
    "unit backends": ("compile_backend", "trt_backend"),
}
"""Folders of the unit tests that run in a process of their own: so that cores share the work."""
LONGEST = ("ui", "unit runtime", "unit backends")
"""How the titles of those begin that take longest, of the tiers without ComfyUI."""
BY_THEMSELVES = ("page", "server")
"""Folders of the tests in ComfyUI that run in a process of their own: so that cores share the work."""
NEWEST_WEBUI = "webui-neo"
GET_COMFYUI = (
    "no ComfyUI found, so nothing was tried in the program that Slipstream is made for. Get one with "
    "`git clone https://github.com/comfyanonymous/ComfyUI ~/.cache/slipstream/ComfyUI`, or name one by "
    "COMFYUI_DIR"
)
GET_WEBUI = "no WebUI found, so the extension was not tried in one; tests/webui/README.md says how to get one"


@dataclass
class Result:
    """What came of one check or one tier of tests."""

    title: str
    passed: int = 0
    failed: int = 0
    skips: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    note: str = ""

    @property
    def skipped(self) -> int:
        """How many tests were skipped."""
        return self.skips.total()


def main(arguments: Sequence[str]) -> int:
    """Run everything and return the exit status."""
    if {"-h", "--help"}.intersection(arguments):
        print(__doc__)
        return 0
    started, whole = time.monotonic(), EVERYTHING in arguments
    arguments = [argument for argument in arguments if argument != EVERYTHING]
    try:
        python = project_python(whole)
        hosts = [(checkout, comfyui_python(checkout)) for checkout in find_comfyui()]
    except SetupError as why:
        print(why, file=sys.stderr)
        print("0 passed, 1 failed, 0 skipped")
        return 1
    ready = time.monotonic()
    shutil.rmtree(RESULTS, ignore_errors=True)
    pages = _pages(python, arguments, whole)
    planned = _planned(python, hosts, arguments, pages, whole)
    print(f"\n== checks and tests: {', '.join(tier.title for tier in planned)}, up to {CORES} at once", flush=True)
    with ThreadPoolExecutor(CORES) as pool:
        # Each computes on one thread, so that none waits for another's core.
        checking = pool.submit(_checks, python)
        tiers = _tiers(planned, hosts, arguments, pages, pool)
        checks = checking.result()
    _report(checks, tiers, _left_to_others(hosts, arguments, whole), _left_out(tiers, hosts, arguments, whole))
    passed, skipped = sum(tier.passed for tier in tiers), sum(tier.skipped for tier in tiers)
    failed = sum(result.failed for result in (*checks, *tiers))
    print(f"\ntook {time.monotonic() - started:.0f} s on {CORES} cores, {ready - started:.0f} s of it for environments")
    if not passed and not failed:
        print("No test ran, which counts as a failure.")
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 0 if passed and not failed else 1


# --------------------------------------------------------------------------------------------------- checks


def _checks(python: Path) -> list[Result]:
    """Run lint, format and types."""
    sources = sorted(str(file) for file in (ROOT / "tools").glob("*.py"))
    mypy = ("mypy", "--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache"))
    return [
        _check("ruff check", python, ROOT, ("ruff", "check", "--output-format=concise", ".")),
        _check("ruff format", python, ROOT, ("ruff", "format", "--check", "--output-format=concise", ".")),
        _check("mypy slipstream", python, _package_parent(), (*mypy, "-p", "slipstream")),
        _check("mypy tools", python, ROOT / "tools", (*mypy, "--explicit-package-bases", *sources)),
    ]


def _check(title: str, python: Path, folder: Path, module: Sequence[str]) -> Result:
    started = time.monotonic()
    code, output = _shown_when_done([str(python), "-m", *module], folder)
    print(f"\n== {title}\n{output}", end="", flush=True)
    return Result(title, failed=int(code != 0), seconds=time.monotonic() - started)


def _shown_when_done(command: Sequence[str], folder: Path, **environment: str) -> tuple[int, str]:
    """Run a command and return its exit status and its output: of several that run side by side, each in one piece."""
    ours = {**os.environ, **environment}
    done = subprocess.run(command, cwd=folder, env=ours, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return done.returncode, done.stdout.decode("utf-8", "replace")


def _package_parent() -> Path:
    """Return a folder that holds the root under the package's name, whatever the clone's folder is called."""
    parent = ROOT / ".mypy_cache" / "package"
    package = parent / "slipstream"
    parent.mkdir(parents=True, exist_ok=True)
    if WINDOWS:
        shutil.rmtree(package, ignore_errors=True)
        left_out = shutil.ignore_patterns(".*", "__pycache__", "tests", "tools", "weights")
        shutil.copytree(ROOT, package, ignore=left_out)
    elif not package.is_symlink() or package.resolve() != ROOT:
        package.unlink(missing_ok=True)
        package.symlink_to(ROOT, target_is_directory=True)
    return parent


# ---------------------------------------------------------------------------------------------------- tests


@dataclass(frozen=True)
class Tier:
    """Tests to run in one process of pytest."""

    title: str
    python: Path
    arguments: Sequence[str]
    checkout: Path | None = None
    webui: Path | None = None
    gradio: str = ""
    """Which of `GRADIOS` the tests want: with an environment of its own, set up before they run."""


Page = tuple[str, "str | None"]
"""The name of a Gradio, and why it cannot be had here, if so."""


def _pages(python: Path, arguments: Sequence[str], whole: bool = False) -> list[Page]:
    """Return the Gradios that the tests to be run ask for."""
    chosen = _chosen(arguments)
    if chosen and not any(_is_below(UI_TESTS, path) for path in chosen):
        return []
    wanted = GRADIOS if whole or chosen else [NEWEST_GRADIO]
    return [(name, why_no_gradio(name, python)) for name in wanted]


def _tiers(
    tiers: Sequence[Tier],
    hosts: Sequence[tuple[Path, Path]],
    arguments: Sequence[str],
    pages: Sequence[Page],
    pool: Executor,
) -> list[Result]:
    """Run what is planned, the longest first, and name the hosts that are not there."""
    longest_first = sorted(tiers, key=lambda tier: (tier.checkout is None, not tier.title.startswith(LONGEST)))
    running = {tier.title: pool.submit(_run, tier) for tier in longest_first}
    results = [running[tier.title].result() for tier in tiers]
    if not hosts and not any(tier.title == "chosen" for tier in tiers):
        results.append(Result("comfyui", skips=Counter({GET_COMFYUI: 1})))
    if not arguments and not any(tier.webui for tier in tiers):
        results.append(Result("webui", skips=Counter({GET_WEBUI: 1})))
    results += [Result(f"ui gradio-{name}", skips=Counter({why: 1})) for name, why in pages if why]
    return results


def _planned(
    python: Path,
    hosts: Sequence[tuple[Path, Path]],
    arguments: Sequence[str],
    pages: Sequence[Page] = (),
    whole: bool = False,
) -> list[Tier]:
    chosen = _chosen(arguments)
    options = [argument for argument in arguments if argument not in chosen]
    options += [WITHOUT_SLOW] if _leaves_out_slow(arguments, whole) else []
    inside = [path for path in chosen if _is_below(COMFYUI_TESTS, path)]
    of_page = [path for path in chosen if _is_below(UI_TESTS, path)]
    of_webui = [path for path in chosen if _is_below(WEBUI_TESTS, path)]
    outside = [path for path in chosen if path not in (*inside, *of_page, *of_webui)]
    parts = {} if chosen else _plain_tiers()
    tiers = [Tier(title, python, [*paths, *options]) for title, paths in parts.items()]
    if outside:
        tiers.append(Tier("chosen", python, [*outside, *options]))
    if inside or not chosen:
        for found, its_python in hosts:
            parts = {"": inside} if inside else _comfyui_tests(found == hosts[-1][0], whole)
            for part, paths in parts.items():
                tiers.append(Tier(f"comfyui {found.name}{part}", its_python, [*paths, *options], found))
    if of_webui or not chosen:
        for webui, its_python in find_webuis():
            name = webui.parent.name if webui.name == "webui" else webui.name
            if of_webui or whole or name == NEWEST_WEBUI:
                tiers.append(Tier(name, its_python, [*(of_webui or [str(WEBUI_TESTS)]), *options], webui=webui))
    for name, why in pages:
        if not why:
            tiers.append(Tier(f"ui gradio-{name}", python, [*(of_page or [str(UI_TESTS)]), *options], gradio=name))
    return tiers


def _leaves_out_slow(arguments: Sequence[str], whole: bool) -> bool:
    """Tell whether slow tests are skipped: nobody asked for all, or for certain ones."""
    asks = any(argument.startswith(("-k", "-m")) for argument in arguments)
    return not whole and not asks and not _chosen(arguments)


def _comfyui_tests(is_newest: bool, whole: bool) -> dict[str, list[str]]:
    """Return pytest's arguments for each process of tests in one ComfyUI, by what is added to its name."""
    if not is_newest and not whole:
        return {"": [str(COMFYUI_TESTS / name) for name in SEAMS]}
    left_out = () if is_newest else ONCE
    parts = {"": [str(COMFYUI_TESTS), *(f"--ignore={COMFYUI_TESTS / name}" for name in BY_THEMSELVES)]}
    parts |= {f" {name}": [str(COMFYUI_TESTS / name)] for name in BY_THEMSELVES}
    return {name: [*paths, *(f"--ignore={COMFYUI_TESTS / each}" for each in left_out)] for name, paths in parts.items()}


def _chosen(arguments: Sequence[str]) -> list[str]:
    """Return the test files and folders among the arguments."""
    return [argument for argument in arguments if Path(argument.split("::")[0]).exists()]


def _plain_tiers() -> dict[str, list[str]]:
    """Return pytest's arguments for each process of tests that need no ComfyUI, WebUI or Gradio, by its title."""
    folders = sorted(path for path in (ROOT / "tests").iterdir() if any(path.rglob("test_*.py")))
    plain = [folder for folder in folders if folder not in (COMFYUI_TESTS, UI_TESTS, WEBUI_TESTS)]
    tiers = {folder.name: [str(folder)] for folder in plain}
    for title, names in UNIT_PARTS.items():
        part = [str(ROOT / "tests" / "unit" / name) for name in names]
        tiers["unit"] += [f"--ignore={folder}" for folder in part]
        tiers[title] = part
    return tiers


def _is_below(folder: Path, argument: str) -> bool:
    return Path(argument.split("::")[0]).resolve().is_relative_to(folder)


def _run(tier: Tier) -> Result:
    """Run one tier; its output appears in one piece when it is done, since tiers run side by side."""
    report = RESULTS / f"{tier.title.replace(' ', '-')}.xml"
    folders = {"COMFYUI_DIR": str(tier.checkout or ""), "WEBUI_DIR": str(tier.webui or "")}
    started = time.monotonic()
    try:
        python = _python_of(tier)
    except SetupError as why:
        return Result(tier.title, failed=1, note=str(why))
    command = [str(python), "-m", "pytest", "-q", f"--rootdir={ROOT}", f"--junitxml={report}", *tier.arguments]
    code, output = _shown_when_done(command, ROOT, OMP_NUM_THREADS="1", **folders)
    print(f"\n== tests: {tier.title}\n{output}", end="", flush=True)
    result = _read(tier.title, report)
    result.seconds = time.monotonic() - started
    if code not in (0, PYTEST_FOUND_NOTHING) and not result.failed:
        result.failed, result.note = 1, f"pytest ended with {code} before it could report"
    return result


def _python_of(tier: Tier) -> Path:
    """Return the Python to run a tier by; its environment is set up now if need be, one at a time."""
    if not tier.gradio:
        return tier.python
    with _SETTING_UP:
        return gradio_python(tier.gradio, tier.python)


def _read(title: str, report: Path) -> Result:
    """Count a tier's outcomes in the report that pytest left."""
    result = Result(title)
    if not report.exists():
        return result
    for case in ElementTree.parse(report).iter("testcase"):
        outcomes = {child.tag: child for child in case}
        if "failure" in outcomes or "error" in outcomes:
            result.failed += 1
        elif "skipped" in outcomes:
            result.skips[outcomes["skipped"].get("message") or "no reason given"] += 1
        else:
            result.passed += 1
    return result


# --------------------------------------------------------------------------------------------------- report


def _report(
    checks: Sequence[Result], tiers: Sequence[Result], elsewhere: Sequence[str], left_out: Sequence[str]
) -> None:
    print("\n== summary")
    for check in checks:
        print(f"{check.title:<28} {'FAILED' if check.failed else 'ok':<6} {check.seconds:>31.0f} s")
    print(f"\n{'tests':<28} {'passed':>8} {'failed':>8} {'skipped':>8} {'time':>12}")
    for tier in tiers:
        counts = f"{tier.passed:>8} {tier.failed:>8} {tier.skipped:>8} {tier.seconds:>10.0f} s"
        print(f"{tier.title:<28} {counts} {tier.note}".rstrip())
    _say("not run here:", (*_absent(), *_skips(tiers), *elsewhere))
    _say(f"LEFT OUT TO SAVE TIME, `python tools/test.py {EVERYTHING}` runs it:", left_out)


def _say(title: str, lines: Sequence[str]) -> None:
    if lines:
        print(f"\n{title}")
    for line in lines:
        print(f"- {line}")


def _skips(tiers: Sequence[Result]) -> list[str]:
    """Say why tests were skipped, but for those left out to save time."""
    reasons = [(tier.title, count, why) for tier in tiers for why, count in sorted(tier.skips.items())]
    lines = [f"{title}: {count} x {why}" for title, count, why in reasons if not why.startswith(SLOW)]
    return lines or ["no test was skipped"]


def _left_to_others(hosts: Sequence[tuple[Path, Path]], arguments: Sequence[str], whole: bool) -> list[str]:
    """Say what is not about a version of ComfyUI, and runs in the newest alone."""
    older = [checkout.name for checkout, _ in hosts[:-1]]
    if not older or not whole or _chosen(arguments):
        return []
    return [f"of tests/comfyui, {', '.join(older)} ran all but {', '.join(ONCE)}"]


def _left_out(
    tiers: Sequence[Result], hosts: Sequence[tuple[Path, Path]], arguments: Sequence[str], whole: bool
) -> list[str]:
    """Say what would run with `--everything`."""
    if whole or _chosen(arguments):
        return []
    older, lines = [checkout.name for checkout, _ in hosts[:-1]], []
    if slow := sum(count for tier in tiers for why, count in tier.skips.items() if why.startswith(SLOW)):
        lines.append(f"{slow} slow tests, which count as skipped")
    if older:
        lines.append(f"of tests/comfyui, {', '.join(older)} ran only {', '.join(SEAMS)}")
    others = [name for name in GRADIOS if name != NEWEST_GRADIO]
    return [*lines, f"Gradio {', '.join(others)}, and WebUIs other than {NEWEST_WEBUI}"]


def _absent() -> list[str]:
    """Name the hardware and packages whose tests cannot run on this machine at all."""
    lines = []
    if shutil.which("nvidia-smi") is None:
        lines.append("GPU and TensorRT: this machine has no NVIDIA GPU")
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
