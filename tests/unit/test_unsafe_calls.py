"""Nothing of ours runs text as code, unpickles, or goes through a shell."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

LEFT_OUT = ("tests", ".venv", "build", "dist", ".mypy_cache", "node_modules")
LEFT_TO_TORCH = {
    # A scratch file that a process of the same measurement has written: nothing that comes from outside.
    "benchmarks/measuring/first_picture.py": {"torch.load"},
    # Files of a trusted engine, which could hold native code as well: see the gate below.
    "compile_backend/torch_compile.py": {"torch.export.load", "torch.compiler.load_cache_artifacts"},
}
"""Files, with the calls of theirs by which torch unpickles."""
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib", "pty", "commands"}
CALLS = {"eval", "exec", "compile", "__import__"}
ATTRIBUTES = {
    "os.system", "os.popen", "os.spawnl", "os.spawnv", "subprocess.getoutput", "subprocess.getstatusoutput",
    "torch.load", "torch.export.load", "torch.compiler.load_cache_artifacts", "torch.jit.load", "torch.hub.load",
    "yaml.load", "yaml.unsafe_load", "yaml.full_load", "asyncio.create_subprocess_shell",
    "tarfile.extractall", "archive.extractall", "archive.extract", "shutil.unpack_archive",
}  # fmt: skip


def unsafe(source: str) -> Iterator[str]:
    """Yield what is unsafe in a file, with its line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        else:
            names = []
        yield from (f"{node.lineno}: import {name}" for name in names if name.split(".")[0] in MODULES)
        if isinstance(node, ast.ImportFrom) and not node.level:
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (f"{node.lineno}: import {name}" for name in whole if name in ATTRIBUTES)
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        reads_weights = any(word.arg == "weights_only" and _is(word.value, True) for word in node.keywords)
        if called in CALLS or (called in ATTRIBUTES and not reads_weights):
            yield f"{node.lineno}: {called}()"
        if any(word.arg == "allow_pickle" and not _is(word.value, False) for word in node.keywords):
            yield f"{node.lineno}: {called}(allow_pickle=…)"
        if any(word.arg == "shell" and not _is(word.value, False) for word in node.keywords):
            yield f"{node.lineno}: {called}(shell=…)"


def _is(value: ast.expr, wanted: bool) -> bool:
    return isinstance(value, ast.Constant) and value.value is wanted


def test_no_file_of_ours_is_unsafe(root: Path) -> None:
    files = [file for file in root.rglob("*.py") if not any(part in LEFT_OUT for part in file.relative_to(root).parts)]
    assert len(files) > 200, "the files were not found"
    for file in files:
        found = {problem.partition(": ")[2] for problem in unsafe(file.read_text(encoding="utf-8"))}
        name = file.relative_to(root).as_posix()
        assert found == {f"{call}()" for call in LEFT_TO_TORCH.get(name, ())}, name


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from pickle import loads", "eval('1')", "exec('x')", "import os\nos.system('ls')",
        "import subprocess\nsubprocess.run('ls', shell=True)", "subprocess.Popen(x, shell=y)", "torch.load('x')",
        "yaml.load(x)", "__import__('os')", "torch.export.load('x')", "from torch import load",
        "np.load(x, allow_pickle=True)",
    ],
)  # fmt: skip
def test_what_is_unsafe_is_found(source: str) -> None:
    assert list(unsafe(source))


@pytest.mark.parametrize("source", ["model.eval()", "re.compile('x')", "subprocess.run(['ls'])", "torch.compile(f)"])
def test_what_is_safe_is_not(source: str) -> None:
    assert not list(unsafe(source))


def test_nothing_hands_an_engines_files_to_a_backend_but_the_gate_of_trust(root: Path) -> None:
    """`Entry.artifact` refuses engines of strangers; an artifact made of an entry's folder would pass it by."""
    files = [file for file in root.rglob("*.py") if not any(part in LEFT_OUT for part in file.relative_to(root).parts)]
    makers = [file for file in files if re.search(r"Artifact\(\s*\w*entry\w*\.", file.read_text(encoding="utf-8"))]
    assert makers == [], makers
