"""The TensorRT that this machine has: TensorRT-RTX, 10, 11, or 8.6 as far as it was tried.

All differences between them are handled here, by what their Python bindings offer.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Container, Iterable
from typing import Any

import torch

from ..core.errors import BackendUnavailable
from ..core.spec import Optimize, Precision
from ..core.streams import Stream
from .requirements import is_installed, runs_rtx

RTX = "tensorrt-rtx"
FULL = "tensorrt"
_MODULES = {RTX: ("tensorrt_rtx_bindings", "tensorrt_rtx"), FULL: ("tensorrt",)}
_OPSETS = (((10, 15), 23), ((10, 9), 21), ((10, 0), 18), ((8, 6), 17))
"""The newest set of ONNX operators that is worth exporting for, by version of TensorRT."""


class Log:
    """TensorRT's log: the last errors and warnings are kept for messages, the rest is dropped."""

    def __init__(self, trt: Any) -> None:
        self.errors: list[str] = []
        self.warnings: list[str] = []
        severity_of = trt.ILogger.Severity
        kept = {int(severity_of.INTERNAL_ERROR): self.errors, int(severity_of.ERROR): self.errors}
        kept[int(severity_of.WARNING)] = self.warnings

        class Listener(trt.ILogger):  # type: ignore[misc]
            def __init__(self) -> None:
                trt.ILogger.__init__(self)

            def log(self, severity: Any, message: str) -> None:
                if (messages := kept.get(int(severity))) is not None:
                    messages.append(message)
                    del messages[:-20]

        self.listener = Listener()

    def said(self) -> str:
        """The last errors, else the last warnings, in one line."""
        told = self.errors[-3:] or self.warnings[-2:]
        return " | ".join(message.strip()[:300] for message in told) or "it gave no reason"

    def clear(self) -> None:
        self.errors.clear()
        self.warnings.clear()

    @property
    def ran_out_of_memory(self) -> bool:
        said = " ".join(self.errors).lower()
        return any(sign in said for sign in ("out of memory", "outofmemory", "insufficient memory", "cudaerror 2:"))


