"""What others did to a live model beside its weights, found by holding it against a fresh one of its architecture.

An engine is made from a fresh model's code and settings. Another extension may have given a layer of the live one a
method of its own, a hook, or another setting. Engines know nothing of that, so the plain model has to compute then.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain, compress, islice, starmap
from operator import is_, is_not, itemgetter
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, Protocol

import torch

from .held_weights import CHANGES, Hold
from .layer_classes import computing_class
from .layer_walk import layers_of, names_in
from .source_code import HostCode, pack_of

_OF_MODULES = frozenset(vars(torch.nn.Module()))
"""What every layer has, and torch's own code keeps in order."""
_PARTS = "_parameters", "_buffers", "_modules"
_HOOKS = "_forward_hooks", "_forward_pre_hooks"
_GLOBAL_HOOKS = "_global_forward_hooks", "_global_forward_pre_hooks"
_COMPILED = "_compiled_call_impl"
"""What torch calls instead of everything else, once it is there."""
_CONTAINERS = torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict
_PLACES = torch.dtype, torch.device, torch.Tensor
"""Kinds of values that say where weights lie and how they are stored, which is no part of what is computed."""
_BOOKKEEPING = frozenset(
    {*CHANGES}  # ComfyUI's
    | {"parameters_manual_cast", "forge_online_loras"}  # Forge's
    | {"processor", "_internal_dict", "sample_size"}  # diffusers'; its own checks look at the first two
    | {"use_checkpoint", "checkpoint", "gradient_checkpointing"}  # what these save is for training
)
"""What hosts give layers; what such a thing does to weights counts as weights."""
_OF_QUANTISED = frozenset(
    {"factory_kwargs", "_orig_shape", "tensor_class", "layout_type", "quant_format"}
    | {"_full_precision_mm", "_full_precision_mm_config"}
)
"""What ComfyUI's layers hold that may be quantised. Engines of parts are told how such a part's weights are stored."""
_HOSTS_OWN = "comfy", "ldm_patched"
"""In names of more of the same."""
_LOADERS = {"model_patcher", "model_management", "memory_management", "model_prefetch", "pinned_memory", "ops"}
"""Last parts of the names of modules by which hosts load weights, and keep notes on layers as they do."""


class Code(Protocol):
    """What is known about the code that layers run."""

    def why_replaced(self) -> str | None:
        """What others replaced, in words; None where nothing."""
        ...

    @property
    def state(self) -> object:
        """What the last answer came from: another thing once anything was replaced; None where it is not kept."""
        ...


CodeOf = Callable[[torch.nn.Module, Mapping[str, torch.nn.Module]], Code]
"""Reads the code of a model's layers, all or some of them."""


class Architecture(Protocol):
    """As much of an architecture as is asked here."""

    @property
    def role(self) -> Hashable: ...

    @property
    def fresh(self) -> torch.nn.Module: ...


def why_changed(
    live: torch.nn.Module,
    architecture: Architecture,
    is_part: bool = False,
    code: CodeOf = HostCode,
    hold: Hold | None = None,
) -> str | None:
    """See `LiveModel`, one of which is kept for each live model and role."""
    return live_model(live, architecture, is_part, code).why_changed(hold=hold)


def live_model(
    live: torch.nn.Module, architecture: Architecture, is_part: bool = False, code: CodeOf = HostCode
) -> LiveModel:
    """The account of a live model, the same one each time."""
    accounts = vars(live).get(_ACCOUNTS)
    if accounts is None or accounts.live() is not live:  # a shallow copy has those of the other
        accounts = vars(live)[_ACCOUNTS] = _Accounts(live)
        weakref.finalize(live, _end, weakref.ref(accounts)).atexit = False
    case = architecture.role, type(live)  # an extension may make it one of another class
    if case not in accounts.by_case:
        accounts.by_case[case] = LiveModel(live, lambda: architecture.fresh, is_part, code)
    return accounts.by_case[case]


