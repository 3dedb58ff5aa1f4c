"""The half of the fake TensorRT that makes plans; see `fake_tensorrt`.

Only `vars` of these classes are used: no super(), and no class of their own as base.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx

_OPSETS = {"8.6.1": 17, "10.0.1": 20, "10.16.1": 24, "11.4.0": 24, "rtx-1.7.1": 23}
_OLD = ("8.6.1", "10.0.1")
_LACKS = {"8.6.1": ("GroupNormalization", "Attention"), "10.0.1": ("GroupNormalization", "Attention")}
_TYPES = {
    onnx.TensorProto.FLOAT: "FLOAT",
    onnx.TensorProto.FLOAT16: "HALF",
    onnx.TensorProto.BFLOAT16: "BF16",
    onnx.TensorProto.INT32: "INT32",
    onnx.TensorProto.INT64: "INT64",
    onnx.TensorProto.BOOL: "BOOL",
    onnx.TensorProto.INT8: "INT8",
    onnx.TensorProto.FLOAT8E4M3FN: "FP8",
}
PLAN = b"ftrt"
CACHE = b"ptrt"
Range = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


@dataclass
class Build:
    """One build as it was configured.

    Attributes:
        workspace: limit in bytes; None for none.
        known: what its timing cache knew before; None where it had no cache.
        refittable: names that were marked.
        wide: nodes that were held to fp32.
        capabilities: of the GPUs that it is for.
    """

    flags: set[str]
    settings: dict[str, Any]
    workspace: int | None
    profiles: list[dict[str, Range]]
    known: set[str] | None
    refittable: set[str]
    wide: set[str] = field(default_factory=set)
    capabilities: list[str] = field(default_factory=list)


class Setting:
    """An attribute that is stored and recorded."""

    def __init__(self, default: Any) -> None:
        self._default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self._key = name

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else instance._values.get(self._key, self._default)

    def __set__(self, instance: Any, value: Any) -> None:
        instance._values[self._key] = value


def complain(trt: Any, logger: Any, message: str) -> None:
    logger.log(trt.ILogger.Severity.ERROR, message)


def data_type(trt: Any, element: int) -> Any:
    """TensorRT's name of an ONNX dtype; None where the release has none."""
    name = _TYPES.get(element, "")
    return getattr(trt.DataType, name) if hasattr(trt.DataType, name or "?") else None


def dims(value: onnx.ValueInfoProto) -> tuple[int, ...]:
    """Sizes of an input or output; -1 for open ones."""
    return tuple(dim.dim_value if dim.HasField("dim_value") else -1 for dim in value.type.tensor_type.shape.dim)


class ILogger:
    def __init__(self) -> None:
        self._initialised = True

    def log(self, severity: Any, message: str) -> None:
        raise TypeError('Tried to call pure virtual function "log"')


class IProgressMonitor:
    def __init__(self) -> None:
        self._initialised = True


class IHostMemory(bytes):
    """A buffer of bytes and nothing else: no length, no slices."""

    __len__ = None
    __getitem__ = None
    __iter__ = None

    def __getattribute__(self, name: str) -> Any:
        if name == "nbytes":
            return memoryview(self).nbytes
        if not name.startswith("_"):
            raise AttributeError(f"TensorRT {type(self)._release} has no IHostMemory.{name}")
        return object.__getattribute__(self, name)


class ITensor:
    def __init__(self, value: onnx.ValueInfoProto) -> None:
        self._value = value

    @property
    def name(self) -> str:
        return str(self._value.name)

    @property
    def shape(self) -> tuple[int, ...]:
        return dims(self._value)

    @property
    def dtype(self) -> Any:
        return data_type(self._trt, self._value.type.tensor_type.elem_type)


