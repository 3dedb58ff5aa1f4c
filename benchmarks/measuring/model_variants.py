"""Single calls of a model, by each variant."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ...core.dtypes import dtype_of
from ...core.errors import UnsupportedModel
from ...core.progress import Progress
from ...core.protocols import Tensors
from ...core.spec import Precision, Quantised
from ...hosts.architecture import cast_inputs
from ...runtime.checking.measure import load_seconds, versions
from ...runtime.module import AcceleratedModule
from ...runtime.provider import HostHooks
from ...runtime.settings.model_settings import BuildPolicy
from ..subjects import fast_options, rivals, sage
from ..subjects.models import Model
from ..subjects.plain_source import PlainSource, called
from ..subjects.setup import Ready, SetupContext, apart, bytes_of, compiler_cache, package_versions
from ..subjects.variants import (
    BF16_MATH,
    CHANNELS_LAST,
    COMPILE,
    EAGER,
    EAGER_GRAPH,
    FAST,
    FP32,
    MODES,
    NODE,
    OURS,
    RIVAL,
    SAGE,
    Variant,
)
from .ours import provider_of, settings_of
from .switching import sides_of


def set_up(variant: Variant, model: Model, setup_context: SetupContext, ending: ExitStack) -> Ready:
    """Make a variant ready; what it holds is let go with `ending`.

    Raises:
        Exception: whatever stops it; no variant's failure concerns another.
    """
    makers = {EAGER: _eager, EAGER_GRAPH: _eager_graph, NODE: _node, COMPILE: _compiled, RIVAL: _rival, OURS: _ours}
    return makers[variant.kind](variant, model, setup_context, ending)


def _eager(variant: Variant, model: Model, setup_context: SetupContext, ending: ExitStack) -> Ready:
    if variant.mode == FAST:
        return Ready(_fast(model.source.eager), model.source.precision)
    if FP32 in variant.levers:
        return _in_other_numbers(model, Precision.FP32)
    if BF16_MATH in variant.levers:
        return _in_other_numbers(model, Precision.BF16, optimized_attention_override=_plain_products)
    if SAGE in variant.levers:
        return _by_sage(variant, model, setup_context)
    return Ready(model.source.eager, model.source.precision)


def _fast(eager: Callable[[Tensors], Tensors]) -> Callable[[Tensors], Tensors]:
    def compute(inputs: Tensors) -> Tensors:
        with fast_options.switched_on():
            return eager(inputs)

    return compute


def _in_other_numbers(model: Model, precision: Precision, **options: Any) -> Ready:
    """By a copy. The model itself is not needed then, which is what its memory is not counted for.

    Args:
        options: for ComfyUI's `transformer_options`.
    """
    dtype = dtype_of(precision)
    module = copy.deepcopy(model.module).to(dtype)
    return Ready(
        lambda inputs: called(module, inputs, **options),
        precision,
        prepare=lambda inputs: cast_inputs(inputs, dtype),
        copied_bytes=bytes_of(model.module),
    )


def _by_sage(variant: Variant, model: Model, setup_context: SetupContext) -> Ready:
    """
    Raises:
        RuntimeError: the package computes no attention of this model.
    """
    dtype = dtype_of(model.source.precision)

    def compute(inputs: Tensors) -> Tensors:
        return called(model.module, inputs, optimized_attention_override=sage.override)

    def prepare(inputs: Tensors) -> Tensors:
        return cast_inputs(inputs, dtype)

    with sage.counted() as answers:
        compute(prepare(model.inputs(seed=0)))
    if not any(answers):
        raise RuntimeError(f"{sage.PACKAGE} computed none of {len(answers)} attentions")
    setup_context.tell(
        f"{variant.name}: {sage.PACKAGE} computes {sum(answers)} of {len(answers)} attentions, torch the rest"
    )
    return Ready(compute, model.source.precision, prepare, facts={"versions": package_versions([sage.PACKAGE])})


def _plain_products(chosen: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """ComfyUI's attention without kernels of its own: all scores at once, in the model's precision."""
    from comfy.ldm.modules.attention import attention_basic

    found: torch.Tensor = attention_basic(*args, **kwargs)
    return found


def _eager_graph(variant: Variant, model: Model, setup_context: SetupContext, ending: ExitStack) -> Ready:
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


def _node(variant: Variant, model: Model, setup_context: SetupContext, ending: ExitStack) -> Ready:
    """`apply_model` takes the noisy picture and sigma and gives the clean picture; both ways are undone apart."""
    from comfy_extras.nodes_torch_compile import TorchCompileModel

    ending.enter_context(compiler_cache(setup_context))
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
    import comfy.model_sampling

    is_flux = isinstance(sampling, comfy.model_sampling.ModelSamplingFlux)
    multiplier = 1.0 if is_flux else getattr(sampling, "multiplier", None)
    sigma: torch.Tensor = sampling.sigma(timesteps) if multiplier is None else timesteps / multiplier
    return sigma.to(timesteps.device, torch.float32)


def _uncalculate_input(sampling: Any, sigma: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The noisy picture that the model's own `calculate_input`, which only scales, turns into `x`."""
    scale: torch.Tensor = sampling.calculate_input(sigma, torch.ones_like(x))
    return x / scale


