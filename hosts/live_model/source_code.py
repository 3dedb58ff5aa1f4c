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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_, itemgetter
from pathlib import Path
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType
from typing import Any

import torch

from ...core.errors import UnsupportedModel
from ...core.version import STARTED
from .layer_classes import computing_class, storing_classes
from .layer_walk import layers_of

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


class HostCode:
    """The code that a model runs in this process: methods of its layers' classes, and functions that these call.

    Args:
        layers: what `layers_of(model)` gave just now, or some of them.
    """

    def __init__(self, model: torch.nn.Module, layers: Mapping[str, torch.nn.Module]) -> None:
        self._home = _top(type(model).__module__)
        self._classes = _layer_classes(layers)
        kinds = set(map(type, layers.values()))
        self._storing = sorted({each for kind in kinds for each in storing_classes(kind)}, key=_name)
        self._torch_classes = {torch.Tensor, *_torch_classes(layers)}
        self._known: tuple[list[int], list[Any], str | None] | None = None
        self._is_read = True
        self._spaces: list[Mapping[str, Any]] = []
        self._functions: list[FunctionType] = []
        self._places: list[tuple[Callable[[Mapping[str, Any]], Any], Mapping[str, Any]]] = []

    def why_replaced(self) -> str | None:
        """What an extension replaced in it, in words; None where it is the host's own. Cheap where nothing was replaced
        since it was asked last."""
        if self._known is None or not self._is_as_known(*self._known[:2]):
            reason = self._find()
            self._spaces = [vars(kind) for kind in (*self._classes, *self._storing, *self._torch_classes)]
            self._places = [(itemgetter(*names, names[0]), space) for space, names in self._watched() if names]
            self._functions = [
                found for value in self._values() if isinstance(found := _unwrapped(value), FunctionType)
            ]
            self._known = *self._look(), reason
        return self._known[2]

    @property
    def state(self) -> object:
        """See `Code`; of code that cannot be read it is not known which functions that calls."""
        return self._known if self._is_read else None

    def _look(self) -> tuple[list[int], list[Any]]:
        return [*map(len, self._spaces)], [*self._values(), *map(attrgetter("__code__"), self._functions)]

    def _values(self) -> Iterator[Any]:
        return chain.from_iterable([get(space) for get, space in self._places])

    def _is_as_known(self, sizes: list[int], values: list[Any]) -> bool:
        try:
            found = self._look()
        except KeyError:  # something is gone
            return False
        return found[0] == sizes and all(map(is_, found[1], values))

    def _find(self) -> str | None:
        for kind in sorted(self._classes, key=_name):
            if _top(kind.__module__) != self._home:
                return f"another extension brought its own layers ({_name(kind)})"
        try:
            modules = _modules_of(self._classes)
            found = (
                self._replaced_in_classes(), self._replaced_in_torch(modules), self._replaced_functions(modules),
                self._replaced_where_weights_are_stored(),
            )  # fmt: skip
            return next(chain.from_iterable(found), None)
        except UnsupportedModel as error:
            return str(error)

    def _replaced_in_classes(self) -> Iterator[str]:
        for kind in sorted(self._classes, key=_name):
            written = _written(kind.__module__)
            for name, value in list(vars(kind).items()):
                function, place = _unwrapped(value), f"{kind.__qualname__}.{name}"
                if isinstance(function, FunctionType):
                    is_foreign = not is_own(function, self._home)
                else:  # a method is a function, but for what other things that are bound, or called, were made of it
                    is_foreign = _is_bound(value) and place not in written.of_classes
                if is_foreign or written.constants.get(place, value) != value:
                    yield _say_replaced(f"{_name(kind)}.{name}", value)

    def _replaced_in_torch(self, modules: frozenset[str]) -> Iterator[str]:
        for kind in sorted(self._torch_classes, key=_name):
            for name, value in list(vars(kind).items()):
                if _is_computing(name, kind) and not _is_torchs(value):
                    yield _say_replaced(f"{_name(kind)}.{name}", value)
        for module, name in sorted(_called_of_torch(modules)):
            if not _is_torchs(value := _attribute(module, name)):
                yield _say_replaced(f"{module}.{name}", value)

    def _replaced_functions(self, modules: frozenset[str]) -> Iterator[str]:
        """Functions and constants that are not, in this process, what the modules' files say."""
        for module in sorted(modules & sys.modules.keys()):
            written, names = _written(module), vars(sys.modules[module])
            for name in sorted(written.names & names.keys()):
                if self._is_replaced(module, name, names[name], written):
                    yield _say_replaced(f"{module}.{name}", names[name])
        for module, name in sorted(_called_elsewhere(modules)):
            value = _attribute(module, name)
            if isinstance(value, FunctionType) and not is_own(value, self._home):
                yield _say_replaced(f"{module}.{name}", value)

    def _is_replaced(self, module: str, name: str, value: Any, written: _Written) -> bool:
        if name in written.constants:
            return type(value) is not type(written.constants[name]) or bool(value != written.constants[name])
        if name in written.modules:
            return sys.modules.get(written.modules[name], value) is not value
        if name in written.single_imports:
            source, original = written.imports[name]
            return getattr(sys.modules.get(source), original, value) is not value
        if name in written.imports and _top(written.imports[name][0]) != self._home:
            return False  # one of several, which the module takes as it finds them
        return callable(value) and not isinstance(value, type) and not _is_made_of(value, self._home)

    def _replaced_where_weights_are_stored(self) -> Iterator[str]:
        """Functions that a pack's classes of layers, and their modules, hold of another pack."""
        for kind in self._storing:
            module = kind.__module__
            home = module.rpartition(".")[0] or module
            for name, value in list(vars(kind).items()):
                function = _unwrapped(value)
                if isinstance(function, FunctionType) and not _owner(function).startswith(home):
                    yield _say_replaced(f"{_name(kind)}.{name}", value)
            for name, function in _functions_in(module).items():
                if not _owner(function).startswith(home) and not _is_imported(module, name, function):
                    yield _say_replaced(f"{module}.{name}", function)

    def _watched(self) -> Iterator[tuple[Mapping[str, Any], list[str]]]:
        """Where all of that is found: namespaces, and names in each that are there."""
        yield from ((space, list(space)) for space in self._spaces)
        for module in {kind.__module__ for kind in self._storing} & sys.modules.keys():
            yield vars(sys.modules[module]), list(_functions_in(module))
        try:
            modules = _modules_of(self._classes)
        except UnsupportedModel:  # which does not change
            self._is_read = False
            return
        watched = {(module, name) for module in modules for name in _written(module).names}
        named: dict[str, list[str]] = {}
        for module, name in watched | _called_of_torch(modules) | _called_elsewhere(modules):
            if module in sys.modules and name in vars(sys.modules[module]):
                named.setdefault(module, []).append(name)
        yield from ((vars(sys.modules[module]), names) for module, names in named.items())


