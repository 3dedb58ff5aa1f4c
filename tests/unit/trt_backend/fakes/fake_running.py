"""The half of the fake TensorRT that runs plans; see `fake_tensorrt`.

Engines compute by onnxruntime, on memory that they know by address alone, as the real ones do.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from typing import Any

import numpy as np
import onnx

from slipstream.tests.unit.trt_backend.fakes.fake_building import complain, data_type, dims, read_plan

_NUMPY = {"FLOAT": "float32", "HALF": "float16", "INT32": "int32", "INT64": "int64", "BOOL": "bool", "INT8": "int8"}
_NUMPY["FP8"] = "float8_e4m3fn"
Shape = tuple[int, ...]


def memory_at(address: int, dtype: Any, shape: Shape) -> np.ndarray[Any, Any]:
    """What lies at an address; not copied."""
    count = max(1, math.prod(shape) * np.dtype(dtype).itemsize)
    raw = (ctypes.c_ubyte * count).from_address(address)
    return np.frombuffer(raw, dtype, math.prod(shape)).reshape(shape)


class Runtime:
    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> Any:
        trt = self._trt
        try:
            header, model = read_plan(serialized_engine)
        except ValueError as error:
            complain(trt, self._logger, str(error))
            return None
        if header["release"] != trt.release:
            complain(trt, self._logger, f"The engine plan file was made by {header['release']}.")
            return None
        return trt.ICudaEngine(self, header, model)


class ICudaEngine:
    def __init__(self, runtime: Any, header: dict[str, Any], model: onnx.ModelProto) -> None:
        self._runtime = weakref.ref(runtime)
        self._logger = runtime._logger
        self._profiles: list[dict[str, list[Shape]]] = header["profiles"]
        self._refittable = set(header["refittable"])
        self._prototypes = {tensor.name: tensor for tensor in model.graph.initializer}
        self._missing = set(header["stripped"])
        self._weights = {
            name: onnx.numpy_helper.to_array(self._prototypes[name])
            for name in self._refittable
            if name not in self._missing
        }
        self._inputs = {value.name: value for value in model.graph.input}
        self._outputs = {value.name: value for value in model.graph.output}
        self._merged = _merged(model, self._refittable)
        self._session = _session(model, self._refittable)
        self._known_shapes: dict[Any, dict[str, Shape]] = {}

    @property
    def num_io_tensors(self) -> int:
        return len(self._inputs) + len(self._outputs)

    @property
    def num_optimization_profiles(self) -> int:
        return max(1, len(self._profiles))

    @property
    def refittable(self) -> bool:
        return bool(self._refittable)

    def get_tensor_name(self, index: int) -> str:
        return str([*self._inputs, *self._outputs][index])

    def get_tensor_mode(self, name: str) -> Any:
        modes = self._trt.TensorIOMode
        return modes.INPUT if name in self._inputs else modes.OUTPUT if name in self._outputs else modes.NONE

    def get_tensor_dtype(self, name: str) -> Any:
        value = {**self._inputs, **self._outputs}[name]
        return data_type(self._trt, value.type.tensor_type.elem_type)

    def get_tensor_shape(self, name: str) -> Shape:
        return dims({**self._inputs, **self._outputs}[name])

    @property
    def device_memory_size(self) -> int:
        return max(self._bytes(profile) for profile in range(max(1, len(self._profiles))))

    def get_device_memory_size_for_profile(self, profile_index: int) -> int:
        return self._bytes(profile_index)

    def get_device_memory_size_for_profile_v2(self, profile_index: int) -> int:
        return self._bytes(profile_index)

    def create_execution_context(self, strategy: Any = None) -> Any:
        strategies = getattr(self._trt, "ExecutionContextAllocationStrategy", None)
        return self._context(strategies is None or strategy is not strategies.USER_MANAGED)

    def create_execution_context_without_device_memory(self) -> Any:
        return self._context(False)

    def _context(self, has_memory: bool) -> Any:
        trt = self._trt
        if "create_execution_context" in trt.script.refusals:
            complain(trt, self._logger, trt.script.refusals["create_execution_context"])
            return None
        return trt.IExecutionContext(self, has_memory)

    def _bytes(self, profile: int) -> int:
        """Some size that grows with the shapes; no multiple of anything."""
        largest = self._profiles[profile] if self._profiles else {}
        shapes = [largest[name][2] if name in largest else dims(value) for name, value in self._inputs.items()]
        return 1001 + 4 * sum(math.prod(shape) for shape in shapes)

    def _compute(self, feeds: dict[str, Any]) -> dict[str, Any]:
        values = {name: _value(array) for name, array in {**self._weights, **feeds}.items()}
        found = self._session.run_with_ort_values(list(self._outputs), values)
        return {name: value.numpy() for name, value in zip(self._outputs, found, strict=True)}

    def _dtype(self, name: str) -> str:
        return _NUMPY[self.get_tensor_dtype(name).name]

    def _output_shapes(self, inputs: dict[str, Shape]) -> dict[str, Shape]:
        """Found by computing with zeros."""
        key = tuple(sorted(inputs.items()))
        if key not in self._known_shapes:
            feeds = {name: np.zeros(shape, self._dtype(name)) for name, shape in inputs.items()}
            for name in self._missing:
                tensor = self._prototypes[name]
                feeds[name] = np.zeros(tensor.dims, onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type))
            self._known_shapes[key] = {name: found.shape for name, found in self._compute(feeds).items()}
        return self._known_shapes[key]


def _value(array: np.ndarray[Any, Any]) -> Any:
    """As onnxruntime takes it, which does not know NumPy's eight-bit floats."""
    from onnxruntime import OrtValue

    if array.dtype.name != _NUMPY["FP8"]:
        return OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))
    return OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint8), onnx.TensorProto.FLOAT8E4M3FN)


