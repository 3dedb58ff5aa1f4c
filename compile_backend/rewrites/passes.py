"""All passes, in order."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch.export import ExportedProgram

from ...core.eight_bits import CHOOSE_AUTO, DTYPES, why_no_layer, why_not_on
from ...core.errors import UnsupportedModel, first_line
from ...core.protocols import Tensors
from ...core.spec import EngineSpec, Quantised
from ..inductor.options import JOINED_PERCENT, PACKAGED, REWRITES
from .derived_weights import DerivedWeight
from .eight_bits import quantise_linears
from .gated import fuse_gates, runs_on
from .graph import Graph
from .group_norm import by_channel
from .joined import join_linears
from .layout import keep_channels_last
from .traced_module import module_of
from .wide_attention import by_products

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rewritten:
    """A program after all passes.

    Attributes:
        derived: the weights that the program reads and the host does not have, by name.
        eight_bits: layers that compute in eight bits.
        as_it_is: why rewriting failed and the graph was compiled unchanged; else empty.
    """

    program: ExportedProgram
    derived: Mapping[str, DerivedWeight]
    eight_bits: int = 0
    as_it_is: str = ""


def rewrite(program: ExportedProgram, spec: EngineSpec, example: Tensors, device: torch.device) -> Rewritten:
    """Run the passes that the spec asks for, and trace the result again.

    Args:
        example: inputs to trace it with again.

    Raises:
        UnsupportedModel: no layer of the model is worth eight bits, which were asked for, or the chip has no such
            arithmetic.
    """
    options = spec.backend.options
    if not options.get(REWRITES) and spec.quantised is None:
        return Rewritten(program, {})
    if spec.quantised is not None and (reason := why_not_on(device, spec.quantised)):
        raise UnsupportedModel(reason)
    gates = spec.quantised is Quantised.FP8 and bool(options.get(PACKAGED)) and runs_on(device)
    try:
        return _rewritten(program, spec, example, device, gates)
    except UnsupportedModel:
        raise
    except Exception as error:  # whatever torch raises for a graph that it cannot trace again
        if gates:
            log.warning(
                "Slipstream: %s is built without the fused GEGLU kernel: %s", spec.describe(), first_line(error)
            )
            without = replace(spec.backend, options={**options, PACKAGED: False})
            return rewrite(program, replace(spec, backend=without), example, device)
        if spec.quantised is not None:
            raise UnsupportedModel(f"{spec.describe()} cannot be built: {first_line(error)}; {CHOOSE_AUTO}") from error
        log.warning("Slipstream: %s is compiled without rewriting its graph: %s", spec.describe(), first_line(error))
        return Rewritten(program, {}, as_it_is=first_line(error))


def _rewritten(
    program: ExportedProgram, spec: EngineSpec, example: Tensors, device: torch.device, gates: bool
) -> Rewritten:
    options = spec.backend.options
    graph = Graph(module_of(program))
    if options.get(REWRITES):
        keep_channels_last(graph)
        by_channel(graph)
    if options.get(PACKAGED):
        by_products(graph)
    count = 0
    if spec.quantised is not None:
        count = quantise_linears(graph, DTYPES[spec.quantised])
        if not count:
            raise UnsupportedModel(why_no_layer(spec.fingerprint.architecture_name, spec.precision_name))
        if gates:
            fuse_gates(graph)
    join_linears(graph, _bytes_of(graph.module) * int(options.get(JOINED_PERCENT) or 0) // 100)
    module = graph.finish(device)
    with torch.no_grad():
        traced = torch.export.export(module, (), dict(example), strict=False)
    return Rewritten(traced, graph.derived, count)


def _bytes_of(module: torch.nn.Module) -> int:
    return sum(weight.nbytes for weight in module.parameters())
