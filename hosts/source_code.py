"""The code that a model runs: which files define it, and whether it still is what they say.

Two things may part them: a file that was updated under a running host, and an extension that replaces functions or
classes of the host. Neither may go unnoticed, since engines are traced from the files, by another process.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import inspect
import os
import re
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType

import torch

from .. import STARTED
from ..core.errors import UnsupportedModel
from .walk import Layers, layers_of

_FOUNDATIONS = {"torch", *sys.stdlib_module_names}
"""Packages whose code is no part of a model's own."""


def source_digest(model: torch.nn.Module) -> str:
    """Of the files that define the model's layers, and of those whose functions these import from the same package.

    Raises:
        UnsupportedModel: a file cannot be read, or is not what this process runs.
    """
    digest = hashlib.sha256()
    for name in sorted(_modules_of(_layer_classes(layers_of(model)))):
        digest.update(name.encode() + b"\0" + _written(name).text.encode() + b"\0")
    return digest.hexdigest()


def why_replaced(model: torch.nn.Module, layers: Layers | None = None) -> str | None:
    """What an extension has replaced in the code that the model runs, in words; None when it is the host's own.

    Args:
        layers: what `layers_of(model)` gave just now, if somebody asked.
    """
    classes = _layer_classes(layers_of(model) if layers is None else layers)
    home = _top(type(model).__module__)
    for kind in sorted(classes, key=_name):
        if _top(kind.__module__) != home:
            return f"another extension brought its own layers ({_name(kind)})"
        for name, function in _methods_of(kind):
            if not is_own(function, home):
                return _say_replaced(f"{_name(kind)}.{name}", function)
    try:
        return next(_replaced_functions(_modules_of(classes), home), None)
    except UnsupportedModel as error:
        return str(error)


def _layer_classes(layers: Layers) -> frozenset[type]:
    kinds = set(map(type, layers.values()))
    bases = ((base, kind) for kind in kinds for base in kind.__mro__ if _top(base.__module__) not in _FOUNDATIONS)
    return frozenset(base for base, kind in bases if not _is_mixin(base, kind))


def _is_mixin(base: type, kind: type) -> bool:
    """Whether a base is an installed package's and no layer, as diffusers' for configs is in Forge: it computes
    nothing."""
    package = _top(base.__module__)
    return not issubclass(base, torch.nn.Module) and package != _top(kind.__module__) and _is_installed(package)


@functools.lru_cache(maxsize=64)
def _modules_of(classes: frozenset[type]) -> frozenset[str]:
    found: set[str] = set()
    waiting = {kind.__module__ for kind in classes}
    while waiting:
        name = waiting.pop()
        found.add(name)
        written = _written(name)
        used = {pair for pair in written.imports.values() if _top(pair[0]) == _top(name)}
        used |= {pair for pair in written.calls if _family(pair[0]) == _family(name)}
        sources = (_source_of(module, function) for module, function in used)
        waiting |= {module for module in sources if module is not None} - found
    return frozenset(found)


def _source_of(module: str, name: str) -> str | None:
    """The module that defines the function which `module` gives as `name`; None where it is no function."""
    if _file_of(module) is None:  # a folder of modules: what is imported from it is a module
        return None
    written = _written(module)
    if name in written.functions or name in written.aliases:
        return module
    if name in written.imports and _top(written.imports[name][0]) == _top(module):
        return _source_of(*written.imports[name])
    return None


def _replaced_functions(modules: Iterable[str], home: str) -> Iterator[str]:
    """Functions that are not, in this process, what the modules' files say."""
    for module in sorted(modules):
        written = _written(module)
        for name, value in list(vars(sys.modules[module]).items()) if module in sys.modules else ():
            if not isinstance(value, FunctionType):
                continue
            source, original = written.imports.get(name, (module, name))
            if source == module:
                replaced = name in written.functions and not is_own(value, home)
            else:  # from another package it may be whatever it is
                replaced = _top(source) == home and getattr(sys.modules.get(source), original, value) is not value
            if replaced:
                yield _say_replaced(f"{module}.{name}", value)


# ------------------------------------------------------------------------------------------------- on the disk