def _session(model: onnx.ModelProto, fed: set[str]) -> Any:
    """Computes the graph; weights in `fed` are inputs of it."""
    import onnxruntime

    open_model = onnx.ModelProto()
    open_model.CopyFrom(model)
    kept = [tensor for tensor in model.graph.initializer if tensor.name not in fed]
    del open_model.graph.initializer[:]
    open_model.graph.initializer.extend(kept)
    for tensor in model.graph.initializer:
        if tensor.name in fed:
            value = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            open_model.graph.input.append(value)
    for node in open_model.graph.node:
        ours = [attribute for attribute in node.attribute if not attribute.name.startswith("TRT_")]
        del node.attribute[:]
        node.attribute.extend(ours)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    # Its fused products of 8-bit integers saturate on CPUs without VNNI.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    return onnxruntime.InferenceSession(open_model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _merged(model: onnx.ModelProto, refittable: set[str]) -> dict[str, set[str]]:
    """Weight -> those that TensorRT wants anew with it: it folds a convolution's bias into the kernel's layout."""
    found: dict[str, set[str]] = {}
    for node in model.graph.node:
        if node.op_type == "Conv" and len(node.input) == 3 and {*node.input[1:]} <= refittable:
            found.setdefault(node.input[1], set()).add(node.input[2])
    return found


