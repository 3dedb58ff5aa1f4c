"""Differences between two sets of factors, in the words of a user."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Path = tuple[str, ...]

_PROFILE: Path = ("spec", "profile", "inputs")
_MORE_PROFILES: Path = ("spec", "more_profiles")

_NAMES: dict[Path, str] = {
    ("spec", "role"): "role",
    ("spec", "fingerprint", "architecture"): "architecture",
    ("spec", "fingerprint", "weights"): "weights",
    ("spec", "fingerprint", "lora"): "LoRA",
    ("spec", "precision"): "precision",
    ("spec", "quantised"): "quantisation",
    ("spec", "optimize"): "optimize",
    ("spec", "backend", "name"): "backend",
    ("spec", "backend", "contains_weights"): "weights inside the engine",
    ("spec", "output_dtype"): "output dtype",
    _MORE_PROFILES: "further profiles",
    ("environment", "device"): "device",
    ("environment", "gpu"): "GPU",
    ("environment", "compute_capability"): "compute capability",
    ("environment", "cuda"): "CUDA",
    ("environment", "torch"): "torch",
    ("environment", "os"): "operating system",
    ("environment", "machine"): "processor type",
    ("environment", "cpu"): "CPU instructions",
    ("environment", "threads"): "CPU threads",
    ("schema",): "key format",
}
"""Also the order in which differences are told."""

_NAMES |= {
    ("spec", "backend", "options", f"slipstream.{name}"): words
    for name, words in {
        "rewrites": "graphs rewritten before compiling",
        "joined_percent": "copies of joined layers, % of the weights",
        "rows_at_once": "longest row read at once",
        "packaged": "kernels of our own",
        "program_device": "number of the GPU in the program",
    }.items()
}

_PATTERNS: dict[Path, str] = {
    ("spec", "dtypes"): "{} dtype",
    ("spec", "backend", "options"): "option {}",
    ("environment", "versions"): "{}",
}

_AXES: dict[int, tuple[str, ...]] = {
    1: ("batch",),
    2: ("batch", "features"),
    3: ("batch", "tokens", "features"),
    4: ("batch", "channels", "height", "width"),
    5: ("batch", "channels", "frames", "height", "width"),
}


def describe_differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """One line for each difference: "name: before → after"."""
    old, new = dict(_leaves(before)), dict(_leaves(after))
    changed = [path for path in {**old, **new} if not _same(old.get(path), new.get(path))]
    lines = []
    for path in sorted(changed, key=_order):
        if path[:-1] == _PROFILE:
            lines += _describe_shape(path[-1], old.get(path), new.get(path))
        else:
            lines.append(f"{_name(path)}: {_say(path, old.get(path))} → {_say(path, new.get(path))}")
    return lines


def _leaves(node: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Values by path. The axes of one input count as one value, and so do all further profiles."""
    if path[:-1] == _PROFILE or path == _MORE_PROFILES:
        yield path, node
    elif isinstance(node, Mapping):
        for name, child in node.items():
            yield from _leaves(child, (*path, str(name)))
    elif isinstance(node, list):
        for index, child in enumerate(node):
            yield from _leaves(child, (*path, str(index)))
    else:
        yield path, node


def _same(before: Any, after: Any) -> bool:
    # 1, 1.0 and True are equal to Python, yet they are three different keys.
    return type(before) is type(after) and bool(before == after)


def _order(path: Path) -> tuple[int, Path]:
    known = list(_NAMES)
    if path[: len(_PROFILE)] == _PROFILE:
        return known.index(("spec", "fingerprint", "lora")), path
    return (known.index(path) if path in _NAMES else len(known)), path


def _name(path: Path) -> str:
    if path in _NAMES:
        return _NAMES[path]
    for prefix, pattern in _PATTERNS.items():
        if path[: len(prefix)] == prefix and len(path) > len(prefix):
            return pattern.format(".".join(path[len(prefix) :]))
    return ".".join(path)


def _say(path: Path, value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if path == _MORE_PROFILES:
        return "; ".join(map(_say_profile, value)) or "none"
    if path[:2] == ("spec", "fingerprint") and isinstance(value, str):
        return value[:12]  # a digest: its beginning is enough to tell two apart
    return str(value)


def _describe_shape(name: str, before: Any, after: Any) -> list[str]:
    if not (_is_shape(before) and _is_shape(after) and len(before) == len(after)):
        return [f"{name} shape: {_say_shape(before)} → {_say_shape(after)}"]
    names = _AXES.get(len(before), ())
    return [
        f"{name} {names[index] if names else f'axis {index}'}: {_say_range(old)} → {_say_range(new)}"
        for index, (old, new) in enumerate(zip(before, after, strict=True))
        if old != new
    ]


def _say_profile(profile: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_say_shape(axes)}" for name, axes in profile["inputs"].items())


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(axis, Mapping) and {"min", "opt", "max"} <= set(axis) for axis in value
    )


def _say_shape(value: Any) -> str:
    if value is None:
        return "none"
    return ("×".join(map(_say_range, value)) or "scalar") if _is_shape(value) else str(value)


def _say_range(axis: Mapping[str, Any]) -> str:
    if axis["min"] == axis["max"]:
        return str(axis["opt"])
    return f"{axis['min']}..{axis['max']} (tuned for {axis['opt']})"