class Library:
    """One TensorRT.

    Attributes:
        name: `RTX` or `FULL`.
        trt: its Python module.
    """

    def __init__(self, name: str, trt: Any) -> None:
        self.name = name
        self.trt = trt
        self.version = str(trt.__version__)
        self.log = Log(trt)

    @property
    def release(self) -> tuple[int, ...]:
        """The version as numbers, e.g. (10, 16, 1)."""
        return tuple(int(part) for part in self.version.split(".")[:3] if part.isdigit())

    @property
    def is_rtx(self) -> bool:
        return self.name == RTX

    @property
    def opset(self) -> int:
        if self.is_rtx:
            return 23
        return next(opset for oldest, opset in _OPSETS if self.release >= oldest)

    @property
    def is_strongly_typed(self) -> bool:
        """Whether every layer computes in the dtype that the graph says."""
        return hasattr(self.trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED")

    @property
    def can_strip(self) -> bool:
        """Whether plans may leave out exactly those weights that are named."""
        return hasattr(self.trt.BuilderFlag, "STRIP_PLAN") and hasattr(self.trt.BuilderFlag, "REFIT_INDIVIDUAL")

    def level(self, optimize: Optimize) -> int:
        """TensorRT's own measure, 0 to 5, of how much a build tries out."""
        levels = {Optimize.FAST_BUILD: 1, Optimize.BALANCED: 3, Optimize.MAX: 5}
        if not self.is_strongly_typed:  # it tries everything in several dtypes: minutes each
            levels = {Optimize.FAST_BUILD: 1, Optimize.BALANCED: 2, Optimize.MAX: 3}
        return levels[optimize]

    def why_not_precision(self, precision: Precision) -> str | None:
        if precision is Precision.BF16 and not hasattr(self.trt.DataType, "BF16"):
            return f"TensorRT {self.version} has no bf16; use fp16, or TensorRT 10 or newer"
        return None

    @property
    def why_not_in_eight_bits(self) -> str | None:
        """Why TensorRT before 10.9 cannot: it does not read opset 21, the first with 8-bit floats for all operators."""
        if self.opset >= 21:
            return None
        return f"TensorRT {self.version} does not compute in 8 bits here, 10.9 and newer do; choose backend compiled"

    @property
    def why_no_range(self) -> str | None:
        """Why an engine is for one size alone; None where it may be for several."""
        if self.opset >= 18:
            return None
        return f"TensorRT {self.version} has engines for one size each here, 10 and newer have them for a range"

    # ------------------------------------------------------------------------------------------------ building

    def new_builder(self) -> Any:
        """TensorRT's builder.

        Raises:
            BackendUnavailable: TensorRT does not start, for lack of a driver say.
        """
        try:
            builder = self.trt.Builder(self.log.listener)
        except Exception as error:  # the bindings raise TypeError for whatever goes wrong inside
            raise BackendUnavailable(f"TensorRT {self.version} does not start: {error}. {self.log.said()}") from error
        return builder

    def new_network(self, builder: Any) -> Any:
        flags = self.trt.NetworkDefinitionCreationFlag
        flag = flags.STRONGLY_TYPED if self.is_strongly_typed else flags.EXPLICIT_BATCH
        return builder.create_network(1 << int(flag))

    def follow_dtypes(self, config: Any, network: Any, precision: Precision, exact: Container[str]) -> None:
        """Compute in the dtypes of the graph, where TensorRT does not do so by itself.

        Args:
            exact: names of nodes that are computed in fp32, with all that leads to them: a network without types of its
                own is computed in fp16 throughout, which cannot represent all timesteps.
        """
        flags = self.trt.BuilderFlag
        if precision is Precision.FP32:
            config.clear_flag(flags.TF32)  # on by default, and less precise than fp32
        if self.is_strongly_typed or precision is not Precision.FP16:
            return
        config.set_flag(flags.FP16)
        config.set_flag(flags.PREFER_PRECISION_CONSTRAINTS)
        for layer in _up_to(network, exact, self.trt.LayerType.CONSTANT):
            layer.precision = self.trt.DataType.FLOAT

    def make_refittable(self, config: Any, network: Any, names: Iterable[str]) -> list[str]:
        """Make these weights refittable, and strip them from the plan where TensorRT supports that.

        Returns:
            Names that the network does not know.
        """
        flags = self.trt.BuilderFlag
        if not self.can_strip:
            config.set_flag(flags.REFIT)
            return []  # what cannot be replaced shows when the plan is loaded
        config.set_flag(flags.REFIT_INDIVIDUAL)
        config.set_flag(flags.STRIP_PLAN)
        return [name for name in names if not network.mark_weights_refittable(name)]

    def target_this_gpu(self, config: Any) -> None:
        """Build for this GPU alone; TensorRT-RTX builds for several by default."""
        if self.is_rtx and torch.cuda.is_available():
            config.num_compute_capabilities = 1
            config.set_compute_capability(self.trt.ComputeCapability.CURRENT, 0)

    def watch(self, config: Any, monitor: type) -> Any:
        """Report progress to an instance of `monitor`, a class without bases; the result is to be kept alive."""
        base = getattr(self.trt, "IProgressMonitor", None)
        if base is None or not hasattr(config, "progress_monitor"):
            return None
        made = type("Monitor", (monitor, base), {"__init__": lambda this: base.__init__(this)})()
        config.progress_monitor = made
        return made

    # ------------------------------------------------------------------------------------------------- running

    def load(self, plan: bytes) -> Any:
        """The engine of a plan, None where it does not fit, and the runtime that has to outlive it."""
        # Without a driver its runtime exists all the same, and crashes the process when it is touched.
        if not torch.cuda.is_available():
            raise BackendUnavailable("TensorRT engines run on NVIDIA GPUs only, and there is none")
        runtime = self.trt.Runtime(self.log.listener)
        return runtime.deserialize_cuda_engine(plan), runtime

    def new_context(self, engine: Any) -> Any:
        """An execution context whose device memory comes from its caller; None where memory is short."""
        strategies = getattr(self.trt, "ExecutionContextAllocationStrategy", None)
        if strategies is not None:
            return engine.create_execution_context(strategies.USER_MANAGED)
        return engine.create_execution_context_without_device_memory()

    def needed_bytes(self, engine: Any, profile: int) -> int:
        """Device memory that a context of this profile computes in."""
        if hasattr(engine, "get_device_memory_size_for_profile_v2"):
            return int(engine.get_device_memory_size_for_profile_v2(profile))
        if hasattr(engine, "get_device_memory_size_for_profile"):
            return int(engine.get_device_memory_size_for_profile(profile))
        return int(engine.device_memory_size)

    def lend_memory(self, context: Any, memory: torch.Tensor) -> None:
        """Let `context` compute in `memory`, which is to outlive it."""
        if hasattr(context, "set_device_memory"):
            context.set_device_memory(memory.data_ptr(), memory.nbytes)
        else:
            context.device_memory = memory.data_ptr()

    @property
    def refits_on_device(self) -> bool:
        return hasattr(self.trt.Refitter, "refit_cuda_engine_async")

    def new_refitter(self, engine: Any) -> Any:
        return self.trt.Refitter(engine, self.log.listener)

    def set_weights(self, refitter: Any, name: str, tensor: torch.Tensor) -> Any:
        """Give a refitter one weight.

        Returns:
            What is to be kept alive until the refit has run; None when TensorRT refused.
        """
        if self.refits_on_device:
            dtype = refitter.get_weights_prototype(name).dtype
            if self.torch_dtype(dtype) != tensor.dtype:  # it is told an address, and cannot see what lies there
                self.log.errors.append(f"{name} is {dtype} in the engine, and {tensor.dtype} was given")
                return None
            weights = self.trt.Weights(dtype, tensor.data_ptr(), tensor.numel())
            location = self.trt.TensorLocation.DEVICE if tensor.is_cuda else self.trt.TensorLocation.HOST
            return (tensor, weights) if refitter.set_named_weights(name, weights, location) else None
        array = tensor.cpu().numpy()
        weights = self.trt.Weights(array)
        return (array, weights) if refitter.set_named_weights(name, weights) else None

    def refit(self, refitter: Any, stream: Stream) -> bool:
        """Put what was set into the engine, after all that `stream` was given."""
        if self.refits_on_device:
            return bool(refitter.refit_cuda_engine_async(stream.cuda_stream))
        stream.synchronize()
        return bool(refitter.refit_cuda_engine())

    def torch_dtype(self, dtype: Any) -> torch.dtype:
        """The torch dtype of one of TensorRT's.

        Raises:
            KeyError: no input, output or weight of ours has it.
        """
        names = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "INT32": "int32", "INT64": "int64"}
        names |= {"BOOL": "bool", "FP8": "float8_e4m3fn", "INT8": "int8"}
        known = {
            getattr(self.trt.DataType, ours): theirs
            for ours, theirs in names.items()
            if hasattr(self.trt.DataType, ours)
        }
        found: torch.dtype = getattr(torch, known[dtype])
        return found


