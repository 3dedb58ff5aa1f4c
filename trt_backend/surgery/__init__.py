"""Makes an exported graph one that TensorRT builds well, without looking at a single weight.

`operate` runs the passes; `lower_to_opset_17` is for TensorRT 8.6.
"""

from __future__ import annotations

from .operate import PASSES, PassReport, operate
from .opset import lower_to_opset_17

__all__ = ["PASSES", "PassReport", "lower_to_opset_17", "operate"]
