"""What a step's result depends on besides x and sigma, as far as it changes within a run."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterator
from typing import Any

import torch


class StepConditions:
    """Tells steps apart that are not to be continued from one another.

    Args:
        guider: of the run; looked at when the first step begins, since windows are known in sigmas only then.
    """

    def __init__(self, guider: Any) -> None:
        self._guider = guider
        self._prompts: Hashable = None
        self._begins: list[float] = []
        self._ends: list[float] = []
        self._sigma, self._times = math.inf, 0

    def next(self, sigma: float) -> Hashable:
        """`at` for the step that is asked for now. Who asks a second time at the same sigma, another node say, means
        something else by it: that is a condition of its own, so that neither is continued from the other.
        """
        self._times = self._times + 1 if sigma == self._sigma else 0
        self._sigma = sigma
        return self.at(sigma), self._times

    def at(self, sigma: float) -> Hashable:
        """Equal for steps between which no prompt, ControlNet or hook begins, ends or is exchanged."""
        prompts = tuple(
            (name, tuple(str(cond.get("uuid", id(cond))) for cond in conds or []))
            for name, conds in sorted(self._guider.conds.items())
        )
        if prompts != self._prompts:
            self._prompts = prompts
            windows = list(_windows(self._guider.conds))
            self._begins = sorted({_float32(begin) for begin, _ in windows if begin is not None})
            self._ends = sorted({_float32(end) for _, end in windows if end is not None})
        cfg = getattr(self._guider, "cfg", None)
        # Both sigmas of a window belong to it.
        inside = bisect_left(self._begins, sigma), bisect_right(self._ends, sigma)
        return prompts, cfg if isinstance(cfg, (int, float)) else None, inside


def _float32(value: float) -> float:
    return torch.tensor(float(value), dtype=torch.float32).item()


def _windows(conds: dict[str, Any]) -> Iterator[tuple[float | None, float | None]]:
    """From which sigma to which something is part of a step."""
    for cond in (cond for each in conds.values() for cond in each or []):
        yield cond.get("timestep_start"), cond.get("timestep_end")
        control = cond.get("control")
        while control is not None:
            if (window := getattr(control, "timestep_range", None)) is not None:
                yield float(window[0]), float(window[1])
            control = getattr(control, "previous_controlnet", None)
        for hook in getattr(cond.get("hooks"), "hooks", ()):
            for keyframe in getattr(getattr(hook, "hook_keyframe", None), "keyframes", ()):
                yield float(keyframe.start_t), None
