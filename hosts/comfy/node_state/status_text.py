"""An accelerated model's status in a few lines."""

from __future__ import annotations

import time

import torch

from ....core.formatting import say_share, say_speedup, say_times
from ....runtime.module import AcceleratedModule
from ....runtime.settings.model_settings import BackendChoice
from ....trt_backend import TensorRTBackend


def describe(module: AcceleratedModule | None, what: str = "model", node: str = "Accelerate Model") -> str:
    """Lines for Engine Info.

    Args:
        what, node: for people: what should be accelerated, and by which node.
    """
    if module is None:
        return f"This {what} is not accelerated: place {node} between it and this node."
    module.provider.settle_times()
    status = module.status.to_json()
    lines = [
        f"now: {status['now']}",
        f"calls on engines: {status['engine_calls']}, on your model: {status['eager_calls']}",
    ]
    if status["block_calls"]:
        lines.append(f"calls by engines of blocks: {status['block_calls']}")
    for use in status["engines"]:
        since = time.strftime("%H:%M:%S", time.localtime(use["since"]))
        error = use["relative_error"]
        checked = f", checked: {say_share(error)} off your model in fp32" if error is not None else ""
        lines.append(
            f"engine {use['digest'][:12]}: {use['label']}, {use['backend']} {use['precision']}, "
            f"since {since}, {use['calls']} calls{checked}{_speed(module, use['digest'])}"
        )
        if caution := module.provider.canary.caution(use["digest"]):
            lines.append(f"  {caution}. Choose Try again on it in the sidebar to have it as before")
    lines += [f"on your model × {count}: {reason}" for reason, count in status["reasons"].items()]
    tickets = (ticket for queue in module.provider.queues for ticket in queue.pending())
    lines += [f"building: {ticket.plan} {ticket.describe()}" for ticket in tickets]
    if module.settings.backend is BackendChoice.TENSORRT:
        lines.append(f"tensorrt: {_tensorrt()}")
    return "\n".join(lines)


def _speed(module: AcceleratedModule, digest: str) -> str:
    entry = module.provider.store.lookup(digest)
    speed = None if entry is None else module.provider.speed_of(entry)
    if entry is None or speed is None:
        return ""
    times = say_times(speed.eager_ms, speed.engine_ms, entry.manifest.timed_by)
    return f", {times} ({say_speedup(speed.speedup)})"


def _tensorrt() -> str:
    import comfy.model_management

    backend, device = TensorRTBackend(), torch.device(comfy.model_management.get_torch_device())
    reason = backend.why_unavailable(device)
    if reason is not None:
        return reason
    found = " ".join(f"{name} {version}" for name, version in backend.environment(device).versions.items())
    return f"{found} is there" + (f", but {why}" if (why := backend.why_cannot_build(device)) else "")