_ACCOUNTS = "_slipstream_accounts"
"""Of a model: its accounts lie there, since they know what others gave it, which may know the model."""


def _end(accounts: weakref.ref[_Accounts]) -> None:
    """Let go of a model's layers when it goes: its memory is wanted at once, not after garbage collection."""
    if (found := accounts()) is not None:
        found.by_case.clear()


class _Accounts:
    """Those of one model, which know its layers, but not itself; a copy of the model has none."""

    def __init__(self, live: torch.nn.Module) -> None:
        self.live = weakref.ref(live)
        self.by_case: dict[Hashable, LiveModel] = {}

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


class LiveModel:
    """What others did to a live model, or to a part of it.

    Args:
        live: the host's model.
        fresh: returns a new one of the same architecture, which may be a meta module.
        is_part: engines stand for some of the layers alone: the model itself may have others beside, and other methods.
        code: knows what was replaced in the code that layers run.
    """

    def __init__(
        self,
        live: torch.nn.Module,
        fresh: Callable[[], torch.nn.Module],
        is_part: bool = False,
        code: CodeOf = HostCode,
    ) -> None:
        self._live = weakref.ref(live)
        self._fresh = fresh
        self._is_part = is_part
        self._code_of = code
        self._parts: dict[str, _Part] = {}
        self._changed: tuple[tuple[Any, ...], dict[str, str]] = (), {}

    def why_changed(self, part: str = "", hold: Hold | None = None) -> str | None:
        """What others changed, in words; None where the model computes what a fresh one would.

        Cheap where nothing happened since it was asked last: ask at every call.

        Args:
            part: the name of a layer: asked is about that one and those in it alone, and not about hooks on that one,
                which run around whatever computes in its place.
            hold: of a run, in which weights are to stay as they are.
        """
        live = self._live()
        assert live is not None
        known = self._parts.get(part)
        if known is None or not known.is_as_it_was(_layer_at(live, part)):
            known = self._parts[part] = self._look_at(live, part, known)
        reason = known.reason or known.code.why_replaced()
        return reason or (hold.why_changed(known.layers) if hold is not None else None)

    def changed_parts(self, parts: tuple[str, ...]) -> dict[str, str]:
        """What others changed in several layers, in words, by their names; without those in which they changed nothing.

        Cheap where nothing happened since it was asked last, about the same tuple.
        """
        if self.why_changed() is None:
            self._parts = {"": self._parts[""]}  # without layers that were in the model for a while
            self._changed = (), {}
            return {}
        whole = self._parts[""]
        whole.code.why_replaced()  # which is asked above where nothing else is changed
        state = whole, whole.code.state, parts
        if whole.code.state is None or not (self._changed[0] and all(map(is_, self._changed[0], state))):
            reasons = ((part, self.why_changed(part)) for part in parts)
            self._changed = state, {part: reason for part, reason in reasons if reason is not None}
        return self._changed[1]

    def _look_at(self, live: torch.nn.Module, part: str, before: _Part | None) -> _Part:
        layers = _layers_in(live, part)
        wanted = {name: each for name, each in self._wanted.items() if _is_in(name, part)}
        watched = {name: [*self._watched(name, layer, wanted)] for name, layer in layers.items()}
        is_same_code = before is not None and before.classes == _classes_of(layers.values())
        code = before.code if before is not None and is_same_code else self._code_of(live, layers)
        return _Part(layers, watched, next(self._changes(layers, wanted, part), None), code)

    def _watched(
        self, name: str, layer: torch.nn.Module, wanted: Mapping[str, tuple[type, dict[str, Any]]]
    ) -> Iterator[str]:
        """Names of what a layer holds that may count: what a fresh one holds as well, and what others gave it."""
        if name not in wanted:
            return
        own, fresh = vars(layer), wanted[name][1]
        yield from (key for key in fresh if key in own)
        added = own.keys() - fresh.keys() - _OF_MODULES
        yield from (key for key in added if self._may_count(key, layer))

    @functools.cached_property
    def _wanted(self) -> dict[str, tuple[type, dict[str, Any]]]:
        """Of each layer of a fresh model: its class, and what it holds beside tensors and layers."""
        layers = {name: layer for name, layer in layers_of(self._fresh()).items() if not _is_ours(layer)}
        kinds: set[Any] = set(map(type, layers.values()))
        read = frozenset().union(*map(names_read, kinds))  # parents look at settings of their parts, too
        return {name: (type(layer), _own(layer, read)) for name, layer in layers.items()}

    @functools.cached_property
    def _notes(self) -> frozenset[str]:
        """Names of attributes that the host's own code gives layers when it loads weights."""
        home = type(self._live()).__module__.partition(".")[0]
        loaders = (name for name in [*sys.modules] if name.startswith(f"{home}.") and name.split(".")[-1] in _LOADERS)
        return frozenset().union(*map(_set_on_others, loaders))

    def _changes(
        self,
        layers: Mapping[str, torch.nn.Module],
        wanted_layers: Mapping[str, tuple[type, dict[str, Any]]],
        part: str = "",
    ) -> Iterator[str]:
        """What is not as a fresh model has it."""
        if any(getattr(torch.nn.modules.module, name, None) for name in _GLOBAL_HOOKS):
            yield "another extension hooks into every layer"
        for name, (kind, wanted) in wanted_layers.items():
            layer = layers.get(name)
            if layer is None or not _is_alike(computing_class(type(layer)) if part else type(layer), kind):
                yield _say_other(name or "the model", layer)
            elif reason := self._why_not_this_layer(name, layer, wanted, part):
                yield reason
        for name in layers:
            if name not in wanted_layers and self._is_read(name, layers):
                yield f"another extension put {name} into the model"

    def _why_not_this_layer(
        self, name: str, layer: torch.nn.Module, wanted: Mapping[str, Any], part: str
    ) -> str | None:
        own, what = vars(layer), name or "the model"
        has_own_hooks = name == part != ""
        if not has_own_hooks and any(own.get(hooks) for hooks in _HOOKS):
            return f"another extension hooks into {what}"
        if own.get(_COMPILED) is not None:
            return f"another extension changed how {what} computes (compiled)"
        if name == "" and self._is_part:
            return None
        for key, value in wanted.items():
            if key not in own:
                return f"another extension removed {key} of {what}"
            if not _is_same(own[key], value):
                return f"another extension changed {key} of {what}{_say_change(value, own[key])}"
        kind: Any = computing_class(type(layer))
        known = _OF_QUANTISED if part and kind.__module__ == "comfy.ops" else frozenset()
        for key in own.keys() - wanted.keys() - _OF_MODULES - known:
            if own[key] is None or is_own_method(layer, key):
                continue
            is_mere_note = isinstance(own[key], _PLACES) or self._is_note(key)
            if _replaces(key, layer) or (not is_mere_note and key in names_read(kind)):
                return f"another extension changed how {what} computes ({key})"
        return None

    def _may_count(self, name: str, layer: torch.nn.Module) -> bool:
        """Whether an attribute that others gave a layer may change what it computes, whatever its value."""
        if name == _COMPILED or _replaces(name, layer):
            return True
        return not self._is_note(name) and name in names_read(type(layer))

    def _is_note(self, name: str) -> bool:
        """Whether an attribute that fresh layers have not is one that hosts give layers."""
        return _is_bookkeeping(name) or name in self._notes

    def _is_read(self, name: str, layers: Mapping[str, torch.nn.Module]) -> bool:
        """Whether a layer that a fresh model has not takes part in what its parent computes."""
        parent, _, own = name.rpartition(".")
        if parent not in layers or parent not in self._wanted or (parent == "" and self._is_part):
            return False
        kind: Any = type(layers[parent])
        return issubclass(kind, _CONTAINERS) or own in names_read(kind)