def _functions_in(module: str) -> dict[str, FunctionType]:
    """By their names in a module that is loaded."""
    space = vars(sys.modules[module]) if module in sys.modules else {}
    return {name: value for name, value in list(space.items()) if isinstance(value, FunctionType)}


def _is_imported(module: str, name: str, function: FunctionType) -> bool:
    """Whether a module's file imports a function, as it is, of the package that defines it."""
    source, original = _written(module).imports.get(name, ("", ""))
    return bool(source) and _attribute(source, original) is function and is_own(function, _top(source))


def _is_bound(value: object) -> bool:
    """Whether what a class holds acts where it is read from an instance."""
    is_plain = isinstance(value, (type, GetSetDescriptorType, MemberDescriptorType))
    return not is_plain and hasattr(type(value), "__get__")


_COMPUTING = "__call__", "_wrapped_call_impl", "_call_impl", "__getattr__"
"""Of torch's base class of layers: what takes part in a call."""
_NOT_COMPUTING = "__init__", "reset_parameters", "extra_repr", "__setstate__", "_load_from_state_dict", "__repr__"


def _torch_classes(layers: Mapping[str, torch.nn.Module]) -> frozenset[type]:
    return frozenset(base for kind in set(map(type, layers.values())) for base in kind.__mro__ if _is_of_torch(base))


def _is_of_torch(kind: type) -> bool:
    return _top(kind.__module__) == "torch" and issubclass(kind, torch.nn.Module)


def _is_computing(name: str, kind: type) -> bool:
    if kind is torch.nn.Module:
        return name in _COMPUTING
    return callable(_unwrapped(vars(kind)[name])) and name not in _NOT_COMPUTING


def _is_torchs(value: object) -> bool:
    """Whether a function is torch's own, or what torch itself put there; None is nothing that is called."""
    return value is None or _is_made_of(value, "torch")


def _is_made_of(value: object, package: str) -> bool:
    """Whether what is called is a function of `package`, or what decorators of installed packages made of one."""
    function = _unwrapped(value)
    if not isinstance(function, FunctionType) and hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    if isinstance(function, FunctionType):
        return is_own(function, package)
    return not isinstance(function, functools.partial) and _is_installed(_top(type(function).__module__))


