"""Whole pictures, by each variant: model, ControlNet and VAE made fast in the way that a user would."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from ...core.errors import BuildFailed
from ...core.protocols import Tensors
from ...core.spec import Quantised
from ...engine_cache import EngineStore
from ...runtime.module import AcceleratedModule
from ...runtime.settings.model_settings import NUMBERS, BuildPolicy
from ...sampling.presets import PRESETS
from ...sampling.run import Skipped
from ..subjects import fast_options
from ..subjects.jobs import MODEL, OTHERS, PARTS, Applied, Job, Parts
from ..subjects.setup import Ready, SetupContext, apart, bytes_of, compiler_cache
from ..subjects.variants import CHANNELS_LAST, COMPILE, EAGER, FAST, MODES, OURS, Variant
from .ours import provider_of, settings_of

_METHODS = {"AutoencoderKL": "decode"}
"""What is called of a network, where it is not the network itself."""


def set_up(variant: Variant, job: Job, setup_context: SetupContext, ending: ExitStack) -> Ready:
    """Make a variant ready; what it holds is let go with `ending`.

    Raises:
        Exception: whatever stops it; no variant's failure concerns another.
    """
    makers = {EAGER: _eager, COMPILE: _compiled, OURS: _ours}
    return makers[variant.kind](variant, job, setup_context, ending)


def _ready(job: Job, parts: Parts, **more: Any) -> Ready:
    compute = {"compute": lambda applied: job.paint(parts, applied), "prepare": lambda wish: job.apply(parts, wish)}
    return Ready(**{"precision": job.precision, **compute, **more})


def _eager(variant: Variant, job: Job, setup_context: SetupContext, ending: ExitStack) -> Ready:
    if variant.mode == FAST:
        return _ready(job, job.parts, compute=lambda applied: _fast(job, applied))
    if variant.steps is None:
        return _ready(job, job.parts)
    parts, runs = _skipping(job.parts, variant.steps)
    job.paint(parts, job.apply(parts, job.inputs(seed=0)))
    return _ready(job, parts, facts={"computed": _computed(runs)}, skips=True)


def _fast(job: Job, applied: Applied) -> Tensors:
    with fast_options.switched_on():
        return job.paint(job.parts, applied)


def _skipping(parts: Parts, steps: str) -> tuple[Parts, list[Skipped]]:
    """With a model that skips steps, and what happened in its runs."""
    from ...hosts.comfy.skip.step_skip import skip_steps

    runs: list[Skipped] = []
    return replace(parts, model=skip_steps(parts.model, PRESETS[steps], runs.append)), runs


def _computed(runs: list[Skipped]) -> int:
    """Calls of the model that the last run computed.

    Raises:
        RuntimeError: it skipped none.
    """
    if runs[-1].reason:
        raise RuntimeError(f"no step was skipped: {runs[-1].reason}")
    return runs[-1].computed


def _compiled(variant: Variant, job: Job, setup_context: SetupContext, ending: ExitStack) -> Ready:
    """Each network computes by compiled code for as long as a picture takes; other variants have it as it was."""
    ending.enter_context(compiler_cache(setup_context))
    networks, copied = job.parts.networks, 0
    sources = networks
    if CHANNELS_LAST in variant.levers:
        sources = [copy.deepcopy(each).to(memory_format=torch.channels_last) for each in networks]  # type: ignore[call-overload]
        copied = sum(map(bytes_of, sources))
    mode = MODES[variant.mode]
    compiled = []
    for network, source in zip(networks, sources, strict=True):
        method = _METHODS.get(type(network).__name__, "forward")
        function = torch.compile(apart(getattr(source, method)), mode=mode)
        compiled.append((network, method, _kept(function) if mode else function))

    def compute(applied: Applied) -> Tensors:
        with ExitStack() as swapped:
            for network, method, function in compiled:
                swapped.enter_context(_in_place_of(network, method, function))
            return job.paint(job.parts, applied)

    return _ready(job, job.parts, compute=compute, copied_bytes=copied)


def _kept(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """What a CUDA graph computes is gone with the next call of any: the model needs the ControlNet's residuals."""

    def call(*args: Any, **kwargs: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return _cloned(compiled(*args, **kwargs))

    return call


def _cloned(given: Any) -> Any:
    """Tensors as they are, or by kind as ControlNets give them."""
    if torch.is_tensor(given):
        return given.clone()
    if isinstance(given, Mapping):
        return {kind: _cloned(each) for kind, each in given.items()}
    return [_cloned(each) for each in given]


@contextmanager
def _in_place_of(network: torch.nn.Module, method: str, function: Callable[..., Any]) -> Iterator[None]:
    setattr(network, method, function)
    try:
        yield
    finally:
        delattr(network, method)


def _ours(variant: Variant, job: Job, setup_context: SetupContext, ending: ExitStack) -> Ready:
    """Engines are built by a first picture, which is not counted as a call."""
    parts, modules = _accelerated(variant, job, setup_context, ending, dict.fromkeys(PARTS, setup_context.builds))
    runs: list[Skipped] = []
    if variant.steps is not None:
        parts, runs = _skipping(parts, variant.steps)
    setup_context.tell(f"{variant.name}: its engines, and a first picture")
    job.paint(parts, job.apply(parts, job.inputs(seed=0)))
    first, computed = _engine_calls(modules), _computed(runs) if runs else None
    return _ready(
        job,
        parts,
        **_numbers(job, modules[0]),
        facts={**_facts(modules, setup_context.store), **({} if computed is None else {"computed": computed})},
        skips=computed is not None,
        wanted_calls=None if computed is None else job.engine_calls_of(computed),
        engine_calls=lambda: _engine_calls(modules) - first,
        reasons=lambda: "; ".join(reason for module in modules for reason in module.status.to_json()["reasons"]),
    )


def build(variant: Variant, job: Job, setup_context: SetupContext, part: str, ending: ExitStack) -> None:
    """Build what one of `PARTS` lacks in the store, by a picture of which the others build nothing.

    Raises:
        BuildFailed: the picture was made without an engine of this part.
    """
    policies = {**dict.fromkeys(PARTS, BuildPolicy.MANUAL), part: BuildPolicy.FIRST_USE}
    parts, modules = _accelerated(variant, job, setup_context, ending, policies)
    setup_context.tell(f"{variant.name}: engines of {part}")
    job.paint(parts, job.apply(parts, job.inputs(seed=0)))
    for module in modules[:1] if part == MODEL else modules[1 if job.parts.control is not None else 2 :]:
        if not module.status.engine_calls:
            raise BuildFailed("; ".join(module.status.to_json()["reasons"]) or f"no engine served a call of {part}")


def _accelerated(
    variant: Variant, job: Job, setup_context: SetupContext, ending: ExitStack, policies: Mapping[str, BuildPolicy]
) -> tuple[Parts, list[AcceleratedModule]]:
    """Parts on engines, and what serves each.

    Args:
        policies: of each of `PARTS`.
    """
    from ...hosts.comfy.accelerate import accelerate_model
    from ...hosts.comfy.accelerate_controlnet import accelerate_controlnet
    from ...hosts.comfy.accelerate_vae import accelerate_vae

    provider = provider_of(variant, setup_context.store)
    ending.callback(provider.pool.clear)
    modules = [AcceleratedModule(provider, settings_of(variant, policies[part])) for part in (MODEL, OTHERS, OTHERS)]
    plain = job.parts
    parts = Parts(
        accelerate_model(plain.model, modules[0]),
        None if plain.control is None else accelerate_controlnet(plain.control, modules[1]),
        accelerate_vae(plain.vae, modules[2]),
    )
    return parts, modules


def _numbers(job: Job, module: AcceleratedModule) -> dict[str, Any]:
    """What the model's engine computes in, which gives way to another where it overflows."""
    used = module.status.last_engine
    found = job.precision if used is None else NUMBERS[used.precision]
    if isinstance(found, Quantised):
        return {"precision": job.precision, "quantised": found}
    return {"precision": found}


def _engine_calls(modules: list[AcceleratedModule]) -> int:
    return sum(module.status.engine_calls for module in modules)


def _facts(modules: list[AcceleratedModule], store: EngineStore) -> dict[str, Any]:
    """Of all engines together."""
    digests = {use["digest"] for module in modules for use in module.status.to_json()["engines"]}
    entries = [entry for digest in digests if (entry := store.lookup(digest)) is not None]
    return {
        "build_s": round(sum(entry.manifest.build.seconds for entry in entries), 3),
        "size_mb": round(sum(entry.bytes for entry in entries) / 2**20, 2),
        "versions": {
            name: of for entry in entries for name, of in entry.manifest.factors["environment"]["versions"].items()
        },
    }