def _as_factor(sigma: torch.Tensor, picture: torch.Tensor) -> torch.Tensor:
    return sigma.view(-1, *[1] * (picture.ndim - 1))


def _compiled(variant: Variant, model: Model, setup_context: SetupContext, ending: ExitStack) -> Ready:
    ending.enter_context(compiler_cache(setup_context))
    module, copied = model.module, 0
    if CHANNELS_LAST in variant.levers:
        module = copy.deepcopy(module).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        copied = bytes_of(module)
    compiled = torch.compile(apart(module), mode=MODES[variant.mode])

    def prepare(inputs: Tensors) -> Tensors:
        return _channels_last(inputs) if CHANNELS_LAST in variant.levers else inputs

    def compute(inputs: Tensors) -> Tensors:
        if variant.mode:
            torch.compiler.cudagraph_mark_step_begin()
        return model.call(compiled, inputs)

    return Ready(compute, model.source.precision, prepare, copied_bytes=copied)


def _channels_last(inputs: Tensors) -> Tensors:
    return {
        name: tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor
        for name, tensor in inputs.items()
    }


def _rival(variant: Variant, model: Model, setup_context: SetupContext, ending: ExitStack) -> Ready:
    precision = model.source.precision
    dtype, versions_of = dtype_of(precision), {"versions": rivals.versions(variant.is_quantised)}
    with torch.inference_mode(False), torch.no_grad():  # layers are joined and quantised in place
        network = rivals.network_of(model)
        copied = bytes_of(network)
        if variant.mode:
            network = rivals.fused(network).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if variant.is_quantised:
            rivals.quantise(network)
    if not variant.mode:
        plain = network
        return Ready(
            lambda inputs: rivals.called(plain, inputs),
            precision,
            prepare=lambda inputs: cast_inputs(inputs, dtype),
            facts=versions_of,
            copied_bytes=copied,
        )
    ending.enter_context(compiler_cache(setup_context))
    compiled = torch.compile(apart(network), fullgraph=True, options=rivals.compiler_options(variant.is_quantised))

    def compute(inputs: Tensors) -> Tensors:
        torch.compiler.cudagraph_mark_step_begin()
        return rivals.called(compiled, inputs)

    return Ready(
        compute,
        precision,
        prepare=lambda inputs: _channels_last(cast_inputs(inputs, dtype)),
        facts=versions_of,
        copied_bytes=copied,
        quantised=Quantised.INT8 if variant.is_quantised else None,
    )


def _ours(variant: Variant, model: Model, setup_context: SetupContext, ending: ExitStack) -> Ready:
    source = model.source
    if isinstance(source, PlainSource):
        raise UnsupportedModel(source.why_no_engine)
    provider = provider_of(variant, setup_context.store)
    settings = settings_of(variant, BuildPolicy.MANUAL)
    hooks = HostHooks(_teller(setup_context, variant))
    made = [provider.make(source, each.call_shape, settings, hooks) for each in sides_of(model, variant)]
    plan, entry = made[0].plan, made[0].entry
    loading = load_seconds(provider, source, plan, entry)
    module = AcceleratedModule(provider, settings)
    ending.callback(provider.pool.clear)

    @contextmanager
    def picture() -> Iterator[Callable[[Tensors], Tensors]]:
        with module.run(source) as run:  # the very way that a picture's calls take
            yield lambda inputs: run(inputs, lambda: source.eager(inputs))

    def compute(inputs: Tensors) -> Tensors:
        with picture() as call:
            return call(inputs)

    facts = {
        "build_s": round(sum(each.entry.manifest.build.seconds for each in made), 3),
        "load_s": loading,
        "size_mb": round(sum(each.entry.bytes for each in made) / 2**20, 2),
        "versions": versions(plan.key.environment),
    }
    return Ready(
        ending.enter_context(picture()) if variant.switch is None else compute,
        plan.spec.precision,
        quantised=plan.spec.quantised,
        facts=facts,
        engine_calls=lambda: module.status.engine_calls,
        reasons=lambda: "; ".join(module.status.to_json()["reasons"]),
        picture=picture,
    )


def _teller(setup_context: SetupContext, variant: Variant) -> Callable[[Progress], None]:
    told: list[str] = []

    def tell(progress: Progress) -> None:
        if told[-1:] != [progress.phase]:
            told.append(progress.phase)
            setup_context.tell(f"{variant.name}: {progress.phase}: {progress.message}")

    return tell