def _replaces(name: str, layer: torch.nn.Module) -> bool:
    """Whether an attribute that others gave a layer is read in the place of a method, or of a part, of its own."""
    kind: Any = type(layer)
    return callable(getattr(kind, name, None)) or any(name in vars(layer)[parts] for parts in _PARTS)


_ALWAYS = (*_PARTS, *_HOOKS)
"""Dicts that each layer has, of what counts."""


class _Part:
    """What is known about some layers of a model, or all, laid out so that another look at them is quick.

    Values are kept, so that no other one can be taken for one of them.

    Args:
        watched: names of what each layer holds that may count.

    Attributes:
        reason: what others changed, in words; None where nothing.
        code: that they run.
    """

    def __init__(
        self,
        layers: Mapping[str, torch.nn.Module],
        watched: Mapping[str, Sequence[str]],
        reason: str | None,
        code: Code,
    ) -> None:
        self._first = weakref.ref(next(iter(layers.values()))) if layers else None
        self._others = [*islice(layers.values(), 1, None)]
        self._last: weakref.ref[_Layers] | None = None
        self.reason, self.code = reason, code
        self._owns = [layer.__dict__ for layer in layers.values()]
        self._gets = [
            (itemgetter(*_ALWAYS, *names), own) for own, names in zip(self._owns, watched.values(), strict=True)
        ]
        self._hooks = [own[hooks] for own in self._owns for hooks in _HOOKS]
        self._parts = [own["_modules"] for own in self._owns]
        held = ((own, name) for own, names in zip(self._owns, watched.values(), strict=True) for name in names)
        self._held = [(own, name) for own, name in held if _may_change(own[name])]  # where they are
        self._facts, self._values = self._look(self.layers)

    @property
    def layers(self) -> Sequence[torch.nn.Module]:
        """The same list each time, for as long as somebody has it. Kept are those without the first, which may be the
        model itself, and in which this lies."""
        if self._last is None or (found := self._last()) is None:
            first = None if self._first is None else self._first()
            found = _Layers([] if first is None else [first, *self._others])
            self._last = weakref.ref(found)
        return found

    def is_as_it_was(self, first: torch.nn.Module | None) -> bool:
        """Whether nothing changed since.

        Args:
            first: the layer in which the others are to lie; None where there is none any more.
        """
        layers = self.layers
        try:
            facts, values = self._look(layers)
        except KeyError:  # something is gone
            return False
        is_there = bool(layers) and layers[0] is first
        is_as_much = facts == self._facts and len(values) == len(self._values)
        others = compress(zip(values, self._values, strict=False), map(is_not, values, self._values))
        return is_there and is_as_much and all(starmap(_is_same_method, others))

    def _look(self, layers: Sequence[torch.nn.Module]) -> tuple[tuple[Any, ...], list[Any]]:
        names = names_in([*self._owns, *self._parts])
        hooks = [*map(len, self._hooks), *[len(getattr(torch.nn.modules.module, name, ())) for name in _GLOBAL_HOOKS]]
        values: list[Any] = [layer.__dict__ for layer in layers]
        values += chain.from_iterable([get(own) for get, own in self._gets])
        values += chain.from_iterable([each.values() for each in self._parts if each])
        for own, name in self._held:
            values += _contents(own[name])
        return (_classes_of(layers), names, hooks), values

    @property
    def classes(self) -> Any:
        """See `_classes_of`."""
        return self._facts[0]


