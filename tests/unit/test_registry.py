"""What Comfy's registry asks of a pack.

Its published standards (docs.comfy.org/registry/standards) forbid `eval` and `exec`, packages that are installed at run
time, and obfuscated code; people who scan packs look for encoded text, unpickling and processes besides. What there has
to be of these is in the modules that are named here.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
STARTS_PROCESSES = "core/programs.py"
"""The one module that does; what it starts stands in its docstring."""


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    """tools/publish.py."""
    spec = importlib.util.spec_from_file_location("slipstream_tools_publish", ROOT / "tools" / "publish.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sources(tool: ModuleType) -> Iterator[tuple[str, ast.Module]]:
    for file in tool.installed_files():
        if file.suffix == ".py":
            yield file.relative_to(ROOT).as_posix(), ast.parse(file.read_text(encoding="utf-8"))


def imported(tree: ast.Module) -> set[str]:
    """Names of all modules that a file imports from outside."""
    found = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    froms = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level)
    return found | {node.module for node in froms if node.module}


def called(tree: ast.Module) -> set[str]:
    """What is called by a plain name, or as an attribute of one."""
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return {ast.unparse(function) for function in calls}


def test_nothing_is_evaluated_encoded_unpickled_or_run_by_a_shell(tool: ModuleType) -> None:
    for name, tree in sources(tool):
        assert not {"eval", "exec", "compile", "__import__", "os.system", "os.popen"} & called(tree), name
        assert not {"base64", "pickle", "marshal", "dill"} & imported(tree), name
        assert not any("shell=True" in ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Call)), name


def test_processes_are_started_where_it_is_said(tool: ModuleType) -> None:
    starting = {"subprocess", "pty", "asyncio.subprocess", "_posixsubprocess"}
    found = {name: imported(tree) & starting for name, tree in sources(tool)}
    assert [name for name, modules in found.items() if modules] == [STARTS_PROCESSES]
    calls = {"os.posix_spawn", "os.execv", "os.execvp", "os.spawnv", "os.startfile"}
    assert [name for name, tree in sources(tool) if calls & called(tree)] == []
    assert [name for name, tree in sources(tool) if "os.fork" in called(tree)] == [STARTS_PROCESSES]


def test_nothing_is_installed_at_run_time(tool: ModuleType) -> None:
    """What has a program started knows no installer. Messages may name the command that a person can give."""
    for name, tree in sources(tool):
        if not {"run", "start", "start_and_wait"} & called(tree):
            continue
        constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
        assert not {"pip", "conda", "uv", "npm"} & {each for each in constants if isinstance(each, str)}, name


def test_the_installed_folder_is_small_and_holds_no_developers_files(tool: ModuleType) -> None:
    files = tool.installed_files()
    assert sum(file.stat().st_size for file in files) < tool.MOST_BYTES
    tops = {file.relative_to(ROOT).parts[0] for file in files}
    assert not tops & {"tests", "tools", "benchmarks", ".ci", "publisher.toml"}
    assert {"__init__.py", "nodes", "web", "locales", "subgraphs", "example_workflows", "README.md"} <= tops


def test_what_installed_files_import_and_link_to_is_installed(tool: ModuleType) -> None:
    installed = set(tool.installed_files())
    for name, tree in sources(tool):
        package = (ROOT / name).parent
        for node in ast.walk(tree):
            if not (isinstance(node, ast.ImportFrom) and node.level):
                continue
            base = package.joinpath(*[".."] * (node.level - 1)).resolve().joinpath(*(node.module or "").split("."))
            for target in (base, *(base / alias.name for alias in node.names)):
                files = {target.with_suffix(".py"), target / "__init__.py"}
                assert not any(map(Path.exists, files)) or files & installed, f"{name} imports {target}"
    for page in (file for file in installed if file.suffix == ".md"):
        for link in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text(encoding="utf-8")):
            target = (page.parent / link).resolve()
            is_in_repository = target.relative_to(ROOT).parts[0] in ("tests", "benchmarks", "deploy")
            assert is_in_repository or not target.is_file() or target in installed, f"{page} links to {link}"


def test_a_pack_without_its_publisher_is_refused(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tool, "publisher", lambda: {"publisher_id": "", "repository": "", "icon": ""})
    assert tool.main(["--check"]) == 1
    told = capsys.readouterr().err
    assert all(name in told for name in ("publisher_id", "repository", "icon"))


def test_the_publishers_facts_reach_the_project(tool: ModuleType) -> None:
    address = "https://github.com/someone/slipstream"
    fields = {"publisher_id": "someone", "repository": f"{address}/", "icon": "https://example.org/icon.png"}
    assert list(tool.missing(fields)) == []
    text = tool.filled((ROOT / "pyproject.toml").read_text(encoding="utf-8"), fields)
    for line in (f'Repository = "{address}"', 'PublisherId = "someone"', 'Icon = "https://example.org/icon.png"'):
        assert text.count(f"{line}\n") == 1
    assert tool.filled(text, fields) == text, "twice is once"