class ILayer:
    """Of a network without types of its own: every tensor is said to be FLOAT (seen on 8.6)."""

    def __init__(self, node: onnx.NodeProto, constrained: set[str]) -> None:
        self._node = node
        self._constrained = constrained

    @property
    def name(self) -> str:
        return self._node.name

    @property
    def type(self) -> Any:
        types = self._trt.LayerType
        return types.CONSTANT if self._node.op_type == "Constant" else types.ELEMENTWISE

    @property
    def num_outputs(self) -> int:
        return len(self._node.output)

    @property
    def num_inputs(self) -> int:
        return len(self._node.input)

    def get_output(self, index: int) -> Any:
        return self._trt.ITensor(_float(self._node.output[index]))

    def get_input(self, index: int) -> Any:
        return self._trt.ITensor(_float(self._node.input[index])) if self._node.input[index] else None

    @property
    def precision(self) -> Any:
        raise NotImplementedError

    @precision.setter
    def precision(self, dtype: Any) -> None:
        assert dtype is self._trt.DataType.FLOAT
        self._constrained.add(self._node.name or self._node.output[0])


class INetworkDefinition:
    def __init__(self, logger: Any, strongly_typed: bool) -> None:
        self._logger = logger
        self._strongly_typed = strongly_typed
        self._model: onnx.ModelProto | None = None
        self._refittable: set[str] = set()
        self._layers: list[Any] = []
        self._wide: set[str] = set()

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def get_layer(self, index: int) -> Any:
        return self._layers[index]

    @property
    def num_inputs(self) -> int:
        return len(self._model.graph.input) if self._model else 0

    def get_input(self, index: int) -> Any:
        assert self._model is not None
        return self._trt.ITensor(self._model.graph.input[index])

    def mark_weights_refittable(self, name: str) -> bool:
        assert self._model is not None
        if name not in {tensor.name for tensor in self._model.graph.initializer}:
            complain(self._trt, self._logger, f"There are no weights named {name}.")
            return False
        self._refittable.add(name)
        return True


class IOptimizationProfile:
    def __init__(self) -> None:
        self._ranges: dict[str, Range] = {}

    def set_shape(self, input: str, min: Any, opt: Any, max: Any) -> None:
        self._ranges[input] = (tuple(min), tuple(opt), tuple(max))


class ITimingCache:
    """A set of lines, each something that was measured."""

    def __init__(self, known: set[str]) -> None:
        self._known = known

    def combine(self, input_cache: Any, ignore_mismatch: bool) -> bool:
        self._known |= input_cache._known
        return True

    def serialize(self) -> Any:
        text = json.dumps([self._release, *sorted(self._known)])
        return self._trt.IHostMemory(CACHE + text.encode())


class IBuilderConfig:
    builder_optimization_level = Setting(3)
    max_aux_streams = Setting(-1)
    hardware_compatibility_level = Setting(None)
    progress_monitor = Setting(None)
    num_compute_capabilities = Setting(0)

    def __init__(self, logger: Any) -> None:
        self._logger = logger
        self._values: dict[str, Any] = {}
        self._flags: set[str] = set()
        self._profiles: list[dict[str, Range]] = []
        self._workspace: int | None = None
        self._cache: Any = None
        self._capabilities: list[str] = []

    def set_flag(self, flag: Any) -> None:
        if not isinstance(flag, self._trt.BuilderFlag):
            raise TypeError(f"set_flag(): incompatible function arguments: {flag!r}")
        self._flags.add(flag.name)

    def clear_flag(self, flag: Any) -> None:
        if not isinstance(flag, self._trt.BuilderFlag):
            raise TypeError(f"clear_flag(): incompatible function arguments: {flag!r}")
        self._flags.discard(flag.name)
        self._values["cleared"] = [*self._values.get("cleared", []), flag.name]

    def set_preview_feature(self, feature: Any, enable: bool) -> None:
        if not isinstance(feature, self._trt.PreviewFeature):
            raise TypeError(f"set_preview_feature(): incompatible function arguments: {feature!r}")
        (self._flags.add if enable else self._flags.discard)(feature.name)

    def set_memory_pool_limit(self, pool: Any, pool_size: int) -> None:
        if pool is self._trt.MemoryPoolType.WORKSPACE:
            self._workspace = pool_size

    def set_compute_capability(self, capability: Any, index: int) -> bool:
        if not 0 <= index < self.num_compute_capabilities:
            complain(self._trt, self._logger, f"There is no room for capability {index}.")
            return False
        self._capabilities.append(capability.name)
        return True

    def add_optimization_profile(self, profile: Any) -> int:
        bad = [
            name
            for name, (low, mid, high) in profile._ranges.items()
            if not len(low) == len(mid) == len(high)
            or not all(0 < a <= b <= c for a, b, c in zip(low, mid, high, strict=True))
        ]
        refusal = self._trt.script.refusals.get("add_optimization_profile")
        if bad or refusal:
            message = refusal or f"Invalid optimization profiles for input tensors {', '.join(bad)}"
            complain(self._trt, self._logger, message)
            return -1
        self._profiles.append(profile._ranges)
        return len(self._profiles) - 1

    def create_timing_cache(self, serialized_timing_cache: bytes) -> Any:
        trt = self._trt
        data = bytes(serialized_timing_cache)
        try:
            release, *known = json.loads(data.removeprefix(CACHE)) if data else [trt.release]
            valid = not data or (data.startswith(CACHE) and release == trt.release)
        except ValueError:
            valid = False
        if valid:
            return trt.ITimingCache(set(known))
        complain(trt, self._logger, "Failed to deserialize timing cache.")
        return None if trt.release in _OLD else trt.ITimingCache(set())

    def set_timing_cache(self, cache: Any, ignore_mismatch: bool) -> bool:
        trt = self._trt
        if cache._known and "set_timing_cache" in trt.script.refusals and not ignore_mismatch:
            complain(trt, self._logger, trt.script.refusals["set_timing_cache"])
            return False
        self._cache = cache
        return True

    def get_timing_cache(self) -> Any:
        return self._cache


