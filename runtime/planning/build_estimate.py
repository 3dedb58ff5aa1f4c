"""How long a build will take, by earlier builds on this machine."""

from __future__ import annotations

import functools
import os
import platform
import statistics
from collections.abc import Callable, Collection, Iterable

from ...core.spec import Role
from ...engine_cache import BuildHistory, PastBuild
from .plan import Plan

_NO_GPU = "cpu"

ROLES_OF_KIND = {
    "unet": (Role.UNET,),
    "controlnet": (Role.CONTROLNET,),
    "vae": (Role.VAE_ENCODE, Role.VAE_DECODE),
    "text_encoder": (Role.TEXT_ENCODER,),
}
"""Kind of a model, as a node accelerates one → what its engines stand for."""


def past_build(plan: Plan, operations: int, seconds: float) -> PastBuild:
    """The record of a build that was just made here."""
    environment, fingerprint = plan.key.environment, plan.spec.fingerprint
    return PastBuild(
        machine=platform.node(),
        device=environment.gpu or _NO_GPU,
        threads=environment.threads or os.cpu_count() or 1,
        backend=plan.backend.name,
        optimize=plan.spec.optimize.value,
        architecture=fingerprint.architecture,
        layers=fingerprint.layers,
        operations=operations,
        seconds=seconds,
        role=plan.spec.role.value,
    )


def estimate(history: BuildHistory, plan: Plan, operations: int = 0) -> float | None:
    """Seconds that a build of `plan` will run; None where nothing like it was built on this machine.

    Args:
        operations: of the traced graph, once they are counted.
    """
    return _estimate(history.builds(), plan, operations)


def typical(history: BuildHistory, optimize: str | None = None, roles: Collection[Role] = tuple(Role)) -> float | None:
    """Seconds that builds took on this machine, in the middle; None before the first.

    Args:
        optimize: an `Optimize`, as text, for builds with this much effort alone.
        roles: what was built; a build of which that is not known counts only where any will do.
    """
    here = [build for build in history.builds() if build.machine == platform.node()]
    if set(roles) != set(Role):
        here = [build for build in here if build.role in {role.value for role in roles}]
    seconds = [build.seconds for build in here if optimize in (None, build.optimize)]
    return statistics.median(seconds) if seconds else None


def estimator(history: BuildHistory, plan: Plan) -> Callable[[int], float | None]:
    """`estimate` by the number of operations; the history is read once."""
    builds = history.builds()
    return functools.cache(lambda operations: _estimate(builds, plan, operations))


def say_estimate(seconds: float | None, running: float = 0.0) -> str:
    """A clause for people, e.g. ", about 2 min by earlier builds on this machine, 40 s left"; empty where unknown.

    Args:
        running: seconds that the build has run already.
    """
    if seconds is None:
        return ""
    words = f", about {say_roughly(seconds)} by earlier builds on this machine"
    if not running:
        return words
    left = seconds - running
    return f"{words}, {say_roughly(left)} left" if left > 0 else f"{words}, done any moment"


def say_roughly(seconds: float) -> str:
    """E.g. "7 s", "40 s", "2 min": no more digits than a guess deserves."""
    if seconds < 10:
        return f"{max(1, round(seconds))} s"
    if seconds < 90:
        return f"{10 * round(seconds / 10)} s"
    return f"{round(seconds / 60)} min"


def _estimate(builds: Iterable[PastBuild], plan: Plan, operations: int) -> float | None:
    here = past_build(plan, operations, 1.0)
    comparable = [build for build in builds if _place(build) == _place(here)]
    if same := [build.seconds for build in comparable if build.architecture == here.architecture]:
        return statistics.median(same)
    if plan.spec.role is Role.BLOCK:  # the compiler's start takes most of it, whatever the block
        return statistics.median(build.seconds for build in comparable) if comparable else None
    operations = operations or _operations_of(here.architecture, builds)
    by_operations = [build.seconds / build.operations for build in comparable if build.operations]
    if operations and by_operations:
        return operations * statistics.median(by_operations)
    by_layers = [build.seconds / build.layers for build in comparable if build.layers]
    return here.layers * statistics.median(by_layers) if here.layers and by_layers else None


def _place(build: PastBuild) -> tuple[object, ...]:
    """What must be the same for one build's time to predict another's."""
    return build.machine, build.device, build.threads, build.backend, build.optimize


def _operations_of(architecture: str, builds: Iterable[PastBuild]) -> int:
    """As counted in any build of it: another backend's, another machine's."""
    counted = [build.operations for build in builds if build.architecture == architecture and build.operations]
    return counted[-1] if counted else 0
