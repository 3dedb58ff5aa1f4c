"""The developer commands: which ComfyUI they find, how they count, when they fail."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

REPORT = """<testsuites><testsuite>
<testcase name="a"/><testcase name="b"><failure message="no"/></testcase><testcase name="c"><error/></testcase>
<testcase name="d"><skipped message="no CUDA GPU"/></testcase><testcase name="e"><skipped message="no CUDA GPU"/></testcase>
</testsuite></testsuites>"""  # noqa: E501


def load(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"slipstream_tools_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def bootstrap(root: Path) -> ModuleType:
    return load(root / "tools" / "bootstrap.py")


@pytest.fixture
def command(root: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(root / "tools"))
    return load(root / "tools" / "test.py")


def a_checkout(folder: Path) -> Path:
    (folder / "comfy").mkdir(parents=True)
    (folder / "main.py").touch()
    return folder


def test_comfyui_dir_may_name_several(bootstrap: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = [a_checkout(tmp_path / name).resolve() for name in ("one", "two")]
    monkeypatch.setenv("COMFYUI_DIR", os.pathsep.join(map(str, named)))
    assert bootstrap.find_comfyui() == named


def test_a_wrong_comfyui_dir_is_an_error(
    bootstrap: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMFYUI_DIR", str(tmp_path))
    with pytest.raises(bootstrap.SetupError, match="holds no ComfyUI"):
        bootstrap.find_comfyui()


def test_the_host_of_the_pack_comes_before_the_cache(
    bootstrap: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COMFYUI_DIR", raising=False)
    cached = [a_checkout(tmp_path / "cache" / name) for name in ("ComfyUI-1", "ComfyUI-2")]
    monkeypatch.setattr(bootstrap, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path / "elsewhere" / "slipstream")
    assert bootstrap.find_comfyui() == cached
    host = a_checkout(tmp_path / "host")
    monkeypatch.setattr(bootstrap, "ROOT", host / "custom_nodes" / "slipstream")
    assert bootstrap.find_comfyui() == [host]


def test_a_recipe_changes_with_what_it_installs(bootstrap: ModuleType) -> None:
    def digest(*arguments: str, **options: object) -> str:
        return str(bootstrap.Recipe((bootstrap.Stage("t", arguments),), **options).digest())

    assert digest("a") == digest("a")
    assert len({digest("a"), digest("b"), digest("a", mend_torchvision=True), digest("a", inputs=("x",))}) == 4


def test_a_failing_command_shows_its_end_and_what_to_do(bootstrap: ModuleType) -> None:
    with pytest.raises(bootstrap.SetupError, match=r"(?s)the reason.*pip install failed"):
        bootstrap._run([sys.executable, "-c", "print('the reason'); raise SystemExit(3)"], "pip install")


def test_outcomes_are_counted_with_their_reasons(command: ModuleType, tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT, encoding="utf-8")
    result = command._read("unit", report)
    assert (result.passed, result.failed, result.skipped) == (1, 2, 2)
    assert result.skips == Counter({"no CUDA GPU": 2})


@pytest.mark.parametrize(
    ("test", "passes"),
    [
        ("def test_it(): pass", True),
        ("def test_it(): assert 0", False),
        ("import absent_module", False),
        ("import os\ndef test_it(): os._exit(3)", False),
        ("", False),  # nothing ran
    ],
)
def test_the_last_line_and_the_exit_status(
    command: ModuleType,
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    test: str,
    passes: bool,
) -> None:
    file = tmp_path / "test_it.py"
    file.write_text(test, encoding="utf-8")
    monkeypatch.setattr(command, "project_python", lambda: Path(sys.executable))
    monkeypatch.setattr(command, "find_comfyui", lambda: [])
    monkeypatch.setattr(command, "_checks", lambda python: [])
    monkeypatch.setattr(command, "RESULTS", tmp_path / "results")
    status = command.main([str(file)])
    last = capsys.readouterr().out.splitlines()[-1]
    assert (status == 0) is passes
    counts = (1, 0) if passes else (0, 1 if test else 0)
    assert last == f"{counts[0]} passed, {counts[1]} failed, 0 skipped"


def test_a_failing_check_fails_the_whole(
    command: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "project_python", lambda: Path(sys.executable))
    monkeypatch.setattr(command, "find_comfyui", lambda: [])
    monkeypatch.setattr(command, "_checks", lambda python: [command.Result("ruff check", failed=1)])
    monkeypatch.setattr(command, "_tiers", lambda *given: [command.Result("unit", passed=5)])
    assert command.main([]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "5 passed, 1 failed, 0 skipped"


def test_the_page_is_tried_in_each_gradio(command: ModuleType, tmp_path: Path) -> None:
    python, test = Path(sys.executable), str(command.UI_TESTS / "test_page.py")
    pages = [("4.40.0", "no such Python"), ("6", python)]
    tiers = {tier.title: list(tier.arguments) for tier in command._planned(python, [], [], pages)}
    assert tiers["ui gradio-6"] == [str(command.UI_TESTS)] and "ui gradio-4.40.0" not in tiers and "ui" not in tiers
    (tier,) = command._planned(python, [], [test, "-x"], pages)
    assert (tier.title, list(tier.arguments)) == ("ui gradio-6", [test, "-x"])
    assert command._pages(python, [__file__]) == []


def test_a_gradio_of_other_pythons_is_a_loud_skip(
    bootstrap: ModuleType, command: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "_version_of", lambda python: (3, 13))
    assert bootstrap.why_no_gradio(bootstrap.NEWEST_GRADIO, Path(sys.executable)) is None
    why = bootstrap.why_no_gradio("3.41.2", Path(sys.executable))
    assert "needs Python 3.12 or older, and .venv has 3.13" in why
    webui, skipped = command._tiers([], [(Path("x"), Path("y"))], [], [("3.41.2", why)])
    assert webui.skips == Counter({command.GET_WEBUI: 1})
    assert skipped.title == "ui gradio-3.41.2" and skipped.skips == Counter({why: 1})


def test_packages_of_another_environment_are_found_behind_its_own(bootstrap: ModuleType, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "of_the_project.py").touch()
    python = bootstrap._ensure(tmp_path / "venv", bootstrap.Recipe((), shared=shared))
    found = subprocess.run([str(python), "-c", "import of_the_project, sys; print(sys.path[-1])"], capture_output=True)
    assert found.stdout.decode().strip() == str(shared), found.stderr
    assert bootstrap._is_current(tmp_path / "venv", bootstrap.Recipe((), shared=shared))
    assert not bootstrap._is_current(tmp_path / "venv", bootstrap.Recipe(()))


def test_the_tools_need_nothing_but_the_standard_library(root: Path) -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); import bootstrap"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code, str(root / "tools")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_is_not_about_a_version_runs_in_one_comfyui(command: ModuleType, tmp_path: Path) -> None:
    older, newer = hosts = [(tmp_path / name, Path(sys.executable)) for name in ("older", "newer")]

    def planned(whole: bool) -> dict[Path, list[str]]:
        tiers = command._planned(Path(sys.executable), hosts, [], whole=whole)
        return {tier.checkout: list(tier.arguments) for tier in tiers if tier.checkout}

    assert planned(False)[newer[0]] == planned(True)[newer[0]] == [str(command.COMFYUI_TESTS)]
    assert planned(False)[older[0]] == [str(command.COMFYUI_TESTS / name) for name in command.SEAMS]
    assert len(planned(True)[older[0]]) == 1 + len(command.ONCE)
    assert all((command.COMFYUI_TESTS / name).is_file() for name in (*command.ONCE, *command.SEAMS))
    assert "older ran test_harness.py" in command._left_out(hosts, [], False)[0]
    assert "older ran all but test_benchmarks.py" in command._left_out(hosts, [], True)[0]
    chosen = command._planned(Path(sys.executable), hosts, [str(command.COMFYUI_TESTS / "test_cli.py")])
    assert all(not word.startswith("--ignore") for tier in chosen for word in tier.arguments)