class ParserError:
    def __init__(self, desc: str, node: int) -> None:
        self._desc = desc
        self._node = node

    def desc(self) -> str:
        return self._desc

    def node(self) -> int:
        return self._node


class OnnxParser:
    def __init__(self, network: Any, logger: Any) -> None:
        self._network = network
        self._logger = logger
        self._errors: list[Any] = []

    @property
    def num_errors(self) -> int:
        return len(self._errors)

    def get_error(self, index: int) -> Any:
        return self._errors[index]

    def parse_from_file(self, model: str) -> bool:
        trt = self._trt
        if not Path(model).is_file():
            return self._fail(f"Input file cannot be found, or is not a regular file: {model}", -1)
        if trt.script.parser_error:
            return self._fail(trt.script.parser_error, 0)
        parsed = onnx.load(model)
        (opset,) = [entry.version for entry in parsed.opset_import if entry.domain in ("", "ai.onnx")]
        if opset > _OPSETS[trt.release]:
            return self._fail(f"The model uses opset {opset}, which this parser does not know", -1)
        for index, node in enumerate(parsed.graph.node):
            if node.domain not in ("", "ai.onnx") or node.op_type in _LACKS.get(trt.release, ()):
                return self._fail(f"Plugin not found for operator {node.op_type}", index)
        if any(data_type(trt, value.type.tensor_type.elem_type) is None for value in parsed.graph.input):
            return self._fail("An input has a dtype that this release does not know", -1)
        self._network._model = parsed
        self._network._layers = _layers(trt, parsed, self._network._wide)
        return True

    def _fail(self, desc: str, node: int) -> bool:
        self._errors.append(self._trt.ParserError(desc, node))
        return False


def _layers(trt: Any, model: onnx.ModelProto, constrained: set[str]) -> list[Any]:
    return [trt.ILayer(node, constrained) for node in model.graph.node]


def _float(name: str) -> onnx.ValueInfoProto:
    return onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)


class Builder:
    def __init__(self, logger: Any) -> None:
        script = self._trt.script
        if not getattr(logger, "_initialised", False):
            raise TypeError("ILogger.__init__() must be called when overriding __init__")
        if script.start_error:
            complain(self._trt, logger, script.start_error)
            raise TypeError("pybind11::init(): factory function returned nullptr")
        self._logger = logger

    def create_network(self, flags: int = 0) -> Any:
        trt = self._trt
        known = {1 << int(flag): flag.name for flag in trt.NetworkDefinitionCreationFlag}
        if flags not in known:
            raise RuntimeError(f"TensorRT {trt.release} has no network flags {flags}")
        return trt.INetworkDefinition(self._logger, known[flags] == "STRONGLY_TYPED")

    def create_builder_config(self) -> Any:
        return self._trt.IBuilderConfig(self._logger)

    def create_optimization_profile(self) -> Any:
        return self._trt.IOptimizationProfile()

    def build_serialized_network(self, network: Any, config: Any) -> Any:
        trt = self._trt
        known = None if config._cache is None else set(config._cache._known)
        build = Build(config._flags, config._values, config._workspace, config._profiles, known, network._refittable)
        build.wide, build.capabilities = network._wide, config._capabilities
        trt.script.builds.append(build)
        problem = trt.script.build_errors.pop(0) if trt.script.build_errors else why_not(trt, network, build)
        if problem or not _report_phases(build.settings.get("progress_monitor")):
            complain(trt, self._logger, problem or "The build was cancelled.")
            return None
        if config._cache is not None:
            config._cache._known |= {node.op_type for node in network._model.graph.node}
        return trt.IHostMemory(_plan(trt, network, build))


