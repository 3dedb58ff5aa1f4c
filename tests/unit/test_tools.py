"""The developer commands: which ComfyUI they find, how they count, when they fail."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
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


def test_an_environment_with_more_serves_who_needs_less(
    bootstrap: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = bootstrap.Recipe((bootstrap.Stage("some", ("a",)),))
    whole = bootstrap.Recipe((*usual.stages, bootstrap.Stage("more", ("b",))))
    venv, installed = tmp_path / "venv", list[str]()
    bootstrap._python_of(venv).parent.mkdir(parents=True)
    bootstrap._python_of(venv).touch()
    monkeypatch.setattr(bootstrap, "_runs", lambda python: True)
    monkeypatch.setattr(bootstrap, "_pip", lambda venv, arguments: installed.extend(arguments))
    for recipe in (usual, whole, usual):
        bootstrap._ensure(venv, recipe)
    assert installed == ["a", "a", "b"]


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
    monkeypatch.setattr(command, "project_python", lambda whole: Path(sys.executable))
    monkeypatch.setattr(command, "find_comfyui", lambda: [])
    monkeypatch.setattr(command, "_checks", lambda python: [])
    monkeypatch.setattr(command, "RESULTS", tmp_path / "results")
    status = command.main([str(file)])
    last = capsys.readouterr().out.splitlines()[-1]
    assert (status == 0) is passes
    counts = (1, 0) if passes else (0, 1 if test else 0)
    assert last == f"{counts[0]} passed, {counts[1]} failed, 0 skipped"


def test_a_failing_check_fails_the_whole(
    command: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(command, "project_python", lambda whole: Path(sys.executable))
    monkeypatch.setattr(command, "find_comfyui", lambda: [])
    monkeypatch.setattr(command, "_checks", lambda python: [command.Result("ruff check", failed=1)])
    monkeypatch.setattr(command, "_tiers", lambda *given: [command.Result("unit", passed=5)])
    assert command.main([]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "5 passed, 1 failed, 0 skipped"


def test_the_page_is_tried_in_each_gradio(command: ModuleType, tmp_path: Path) -> None:
    python, test = Path(sys.executable), str(command.UI_TESTS / "test_page.py")
    pages = [("4.40.0", "no such Python"), ("6", None)]
    tiers = {tier.title: list(tier.arguments) for tier in command._planned(python, [], [], pages)}
    assert (
        tiers["ui gradio-6"] == [str(command.UI_TESTS), NO_SLOW]
        and "ui gradio-4.40.0" not in tiers
        and "ui" not in tiers
    )
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
    with ThreadPoolExecutor(1) as pool:
        webui, skipped = command._tiers([], [(Path("x"), Path("y"))], [], [("3.41.2", why)], pool)
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


def hosts_of(tmp_path: Path) -> list[tuple[Path, Path]]:
    """An older and a newer ComfyUI."""
    return [(tmp_path / name, Path(sys.executable)) for name in ("older", "newer")]


def test_what_is_not_about_a_version_runs_in_one_comfyui(command: ModuleType, tmp_path: Path) -> None:
    hosts = hosts_of(tmp_path)

    def planned(whole: bool) -> dict[str, list[str]]:
        tiers = command._planned(Path(sys.executable), hosts, [], whole=whole)
        return {tier.title: list(tier.arguments) for tier in tiers if tier.checkout}

    def ignored(arguments: list[str]) -> list[str]:
        ignored = (Path(word.removeprefix("--ignore=")) for word in arguments if word.startswith("--ignore="))
        return [path.relative_to(command.COMFYUI_TESTS).as_posix() for path in ignored]

    usual, whole = planned(False), planned(True)
    parts = [f"comfyui newer {name}" for name in command.BY_THEMSELVES]
    assert list(usual) == ["comfyui older", "comfyui newer", *parts]
    assert usual["comfyui older"] == [str(command.COMFYUI_TESTS / name) for name in command.SEAMS] + [NO_SLOW]
    for part, name in zip(parts, command.BY_THEMSELVES, strict=True):
        folder = command.COMFYUI_TESTS / name
        assert folder.is_dir() and whole[part] == [str(folder)] and usual[part] == [str(folder), NO_SLOW]
    assert ignored(usual["comfyui newer"]) == ignored(whole["comfyui newer"]) == list(command.BY_THEMSELVES)
    assert ignored(whole["comfyui older"]) == [*command.BY_THEMSELVES, *command.ONCE]
    assert all(ignored(whole[f"comfyui older {name}"]) == list(command.ONCE) for name in command.BY_THEMSELVES)
    named = (*command.ONCE, *command.SEAMS)
    assert all((command.COMFYUI_TESTS / name).is_file() for name in named)
    chosen = command._planned(Path(sys.executable), hosts, [str(command.COMFYUI_TESTS / "server" / "test_cli.py")])
    assert [tier.title for tier in chosen] == ["comfyui older", "comfyui newer"]
    assert all(not word.startswith("--") for tier in chosen for word in tier.arguments)


NO_SLOW = "--without-slow"


def test_slow_tests_are_left_out_unless_they_are_asked_for(command: ModuleType, tmp_path: Path) -> None:
    def leave_out(*given: object) -> set[bool]:
        tiers = command._planned(Path(sys.executable), *given[:2], whole=given[2])
        return {NO_SLOW in tier.arguments for tier in tiers}

    hosts = hosts_of(tmp_path)
    assert leave_out(hosts, [], False) == leave_out(hosts, ["-x"], False) == leave_out([], [], False) == {True}
    assert leave_out(hosts, [], True) == leave_out([], [], True) == leave_out(hosts, [__file__], False) == {False}


def test_what_was_left_out_is_said_apart_and_counted_as_skipped(
    command: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = hosts_of(tmp_path)
    tiers = [command.Result(name, 1, skips=Counter({"slow: why": 2, "no GPU": 1})) for name in ("a", "b")]
    elsewhere, left_out = command._left_to_others(hosts, [], False), command._left_out(tiers, hosts, [], False)
    command._report([], tiers, elsewhere, left_out)
    not_here, by_choice = capsys.readouterr().out.split("not run here:")[1].split("LEFT OUT TO SAVE TIME")
    assert "a: 1 x no GPU" in not_here and "slow" not in not_here
    assert (
        "--everything" in by_choice
        and "4 slow tests" in by_choice
        and f"older ran only {command.SEAMS[0]}" in by_choice
    )
    assert "Gradio 3.41.2" in by_choice and [tier.skipped for tier in tiers] == [3, 3]
    assert command._left_out(tiers, hosts, [], True) == command._left_out(tiers, hosts, [__file__], False) == []
    (line,) = command._left_to_others(hosts, [], True)
    assert f"older ran all but {command.ONCE[0]}" in line


@pytest.mark.parametrize("given", [[], [NO_SLOW]])
def test_a_slow_test_is_skipped_with_its_reason(
    root: Path, command: ModuleType, tmp_path: Path, given: list[str]
) -> None:
    file = tmp_path / "test_it.py"
    file.write_text("import pytest\n\n@pytest.mark.slow\ndef test_it(): pass\n", encoding="utf-8")
    arguments = ["-m", "pytest", "-q", "-rs", "-p", "conftest", *given, str(file)]
    ours = {**os.environ, "PYTHONPATH": str(root / "tests")}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=tmp_path, env=ours)
    assert done.returncode == 0, done.stdout
    assert (command.SLOW in done.stdout, "1 skipped" in done.stdout) == (bool(given), bool(given))
