"""What a user chose for all of Slipstream."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from enum import Enum
from typing import Any, TypeVar

from ...core.spec import Precision, Quantised
from ...engine_cache import DEFAULT_LIMIT_BYTES
from .model_settings import PRECISIONS, BackendChoice, Settings, precision_named, word_of

LEAST_BYTES, MOST_BYTES = 2**20, 2**50

_Choice = TypeVar("_Choice", bound=Enum)


class Background(str, Enum):
    """When builds run that nobody waits for."""

    IDLE = "idle"
    ALWAYS = "always"


@dataclass(frozen=True)
class Preferences:
    """
    Attributes:
        folder: of the engine store; None leaves it to the host.
        limit_bytes: what the store may take of the disk.
        backend, precision: what `auto` means in nodes and commands.
        background: while prompts run as well, or only while there are none.
        notifications: whether the page tells when a build has ended.
    """

    folder: str | None = None
    limit_bytes: int = DEFAULT_LIMIT_BYTES
    backend: BackendChoice = BackendChoice.AUTO
    precision: Precision | Quantised | None = None
    background: Background = Background.IDLE
    notifications: bool = True

    def changed(self, values: Mapping[str, Any]) -> Preferences:
        """
        Raises:
            ValueError: a name that is none, or a value that does not do, with the reason.
        """
        unknown = sorted(values.keys() - NAMES)
        if unknown:
            raise ValueError(f"Unknown: {', '.join(map(repr, unknown[:5]))}. Known here: {', '.join(sorted(NAMES))}.")
        return replace(self, **{name: _READ[name](value) for name, value in values.items()})

    def applied_to(self, settings: Settings) -> Settings:
        """The settings of one node, with `auto` replaced by what the user prefers."""
        backend = self.backend if settings.backend is BackendChoice.AUTO else settings.backend
        return replace(settings, backend=backend, precision=settings.precision or self.precision)

    def to_json(self) -> dict[str, Any]:
        """As plain data, in the words that `changed` takes."""
        return {**asdict(self), "precision": word_of(self.precision)}


NAMES = frozenset(field.name for field in fields(Preferences))


def _folder(value: object) -> str | None:
    if value is None or value == "":
        return None
    if not isinstance(value, str) or len(value) > 4096 or not os.path.isabs(os.path.expanduser(value)):
        raise ValueError("folder must be the whole path of a folder, or null for ComfyUI's models/slipstream.")
    return os.path.normpath(os.path.expanduser(value))


def _bytes(value: object) -> int:
    if type(value) is not int or not LEAST_BYTES <= value <= MOST_BYTES:
        raise ValueError(f"limit_bytes must be a whole number from {LEAST_BYTES} to {MOST_BYTES}.")
    return value


def _choice(name: str, choices: type[_Choice]) -> Callable[[object], _Choice]:
    def read(value: object) -> _Choice:
        for choice in choices:
            if value == choice.value:
                return choice
        raise ValueError(f"{name} must be one of: {', '.join(str(choice.value) for choice in choices)}.")

    return read


def _precision(value: object) -> Precision | Quantised | None:
    try:
        return precision_named(value)
    except ValueError:
        raise ValueError(f"precision must be one of: {', '.join(PRECISIONS)}.") from None


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("notifications must be true or false.")
    return value


_READ: Mapping[str, Callable[[object], Any]] = {
    "folder": _folder,
    "limit_bytes": _bytes,
    "backend": _choice("backend", BackendChoice),
    "precision": _precision,
    "background": _choice("background", Background),
    "notifications": _flag,
}
