"""What a person can do where a node has no engine, as a name that the page has a button for."""

from __future__ import annotations

from ....compile_backend.cpp.toolchain import why_no_c_compiler, why_no_cpp_compiler
from ....core.eight_bits import CHOOSE_AUTO
from ....engine_cache import ADOPT as OF_NO_MAKER
from ....runtime.building.supply import BUILD_IT
from ....runtime.module import AcceleratedModule

COMPILER = "compiler"
"""Install a C++ compiler."""

PRECISION = "precision"
"""Let the engine compute in the model's own precision."""

BACKEND = "backend"
"""Let the node choose its backend: it is switched off."""

SETTINGS = "settings"
"""Open Slipstream's settings: they switch acceleration off."""

ADOPT = "adopt"
"""Say that this machine built its engine, which no maker's key vouches for."""

RETRY = "retry"
"""Build again: the next try may succeed, and says why where it does not."""


def way_out(module: AcceleratedModule, kind: str, reason: str) -> str | None:
    """One of this file's names for what helps a node of a state; None where nothing here does.

    Args:
        kind: of the node's state.
        reason: the whole of what the state says.
    """
    if kind == "off":
        return BACKEND if module.chosen.is_off else SETTINGS
    if kind not in ("failed", "eager", "slower"):
        return None
    if any(missing and missing in reason for missing in (why_no_cpp_compiler(), why_no_c_compiler())):
        return COMPILER
    if OF_NO_MAKER in reason:
        return ADOPT
    if CHOOSE_AUTO in reason:
        return PRECISION if module.chosen.quantised else SETTINGS
    return RETRY if kind in ("failed", "slower") or BUILD_IT in reason else None
