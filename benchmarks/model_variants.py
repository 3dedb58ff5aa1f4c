"""Single calls of a model, by each variant."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from ..core.progress import Progress
from ..core.protocols import Tensors
from ..runtime.measure import load_seconds, versions
from ..runtime.module import AcceleratedModule
from ..runtime.provider import HostHooks
from ..runtime.settings import BuildPolicy
from .models import Model
from .ours import provider_of, settings_of
from .variants import CHANNELS_LAST, COMPILE, EAGER, EAGER_GRAPH, MODES, NODE, OURS, Variant
from .workshop import Ready, Workshop, apart, bytes_of, compiler_cache


def set_up(variant: Variant, model: Model, workshop: Workshop, ending: ExitStack) -> Ready:
    """Make a variant ready; what it holds is let go with `ending`.

    Raises:
        Exception: whatever stops it; no variant's failure concerns another.
    """
    makers = {EAGER: _eager, EAGER_GRAPH: _eager_graph, NODE: _node, COMPILE: _compiled, OURS: _ours}
    return makers[variant.kind](variant, model, workshop, ending)


def _eager(variant: Variant, model: Model, workshop: Workshop, ending: ExitStack) -> Ready:
    return Ready(model.source.eager, model.source.precision)


def _eager_graph(variant: Variant, model: Model, workshop: Workshop, ending: ExitStack) -> Ready:
    """The inputs are copied to where the graph reads them in every call, as a user of it must."""
    fixed = {name: tensor.clone() for name, tensor in model.inputs(seed=0).items()}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # libraries choose their kernels and workspaces before the recording
        for _ in range(3):
            model.source.eager(fixed)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = model.source.eager(fixed)
    ending.callback(graph.reset)

    def compute(inputs: Tensors) -> Tensors:
        for name, tensor in inputs.items():
            fixed[name].copy_(tensor)
        graph.replay()
        return outputs

    return Ready(compute, model.source.precision)


def _node(variant: Variant, model: Model, workshop: Workshop, ending: ExitStack) -> Ready:
    """`apply_model` takes the noisy picture and sigma and gives the clean picture; both ways are undone apart."""
    from comfy_extras.nodes_torch_compile import TorchCompileModel

    ending.enter_context(compiler_cache(workshop))
    patcher = TorchCompileModel.execute(model.patcher, "inductor").result[0]
    base, sampling = patcher.model, patcher.model.model_sampling

    def prepare(inputs: Tensors) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        sigma = _sigma(sampling, inputs["timesteps"])
        noisy = _uncalculate_input(sampling, sigma, inputs["x"].float())
        rest = {name: tensor for name, tensor in inputs.items() if name not in ("x", "timesteps", "context")}
        return noisy, sigma, {"c_crossattn": inputs["context"], **rest}

    def compute(taken: tuple[torch.Tensor, torch.Tensor, dict[str, Any]]) -> torch.Tensor:
        noisy, sigma, conditions = taken
        options = {"wrappers": patcher.wrappers, "cond_or_uncond": [1, 0], "sigmas": sigma}
        clean: torch.Tensor = base.apply_model(noisy, sigma, transformer_options=options, **conditions)
        return clean

    def result(taken: tuple[torch.Tensor, torch.Tensor, dict[str, Any]], clean: torch.Tensor) -> Tensors:
        noisy, sigma, _ = taken
        return {"out": (noisy - clean) / _as_factor(sigma, clean)}

    return Ready(compute, model.source.precision, prepare, result)


def _sigma(sampling: Any, timesteps: torch.Tensor) -> torch.Tensor:
    """The inverse of the model's own `timestep`; of flow models `sigma` is not, as it also shifts."""
    multiplier = getattr(sampling, "multiplier", None)
    sigma: torch.Tensor = sampling.sigma(timesteps) if multiplier is None else timesteps / multiplier
    return sigma.to(timesteps.device, torch.float32)


def _uncalculate_input(sampling: Any, sigma: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The noisy picture that the model's own `calculate_input`, which only scales, turns into `x`."""
    scale: torch.Tensor = sampling.calculate_input(sigma, torch.ones_like(x))
    return x / scale


def _as_factor(sigma: torch.Tensor, picture: torch.Tensor) -> torch.Tensor:
    return sigma.view(-1, *[1] * (picture.ndim - 1))


def _compiled(variant: Variant, model: Model, workshop: Workshop, ending: ExitStack) -> Ready:
    ending.enter_context(compiler_cache(workshop))
    module, copied = model.module, 0
    if CHANNELS_LAST in variant.levers:
        module = copy.deepcopy(module).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        copied = bytes_of(module)
    compiled = torch.compile(apart(module), mode=MODES[variant.mode])

    def prepare(inputs: Tensors) -> Tensors:
        if CHANNELS_LAST not in variant.levers:
            return inputs
        return {
            name: tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor
            for name, tensor in inputs.items()
        }

    def compute(inputs: Tensors) -> Tensors:
        if variant.mode:
            torch.compiler.cudagraph_mark_step_begin()
        return model.call(compiled, inputs)

    return Ready(compute, model.source.precision, prepare, copied_bytes=copied)


def _ours(variant: Variant, model: Model, workshop: Workshop, ending: ExitStack) -> Ready:
    source = model.source
    provider = provider_of(variant, workshop.store)
    settings = settings_of(variant, BuildPolicy.MANUAL)
    plan, entry = provider.prepare(source, model.call_shape, settings, HostHooks(_teller(workshop, variant)))
    loading = load_seconds(provider, source, plan, entry)
    module = AcceleratedModule(provider, settings)
    ending.callback(provider.pool.clear)
    run = ending.enter_context(module.run(source))  # the very way that a picture's calls take

    def compute(inputs: Tensors) -> Tensors:
        return run(inputs, lambda: source.eager(inputs))

    facts = {
        "build_s": entry.manifest.build.seconds,
        "load_s": loading,
        "size_mb": round(entry.bytes / 2**20, 2),
        "versions": versions(plan.key.environment),
    }
    return Ready(
        compute,
        plan.spec.precision,
        facts=facts,
        engine_calls=lambda: module.status.engine_calls,
        reasons=lambda: "; ".join(module.status.to_json()["reasons"]),
    )


def _teller(workshop: Workshop, variant: Variant) -> Callable[[Progress], None]:
    told: list[str] = []

    def tell(progress: Progress) -> None:
        if told[-1:] != [progress.phase]:
            told.append(progress.phase)
            workshop.tell(f"{variant.name}: {progress.phase}: {progress.message}")

    return tell
