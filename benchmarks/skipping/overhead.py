"""What a skipped step costs, at the size of SDXL's latents."""

from __future__ import annotations

import statistics
import time
from types import SimpleNamespace
from typing import Any

import torch

from ...hosts.comfy.skip.call_sigmas import CallSigmas
from ...hosts.comfy.skip.step_skip import prediction
from ...runtime.checking.measure import milliseconds
from ...sampling.reuse import Reuse
from ...sampling.run import SkippingRun

SHAPE = (1, 4, 128, 128)
_STEPS, _COMPUTED = 200, 3


def overhead(device: torch.device) -> dict[str, Any]:
    """Median ms of a skipped step by rule: of work on the device, and of the host until all of it is queued.

    The host's part is all that happens between sampler and network, the wait for sigma included, on an idle device.
    """
    return {rule.value: _of(rule, device) for rule in Reuse}


def _of(rule: Reuse, device: torch.device) -> dict[str, float]:
    levels = [float(level) for level in torch.linspace(14.6, 0.1, 2 * _STEPS)] + [0.0]
    guider = SimpleNamespace(conds={"positive": [{"uuid": "p"}], "negative": [{"uuid": "n"}]}, cfg=7.0)
    run = SkippingRun(levels, tuple(range(_COMPUTED)), rule)
    step = prediction(guider, run, CallSigmas((), in_order=False))
    x = torch.randn(SHAPE, device=device)
    sigmas = torch.tensor(levels, device=device)[:, None]
    on_device, on_host = [], []
    for place in range(_COMPUTED):
        step(lambda *_: torch.randn_like(x), x, sigmas[place])
    for place in range(_COMPUTED, len(levels) - 1):
        if place % 2:
            on_device.append(milliseconds(lambda: step(_never, x, sigmas[place]), device))  # noqa: B023
        else:
            _wait(device)
            started = time.perf_counter()
            step(_never, x, sigmas[place])
            on_host.append((time.perf_counter() - started) * 1000)
    return {"device_ms": round(statistics.median(on_device), 4), "host_ms": round(statistics.median(on_host), 4)}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _never(*_: Any) -> torch.Tensor:
    raise AssertionError("a skipped step computed the model")