def _classes_of(layers: Iterable[torch.nn.Module]) -> tuple[list[type], list[tuple[type, ...]]]:
    """The layers' classes, in order, and the bases that each has now."""
    kinds = [*map(type, layers)]
    return kinds, [kind.__mro__ for kind in dict.fromkeys(kinds)]


def _is_same_method(one: Any, other: Any) -> bool:
    """Whether two values are the same method, of which some packs make another object for each call."""
    are_methods = type(one) is type(other) is MethodType
    return are_methods and one.__func__ is other.__func__ and one.__self__ is other.__self__


class _Layers(list[torch.nn.Module]):
    """A list that can be referred to weakly."""


def settings_of(layers: Mapping[str, torch.nn.Module]) -> list[dict[str, Any]]:
    """Of each layer what it holds, beside tensors and layers, that code of any of these layers reads."""
    kinds: set[Any] = set(map(type, layers.values()))
    read = frozenset().union(*map(names_read, kinds))
    return [_own(layer, read) for layer in layers.values()]


def _own(layer: torch.nn.Module, read: Set[str]) -> dict[str, Any]:
    names = [name for name in vars(layer) if name in read and name not in _OF_MODULES and not _is_bookkeeping(name)]
    return {name: vars(layer)[name] for name in names}


def _may_change(value: Any) -> bool:
    """Whether something can be changed where it is."""
    if isinstance(value, tuple):
        return any(map(_may_change, value))
    return isinstance(value, (list, dict, FunctionType)) or _has_settings(value)


