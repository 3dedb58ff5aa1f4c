"""What others did to a live model beside its weights, found by holding it against a fresh one of its architecture.

An engine is made from a fresh model's code and settings. Another extension may have given a layer of the live one a
method of its own, a hook, or another setting. Engines know nothing of that, so the plain model has to compute then.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from types import CodeType, FunctionType, MethodType
from typing import Any, Protocol

import torch

from .layer_walk import Layers, layers_of
from .source_code import HostCode

_OF_MODULES = frozenset(vars(torch.nn.Module()))
"""What every layer has, and torch's own code keeps in order."""
_HOOKS = "_forward_hooks", "_forward_pre_hooks"
_GLOBAL_HOOKS = "_global_forward_hooks", "_global_forward_pre_hooks"
_COMPILED = "_compiled_call_impl"
"""What torch calls instead of everything else, once it is there."""
_CONTAINERS = torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict
_PLACES = torch.dtype, torch.device, torch.Tensor
"""Kinds of values that say where weights lie and how they are stored, which is no part of what is computed."""
_BOOKKEEPING = frozenset(
    {"weight_function", "bias_function", "weight_lowvram_function", "bias_lowvram_function"}  # ComfyUI's
    | {"parameters_manual_cast", "forge_online_loras"}  # Forge's
    | {"processor", "_internal_dict", "sample_size"}  # diffusers'; its own checks look at the first two
    | {"use_checkpoint", "checkpoint", "gradient_checkpointing"}  # what these save is for training
)
"""What hosts give layers; what such a thing does to weights counts as weights."""
_HOSTS_OWN = "comfy", "ldm_patched"
"""In names of more of the same."""


class Code(Protocol):
    """What is known about the code that layers run."""

    def is_of(self, layers: Mapping[str, torch.nn.Module]) -> bool:
        """Whether it is that of these layers."""
        ...

    def why_replaced(self) -> str | None:
        """What others replaced, in words; None where nothing."""
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
    live: torch.nn.Module, architecture: Architecture, is_part: bool = False, code: CodeOf = HostCode
) -> str | None:
    """See `LiveModel`, one of which is kept for each live model and role."""
    return live_model(live, architecture, is_part, code).why_changed()


def live_model(
    live: torch.nn.Module, architecture: Architecture, is_part: bool = False, code: CodeOf = HostCode
) -> LiveModel:
    """The account of a live model, the same one each time."""
    accounts = vars(live).get(_ACCOUNTS)
    if accounts is None:
        accounts = vars(live)[_ACCOUNTS] = _Accounts()
    case = architecture.role, type(live)  # an extension may make it one of another class
    if case not in accounts.by_case:
        accounts.by_case[case] = LiveModel(live, lambda: architecture.fresh, is_part, code)
    return accounts.by_case[case]


_ACCOUNTS = "_slipstream_accounts"
"""Of a model: its accounts lie there, since they know what others gave it, which may know the model."""


class _Accounts:
    """Those of one model; a copy of the model has none."""

    def __init__(self) -> None:
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
        self._known: tuple[_Look, dict[str, str]] | None = None
        self._added: list[tuple[str, str]] = []
        self._codes: dict[str, Code] = {}

    def why_changed(self, part: str = "") -> str | None:
        """What others changed, in words; None where the model computes what a fresh one would.

        Cheap where nothing happened since it was asked last: ask at every call.

        Args:
            part: the name of a layer: asked is about that one and those in it alone.
        """
        live = self._live()
        assert live is not None
        layers = layers_of(live)
        look = _Look(layers, self._wanted, self._held, self._added)
        if self._known is None or not self._known[0].finds(look):
            self._added = [*self._additions(layers)]
            look = _Look(layers, self._wanted, self._held, self._added)
            self._known = look, dict(self._changes(layers))
        reasons = (reason for name, reason in self._known[1].items() if _is_in(name, part))
        return next(reasons, None) or self._code(live, layers, part).why_replaced()

    def _code(self, live: torch.nn.Module, layers: Layers, part: str) -> Code:
        own = {name: layer for name, layer in layers.items() if _is_in(name, part)} if part else layers
        code = self._codes.get(part)
        if code is None or not code.is_of(own):
            code = self._codes[part] = self._code_of(live, own)
        return code

    @functools.cached_property
    def _wanted(self) -> dict[str, tuple[type, dict[str, Any]]]:
        """Of each layer of a fresh model: its class, and what it holds beside tensors and layers."""
        layers = {name: layer for name, layer in layers_of(self._fresh()).items() if not _is_ours(layer)}
        kinds: set[Any] = set(map(type, layers.values()))
        read = frozenset().union(*map(_names_read, kinds))  # parents look at settings of their parts, too
        return {name: (type(layer), _own(layer, read)) for name, layer in layers.items()}

    @functools.cached_property
    def _held(self) -> list[tuple[str, str]]:
        """Layers, and names of what they hold that is a list, a dict or an object of settings."""
        wanted = ((name, key, value) for name, (_, own) in self._wanted.items() for key, value in own.items())
        return [(name, key) for name, key, value in wanted if _contents(value)]

    def _additions(self, layers: Layers) -> Iterator[tuple[str, str]]:
        """Layers, and names of what they hold that a fresh one does not."""
        for name, (_, wanted) in self._wanted.items():
            keys = vars(layers[name]).keys() - wanted.keys() - _OF_MODULES if name in layers else ()
            yield from ((name, key) for key in keys if not _is_bookkeeping(key))

    def _changes(self, layers: Layers) -> Iterator[tuple[str, str]]:
        """Names of layers, and what is not as a fresh model has it."""
        if any(getattr(torch.nn.modules.module, name, None) for name in _GLOBAL_HOOKS):
            yield from ((name, "another extension hooks into every layer") for name in layers)
            return
        for name, (kind, wanted) in self._wanted.items():
            layer = layers.get(name)
            if layer is None or not _is_alike(type(layer), kind):
                yield name, f"another extension replaced {name or 'the model'}"
            elif reason := self._why_not_this_layer(name, layer, wanted):
                yield name, reason
        for name in layers:
            if name not in self._wanted and self._is_read(name, layers):
                yield name, f"another extension put {name} into the model"

    def _why_not_this_layer(self, name: str, layer: torch.nn.Module, wanted: Mapping[str, Any]) -> str | None:
        own, what = vars(layer), name or "the model"
        if any(own.get(hooks) for hooks in _HOOKS):
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
        kind: Any = type(layer)
        for key in own.keys() - wanted.keys() - _OF_MODULES:
            if own[key] is None:
                continue
            is_method = callable(getattr(kind, key, None))
            if is_method or (not isinstance(own[key], _PLACES) and _counts(key, kind)):
                return f"another extension changed how {what} computes ({key})"
        return None

    def _is_read(self, name: str, layers: Layers) -> bool:
        """Whether a layer that a fresh model has not takes part in what its parent computes."""
        parent, _, own = name.rpartition(".")
        if parent not in self._wanted or (parent == "" and self._is_part):
            return False
        kind: Any = type(layers[parent])
        return issubclass(kind, _CONTAINERS) or own in _names_read(kind)


