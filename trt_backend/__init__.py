"""TensorRT engines. Not part of this version: the room says so wherever it is asked."""

from __future__ import annotations


def why_unavailable() -> str:
    """Why no TensorRT engine can be built or run."""
    return "TensorRT engines are not part of this version of Slipstream yet"