@dataclass(frozen=True)
class _Written:
    """A module as its file has it.

    Attributes:
        functions: names of those that it defines.
        aliases: further names that it gives to them, such as that of the one to be used on this machine.
        imports: name -> module and name there, of all that it imports by `from … import …`.
        calls: module and name there, of all that it reaches through a module that it imports by `import …`.
    """

    text: str
    functions: frozenset[str]
    aliases: frozenset[str]
    imports: Mapping[str, tuple[str, str]]
    calls: frozenset[tuple[str, str]]


@functools.lru_cache(maxsize=1024)
def _written(module: str) -> _Written:
    """
    Raises:
        UnsupportedModel: the file cannot be read, or was changed since this process started.
    """
    text = _read(module)
    package = module if _is_package(module) else module.rpartition(".")[0]
    tree = ast.parse(text)
    functions: set[str] = set()
    equal: dict[str, str] = {}
    imports: dict[str, tuple[str, str]] = {}
    modules: dict[str, str] = {}
    for node in _statements(tree.body):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            functions.add(node.name)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
            equal |= {target.id: node.value.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            imports |= {alias.asname or alias.name: (source, alias.name) for alias in node.names}
    aliases = frozenset(name for name, other in equal.items() if other in functions)
    return _Written(text, frozenset(functions), aliases, imports, frozenset(_reached(tree, modules)))


def _reached(tree: ast.Module, modules: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Module and name of each `module.name` in the code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (owner := ast.unparse(node.value)) in modules:
            yield modules[owner], node.attr


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Those that a module runs when it is imported, inside of conditions too."""
    for node in body:
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield from _statements(
                child for child in ast.walk(node) if isinstance(child, ast.stmt) and child is not node
            )


def _read(module: str) -> str:
    file = _file_of(module)
    try:
        if file is None:
            raise OSError("it has no file")
        status, text = os.stat(file), Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise UnsupportedModel(
            f"The source of {module} cannot be read ({error}), so a change of it would go unnoticed; "
            "the plain model is used"
        ) from error
    if max(status.st_mtime, status.st_ctime) > STARTED:
        raise UnsupportedModel(f"{file} was changed after this program started; restart it to use engines")
    return text


def _file_of(module: str) -> str | None:
    """The source file of a module, loaded or not."""
    if module in sys.modules:
        try:
            return inspect.getsourcefile(sys.modules[module])
        except TypeError:  # a folder, or made in memory
            return None
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    return spec.origin if spec is not None and spec.has_location else None


def _is_package(module: str) -> bool:
    return os.path.basename(_file_of(module) or "") == "__init__.py"


# --------------------------------------------------------------------------------------------- in this process


def _methods_of(kind: type) -> Iterator[tuple[str, FunctionType]]:
    for name, value in list(vars(kind).items()):
        plain = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if isinstance(plain, FunctionType):
            yield name, plain


def _say_replaced(what: str, function: FunctionType) -> str:
    owner = re.split(r"[/\\]", _owner(function))[-1]  # ComfyUI names packs by their folders' paths
    return f"another extension ({owner}) replaced {what}"


def _owner(function: FunctionType) -> str:
    return str(function.__globals__.get("__name__"))  # unlike __module__, no decorator alters it


def is_own(function: FunctionType, package: str) -> bool:
    """Whether a function was defined in `package`, decorators from installed packages aside."""
    owners = []
    layer: object = function
    while isinstance(layer, FunctionType):
        owners.append(_top(_owner(layer)))
        layer = getattr(layer, "__wrapped__", None)
    return package in owners and all(owner == package or _is_installed(owner) for owner in owners)


@functools.lru_cache(maxsize=256)
def _is_installed(package: str) -> bool:
    """Whether it is the standard library's, torch, or an installed package: no extension of a host is."""
    file = getattr(sys.modules.get(package), "__file__", None)
    places = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), site.getusersitepackages())
    return package in _FOUNDATIONS or (file is not None and file.startswith(places))


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _top(module: str) -> str:
    return module.partition(".")[0]


def _family(module: str) -> list[str]:
    """Models lie together in a package of their own, beside services which extensions may replace as they like."""
    return module.split(".")[:2]
