"""Inductor's options for a build: attacks overhead and bandwidth by fusion, compute by tuned kernels."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..core.spec import Optimize

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
    options: dict[str, str | int | float | bool | None] = {"conv_1x1_as_mm": True, "epilogue_fusion": False}
    if optimize is not Optimize.FAST_BUILD:
        options["coordinate_descent_tuning"] = True
    if optimize is Optimize.MAX:
        options |= {"max_autotune": True, "coordinate_descent_check_all_directions": True}
    return options


def package_options(device: torch.device, optimize: Optimize) -> Options:
    """Options of an ahead-of-time package."""
    # Only calls between kernels live in the wrapper: compiling it without optimisation costs microseconds a call.
    wrapper = {"aot_inductor.compile_wrapper_opt_level": "O0" if optimize is Optimize.FAST_BUILD else "O1"}
    return {**_WITHOUT_WEIGHTS, **wrapper, **fusion_options(device, optimize)}
