"""Imports point one way, and heavy or foreign packages stay in the room that needs them."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

BACKENDS = {"compile_backend", "trt_backend"}
SERVICES = {"core", "engine_cache", "runtime", "sampling", *BACKENDS}

# room -> rooms that it may import, besides itself
ARROWS: dict[str, set[str]] = {
    "core": set(),
    "engine_cache": {"core"},
    "compile_backend": {"core"},
    "trt_backend": {"core"},
    "runtime": {"core", "engine_cache", *BACKENDS},
    "sampling": {"core", "engine_cache", *BACKENDS},
    "demo": {"core"},
    "hosts": {*SERVICES, "demo"},
    "nodes": {*SERVICES, "demo", "hosts", "ui"},
    "cli": {*SERVICES, "demo", "hosts", "ui"},
    "ui": {*SERVICES, "hosts"},
    "scripts": {*SERVICES, "hosts", "ui"},
    "benchmarks": {*SERVICES, "demo", "hosts"},
}

COMFYUI = {
    "comfy", "comfy_api", "comfy_execution", "comfy_extras", "comfyui_version", "execution", "folder_paths",
    "latent_preview", "node_helpers", "nodes", "server",
}  # fmt: skip

WEBUI = {"backend", "huggingface_guess", "ldm", "ldm_patched", "modules", "modules_forge", "omegaconf", "sgm"}

TENSORRT = ("tensorrt", "tensorrt_rtx", "tensorrt_rtx_bindings", "onnx", "onnx_graphsurgeon", "onnxscript")

# foreign package -> rooms that may import it
HOMES: dict[str, set[str]] = {
    **dict.fromkeys(COMFYUI, {"benchmarks", "hosts", "nodes"}),
    **dict.fromkeys(WEBUI, {"hosts", "scripts", "ui"}),
    **dict.fromkeys(TENSORRT, {"trt_backend"}),
    "torchao": {"compile_backend", "benchmarks"},
    "aiohttp": {"nodes", "engine_cache", "benchmarks"},
    "cryptography": {"engine_cache"},
    "fsspec": {"engine_cache"},
    "ray": {"cli"},
    "yaml": {"cli"},
    "gradio": {"ui"},
    "starlette": {"ui"},
}
# … and these only when they are used
LAZY = {*TENSORRT, "torchao", "gradio", "starlette", "cryptography", "fsspec", "ray", "yaml"}
CORE_MAY_IMPORT = {"torch"}

MOST_FILES = 15
"""Python files in one folder."""


@dataclass(frozen=True)
class Import:
    """One import statement's target."""

    file: str
    line: int
    module: str  # absolute; our own begin with "slipstream."
    lazy: bool  # inside a function, or for the type checker alone
    names: tuple[str, ...] = ()  # what is imported from it
    typing: bool = False  # for the type checker alone

    @property
    def room(self) -> str:
        return Path(self.file).parts[0] if "/" in self.file else ""

    @property
    def top(self) -> str:
        return self.module.split(".")[0]

    @property
    def target_room(self) -> str | None:
        parts = self.module.split(".")
        return parts[1] if parts[0] == "slipstream" and len(parts) > 1 else None


