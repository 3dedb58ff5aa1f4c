"""ComfyUI's progress bar and cancel button while somebody waits for a build."""

from __future__ import annotations

from typing import Any

from ....core.progress import Progress
from ....runtime.provider import HostHooks
from .current_weights import copies
from .free_memory import free_device_memory

_STEPS = 100


def waiting_hooks() -> HostHooks:
    import comfy.model_management as management

    bar: list[Any] = []  # made at the first report: a bar that never moves would hide the sampler's own

    def progress(update: Progress) -> None:
        import comfy.utils

        if not bar:
            bar.append(comfy.utils.ProgressBar(_STEPS))
        bar[0].update_absolute(int(_STEPS * (update.fraction or 0.0)), _STEPS)

    return HostHooks(
        progress,
        management.throw_exception_if_processing_interrupted,
        (management.InterruptProcessingException, KeyboardInterrupt),
        free_device_memory,
        copies.free,
    )


def throw_if_cancelled() -> None:
    """
    Raises:
        InterruptProcessingException: the user cancelled.
    """
    import comfy.model_management as management

    management.throw_exception_if_processing_interrupted()