def _has_settings(value: Any) -> bool:
    return not isinstance(value, (type, torch.nn.Module, torch.Tensor)) and hasattr(value, "__dict__")


def _contents(value: Any) -> Iterator[Any]:
    """Of a list or a dict, those in it included, of a function or of an object of settings; of anything else none."""
    if isinstance(value, FunctionType):
        yield value.__code__
        yield from _cells(value)
    elif isinstance(value, (list, tuple, dict)):
        for each in chain(value, value.values()) if isinstance(value, dict) else value:
            yield each
            if isinstance(each, (list, tuple, dict)):
                yield from _contents(each)
    elif _has_settings(value):
        yield from vars(value)
        yield from vars(value).values()


def _layer_at(live: torch.nn.Module, name: str) -> torch.nn.Module | None:
    """The layer of a name; None where there is none."""
    layer: torch.nn.Module | None = live
    for each in name.split(".") if name else ():
        layer = layer._modules.get(each) if layer is not None else None
    return layer


def _layers_in(live: torch.nn.Module, part: str) -> Mapping[str, torch.nn.Module]:
    """By their names in the whole model; none where others took the part out of it."""
    if not part:
        return layers_of(live)
    try:
        found = layers_of(live.get_submodule(part))
    except AttributeError:
        return {}
    return {f"{part}.{name}" if name else part: layer for name, layer in found.items()}


def _is_in(name: str, part: str) -> bool:
    """Whether a layer is `part` or lies in it."""
    return not part or name == part or name.startswith(f"{part}.")


def is_own_method(layer: torch.nn.Module, name: str) -> bool:
    """Whether what a layer holds under a name is the method of its class: who put another one there may leave that."""
    found = vars(layer).get(name)
    if not isinstance(found, MethodType) or found.__self__ is not layer:
        return False
    return found.__func__ is getattr(type(layer), name, None)


def _is_alike(kind: type, wanted: type) -> bool:
    """Whether layers of a class compute what those of another do: hosts have variants that store weights otherwise."""
    is_of_torch = wanted.__module__.startswith("torch.")
    return kind.__name__ == wanted.__name__ and (is_of_torch or kind.__module__ == wanted.__module__)


def _say_other(what: str, layer: torch.nn.Module | None) -> str:
    kind = type(layer)
    if layer is None or kind.__module__.startswith("torch."):
        return f"another extension replaced {what}"
    own = kind.__qualname__.rpartition("<locals>.")[2]
    return f"another extension ({pack_of(kind.__module__)}) uses a layer class of its own for {what} ({own})"


def _is_ours(layer: torch.nn.Module) -> bool:
    return type(layer).__module__.startswith(__name__.partition(".")[0])


