"""The weights of a live block as its engine takes them, for the length of one call."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence, Set
from contextlib import ExitStack
from typing import Any

import torch

from ....compile_backend.blocks.ggml_types import TYPES
from ....compile_backend.blocks.program import SCALE, Stored
from ....core.errors import UnsupportedModel
from ...live_model.held_weights import CHANGES, CHANGES_AT_CALLS, PATCHES, PLAIN
from ...live_model.layer_classes import dequantises
from ...live_model.layer_walk import layers_of, tensors_of
from ..process.current_weights import (
    CASTS,
    PREFETCH,
    STAGED,
    LayerCast,
    as_needed,
    is_quantized,
    is_staged_for,
    is_staged_in,
    places_of,
    staged_together,
)
from ..process.staged_pages import counts_holders
from .block_architecture import PREFIX

Wanted = Sequence[tuple[str, tuple[int, ...], torch.dtype]]
"""Name, shape and dtype of each weight."""

_Parts = Sequence[tuple[int, str, torch.dtype]]
"""The weights of one layer: each one's place in the engine's order, its name in the layer, and its dtype."""

_Uncast = tuple[Any, _Parts, Mapping[str, torch.dtype]]
"""A layer, its weights, and their dtypes by name."""


_STORED_OTHERWISE = "its weights are stored otherwise than when the run began"

_MOST_COPIED_BYTES = 128 << 20
"""The most of one block's weights that is copied where there is no memory to stage them: a larger copy would drive out
the staged weights of other blocks."""

_EIGHT_BITS = torch.float8_e4m3fn, torch.float8_e5m2
_SIXTEEN_BITS = torch.float16, torch.bfloat16

_READS_EIGHT_BITS = 8, 9
"""The compute capability from which on NVIDIA's kernels read such weights."""


