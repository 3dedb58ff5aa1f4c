"""TensorRT's Python API without a GPU: what each release offers and no more, computing on the CPU by onnxruntime.

A class has the members that `api_names.json` lists for the release; any other one raises, read or set. A listed member
that no test has needed yet raises NotImplementedError.
"""

from __future__ import annotations

import enum
import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.tests.unit.trt_backend.fakes import fake_building, fake_running
from slipstream.tests.unit.trt_backend.fakes.fake_building import Build

RELEASES = ("8.6.1", "10.0.1", "10.16.1", "11.4.0", "rtx-1.7.1")
_WRITTEN = {**fake_building.CLASSES, **fake_running.CLASSES}
_SEVERITIES = ("INTERNAL_ERROR", "ERROR", "WARNING", "INFO", "VERBOSE")
_NETWORK_FLAGS = {"EXPLICIT_BATCH": 0, "STRONGLY_TYPED": 1}


@functools.cache
def api_names() -> dict[str, dict[str, str]]:
    """Release -> class -> its members, separated by spaces."""
    found: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("api_names.json").read_text("utf-8"))
    return found


@dataclass
class Script:
    """What a test wants of the fake, and what the fake saw.

    Attributes:
        start_error: why no builder can be made.
        parser_error: what a parser says of node 0 of every graph.
        build_errors: what is logged by the next builds, one each, that make no plan.
        refusals: name of a method -> what it logs before it returns False, or makes nothing. "set_input_shape x" is for
            one input.
        builds: all that were tried.
        set_weights: names, in the order in which refitters took them.
        refits: how many ran.
        lent: address and size of the memory that contexts were given; the size is None where the release takes none.
    """

    start_error: str = ""
    parser_error: str = ""
    build_errors: list[str] = field(default_factory=list)
    refusals: dict[str, str] = field(default_factory=dict)
    builds: list[Build] = field(default_factory=list)
    set_weights: list[str] = field(default_factory=list)
    refits: int = 0
    lent: list[tuple[int, int | None]] = field(default_factory=list)


class FakeTensorRT:
    """Stands for the module. `script` is the test's own door to it."""

    def __init__(self, release: str) -> None:
        self.script = Script()
        self.release = release
        self.__version__ = release.removeprefix("rtx-")
        for name, members in api_names()[release].items():
            if name in _WRITTEN:
                made: Any = _restricted(self, name, members.split())
            else:
                made = _enumeration(release, name, [m for m in members.split() if m not in ("name", "value")])
            setattr(self, name, made)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"TensorRT {self.release} has no {name}")


def fake_tensorrt(release: str) -> FakeTensorRT:
    """A new one, with a script of its own."""
    return FakeTensorRT(release)


# ------------------------------------------------------------------------------------------------- strictness


class _StrictType(type):
    """Says what is missing where the class itself is asked."""

    def __getattr__(cls, name: str) -> Any:
        raise AttributeError(f"TensorRT {cls._release} has no {cls._name}.{name}")


class _EnumType(enum.EnumMeta):
    def __getattr__(cls, name: str) -> Any:
        members = cls.__dict__.get("_member_map_", {})
        if name in members:
            return members[name]
        raise AttributeError(f"TensorRT {cls.__dict__.get('_release')} has no {cls.__name__}.{name}")


class _Enum(enum.Enum, metaclass=_EnumType):
    """Like pybind's: becomes a number when asked, and equals none by itself."""

    def __int__(self) -> int:
        return int(self.value)

    __index__ = __int__


class _Unwritten:
    """A member that the release has and no test has needed."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        raise NotImplementedError(f"the fake of TensorRT has no {self._name} yet")


def _enumeration(release: str, name: str, members: list[str]) -> Any:
    values = {member: index for index, member in enumerate(members)}
    if name == "NetworkDefinitionCreationFlag" and not release.startswith("rtx"):
        values = {member: _NETWORK_FLAGS.get(member, 2 + index) for index, member in enumerate(members)}
    made: Any = _Enum(name, values)
    type.__setattr__(made, "_release", release)
    return made


def _restricted(trt: FakeTensorRT, name: str, members: list[str]) -> type:
    """The fake's class with the release's members."""
    written = _WRITTEN[name]
    namespace: dict[str, Any] = {member: _Unwritten(f"{name}.{member}") for member in members}
    for member, value in vars(written).items():
        if member in members or (member.startswith("_") and member not in ("__dict__", "__weakref__")):
            namespace[member] = value

    def refuse(self: Any, member: str) -> Any:
        raise AttributeError(f"TensorRT {trt.release} has no {name}.{member}")

    def assign(self: Any, member: str, value: Any) -> None:
        if not member.startswith("_") and member not in members:
            refuse(self, member)
        object.__setattr__(self, member, value)

    namespace |= {"__getattr__": refuse, "__setattr__": assign}
    namespace |= {"_trt": trt, "_release": trt.release, "_name": name}
    if name == "ILogger":
        namespace["Severity"] = _enumeration(trt.release, "Severity", list(_SEVERITIES))
    return _StrictType(name, written.__bases__, namespace)