def _is_bookkeeping(name: str) -> bool:
    return name in _BOOKKEEPING or name.startswith("_v") or any(host in name for host in _HOSTS_OWN)


@functools.cache
def _set_on_others(module: str) -> frozenset[str]:
    """Names of attributes that a module's code sets on anything but `self`; none where its source cannot be read."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError, SyntaxError, UnicodeError):
        return frozenset()
    return frozenset(name for each in ast.walk(tree) if (name := _name_set(each)) is not None)


def _name_set(node: ast.AST) -> str | None:
    """The attribute that a piece of code sets on another object; None where it sets none."""
    match node:
        case ast.Attribute(value=ast.Name(id=owner), attr=name, ctx=ast.Store()):
            return None if owner == "self" else name
        case ast.Call(
            func=ast.Attribute(value=ast.Attribute(value=ast.Name(id=owner), attr="__dict__"), attr="setdefault"),
            args=[ast.Constant(value=str(name)), *_],
        ):
            return None if owner == "self" else name
    return None


def names_read(kind: Any) -> frozenset[str]:
    """All names of attributes that a class of layers knows once a layer is made, its module's functions included."""
    if (known := _read.get(kind)) is None:
        known = _read[kind] = _read_names(computing_class(kind))
    return known


_read: weakref.WeakKeyDictionary[type, frozenset[str]] = weakref.WeakKeyDictionary()
"""Weak, since a class may know a whole model."""


def _read_names(kind: Any) -> frozenset[str]:
    found: set[str] = set()
    for base in kind.__mro__[: kind.__mro__.index(torch.nn.Module)]:
        module = () if base.__module__.startswith("torch.") else vars(sys.modules[base.__module__]).values()
        for value in (*vars(base).values(), *module):
            function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if isinstance(function, FunctionType) and function.__name__ != "__init__":
                found.update(_names_in(function.__code__))
    return frozenset(found)


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant  # as for `getattr`
        elif isinstance(constant, CodeType):
            yield from _names_in(constant)


def _is_same(found: Any, wanted: Any) -> bool:
    if found is wanted or isinstance(wanted, _PLACES) or isinstance(found, _PLACES):
        return isinstance(found, _PLACES) == isinstance(wanted, _PLACES)
    if type(found) is not type(wanted):
        return _is_number(found) and _is_number(wanted) and found == wanted
    if isinstance(found, (list, tuple)):
        return len(found) == len(wanted) and all(map(_is_same, found, wanted))
    if isinstance(found, Mapping):
        return found.keys() == wanted.keys() and all(_is_same(found[key], wanted[key]) for key in found)
    if isinstance(found, FunctionType):
        return found.__code__ is wanted.__code__ and _cells(found) == _cells(wanted)
    if isinstance(found, MethodType):
        return found.__func__ is wanted.__func__
    if isinstance(found, functools.partial):
        return _is_same((found.func, found.args, found.keywords), (wanted.func, wanted.args, wanted.keywords))
    try:
        has_own = any("__eq__" in vars(base) for base in type(found).__mro__[:-1])
        return bool(found == wanted) if has_own else _settings(found) == _settings(wanted)
    except Exception:  # whatever a class of others' raises: nobody knows
        return False


def _settings(value: Any) -> dict[str, Any]:
    """Numbers and texts that an object holds."""
    own = getattr(value, "__dict__", {})
    return {name: each for name, each in own.items() if isinstance(each, (bool, int, float, str))}


def _cells(function: FunctionType) -> list[Any]:
    contents = [_content(cell) for cell in function.__closure__ or ()]
    return [each if _is_number(each) else type(each) for each in contents]


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it was given none yet
        return None


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float))


def _say_change(wanted: Any, found: Any) -> str:
    plain = (bool, int, float, str)
    return f" ({found} instead of {wanted})" if isinstance(found, plain) and isinstance(wanted, plain) else ""
