"""Inductor's options for a build: reduces launch overhead and memory traffic by fusion, compute by tuned kernels."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import torch

from ...core.spec import EngineSpec, Optimize

OURS = "slipstream."
"""Prefix of our own options, which are not passed to the compiler."""

REWRITES = f"{OURS}rewrites"
"""Whether the graph is rewritten before it is compiled, see `..rewrites`."""
JOINED_PERCENT = f"{OURS}joined_percent"
"""The most memory for copies of joined layers' weights, in percent of the model's weights."""
ROWS_AT_ONCE = f"{OURS}rows_at_once"
"""The longest row, in elements, that one reduction kernel holds whole and so reads only once."""

PACKAGED = f"{OURS}packaged"
"""Whether the program is compiled in the process that exported it. Only then may it contain what cannot be saved:
matrix products with wider results, which torch 2.11 does not load again, and kernels of our own."""
PROGRAM_DEVICE = f"{OURS}program_device"
"""The number of the GPU that is part of a saved program, where that is not the first one."""

_ROW = 8192
_TUNING = "coordinate_descent_tuning"

Options = Mapping[str, str | int | float | bool | None]

# Without weights: the package names every parameter, and the host supplies them all. `always_keep` stops Inductor from
# writing small constants (such as the output convolution's bias) into the code, where a LoRA could not change them.
_WITHOUT_WEIGHTS: dict[str, str | int | float | bool | None] = {
    "always_keep_tensor_constants": True,
    "aot_inductor.package_constants_in_so": False,
}


def fusion_options(device: torch.device, optimize: Optimize) -> Options:
    """Options that shape the kernels, for a package as for `torch.compile`."""
    if device.type != "cuda":
        return {}
    if optimize is Optimize.FAST_BUILD:
        return _file_names()
    options: dict[str, str | int | float | bool | None] = {
        **_file_names(),
        "conv_1x1_as_mm": True,
        REWRITES: True,
        JOINED_PERCENT: 15,
        ROWS_AT_ONCE: _ROW,
    }
    if optimize is Optimize.MAX:
        options[_TUNING] = True  # of the fused kernels; trying other matrix products gained nothing
        options[JOINED_PERCENT] = 100
    return options


def _file_names() -> Options:
    """On Windows a path has 260 characters, unless its user allows more. Triton names files after kernels, and torch's
    compiler kernels after all operations in them."""
    return {"triton.descriptive_names": ""} if sys.platform == "win32" else {}


def of_compiler(spec: EngineSpec) -> dict[str, str | int | float | bool | None]:
    """The options of a build that are passed to the compiler."""
    return {name: value for name, value in spec.backend.options.items() if not name.startswith(OURS)}


def package_options(device: torch.device, optimize: Optimize) -> Options:
    """Options of an ahead-of-time package."""
    # Only calls between kernels live in the wrapper: compiled without optimisation it costs microseconds a call, and
    # nothing at all where a CUDA graph repeats the kernels.
    quick = device.type == "cuda" or optimize is Optimize.FAST_BUILD
    wrapper = {"aot_inductor.compile_wrapper_opt_level": "O0" if quick else "O1"}
    fusion = fusion_options(device, optimize)
    packaged = {PACKAGED: True} if REWRITES in fusion else {}
    return {**_WITHOUT_WEIGHTS, **wrapper, **fusion, **packaged}


def block_options(device: torch.device, optimize: Optimize) -> Options:
    """Options of a block's package. Its weights are arguments, and its graph is compiled as it is."""
    quick = device.type == "cuda" or optimize is Optimize.FAST_BUILD
    wrapper = {"aot_inductor.compile_wrapper_opt_level": "O0" if quick else "O1"}
    ours = {name: value for name, value in fusion_options(device, optimize).items() if name not in _OF_REWRITES}
    # Many kinds are built side by side: one variant of each fused kernel, none to be tried against another on the GPU.
    untried = _UNTRIED if device.type == "cuda" and optimize is not Optimize.MAX else {}
    return {**wrapper, **ours, **untried}


def triton_block_options(device: torch.device, optimize: Optimize) -> Options:
    """Options of a block whose kernels are called from Python.

    Each kernel is compiled in one variant, chosen by rule. Of several, torch would try one after the other in the first
    call of each process, and compile more.
    """
    left_out = *_OF_REWRITES, _TUNING
    ours = {name: value for name, value in fusion_options(device, optimize).items() if name not in left_out}
    return {**ours, **_UNTRIED, "deterministic": True, "triton.autotune_at_compile_time": False}


_UNTRIED = {"triton.autotune_pointwise": False}
_OF_REWRITES = REWRITES, JOINED_PERCENT