class IExecutionContext:
    def __init__(self, engine: Any, has_memory: bool) -> None:
        self._engine = engine
        self._has_memory = has_memory
        self._given: dict[str, Shape] = {}
        self._addresses: dict[str, int] = {}
        self._profile = 0

    @property
    def active_optimization_profile(self) -> int:
        return self._profile

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        if self._refused("set_optimization_profile_async"):
            return False
        if not 0 <= profile_index < self._engine.num_optimization_profiles:
            return self._complain(f"There is no profile {profile_index}.")
        self._profile = profile_index
        self._given = {}
        return True

    def set_device_memory(self, memory: int, size: int) -> None:
        needed = self._engine._bytes(max(0, self._profile))
        if size < needed:
            self._complain(f"The memory has {size} bytes, {needed} are needed.")
            return
        self._lend(memory, size)

    @property
    def device_memory(self) -> int:
        raise TypeError("device_memory can only be written")

    @device_memory.setter
    def device_memory(self, memory: int) -> None:
        self._lend(memory, None)

    def set_input_shape(self, name: str, shape: Any) -> bool:
        if self._refused("set_input_shape") or self._refused(f"set_input_shape {name}"):
            return False
        if name not in self._engine._inputs or self._profile < 0:
            return self._complain(f"{name} is no input, or no profile was chosen.")
        wanted = tuple(shape)
        if not self._fits(name, wanted):
            return self._complain(f"Runtime dimension {list(wanted)} of {name} does not satisfy any profile.")
        self._given[name] = wanted
        return True

    def get_tensor_shape(self, name: str) -> Shape:
        shapes = self._shapes()
        if name in shapes:
            return shapes[name]
        if any(-1 in shape for shape in shapes.values()):
            return tuple(self._engine.get_tensor_shape(name))
        return tuple(self._engine._output_shapes(shapes)[name])

    def set_tensor_address(self, name: str, memory: int) -> bool:
        if self._refused("set_tensor_address"):
            return False
        if name not in self._engine._inputs and name not in self._engine._outputs:
            return self._complain(f"There is no tensor {name}.")
        self._addresses[name] = memory
        return True

    def execute_async_v3(self, stream_handle: int) -> bool:
        engine = self._engine
        if self._refused("execute_async_v3"):
            return False
        if engine._runtime() is None:
            raise RuntimeError("the runtime of this engine is gone: a real one crashes here")
        if not self._has_memory:
            return self._complain("The context has no device memory.")
        if engine._missing:
            return self._complain(f"Weights were stripped and never given: {sorted(engine._missing)[0]}.")
        shapes = self._shapes()
        if opened := [name for name, shape in shapes.items() if -1 in shape]:
            return self._complain(f"The shape of {opened[0]} was not specified.")
        if absent := [name for name in (*engine._inputs, *engine._outputs) if not self._addresses.get(name)]:
            return self._complain(f"The address of {absent[0]} is not set.")
        feeds = {name: memory_at(self._addresses[name], engine._dtype(name), shape) for name, shape in shapes.items()}
        for name, found in engine._compute(feeds).items():
            np.copyto(memory_at(self._addresses[name], engine._dtype(name), found.shape), found)
        return True

    def _shapes(self) -> dict[str, Shape]:
        """Of the inputs; -1 for axes that are not known."""
        return {name: self._given.get(name) or dims(value) for name, value in self._engine._inputs.items()}

    def _fits(self, name: str, shape: Shape) -> bool:
        ranges = self._engine._profiles[self._profile] if self._engine._profiles else {}
        if name not in ranges:
            return shape == dims(self._engine._inputs[name])
        low, _, high = ranges[name]
        return len(shape) == len(low) and all(a <= b <= c for a, b, c in zip(low, shape, high, strict=True))

    def _lend(self, memory: int, size: int | None) -> None:
        self._trt.script.lent.append((memory, size))
        self._has_memory = bool(memory)

    def _refused(self, method: str) -> bool:
        refusals = self._trt.script.refusals
        return method in refusals and not self._complain(refusals[method])

    def _complain(self, message: str) -> bool:
        complain(self._trt, self._engine._logger, message)
        return False