def stored_weights(block: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> dict[str, Stored]:
    """Which weights of a block are cast or multiplied by a scale at each call, by their names in it: those in 8 bits,
    those of GGUF, and those in 16 where it computes in fp32, as text encoders do. None of them where functions change
    any of its weights at its calls, as LoRAs do where memory is short, and on weights of GGUF: they are cast before
    then. So are 8 bits on GPUs whose kernels do not read them.

    Args:
        dtype: that the block computes in.

    Raises:
        UnsupportedModel: ComfyUI does not cast them, but multiplies in 8 bits.
    """
    found: dict[str, Stored] = {}
    are_cast = False
    are_read = device.type != "cuda" or _kernels_read_eight_bits(device)
    forms = (*(_EIGHT_BITS if are_read else ()), *(_SIXTEEN_BITS if dtype == torch.float32 else ()), _BYTES)
    for path, layer in layers_of(block).items():
        own = layer.__dict__
        if any(map(own.get, CHANGES)) or (dequantises(type(layer)) and _is_changed_later(layer)):
            are_cast = True
        for name, tensor in (*own["_parameters"].items(), *own["_buffers"].items()):
            if tensor is None:
                continue
            if is_quantized(tensor) or tensor.dtype in _EIGHT_BITS:
                _check_product(layer, tensor)
            if (stored := _stored(layer, name, tensor)) is not None and stored.dtype in forms:
                found[f"{path}.{name}" if path else name] = stored
    return {} if are_cast else found


def _kernels_read_eight_bits(device: torch.device) -> bool:
    is_nvidia = torch.version.hip is None
    return is_nvidia and torch.cuda.get_device_capability(device) >= _READS_EIGHT_BITS


def _check_product(layer: Any, tensor: Any) -> None:
    """
    Raises:
        UnsupportedModel: see `stored_weights`.
    """
    forward = getattr(type(layer), "forward_comfy_cast_weights", None)
    variables = getattr(getattr(forward, "__code__", None), "co_freevars", ())
    cells = dict(zip(variables, getattr(forward, "__closure__", None) or (), strict=True))
    if is_quantized(tensor):
        multiplies = not getattr(layer, "_full_precision_mm", False) and not vars(layer).get("comfy_force_cast_weights")
    else:  # by --fast, in older ComfyUIs by a checkpoint's wish
        multiplies = type(layer).__qualname__.startswith("fp8_ops.") or (
            "fp8_matrix_mult" in cells and bool(cells["fp8_matrix_mult"].cell_contents)
        )
        multiplies = multiplies and tensor.dtype == torch.float8_e4m3fn
    if multiplies:
        raise UnsupportedModel("ComfyUI multiplies with its weights in 8 bits itself")
    if getattr(layer, "pre_quant_scale", None) is not None:
        raise UnsupportedModel("its inputs are scaled before its quantised weights")


def _stored(layer: Any, name: str, tensor: Any) -> Stored | None:
    """How a weight that lies in 8 or 16 bits, or in GGUF's bytes, is stored; None for others."""
    if dequantises(type(layer)):
        ggml = _ggml_type(layer) if name == "weight" else ""
        return Stored(_BYTES, ggml=ggml) if ggml else None
    if is_quantized(tensor):
        data, scale = _quantized_parts(tensor)
        is_one = data.dtype in _EIGHT_BITS and data.shape == tensor.shape and scale is not None and scale.numel() == 1
        return Stored(data.dtype, True) if is_one else None
    dtype = getattr(tensor, "_model_dtype", tensor.dtype)  # in which ComfyUI stages it
    if dtype not in (*_EIGHT_BITS, *_SIXTEEN_BITS) or type(tensor) not in PLAIN:
        return None
    if dtype in _SIXTEEN_BITS:
        return Stored(dtype, is_cast=hasattr(type(layer), CASTS))
    return Stored(dtype, name == "weight" and getattr(layer, _OLD_SCALE, None) is not None)


def _ggml_type(layer: Any) -> str:
    """The key of `TYPES` by which programs read the weight of a layer that dequantises it; empty where they cannot, or
    where its pack changes it or its bias afterwards, as for LoRAs."""
    weight, bias = getattr(layer, "weight", None), getattr(layer, "bias", None)
    if _is_changed_later(layer) or getattr(type(layer), "dequant_dtype", None) is not None:
        return ""
    if weight is None or (bias is not None and not bias.is_floating_point()):
        return ""
    name = getattr(getattr(weight, "tensor_type", None), "name", "")
    is_read = name in TYPES and weight.dtype == _BYTES and weight.size() == TYPES[name].stored_shape(weight.shape)
    return name if is_read else ""


def _is_changed_later(layer: Any) -> bool:
    return any(getattr(getattr(layer, name, None), _CHANGED_LATER, None) for name in ("weight", "bias"))


_BYTES = torch.uint8
_CHANGED_LATER = "patches"
"""Of a weight that a layer dequantises: what it does to it then."""

_OLD_SCALE = "scale_weight"
"""Of layers of older ComfyUIs."""


def _quantized_parts(tensor: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What ComfyUI stores of a quantised tensor, and its scale."""
    return tensor._qdata, getattr(tensor._params, "scale", None)


def are_staged(block: torch.nn.Module, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether ComfyUI stages a block's large weights in a dtype, and its small ones lie in it on a device, so that a
    call of its engine takes what a call of the block would: what was staged before is read where it lies.
    """
    places = places_of(device)
    for layer in layers_of(block).values():
        own = layer.__dict__
        tensors = [tensor for tensor in own["_parameters"].values() if tensor is not None]
        if STAGED in own:
            is_right = counts_holders() and all(is_staged_in(tensor, dtype) for tensor in tensors)
        else:
            is_right = all(_lies(tensor, dtype, places) for tensor in tensors)
        if not is_right or any(map(own.get, CHANGES_AT_CALLS if STAGED in own else CHANGES)):
            return False
    return True


def dequantised_bytes(block: torch.nn.Module, dtype: torch.dtype) -> int:
    """Bytes that a block's weights take in a dtype at once, where layers of it make theirs anew at each call; 0 where
    none does. Of those that its engine makes itself there are two at a time, at most."""
    layers = layers_of(block)
    if not any(map(dequantises, set(map(type, layers.values())))):
        return 0
    sizes = {name: math.prod(tensor.shape) * dtype.itemsize for name, tensor in tensors_of(layers).items()}
    in_turn = [sizes.pop(f"{name}.weight", 0) for name, layer in layers.items() if _is_read(layer)]
    return sum(sizes.values()) + 2 * max(in_turn, default=0)


def _is_read(layer: Any) -> bool:
    return dequantises(type(layer)) and bool(_ggml_type(layer))


def _lies(tensor: torch.Tensor, dtype: torch.dtype | None, places: Set[torch.device]) -> bool:
    """Whether an engine can be given a tensor as it is."""
    is_right = type(tensor) in PLAIN and tensor.dtype == dtype and tensor.device in places
    return is_right and tensor.is_contiguous()


def _staged_before(
    layer: Any, wanted: Mapping[str, torch.dtype], device: torch.device
) -> dict[str, torch.Tensor] | None:
    """What ComfyUI staged of a layer at an earlier call, whose pages may have been taken away since; None where its
    cast would give something else, or a prefetch is under way.
    """
    own = layer.__dict__
    if not is_staged_for(layer, device) or own.get("_v_signature") is None or not counts_holders():
        return None
    if PREFETCH in own or any(map(own.get, CHANGES_AT_CALLS)):
        return None
    parts, places = {"weight": own.get("_v_weight"), "bias": own.get("_v_bias")}, places_of(device)
    found = {name: tensor for name, tensor in parts.items() if tensor is not None}
    return found if all(_lies(tensor, wanted.get(name), places) for name, tensor in found.items()) else None


class BlockWeights:
    """Where a kind's weights lie in a block, layer by layer.

    Args:
        wanted: as an engine takes them.
        stored: names of those that it casts itself.

    Attributes:
        nbytes: bytes of all weights of a block.
    """

    def __init__(self, wanted: Wanted, stored: Collection[str] = ()) -> None:
        layers: dict[tuple[str, ...], list[tuple[int, str, torch.dtype]]] = {}
        self._stored = {tuple(name.removeprefix(PREFIX).split(".")[:-1]) for name in stored}
        for place, (name, _, dtype) in enumerate(wanted):
            *path, own = name.removeprefix(PREFIX).split(".")
            layers.setdefault(tuple(path), []).append((place, own, dtype))
        self._layers = [(path, parts, {name: dtype for _, name, dtype in parts}) for path, parts in layers.items()]
        self._wanted = wanted
        self.nbytes = sum(math.prod(shape) * dtype.itemsize for _, shape, dtype in wanted)

    def among(self, weights: Mapping[str, torch.Tensor], path: str) -> list[torch.Tensor] | None:
        """A block's weights in the engine's order, of those of the whole network; None where not all are there.

        Args:
            path: of the block in the network.
        """
        found = [weights.get(f"{path}.{name.removeprefix(PREFIX)}") for name, _, _ in self._wanted]
        given = [tensor for tensor in found if tensor is not None]
        if len(given) < len(found):
            return None
        for tensor, (_, shape, dtype) in zip(given, self._wanted, strict=True):
            if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
                return None
        return given

    def of(
        self, block: torch.nn.Module, device: torch.device, until: ExitStack, may_copy: bool = True
    ) -> list[torch.Tensor] | None:
        """A block's weights in the engine's order: its own tensors where they are as they should be; else what
        ComfyUI's own cast gives, so that LoRAs, offloading and staging go on as they do.

        Args:
            until: closed once the call has been made.
            may_copy: otherwise None where the block is large and memory lacks for what ComfyUI stages, so that it
                casts layer by layer.

        Raises:
            UnsupportedModel: they are of a kind, or of a shape, that the engine does not take.
        """
        found: list[Any] = [None] * len(self._wanted)
        uncast: list[_Uncast] = []
        places = places_of(device)
        for path, parts, types in self._layers:
            layer: Any = block
            for name in path:
                layer = layer._modules[name]
            own = layer.__dict__
            tensors = own["_parameters"]
            is_changed = any(map(own.get, CHANGES))
            is_plain, lies = STAGED not in own and not is_changed, True
            for place, name, dtype in parts:
                tensor = tensors.get(name) if name in tensors else own["_buffers"].get(name)
                is_right = is_plain and tensor is not None and type(tensor) in PLAIN
                if is_right and tensor.device in places and tensor.dtype == dtype:
                    found[place] = tensor
                else:
                    lies = False
            if lies:
                continue
            if is_changed and (path in self._stored or dequantises(type(layer))):
                raise UnsupportedModel(_STORED_OTHERWISE)
            if staged := _still_staged(layer, types, device, until):
                _fill(found, parts, staged)
            else:
                uncast.append((layer, parts, types))
        return self._checked(found) if self._cast_all(found, uncast, device, until, may_copy) else None

    def _cast_all(
        self,
        found: list[Any],
        uncast: Sequence[_Uncast],
        device: torch.device,
        until: ExitStack,
        may_copy: bool,
    ) -> bool:
        """Have ComfyUI cast these layers' weights, and put them where they belong. False where it may not; see `of`."""
        is_small = self.nbytes <= _MOST_COPIED_BYTES
        together: list[_Uncast] = []
        others: list[_Uncast] = []
        for each in uncast:
            layer = each[0]
            is_staged = is_staged_for(layer, device)
            has_room = not is_staged or is_small or _held(layer, until) is not None
            if not has_room and not may_copy:
                return False
            (together if is_staged and has_room and _is_transferred_as_it_is(layer) else others).append(each)
        if len(together) > 1:
            until.enter_context(staged_together([layer for layer, *_ in together], device))
        for layer, parts, types in (*together, *others):  # in this order: other casts may use the same memory
            _fill(found, parts, _cast(layer, types, device, until))
        return True

    def _checked(self, found: list[Any]) -> list[torch.Tensor]:
        """The weights, each contiguous.

        Raises:
            UnsupportedModel: they have another dtype or shape than the engine takes.
        """
        for place, (tensor, (name, shape, dtype)) in enumerate(zip(found, self._wanted, strict=True)):
            if tensor is None or tensor.dtype != dtype:
                raise UnsupportedModel(_STORED_OTHERWISE)
            if tensor.shape != shape:
                weight = name.removeprefix(PREFIX)
                raise UnsupportedModel(f"its weight {weight} has another shape than the engine's")
            if not tensor.is_contiguous():
                found[place] = tensor.contiguous()
        return found


def _is_transferred_as_it_is(layer: Any) -> bool:
    """Whether ComfyUI stages a layer's weights unpatched and in the dtype of their storage, which needs no buffer."""
    own = layer.__dict__
    if PREFETCH in own or any(own.get(name) is not None for name in PATCHES) or dequantises(type(layer)):
        return False
    return all(is_staged_in(tensor, tensor.dtype) for tensor in own["_parameters"].values() if tensor is not None)


def _fill(found: list[Any], parts: _Parts, cast: Mapping[str, torch.Tensor]) -> None:
    """Put what was cast of a layer where none of its own tensors can be used."""
    for place, name, _ in parts:
        if found[place] is None:
            found[place] = cast.get(name)


def _still_staged(
    layer: Any, wanted: Mapping[str, torch.dtype], device: torch.device, until: ExitStack
) -> dict[str, torch.Tensor] | None:
    """What ComfyUI staged of a layer and what lies in device memory still, held until the call has been made, in a
    fraction of the time of ComfyUI's cast; None where it has to cast.
    """
    if (found := _staged_before(layer, wanted, device)) is None:
        return None
    signature = _held(layer, until)
    return found if signature is not None and bytes(signature) == bytes(layer._v_signature) else None


def _held(layer: Any, until: ExitStack) -> Any:
    """The signature of a staged layer's pages, held until the call has been made; None where there is no memory."""
    vbar, address, size = layer._v
    try:
        signature = vbar.fault(address, size)
    except RuntimeError:  # which the cast meets as well
        return None
    if signature is not None:
        until.callback(vbar.unpin, address, size)
    return signature


def _cast(
    layer: Any, wanted: Mapping[str, torch.dtype], device: torch.device, until: ExitStack
) -> dict[str, torch.Tensor]:
    """What a layer's weights are in its own call; or as they are stored, where they are wanted in 8 bits.

    Args:
        wanted: name → dtype; the name of a scale is that of its weight with `SCALE` behind it.
    """
    if not hasattr(type(layer), CASTS):
        return {name: _moved(layer, name, dtype, device) for name, dtype in wanted.items()}
    held, dtype = layer.weight, wanted.get("weight", next(iter(wanted.values())))
    if dtype == _BYTES:
        own: dict[str, Any] = {name: getattr(layer, name, None) for name in wanted}
        if not _is_read(layer) or any(part is None for part in own.values()):
            raise UnsupportedModel(_STORED_OTHERWISE)
        plain = {name: part.as_subclass(torch.Tensor).detach() for name, part in own.items()}
        return {name: as_needed(part, wanted[name], device) for name, part in plain.items()}
    is_stored = dtype in _EIGHT_BITS
    if is_stored and not is_quantized(held) and getattr(held, "_model_dtype", held.dtype) != dtype:
        raise UnsupportedModel(_STORED_OTHERWISE)
    cast = LayerCast(layer, held.dtype if is_stored and is_quantized(held) else dtype, device, wanted.get("bias"))
    with ExitStack() as ending:
        weight, bias = ending.enter_context(cast)
        parts = _scaled(layer, weight, is_stored) | ({} if bias is None else {"bias": bias})
        if not _stay(layer, weight, device):  # ComfyUI may use the same memory for the next layer
            return {name: tensor.clone() for name, tensor in parts.items()}
        until.push(ending.pop_all())
        return parts


def _scaled(layer: Any, weight: Any, is_stored: bool) -> dict[str, torch.Tensor]:
    """What ComfyUI's cast gave of a layer's weight: multiplied by its scale, or with it."""
    if is_quantized(weight):
        if not is_stored:
            return {"weight": weight.dequantize()}
        weight, scale = _quantized_parts(weight)
    else:
        scale = getattr(layer, _OLD_SCALE, None)
    if scale is None:
        return {"weight": weight}
    scale = scale.detach().to(weight.device, torch.float32 if is_stored else weight.dtype).reshape(())
    return {"weight": weight, f"weight{SCALE}": scale} if is_stored else {"weight": weight * scale}


def _stay(layer: Any, weight: torch.Tensor, device: torch.device) -> bool:
    """Whether a cast gave memory that no other layer's cast is given before it is let go."""
    if dequantises(type(layer)):
        return True
    if STAGED in layer.__dict__:
        return layer._v_signature is not None and weight is getattr(layer, "_v_weight", None)
    return bool(layer.weight.device == device)


def _as_plain_tensor(tensor: Any) -> Any:
    """A tensor of a pack that loads GGUF as a plain one, where it is not quantised; others as they are given."""
    kind = getattr(getattr(tensor, "tensor_type", None), "name", "")
    is_plain = kind in ("F32", "F16") and tensor.is_floating_point() and tensor.size() == tensor.shape
    return tensor.as_subclass(torch.Tensor) if is_plain and not getattr(tensor, _CHANGED_LATER, None) else tensor


def _moved(layer: Any, name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of a layer that ComfyUI does not cast by itself."""
    tensor = _as_plain_tensor(getattr(layer, name, None))
    if tensor is None or type(tensor) not in PLAIN:
        raise UnsupportedModel(f"its weight {name} is of a kind that engines do not take")
    if dtype in _EIGHT_BITS and tensor.dtype != dtype:
        raise UnsupportedModel(_STORED_OTHERWISE)
    return as_needed(tensor.detach(), dtype, device)