def why_not(trt: Any, network: Any, build: Build) -> str | None:
    """What TensorRT itself checks before it builds."""
    graph = network._model.graph
    opened = {value.name: dims(value) for value in graph.input if -1 in dims(value)}
    if opened and not build.profiles:
        return "Network has dynamic or shape inputs, but no optimization profile has been defined."
    for profile in build.profiles:
        for value in graph.input:
            wanted = profile.get(value.name)
            if wanted is None and value.name in opened:
                return f"Optimization profile is missing values for input {value.name}."
            for size in wanted or ():
                if len(size) != len(dims(value)) or any(
                    a not in (-1, b) for a, b in zip(dims(value), size, strict=True)
                ):
                    return f"Static dimension mismatch while setting the profile of input {value.name}."
    halves = any(value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT16 for value in graph.input)
    if halves and not network._strongly_typed and "FP16" not in build.flags:
        return "Network uses half precision, but the FP16 flag is not set."
    if network._strongly_typed and {"FP16", "BF16"} & build.flags:
        return "Precision flags cannot be set for a strongly typed network."
    if "STRIP_PLAN" in build.flags and not {"REFIT", "REFIT_IDENTICAL", "REFIT_INDIVIDUAL"} & build.flags:
        return "STRIP_PLAN needs a flag that allows refitting."
    return None


def _report_phases(monitor: Any) -> bool:
    """Whether it lets the build go on."""
    if monitor is None:
        return True
    monitor.phase_start("Building engine", None, 2)
    monitor.phase_start("Timing tactics", "Building engine", 3)
    going_on = all([monitor.step_complete("Timing tactics", step) for step in range(3)])
    monitor.phase_finish("Timing tactics")
    monitor.phase_finish("Building engine")
    return going_on


def _plan(trt: Any, network: Any, build: Build) -> bytes:
    model = onnx.ModelProto()
    model.CopyFrom(network._model)
    floats = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
    everything = {tensor.name for tensor in model.graph.initializer if tensor.data_type in floats}
    refittable = everything if {"REFIT", "REFIT_IDENTICAL"} & build.flags else set()
    refittable |= network._refittable if "REFIT_INDIVIDUAL" in build.flags else set()
    stripped = refittable if "STRIP_PLAN" in build.flags else set()
    for tensor in model.graph.initializer:
        if tensor.name in stripped:
            tensor.raw_data = b""
    header = {
        "release": trt.release,
        "refittable": sorted(refittable),
        "stripped": sorted(stripped),
        "profiles": build.profiles,
    }
    text = json.dumps(header).encode()
    return PLAN + len(text).to_bytes(4, "little") + text + model.SerializeToString()


def read_plan(plan: bytes) -> tuple[dict[str, Any], onnx.ModelProto]:
    """
    Raises:
        ValueError: these bytes are no plan.
    """
    data = bytes(plan)
    if not re.match(PLAN, data):
        raise ValueError("Magic tag does not match")
    length = int.from_bytes(data[4:8], "little")
    try:
        header = {"release": "?", **json.loads(data[8 : 8 + length])}
        return header, onnx.ModelProto.FromString(data[8 + length :])
    except Exception as error:
        raise ValueError(f"The plan is damaged: {type(error).__name__}") from error


CLASSES: dict[str, type] = {
    cls.__name__: cls
    for cls in (
        Builder,
        IBuilderConfig,
        IHostMemory,
        ILayer,
        ILogger,
        INetworkDefinition,
        IOptimizationProfile,
        IProgressMonitor,
        ITensor,
        ITimingCache,
        OnnxParser,
        ParserError,
    )
}
