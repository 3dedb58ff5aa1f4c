"""A build job on its way from the host to the worker process, as JSON.

What is no plain data stands in it as what makes it: a class or function of this package, by its name, and arguments.
Nothing else can be named, so that a file can make nothing but what a job is made of.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

from ...core.errors import UnsupportedModel
from ...core.protocols import BuildJob

JOB = "job.json"

_ROOT = str(Path(__file__).resolve().parents[2])
_PACKAGE = __name__.rpartition(".runtime.")[0]
"""The name of this package here: a host may have loaded the pack under the path of its folder."""
_STARTS_PROGRAMS = "core.programs"
"""No part of a job is made by this module, whose functions would run what a file says."""
_NAME = re.compile(r"[A-Za-z0-9_.]+:[A-Za-z0-9_.]+")


def write_job(job: BuildJob) -> None:
    """Write `job` into its folder.

    Raises:
        UnsupportedModel: it holds something that cannot be given to another process.
    """
    path = [os.path.abspath(entry) for entry in sys.path if isinstance(entry, str)]  # as Python itself reads it
    text = json.dumps({"path": path, "job": as_plain(job)})
    (job.directory / JOB).write_text(text, encoding="utf-8")


def read_job(directory: Path) -> BuildJob:
    """The job of a folder, in a process that can import what its host can.

    Raises:
        Exception: whatever importing the host's modules raises.
    """
    data = json.loads((directory / JOB).read_bytes())
    # Last, so that nothing of the host's passes for ours; without our root, whose `nodes` would pass for ComfyUI's.
    sys.path += [entry for entry in data["path"] if entry not in (*sys.path, _ROOT)]
    job = from_plain(data["job"])
    assert isinstance(job, BuildJob)
    return job


def as_plain(value: Any) -> Any:
    """Data for JSON from which `from_plain` makes `value` anew, in another process too.

    Raises:
        UnsupportedModel: `value`, or something in it, is made by no class or function of this package.
    """
    if isinstance(value, Enum):
        return {"call": _name_of(type(value)), "arguments": [as_plain(value.value)]}
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, list):
        return [as_plain(item) for item in value]
    if isinstance(value, (tuple, set, frozenset)):
        kind = next(kind for kind in _CONTAINERS if isinstance(value, _CONTAINERS[kind]))
        return {kind: [as_plain(item) for item in value]}
    if isinstance(value, Mapping):
        return {"dict": [[as_plain(name), as_plain(item)] for name, item in value.items()]}
    if isinstance(value, (Path, torch.device)):
        return {"path" if isinstance(value, Path) else "device": str(value)}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    return _object_as_plain(value)


def _object_as_plain(value: Any) -> Any:
    if isinstance(value, (type, FunctionType)):
        return {"named": _name_of(value)}
    own: Any = type(value).__reduce__
    if own is not object.__reduce__:
        reduced = value.__reduce__()
        if isinstance(reduced, tuple) and len(reduced) == 2:
            makes, arguments = reduced
            return {"call": _name_of(makes), "arguments": [as_plain(argument) for argument in arguments]}
    elif dataclasses.is_dataclass(value):
        fields = {field.name: as_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"call": _name_of(type(value)), "fields": fields}
    raise UnsupportedModel(f"A {type(value).__qualname__} cannot be given to the process that builds engines")


def from_plain(data: Any) -> Any:
    """What `as_plain` was given.

    Raises:
        UnsupportedModel: the data name something else than classes and functions of this package.
        Exception: whatever importing these, and making a value, raises.
    """
    if isinstance(data, list):
        return [from_plain(item) for item in data]
    if not isinstance(data, dict):
        return data
    if "call" in data:
        fields = {name: from_plain(item) for name, item in data.get("fields", {}).items()}
        return _named(data["call"])(*(from_plain(item) for item in data.get("arguments", ())), **fields)
    ((kind, content),) = data.items()
    if kind not in _KINDS:
        raise UnsupportedModel(f"{kind!r} is nothing that a build may use")
    return _KINDS[kind](content)


def _maker_of(container: type) -> Callable[[Any], Any]:
    return lambda content: container(from_plain(item) for item in content)


_CONTAINERS: dict[str, type] = {"tuple": tuple, "frozenset": frozenset, "set": set}
_KINDS: dict[str, Callable[[Any], Any]] = {
    **{kind: _maker_of(container) for kind, container in _CONTAINERS.items()},
    "dict": lambda content: {from_plain(name): from_plain(item) for name, item in content},
    "path": Path,
    "device": torch.device,
    "dtype": lambda content: _dtype(content),
    "named": lambda content: _named(content),
}


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise UnsupportedModel(f"{name!r} is no dtype")
    return found


def _name_of(value: Any) -> str:
    """How a class or function of this package is named in the file, whatever the package's own name is here."""
    module, name = str(getattr(value, "__module__", "")), str(getattr(value, "__qualname__", ""))
    if not module.startswith(_PACKAGE + ".") or "<" in name or not name:
        raise UnsupportedModel(f"{name or value!r} cannot be given to the process that builds engines")
    return f"{module[len(_PACKAGE) + 1 :]}:{name}"


def _named(name: str) -> Any:
    """The class or function of a name.

    Raises:
        UnsupportedModel: it is none of this package, or starts programs.
    """
    module, _, inner = name.partition(":")
    found: Any = None
    if _NAME.fullmatch(name) and module != _STARTS_PROGRAMS:
        found = importlib.import_module(f"{_PACKAGE}.{module}")
        for part in inner.split("."):
            found = getattr(found, part, None)
    if not callable(found) or getattr(found, "__module__", None) != f"{_PACKAGE}.{module}":
        raise UnsupportedModel(f"{name!r} is no class or function that a build may use")
    return found
