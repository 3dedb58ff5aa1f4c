"""The demonstration's figures, page and exit status, from a host that only pretends to sample."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from io import BytesIO, StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL", reason="no pillow")

from rich.console import Console

from slipstream.demo import report
from slipstream.demo.figures import PRESET_PSNR, PSNR_CAP, Figures, Session, engines_in, figures, psnr, relative_error
from slipstream.demo.run import LOG, VARIANTS, Case, Sample, Teller, Variant, run_session, step_seconds

CASES = (Case("a <red> circle", width=64, height=64), Case("a blue star", width=96, height=64, seed=9))
REPEATS = {"cold": 1, "warm": 3}


@dataclass
class PretendHost:
    """Eager steps take 20 ms, others 10 ms; the first accelerated picture of a start takes a second more.

    With a preset 12 of 20 steps are computed; the others take 2 ms.
    """

    name: str = "Pretend 1.2"
    error: float = 1e-5
    engine_calls: int = 20
    preset_computes: int = 12
    preset_calls: int = 12
    preset_noise: int = 4
    preset_error: float = 0.05

    def sample(self, case: Case, variant: Variant, seed: int) -> Sample:
        generator = np.random.default_rng(seed)
        shape = (case.height // 8, case.width // 8)
        latent = generator.standard_normal((4, *shape)).astype(np.float32)
        picture = generator.integers(0, 255, (case.height, case.width, 3), dtype=np.uint8)
        if variant.preset:
            return self._sample_skipping(variant, latent, picture)
        if not variant.accelerate:
            return Sample(0.5, [0.02] * 19, latent, picture, eager_calls=20)
        late = 1.0 if seed == case.seed else 0.0
        picture[0, 0, 0] += 1
        reasons = [] if self.engine_calls else ["no compiler"]
        calls = {"engine_calls": self.engine_calls, "eager_calls": 20 - self.engine_calls}
        return Sample(0.25 + late, [0.01] * 19, latent * (1 + self.error), picture, **calls, reasons=reasons)

    def _sample_skipping(self, variant: Variant, latent: Any, picture: Any) -> Sample:
        step = 0.01 if variant.accelerate else 0.02
        steps = [step] * 11 + [0.002] * 8
        picture = np.clip(picture.astype(int) + self.preset_noise, 0, 255).astype(np.uint8)
        calls = {"engine_calls" if variant.accelerate else "eager_calls": self.preset_calls}
        latent = latent * (1 + self.preset_error)
        reasons = [] if self.preset_computes < 20 else ["the sampler is unknown"]
        return Sample(0.15, steps, latent, picture, **calls, computed_steps=self.preset_computes, reasons=reasons)


def store_engine(home: Path, digest: str, latent: tuple[int, int], seconds: float = 30.0) -> None:
    folder = home / "engines" / digest
    folder.mkdir(parents=True)
    height, width = latent
    axes = [[size, size, size] for size in (2, 4, height, width)]
    manifest = {
        "digest": digest,
        "created": "2026-01-01",
        "label": "Tiny",
        "profile": {"x": axes},
        "build": {"seconds": seconds},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")


def run_both(out: Path, host: PretendHost) -> tuple[Session, Session]:
    for name, repeats in REPEATS.items():
        folder = out / "sessions" / name
        folder.mkdir(parents=True)
        with Teller(Console(quiet=True)) as teller:
            run_session(host, folder, repeats, teller, CASES)
    cold, warm = (Session(out / "sessions" / name) for name in REPEATS)
    return cold, warm


def make_figures(out: Path, host: PretendHost | None = None) -> Figures:
    cold, warm = run_both(out, host or PretendHost())
    store_engine(out / "home", "a", (8, 8), 30.0)
    store_engine(out / "home", "b", (8, 12), 40.0)
    return figures(cold, warm, engines_in(out / "home"), set())


# -------------------------------------------------------------------------------------------------- figures


def test_figures_of_a_good_demonstration(tmp_path: Path) -> None:
    found = make_figures(tmp_path)
    assert found.failures() == []
    assert (found.host, found.cold_builds, found.warm_builds) == ("Pretend 1.2", 2, 0)
    assert [run.name for run in found.runs[:3]] == [
        "a <red> circle, 64×64: eager",
        "a <red> circle, 64×64: accelerated, cold",
        "a <red> circle, 64×64: accelerated, warm",
    ]
    eager, cold, warm = found.runs[:3]
    assert (eager.seconds, eager.seconds_per_step, eager.relative_error, eager.psnr) == (0.5, 0.02, 0.0, PSNR_CAP)
    assert (cold.seconds, cold.build_seconds, cold.engine_calls, cold.eager_calls) == (1.25, 30.0, 20, 0)
    assert (warm.seconds, warm.seconds_per_step, warm.load_seconds) == (0.25, 0.01, 1.0)
    assert (warm.build_seconds, warm.engine_calls) == (None, 60)
    assert warm.relative_error == pytest.approx(1e-5, rel=0.01)
    assert warm.psnr == pytest.approx(psnr_of_one_level(64 * 64 * 3))


def test_figures_of_presets(tmp_path: Path) -> None:
    found = make_figures(tmp_path)
    first = [run for run in found.runs if run.case == 0]
    assert [run.name for run in first[3:]] == [
        "a <red> circle, 64×64: eager+balanced",
        "a <red> circle, 64×64: accelerated+balanced",
    ]
    eager, accelerated = first[3:]
    assert (eager.engine_calls, eager.eager_calls) == (0, 24), "of two pictures"
    assert (accelerated.engine_calls, accelerated.eager_calls) == (24, 0)
    assert (accelerated.steps, accelerated.computed_steps, accelerated.preset) == (40, 24, "balanced")
    assert accelerated.seconds == 0.15
    assert accelerated.seconds_per_step == pytest.approx((12 * 0.01 + 8 * 0.002) / 20)
    assert accelerated.relative_error == pytest.approx(0.05, rel=0.01)
    assert 30 < accelerated.psnr < 40
    assert (accelerated.build_seconds, accelerated.load_seconds) == (None, None)
    assert not found.failures()


def test_the_cold_start_makes_no_pictures_with_presets(tmp_path: Path) -> None:
    cold, warm = run_both(tmp_path, PretendHost())
    assert not cold.samples(0, "accelerated+balanced")
    assert len(warm.samples(0, "accelerated+balanced")) == 2


@pytest.mark.parametrize(
    ("host", "words"),
    [
        (PretendHost(preset_calls=13), "24 of 40 steps were computed"),
        (PretendHost(preset_calls=0), "24 of 40 steps were computed"),
        (PretendHost(preset_computes=20, preset_calls=20), "no step was skipped (the sampler is unknown)"),
        (PretendHost(preset_computes=0), "nothing was told of skipped steps"),
        (PretendHost(preset_noise=60), f"at least {PRESET_PSNR:.0f} are expected"),
        (PretendHost(preset_error=math.nan), "dB of PSNR"),
    ],
    ids=["more calls", "no calls", "nothing skipped", "nothing told", "another picture", "not a number"],
)
def test_what_counts_as_a_failure_of_a_preset(tmp_path: Path, host: PretendHost, words: str) -> None:
    failures = make_figures(tmp_path, host).failures()
    assert sum(words in failure for failure in failures) == 4, failures  # both cases, eager and accelerated
    assert all("+balanced" in failure for failure in failures)


def psnr_of_one_level(values: int) -> float:
    return 10 * math.log10(255**2 * values)


def test_the_json_has_the_fixed_shape(tmp_path: Path) -> None:
    data = json.loads(json.dumps(make_figures(tmp_path).to_json(), allow_nan=False))
    assert {"runs", "cold_builds", "warm_builds", "host"} <= set(data)
    for run in data["runs"]:
        numbers = ("seconds", "seconds_per_step", "relative_error", "psnr", "engine_calls", "eager_calls")
        assert isinstance(run["name"], str) and all(isinstance(run[name], (int, float)) for name in numbers)


def test_what_is_no_number_is_null_in_the_json(tmp_path: Path) -> None:
    data = make_figures(tmp_path, PretendHost(error=math.nan)).to_json()
    assert json.loads(json.dumps(data, allow_nan=False))["runs"][1]["relative_error"] is None


def test_an_engine_counts_for_the_picture_that_built_it(tmp_path: Path) -> None:
    same_size = (CASES[0], Case("another", width=64, height=64, seed=5))
    for name, repeats in REPEATS.items():
        (tmp_path / name).mkdir()
        run_session(PretendHost(), tmp_path / name, repeats, Teller(Console(quiet=True)), same_size)
    store_engine(tmp_path, "a", (8, 8))
    found = figures(Session(tmp_path / "cold"), Session(tmp_path / "warm"), engines_in(tmp_path), set())
    assert [run.build_seconds for run in found.runs if run.phase == "cold"] == [30.0, None]


@pytest.mark.parametrize(
    ("host", "words"),
    [
        (PretendHost(error=2e-3), "allowed is 1e-03"),
        (PretendHost(error=math.nan), "differs from the plain model's by inf"),
        (PretendHost(engine_calls=0), "no call went to an engine (no compiler)"),
    ],
    ids=["too far off", "not a number", "no engine"],
)
def test_what_counts_as_a_failure(tmp_path: Path, host: PretendHost, words: str) -> None:
    failures = make_figures(tmp_path, host).failures()
    assert len(failures) == 4, failures  # both cases, cold and warm
    assert all(words in failure for failure in failures)


def test_a_build_in_the_second_start_is_a_failure(tmp_path: Path) -> None:
    cold, warm = run_both(tmp_path, PretendHost())
    store_engine(tmp_path, "a", (8, 8))
    built = engines_in(tmp_path)
    store_engine(tmp_path, "b", (8, 12))
    again = engines_in(tmp_path) - built
    (failure,) = figures(cold, warm, built, again).failures()
    assert "built 1 engine(s)" in failure


def test_a_build_that_only_the_log_tells_of_is_a_failure_too(tmp_path: Path) -> None:
    """An engine that was replaced leaves as many in the store as before."""
    cold, warm = run_both(tmp_path, PretendHost())
    (tmp_path / "sessions" / "warm" / LOG).write_text("INFO Slipstream: built SD15 64×64 in 30 s\n", encoding="utf-8")
    found = figures(cold, warm, set(), set())
    assert found.warm_builds == 1 and found.failures()


def test_measures() -> None:
    wanted = np.array([3.0, 4.0], dtype=np.float32)
    assert relative_error(wanted + [0, 0.5], wanted) == pytest.approx(0.1)
    assert relative_error(np.array([np.inf, 0]), wanted) == math.inf
    black, white = np.zeros((2, 2, 3), np.uint8), np.full((2, 2, 3), 255, np.uint8)
    assert psnr(black, white) == psnr(white, black) == pytest.approx(0.0)
    assert psnr(black, black) == PSNR_CAP
    assert step_seconds({1: 1.0, 2: 1.5, 3: 3.0}) == [0.5, 1.5] and step_seconds({}) == []
    assert step_seconds({5: 4.0, 1: 1.0, 4: 3.0}) == [pytest.approx(2 / 3)] * 3 + [1.0], "hosts may leave steps out"


# ----------------------------------------------------------------------------------------------------- page


class Page(HTMLParser):
    """Collects tags and addresses; complains about tags that do not close."""

    VOID = {"meta", "img", "rect"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attributes if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def make_page(out: Path, host: PretendHost | None = None) -> str:
    found = make_figures(out, host)
    warm = Session(out / "sessions" / "warm")
    pictures = [warm.pictures(case) for case in range(len(CASES))]
    return report.page(found, pictures, "Made today")


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    text = make_page(tmp_path)
    page = Page(text)
    assert page.tags.count("img") == 4 * len(CASES) and "svg" in page.tags and "table" in page.tags
    assert all(address.startswith("data:image/png;base64,") for address in page.addresses)
    assert not re.search(r"https?://|@import|<script", text)
    assert "a &lt;red&gt; circle" in text and "<red>" not in text
    assert "prefers-color-scheme: dark" in text
    assert "at most 1 of 255 levels" in text and "Failed." not in text
    assert "by the preset balanced: 60% of the steps computed" in text and "accelerated+balanced, PSNR" in text


def test_the_page_says_what_failed(tmp_path: Path) -> None:
    text = make_page(tmp_path, PretendHost(engine_calls=0))
    Page(text)
    assert "Failed." in text and "no compiler" in text


def test_the_pictures_survive_the_page() -> None:
    from base64 import b64decode

    from PIL import Image

    picture = np.random.default_rng(1).integers(0, 255, (8, 16, 3), dtype=np.uint8)
    data = report.data_url(picture).removeprefix("data:image/png;base64,")
    assert np.array_equal(np.asarray(Image.open(BytesIO(b64decode(data)))), picture)
    heat = report.difference_map(picture, picture)
    assert not heat.any()
    other = picture.copy()
    other[2, 3] ^= 255
    assert np.argwhere(report.difference_map(picture, other).any(-1)).tolist() == [[2, 3]]


def test_the_table_fits_a_terminal(tmp_path: Path) -> None:
    console = Console(width=80, record=True, file=StringIO())
    found = make_figures(tmp_path)
    slow = [replace(run, seconds=10 * run.seconds, seconds_per_step=10 * run.seconds_per_step) for run in found.runs]
    console.print(report.table(replace(found, runs=tuple(slow))))
    assert "…" not in console.export_text()
    console.print(report.table(found))
    text = console.export_text()
    assert "…" not in text
    assert "accelerated, warm" in text and "2.00×" in text and "60/0" in text
    assert "accelerated+balanced " in text and "2.94×" in text and "24/0" in text
    assert "\nbalanced: 60% of the steps computed, PSNR of at least" in report.summary(found, 1.0)


# ----------------------------------------------------------------------------------------------- the command


@pytest.fixture
def command(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """tools/demo.py with its folders in `tmp_path`, already in its own environment, without a ComfyUI."""
    monkeypatch.syspath_prepend(str(root / "tools"))
    spec = importlib.util.spec_from_file_location("slipstream_tools_demo", root / "tools" / "demo.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "OUT", tmp_path / "out")
    monkeypatch.setattr(module, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(module, "project_python", lambda: Path(sys.prefix) / "bin" / "python")
    monkeypatch.setattr(module, "find_comfyui", list)
    return module


def pretend(module: ModuleType, host: PretendHost, monkeypatch: pytest.MonkeyPatch, builds: str = "cold") -> None:
    """Replace the starts of the host; `builds` names those in which an engine is stored."""

    def start(chosen: Any, name: str) -> None:
        folder = module.OUT / "sessions" / name
        folder.mkdir(parents=True)
        run_session(host, folder, REPEATS[name], Teller(Console(quiet=True)), CASES)
        if name in builds:
            store_engine(module.OUT / "engines", name, (8, 8))

    monkeypatch.setattr(module, "_start", start)


@pytest.mark.parametrize(
    ("host", "builds", "status"),
    [
        (PretendHost(), "cold", 0),
        (PretendHost(), "cold and warm", 1),
        (PretendHost(error=0.1), "cold", 1),
        (PretendHost(engine_calls=0), "", 1),
    ],
    ids=["good", "built twice", "too far off", "no engine"],
)
def test_exit_status(
    command: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    host: PretendHost,
    builds: str,
    status: int,
) -> None:
    pretend(command, host, monkeypatch, builds)
    file = tmp_path / "new" / "figures.json"
    assert command.main(["--host", "diffusers", "--json", str(file)]) == status
    assert ("FAILED" in capsys.readouterr().out) == bool(status)
    assert len(json.loads(file.read_text(encoding="utf-8"))["runs"]) == 5 * len(CASES)
    assert (tmp_path / "out" / "report.html").is_file()


def test_each_demonstration_begins_without_engines(command: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(command, PretendHost(), monkeypatch)
    for _ in range(2):
        assert command.main(["--host", "diffusers"]) == 0
    assert len(engines_in(command.OUT / "engines")) == 1


def test_it_goes_on_in_the_environment_that_it_made(
    command: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[list[str]] = []

    def run(arguments: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        called.append(arguments)
        return subprocess.CompletedProcess(arguments, 7)

    monkeypatch.setattr(command, "project_python", lambda: tmp_path / ".venv" / "bin" / "python")
    monkeypatch.setattr(command.subprocess, "run", run)
    assert command.main(["--json", "x.json"]) == 7
    ((python, file, *arguments),) = called
    assert (Path(python), Path(file).name) == (tmp_path / ".venv" / "bin" / "python", "demo.py")
    assert arguments == ["--json", "x.json"]


def test_a_start_that_fails_is_told(
    command: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 3))
    assert command.main(["--host", "diffusers"]) == 1
    assert "cold start failed" in capsys.readouterr().err


def test_setup_that_fails_is_told(
    command: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> Path:
        raise command.SetupError("the disk is full")

    monkeypatch.setattr(command, "project_python", fail)
    assert command.main([]) == 1
    assert "the disk is full" in capsys.readouterr().err


def git_failing(with_error: Exception) -> Callable[..., Any]:
    def run(arguments: list[str], **_: Any) -> Any:
        assert arguments[0] == "git"
        Path(arguments[-1]).mkdir()
        (Path(arguments[-1]) / "half").touch()
        raise with_error

    return run


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (FileNotFoundError(), "git is not installed"),
        (subprocess.TimeoutExpired("git", 90), "took longer than"),
        (subprocess.CalledProcessError(128, "git", stderr="fatal: could not resolve host"), "could not resolve"),
    ],
)
def test_without_comfyui_it_says_so_in_one_line_and_goes_on(
    command: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    words: str,
) -> None:
    monkeypatch.setattr(command.subprocess, "run", git_failing(error))
    host = command._choose_host("auto", Path("python"))
    assert host.checkout is None
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert "diffusers" in last and words in last
    assert not list(command.CACHE.iterdir()), "half a clone was left"
    with pytest.raises(command.SetupError, match=words):
        command._choose_host("comfyui", Path("python"))


def test_a_clone_is_used_and_kept(command: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(arguments: list[str], **_: Any) -> None:
        (Path(arguments[-1]) / "comfy").mkdir(parents=True)
        (Path(arguments[-1]) / "main.py").touch()

    monkeypatch.setattr(command.subprocess, "run", run)
    monkeypatch.setattr(command, "comfyui_python", lambda checkout: Path("its-python"))
    host = command._choose_host("auto", Path("python"))
    assert (host.python, host.checkout) == (Path("its-python"), command.CACHE / "ComfyUI")
    assert (host.checkout / "main.py").is_file()


def test_the_newest_comfyui_is_taken(command: ModuleType, tmp_path: Path) -> None:
    for folder, version in {"a": "0.9.2", "b": "0.33.0", "c": "0.3.64"}.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "comfyui_version.py").write_text(f'# x\n__version__ = "{version}"\n', encoding="utf-8")
    assert command._newest([tmp_path / name for name in "abc"]) == tmp_path / "b"
    assert command._newest([]) is None


def test_variants_begin_with_the_plain_model() -> None:
    assert VARIANTS[0] == Variant("eager", accelerate=False)
    assert VARIANTS[1] == Variant("accelerated", accelerate=True)
    assert all(variant.preset for variant in VARIANTS[2:])