class Finder(ast.NodeVisitor):
    """Collects a file's imports."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.lazy = self.typing = False
        self.found: list[Import] = []

    def visit_FunctionDef(self, node: ast.AST) -> None:
        self._inside(node)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in ast.unparse(node.test):
            before, self.typing = self.typing, True
            self._inside(node)
            self.typing = before
        else:
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(node, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = self._absolute(node)
        # `from .. import core` names a room only by the imported name.
        if base == "slipstream":
            for alias in node.names:
                self._add(node, f"{base}.{alias.name}")
        else:
            self._add(node, base, tuple(alias.name for alias in node.names))

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = ["slipstream", *Path(self.file).parts[:-1]]
        kept = package[: len(package) - node.level + 1]
        return ".".join([*kept, *([node.module] if node.module else [])])

    def _add(self, node: ast.AST, module: str, names: tuple[str, ...] = ()) -> None:
        self.found.append(Import(self.file, getattr(node, "lineno", 0), module, self.lazy, names, self.typing))

    def _inside(self, node: ast.AST) -> None:
        before, self.lazy = self.lazy, True
        self.generic_visit(node)
        self.lazy = before


def imports_of(file: str, source: str) -> list[Import]:
    finder = Finder(file)
    finder.visit(ast.parse(source))
    return finder.found


def wrong(found: Import) -> Iterator[str]:
    """Yield what is wrong with an import."""
    target = found.target_room
    if found.room in ARROWS and target in ARROWS and target not in {found.room, *ARROWS[found.room]}:
        yield f"{found.room} may not import {target}"
    homes = HOMES.get(found.top)
    if homes is not None and found.room not in homes:
        yield f"only {', '.join(sorted(homes))} may import {found.top}"
    if found.top in LAZY and not found.lazy:
        yield f"import {found.top} inside the function that needs it"
    foreign = target is None and found.top not in {*sys.stdlib_module_names, "slipstream"}
    ours = target in ARROWS and found.module != "slipstream.core.version"
    if found.room == "" and not found.lazy and (foreign or ours):
        yield "the root imports only the standard library and its version at its top level"
    if found.room == "core" and foreign and found.top not in CORE_MAY_IMPORT:
        yield f"core may not import {found.top}"


def violations(sources: dict[str, str]) -> list[str]:
    """Return each wrong import as `file:line: why`."""
    return [
        f"{found.file}:{found.line}: {why}"
        for file, source in sorted(sources.items())
        for found in imports_of(file, source)
        for why in wrong(found)
    ]


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    root = Path(__file__).resolve().parents[2]
    files = [file for room in ARROWS for file in (root / room).rglob("*.py")]
    files += [root / name for name in ("__init__.py", "__main__.py", "install.py")]
    found = {file.relative_to(root).as_posix(): file.read_text(encoding="utf-8") for file in files}
    assert len(found) > 10, "the rooms were not found"
    return found


def test_imports_point_one_way(sources: dict[str, str]) -> None:
    assert not violations(sources)


Graph = dict[str, set[str]]
"""Importer → what it imports; files or folders by their paths."""


def files_imported(sources: dict[str, str]) -> Graph:
    """Imports inside of functions count, those for the type checker alone do not."""
    graph: Graph = {}
    for file, source in sources.items():
        graph[file] = set()
        for found in imports_of(file, source):
            if found.top == "slipstream" and not found.typing:
                targets = [f"{found.module}.{name}" for name in found.names]
                graph[file] |= {_file_of(target, sources) or "" for target in (found.module, *targets)} - {"", file}
    return graph


def _file_of(module: str, sources: dict[str, str]) -> str | None:
    path = "/".join(module.split(".")[1:])
    return next((file for file in (f"{path}.py", f"{path}/__init__.py".lstrip("/")) if file in sources), None)


def folders_imported(files: Graph) -> Graph:
    graph: Graph = {}
    for file, imported in files.items():
        folder = Path(file).parent.as_posix()
        graph.setdefault(folder, set()).update({Path(other).parent.as_posix() for other in imported} - {folder})
    return graph


def circles(graph: Graph) -> list[list[str]]:
    """Return groups in which each reaches each other."""
    reached = {start: _reached(start, graph) for start in graph}
    groups = {frozenset({start, *(other for other in reached[start] if start in reached[other])}) for start in graph}
    return sorted(sorted(group) for group in groups if len(group) > 1)


def _reached(start: str, graph: Graph) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found


def test_no_file_imports_itself_by_way_of_others(sources: dict[str, str]) -> None:
    assert not circles(files_imported(sources))


def test_no_folder_imports_itself_by_way_of_others(sources: dict[str, str]) -> None:
    assert not circles(folders_imported(files_imported(sources)))


def test_a_folder_holds_no_more_files_than_a_reader_overlooks(root: Path) -> None:
    folders = Counter(
        file.relative_to(root).parent.as_posix()
        for room in (*ARROWS, "tools", "tests")
        for file in (root / room).rglob("*.py")
    )
    assert not {folder: count for folder, count in folders.items() if count > MOST_FILES}


@pytest.mark.parametrize(
    "back",
    ["from . import one", "from .one import x", "def f():\n    from ..a.one import x", "import slipstream.a.one"],
)
def test_a_circle_is_found(back: str) -> None:
    files = files_imported({"a/one.py": "from .two import x", "a/two.py": back})
    assert circles(files) == [["a/one.py", "a/two.py"]]
    assert not circles(folders_imported(files))


def test_a_circle_of_folders_is_found() -> None:
    files = files_imported(
        {"a/x.py": "from ..b.x import y", "b/x.py": "", "b/y.py": "from ..a.y import z", "a/y.py": ""}
    )
    assert not circles(files) and circles(folders_imported(files)) == [["a", "b"]]


def test_what_only_the_type_checker_imports_makes_no_circle() -> None:
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .one import x"
    assert not circles(files_imported({"a/one.py": "from .two import x", "a/two.py": typed}))


PLANTED = {
    ("core/x.py", "from ..runtime import provider"): "core may not import runtime",
    ("core/x.py", "from .. import engine_cache"): "core may not import engine_cache",
    ("core/x.py", "import safetensors"): "core may not import safetensors",
    ("engine_cache/x.py", "import slipstream.runtime.building.build_queue"): "engine_cache may not import runtime",
    ("compile_backend/x.py", "from ..engine_cache.store import Store"): "may not import engine_cache",
    ("trt_backend/deep/x.py", "from ...runtime import x"): "trt_backend may not import runtime",
    ("runtime/x.py", "def f():\n    from ..hosts.comfy import unet"): "runtime may not import hosts",
    ("sampling/x.py", "from ..nodes import x"): "sampling may not import nodes",
    ("hosts/comfy/x.py", "from ...nodes import x"): "hosts may not import nodes",
    ("cli/x.py", "import slipstream.nodes.shared.inputs"): "cli may not import nodes",
    ("ui/x.py", "from ..cli import words"): "ui may not import cli",
    ("ui/x.py", "import gradio"): "import gradio inside the function",
    ("cli/x.py", "from ..benchmarks import rows"): "cli may not import benchmarks",
    ("benchmarks/x.py", "from ..cli import words"): "benchmarks may not import cli",
    ("runtime/x.py", "import comfy.model_management"): "may import comfy",
    ("cli/x.py", "def f():\n    import folder_paths"): "may import folder_paths",
    ("runtime/x.py", "import nodes"): "may import nodes",
    ("compile_backend/x.py", "def f():\n    import tensorrt"): "only trt_backend may import tensorrt",
    ("runtime/x.py", "def f():\n    import tensorrt_rtx_bindings"): "only trt_backend may import tensorrt_rtx_bindings",
    ("trt_backend/x.py", "import onnx"): "import onnx inside the function",
    ("trt_backend/surgery/x.py", "import onnxscript.ir"): "import onnxscript inside the function",
    ("compile_backend/x.py", "import torchao.quantization"): "import torchao inside the function",
    ("hosts/x.py", "def f():\n    import gradio"): "only ui may import gradio",
    ("hosts/x.py", "from aiohttp import web"): "only benchmarks, engine_cache, nodes may import aiohttp",
    ("__init__.py", "from .nodes.extension import X"): "only the standard library",
    ("__init__.py", "from .core.errors import X"): "only the standard library",
    ("__init__.py", "import torch"): "only the standard library",
}  # fmt: skip


@pytest.mark.parametrize(("planted", "why"), PLANTED.items(), ids=[f"{file}: {code}" for file, code in PLANTED])
def test_a_wrong_import_is_found(planted: tuple[str, str], why: str) -> None:
    file, source = planted
    (found,) = violations({file: source})
    assert why in found


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("hosts/comfy/x.py", "import comfy.sd\nfrom ...runtime import x\nfrom ...sampling.x import y"),
        ("trt_backend/x.py", "def f():\n    import tensorrt, onnx"),
        ("trt_backend/surgery/x.py", "def f():\n    import tensorrt_rtx_bindings\nfrom ..weight_map import x"),
        ("trt_backend/x.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import tensorrt"),
        ("core/x.py", "import json, torch\nfrom . import shapes\nfrom .shapes import ShapeRange"),
        ("__init__.py", "import typing\nasync def f():\n    from .nodes import x"),
        ("__init__.py", "from .core.version import x"),
    ],
)
def test_a_right_import_passes(file: str, source: str) -> None:
    assert not violations({file: source})