def _up_to(network: Any, names: Container[str], constant: Any) -> list[Any]:
    """The layers of these names and all layers that they depend on, constants left out."""
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    makers = {layer.get_output(index).name: layer for layer in layers for index in range(layer.num_outputs)}
    open_ends = [layer for layer in layers if layer.name in names]
    found: dict[str, Any] = {}
    while open_ends:
        layer = open_ends.pop()
        if layer.name in found or layer.type == constant:
            continue
        found[layer.name] = layer
        given = [layer.get_input(index) for index in range(layer.num_inputs)]
        open_ends += [makers[tensor.name] for tensor in given if tensor is not None and tensor.name in makers]
    return list(found.values())


def find_library(device: torch.device) -> Library:
    """The TensorRT to use for `device`; on the CPU one that builds.

    Raises:
        BackendUnavailable: none is installed, it cannot be imported, or it is too old.
    """
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    names = [RTX, FULL] if capability is None or runs_rtx(capability) else [FULL]
    problems: list[str] = []
    for name in names:
        found = _import(name)
        if isinstance(found, Library):
            return found
        if found is not None:
            problems.append(found)
    raise BackendUnavailable("; ".join(problems) or "TensorRT is not installed")


@functools.lru_cache(maxsize=4)
def _import(name: str) -> Library | str | None:
    """Why it cannot be used, in words; None where it is not installed. Remembered, since a failure takes as long."""
    module = next((module for module in _MODULES[name] if is_installed(module)), None)
    if module is None:
        return None
    try:
        library = Library(name, importlib.import_module(module))
    except Exception as error:  # a library of it may be missing, or be made for another CUDA
        return f"{module} is installed but cannot be imported: {error}"
    if library.name == FULL and not _is_known(library.release):
        return f"TensorRT {library.version} is not supported; 10 and 11 are"
    return library


def _is_known(release: tuple[int, ...]) -> bool:
    return release[:2] == (8, 6) or release >= (10, 0)