class Weights:
    """Of an array; from 10 on also of a dtype, an address and a count."""

    def __init__(self, first: Any, ptr: int | None = None, count: int | None = None) -> None:
        trt = self._trt
        self._array: Any = None
        if isinstance(first, np.ndarray) and ptr is None:
            self._array = first
            (self._dtype,) = [_find(trt, name) for name, kind in _NUMPY.items() if kind == first.dtype.name]
            self._size = first.size
        elif isinstance(first, trt.DataType) and (ptr is None or trt.release != "8.6.1"):
            self._dtype, self._address, self._size = first, ptr or 0, count or 0
        else:
            raise TypeError(f"Weights(): incompatible constructor arguments: {type(first).__name__}, {ptr}, {count}")

    @property
    def dtype(self) -> Any:
        return self._dtype

    @property
    def size(self) -> int:
        return int(self._size)

    def _read(self, shape: Shape) -> np.ndarray[Any, Any]:
        if self._array is not None:
            return np.array(self._array).reshape(shape)
        kind = _NUMPY.get(self._dtype.name, "int16")
        return memory_at(self._address, kind, shape).copy()


def _find(trt: Any, name: str) -> Any:
    return getattr(trt.DataType, name)


class Refitter:
    """Reads the numbers when it refits, not before: until then they have to stay where they are."""

    def __init__(self, engine: Any, logger: Any) -> None:
        if not engine.refittable:
            complain(self._trt, logger, "The engine was not built to be refitted.")
            raise TypeError("pybind11::init(): factory function returned nullptr")
        self._engine = engine
        self._logger = logger
        self._set: dict[str, Any] = {}

    def get_all_weights(self) -> list[str]:
        return sorted(self._engine._refittable)

    def get_missing_weights(self) -> list[str]:
        merged = {name for given in self._set for name in self._engine._merged.get(given, ())}
        return sorted((merged | self._engine._missing) - set(self._set))

    def get_weights_prototype(self, weights_name: str) -> Any:
        trt = self._trt
        tensor = self._engine._prototypes.get(weights_name)
        if tensor is None or weights_name not in self._engine._refittable:
            complain(trt, self._logger, f"{weights_name} is not refittable.")
            return trt.Weights(trt.DataType.FLOAT, 0, 0)
        return trt.Weights(data_type(trt, tensor.data_type), 0, math.prod(tensor.dims))

    def set_named_weights(self, name: str, weights: Any, location: Any = None) -> bool:
        trt = self._trt
        old = trt.release == "8.6.1"
        if old and location is not None:
            raise TypeError("set_named_weights(): incompatible function arguments")
        reason = self._why_not(name, weights, old) or trt.script.refusals.get("set_named_weights")
        if location is not None and location is not trt.TensorLocation.HOST:
            reason = "There is no GPU here for weights to lie on."
        if reason:
            complain(trt, self._logger, reason)
            return False
        trt.script.set_weights.append(name)
        self._set[name] = weights
        return True

    def refit_cuda_engine(self) -> bool:
        trt = self._trt
        missing = self.get_missing_weights()
        reason = f"Weights are missing: {missing[0]}." if missing else trt.script.refusals.get("refit")
        if reason:
            complain(trt, self._logger, reason)
            return False
        trt.script.refits += 1
        for name, weights in self._set.items():
            self._engine._weights[name] = weights._read(tuple(self._engine._prototypes[name].dims))
        self._engine._missing -= set(self._set)
        self._set = {}
        return True

    def refit_cuda_engine_async(self, stream_handle: int) -> bool:
        return bool(self.refit_cuda_engine())

    def _why_not(self, name: str, weights: Any, old: bool) -> str | None:
        tensor = self._engine._prototypes.get(name)
        if tensor is None or name not in self._engine._refittable:
            return f"{name} is not refittable."
        if weights.size != math.prod(tensor.dims):
            return f"{name} has {math.prod(tensor.dims)} numbers, {weights.size} were given."
        if not old and weights.dtype is not data_type(self._trt, tensor.data_type):
            return f"{name} has another dtype."
        return None


CLASSES: dict[str, type] = {cls.__name__: cls for cls in (ICudaEngine, IExecutionContext, Refitter, Runtime, Weights)}