class _Look:
    """What a model's layers hold at a moment; values are kept, so that no other one can be taken for one of them."""

    def __init__(
        self,
        layers: Layers,
        wanted: Mapping[str, tuple[type, dict[str, Any]]],
        held: Sequence[tuple[str, str]],
        added: Sequence[tuple[str, str]],
    ) -> None:
        owns = [layer.__dict__ for layer in layers.values()]
        self._kinds = [*map(type, layers.values())]
        self._counts = [*map(len, owns)]
        self._last = [*map(next, map(reversed, owns))]  # names: a new one comes at the end
        self._hooks = [*map(len, [own[hooks] for own in owns for hooks in _HOOKS])]
        self._hooks += [len(getattr(torch.nn.modules.module, name, ())) for name in _GLOBAL_HOOKS]
        self._values: list[Any] = []
        for name, own in zip(layers, owns, strict=True):
            if name in wanted:
                self._values += map(own.get, wanted[name][1])
        for name, key in held:  # may be changed where they are
            self._values += _contents(vars(layers[name]).get(key)) if name in layers else ()
        self._values += [vars(layers[name]).get(key) for name, key in added if name in layers]
        self._ids = [*map(id, self._values)]

    def finds(self, other: _Look) -> bool:
        """Whether nothing changed between the two."""
        mine, others = ((look._kinds, look._counts, look._last, look._hooks, look._ids) for look in (self, other))
        return mine == others


def _own(layer: torch.nn.Module, read: Set[str]) -> dict[str, Any]:
    names = [name for name in vars(layer) if name in read and name not in _OF_MODULES and not _is_bookkeeping(name)]
    return {name: vars(layer)[name] for name in names}


def _contents(value: Any) -> list[Any]:
    """Of a list, a dict or an object of settings; of anything else none."""
    if isinstance(value, dict):
        return [*value.values()]
    if isinstance(value, list):
        return value
    is_plain = isinstance(value, (type, FunctionType, torch.nn.Module, torch.Tensor))
    return [] if is_plain else [*getattr(value, "__dict__", {}).values()]


def _is_in(name: str, part: str) -> bool:
    """Whether a layer is `part` or lies in it."""
    return not part or name == part or name.startswith(f"{part}.")


def _is_alike(kind: type, wanted: type) -> bool:
    """Whether layers of a class compute what those of another do: hosts have variants that store weights otherwise."""
    is_of_torch = wanted.__module__.startswith("torch.")
    return kind.__name__ == wanted.__name__ and (is_of_torch or kind.__module__ == wanted.__module__)


def _is_ours(layer: torch.nn.Module) -> bool:
    return type(layer).__module__.startswith(__name__.partition(".")[0])


def _counts(name: str, kind: Any) -> bool:
    """Whether an attribute that fresh layers have not changes what a layer of this class computes."""
    return not _is_bookkeeping(name) and name in _names_read(kind)


def _is_bookkeeping(name: str) -> bool:
    return name in _BOOKKEEPING or name.startswith("_v") or any(host in name for host in _HOSTS_OWN)


def _names_read(kind: Any) -> frozenset[str]:
    """All names of attributes that a class of layers knows once a layer is made, its module's functions included."""
    if (known := _read.get(kind)) is None:
        known = _read[kind] = _read_names(kind)
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
    contents = [cell.cell_contents for cell in function.__closure__ or ()]
    return [each if _is_number(each) else type(each) for each in contents]


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float))


def _say_change(wanted: Any, found: Any) -> str:
    plain = (bool, int, float, str)
    return f" ({found} instead of {wanted})" if isinstance(found, plain) and isinstance(wanted, plain) else ""