def _unwrapped(value: Any) -> Any:
    """The function of a property or of a method."""
    return value.fget if isinstance(value, property) else getattr(value, "__func__", value)


_FUNCTIONAL = "torch.nn.functional"
"""Through which torch's own layers compute."""


@functools.lru_cache(maxsize=64)
def _called_of_torch(modules: frozenset[str]) -> frozenset[tuple[str, str]]:
    """Module and name of each function of torch that code in these modules may call, or torch's own layers."""
    found = {(_FUNCTIONAL, name) for name in vars(torch.nn.functional)}
    for module in (*modules, _FUNCTIONAL):
        written = _written(module)
        found |= {pair for pair in (*written.calls, *written.imports.values()) if _top(pair[0]) == "torch"}
    return frozenset(pair for pair in found if callable(_attribute(*pair)) and not isinstance(_attribute(*pair), type))


@functools.lru_cache(maxsize=64)
def _called_elsewhere(modules: frozenset[str]) -> frozenset[tuple[str, str]]:
    """Module and name of what code in these modules calls in others of their package, but for those that manage
    memory: these compute nothing, and extensions may replace them as they like."""
    called = {pair for module in modules for pair in _written(module).calls}
    homes = set(map(_top, modules))
    return frozenset(
        pair
        for pair in called
        if _top(pair[0]) in homes and pair[0] not in modules and not pair[0].endswith(_MANAGEMENT)
    )


_MANAGEMENT = "_management", "pinned_memory", "_prefetch"


def _attribute(module: str, name: str) -> object:
    return getattr(sys.modules.get(module), name, None)


def _layer_classes(layers: Mapping[str, torch.nn.Module]) -> frozenset[type]:
    kinds = set(map(computing_class, map(type, layers.values())))
    bases = ((base, kind) for kind in kinds for base in kind.__mro__ if _top(base.__module__) not in _FOUNDATIONS)
    return frozenset(base for base, kind in bases if not _is_mixin(base, kind))


def _is_mixin(base: type, kind: type) -> bool:
    """Whether a base is an installed package's and no layer, as diffusers' for configs is in Forge: it computes
    nothing."""
    package = _top(base.__module__)
    return not issubclass(base, torch.nn.Module) and package != _top(kind.__module__) and _is_installed(package)


def _modules_of(classes: Iterable[type]) -> frozenset[str]:
    """Those that define classes, and those whose functions these import from the same package."""
    return _modules_behind(frozenset(kind.__module__ for kind in classes))


@functools.lru_cache(maxsize=64)
def _modules_behind(modules: frozenset[str]) -> frozenset[str]:
    found: set[str] = set()
    waiting = set(modules)
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


# ------------------------------------------------------------------------------------------------- on the disk


@dataclass(frozen=True)
class _Written:
    """A module as its file has it.

    Attributes:
        functions: names of those that it defines.
        aliases: further names that it gives to them, such as that of the one to be used on this machine.
        constants: numbers, texts and the like that it or a class of it, `Class.name`, gives a name to once and for all.
        of_classes: `Class.name` of all that classes define otherwise than by `def`.
        imports: name -> module and name there, of all that it imports by `from … import …`.
        single_imports: names of those that it gives no other value to.
        modules: name -> module, of all that it imports by `import …` and gives no other value to.
        calls: module and name there, of all that it reaches through a module that it imports by `import …`.
    """

    text: str
    functions: frozenset[str]
    aliases: frozenset[str]
    constants: Mapping[str, Any]
    of_classes: frozenset[str]
    imports: Mapping[str, tuple[str, str]]
    single_imports: frozenset[str]
    modules: Mapping[str, str]
    calls: frozenset[tuple[str, str]]

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """All of the module's own namespace that counts."""
        return self.functions | self.aliases | self.imports.keys() | self.modules.keys() | self.constants.keys()


@functools.lru_cache(maxsize=1024)
def _written(module: str) -> _Written:
    """
    Raises:
        UnsupportedModel: the file cannot be read, or was changed since this process started.
    """
    text = _read(module)
    try:
        return _parsed(text, module if _is_package(module) else module.rpartition(".")[0])
    except (SyntaxError, ValueError, ImportError) as error:
        raise _unreadable(module, error) from error


def _parsed(text: str, package: str) -> _Written:
    tree = ast.parse(text)
    bound = _bound(tree)
    functions: set[str] = set()
    equal: dict[str, str] = {}
    imports: dict[str, tuple[str, str]] = {}
    modules: dict[str, str] = {}
    own: dict[str, str] = {}
    for node in _statements(tree.body):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            functions.add(node.name)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
            equal |= {target.id: node.value.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name: alias.name for alias in node.names}
            own |= {alias.asname: alias.name for alias in node.names if alias.asname}
            own |= {_top(alias.name): _top(alias.name) for alias in node.names if not alias.asname}
        elif isinstance(node, ast.ImportFrom):
            source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            imports |= {alias.asname or alias.name: (source, alias.name) for alias in node.names}
    aliases = frozenset(name for name, other in equal.items() if other in functions)
    modules |= {name: ".".join(pair) for name, pair in imports.items() if _top(pair[0]) == "torch"}
    calls = frozenset(_reached(tree, modules))
    once = {name for name, values in bound.items() if len(values) == 1}
    return _Written(
        text,
        frozenset(functions),
        aliases,
        constants={name: value.value for name in once if isinstance(value := bound[name][0], ast.Constant)},
        of_classes=frozenset(name for name, values in bound.items() if "." in name and any(map(_is_no_def, values))),
        imports=imports,
        single_imports=frozenset(imports.keys() & once),
        modules={name: module for name, module in own.items() if name in once},
        calls=calls,
    )


def _bound(tree: ast.Module) -> dict[str, list[ast.AST]]:
    """What each name of a module and its classes, `Class.name`, is given: values, and statements that define or import
    it; nothing of names that functions may give another value."""
    found: dict[str, list[ast.AST]] = {}

    def read(body: Iterable[ast.stmt], prefix: str) -> None:
        for node in _statements(body):
            if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    for name in (each.id for each in ast.walk(target) if isinstance(each, ast.Name)):
                        found.setdefault(prefix + name, []).append(node.value or node)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                for alias in node.names:
                    name = alias.asname or (_top(alias.name) if isinstance(node, ast.Import) else alias.name)
                    found.setdefault(prefix + name, []).append(node)
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.setdefault(prefix + node.name, []).append(node)
                if isinstance(node, ast.ClassDef):
                    read(node.body, f"{prefix}{node.name}.")

    read(tree.body, "")
    for node in ast.walk(tree):
        for name in node.names if isinstance(node, ast.Global) else ():
            found.pop(name, None)
    return found


def _is_no_def(node: ast.AST) -> bool:
    return not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))


def _reached(tree: ast.Module, modules: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Module and name of each `module.name` in the code; of torch also those of a module's module."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        owner = ast.unparse(node.value)
        if owner in modules:
            yield modules[owner], node.attr
            continue
        first, _, rest = owner.partition(".")
        if rest and _top(modules.get(first, "")) == "torch":
            yield f"{modules[first]}.{rest}", node.attr


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
        status, text = os.stat(file), Path(file).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeError) as error:
        raise _unreadable(module, error) from error
    if max(status.st_mtime, status.st_ctime) > STARTED:
        raise UnsupportedModel(f"{file} was changed after this program started; restart it to use engines")
    return text


def _unreadable(module: str, error: Exception) -> UnsupportedModel:
    return UnsupportedModel(
        f"The source of {module} cannot be read ({error}), so a change of it would go unnoticed; "
        "your model runs without an engine"
    )


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


def _say_replaced(what: str, value: object) -> str:
    function = _unwrapped(value)
    owner = type(value).__module__
    if isinstance(function, FunctionType):
        owner = _owner(function) if _has_own_code(function) else function.__code__.co_filename
    return f"another extension ({pack_of(owner)}) replaced {what}; start without it to use engines"


def pack_of(module: str) -> str:
    """A module's name for people: ComfyUI names packs by their folders' paths."""
    return re.split(r"[/\\]", module)[-1]


def _owner(function: FunctionType) -> str:
    return str(function.__globals__.get("__name__"))  # unlike __module__, no decorator alters it


def is_own(function: FunctionType, package: str) -> bool:
    """Whether a function was defined in `package`, decorators from installed packages aside."""
    owners = []
    layer: object = function
    while isinstance(layer, FunctionType):
        if not _has_own_code(layer):
            return False
        owners.append(_top(_owner(layer)))
        layer = getattr(layer, "__wrapped__", None)
    return package in owners and all(owner == package or _is_installed(owner) for owner in owners)


def _has_own_code(function: FunctionType) -> bool:
    """Whether a function still has code of its module's file, or code that was made at runtime, as of data classes."""
    file = function.__code__.co_filename
    return file.startswith("<") or file == function.__globals__.get("__file__", file)


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
