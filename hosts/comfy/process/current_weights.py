"""The weights that ComfyUI computes with right now, as plain tensors."""

from __future__ import annotations

import logging
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch

from ....core.errors import UnsupportedModel
from ...live_model.held_weights import PATCHES, PLAIN, HeldWeights
from ...live_model.layer_classes import dequantises
from ...live_model.layer_walk import Layers, layers_of, tensors_of
from .free_memory import memory_beside_sampling

log = logging.getLogger(__name__)

Weights = dict[str, torch.Tensor]


def current_weights(
    unet: torch.nn.Module,
    names: Iterable[str],
    dtype: torch.dtype,
    device: torch.device,
    token: Hashable | None = None,
    owner: str = "",
) -> Weights:
    """State-dict name -> tensor in `dtype` on `device`, LoRA included.

    A loaded model's own parameters are handed out themselves. Where ComfyUI casts a layer's weights at every call
    (stored in fp8, kept in RAM, patched on the fly), its own cast gives a copy, so that engine and plain model use the
    same weights.

    Args:
        token: see `weights_token`. Copies are kept for the next call with an equal one; None keeps none.
        owner: of the copies; those of another owner stay.

    Raises:
        UnsupportedModel: weights are missing, or of a kind that computes by itself, or the copies would not fit into
            the device's memory.
    """
    wanted = frozenset(names)
    layers = layers_of(unet)
    casting = {name: layer for name, layer in _casting(layers).items() if _parts_of(name) & wanted}
    own = tensors_of(layers)
    _check_kinds(own)
    is_own = not casting and _are_as_needed(own.values(), dtype, device)
    held = None if is_own or token is None else HeldWeights(layers, with_values=True)
    kept = copies.of(device, dtype, token, owner, held)
    made = {} if is_own else _made(own, casting, wanted, kept, dtype, device)
    if missing := sorted(wanted.difference(made, own)):
        raise UnsupportedModel(f"The model holds no weight {missing[0]!r} ({len(missing)} are missing)")
    if token is not None:
        copies.keep(device, dtype, token, _copies_among(made, own, wanted), owner, held)
    if not made:
        return {name: own[name] for name in wanted}
    return {name: made[name] if name in made else own[name] for name in wanted}


def _made(
    own: Weights,
    casting: dict[str, Any],
    wanted: Set[str],
    kept: Weights,
    dtype: torch.dtype,
    device: torch.device,
) -> Weights:
    """What is not handed out as the layers hold it.

    Args:
        casting: the layers whose weights ComfyUI casts at every call.
        kept: copies from before, which are right still.

    Raises:
        UnsupportedModel: the copies would not fit into the device's memory.
    """
    others = {
        name: tensor for name, tensor in own.items() if name in wanted and not _is_as_needed(tensor, dtype, device)
    }
    if casting or others:
        _check_memory(own, casting, wanted - kept.keys(), dtype, device)
    made: Weights = {}
    with torch.no_grad():
        for name, layer in casting.items():
            made.update(_kept_layer(name, layer, kept, dtype, device) or _cast_layer(name, layer, dtype, device))
        for name, tensor in others.items():
            if name not in made:
                made[name] = kept[name] if name in kept else as_needed(tensor.detach(), dtype, device)
    return made


def weights_token(patcher: Any) -> Hashable | None:
    """Equal for two calls between which a `ModelPatcher` computes with the same weights; None where that is not known.

    Every patch (LoRA) gives a model a new `patches_uuid`; hooks change weights without one. It keeps no model alive.
    """
    hooked = getattr(patcher, "current_hooks", None) or getattr(patcher, "hook_patches", None)
    uuid = getattr(patcher, "patches_uuid", None)
    if hooked or uuid is None:
        return None
    return uuid, getattr(patcher.model, "current_weight_patches_uuid", None)


class WeightCopies:
    """Copies of the weights that each owner used last on each device; the diffusion model's owner has no name.

    `Residency` shows them to ComfyUI, which may drop them.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[torch.device, str], tuple[Hashable, Weights, HeldWeights | None]] = {}

    def of(
        self,
        device: torch.device,
        dtype: torch.dtype,
        token: Hashable | None,
        owner: str = "",
        held: HeldWeights | None = None,
    ) -> Weights:
        """What was kept under these; the owner's others are dropped, so that there is room for new copies.

        Args:
            held: by the model now; other extensions exchange weights without ComfyUI's knowledge.
        """
        known, weights, before = self._kept.get((device, owner), (None, {}, None))
        if known == (dtype, token) and (held is None or (before is not None and held.are(before))):
            return weights
        if token is not None:
            self._kept.pop((device, owner), None)
        return {}

    def has(self, device: torch.device, dtype: torch.dtype, token: Hashable | None, owner: str = "") -> bool:
        return token is not None and self._kept.get((device, owner), (None,))[0] == (dtype, token)

    def keep(
        self,
        device: torch.device,
        dtype: torch.dtype,
        token: Hashable,
        weights: Weights,
        owner: str = "",
        held: HeldWeights | None = None,
    ) -> None:
        self._kept[device, owner] = (dtype, token), weights, held

    def bytes(self, device: torch.device) -> int:
        kept = [weights for (place, _), (_, weights, _) in self._kept.items() if place == device]
        return sum(tensor.nbytes for weights in kept for tensor in weights.values())

    def free(self, device: torch.device) -> int:
        """Returns the bytes freed."""
        freed = self.bytes(device)
        self._kept = {place: kept for place, kept in self._kept.items() if place[0] != device}
        return freed


copies = WeightCopies()

CASTS = "comfy_cast_weights"
STAGED = "_v"
"""Of a layer whose weights ComfyUI stages on demand (dynamic VRAM)."""
_QUANTIZED = "QuantizedTensor"


def _casting(layers: Layers) -> dict[str, Any]:
    """The layers whose weights ComfyUI computes anew at every call."""
    kinds = {kind for kind in set(map(type, layers.values())) if hasattr(kind, CASTS)}
    return {
        name: layer
        for name, layer in layers.items()
        if (type(layer) in kinds or CASTS in layer.__dict__) and _casts(layer)
    }


def _parts_of(layer: str) -> set[str]:
    return {f"{layer}.weight", f"{layer}.bias"}


def _casts(layer: Any) -> bool:
    """Of a layer that may."""
    casts = layer.comfy_cast_weights or layer.weight_function or layer.bias_function or STAGED in layer.__dict__
    return bool(casts) and getattr(layer, "weight", None) is not None


def _kept_layer(name: str, layer: Any, kept: Weights, dtype: torch.dtype, device: torch.device) -> Weights | None:
    """A layer's weights without a cast: copies from before, and what it holds in the right form; None where it must."""
    found: Weights = {}
    for part in ("weight", "bias"):
        tensor = getattr(layer, part, None)
        if tensor is None:
            continue
        if _is_as_it_should_be(layer, part, dtype, device):
            found[f"{name}.{part}"] = tensor.detach()
        elif f"{name}.{part}" in kept:
            found[f"{name}.{part}"] = kept[f"{name}.{part}"]
        else:
            return None
    return found


def _is_as_it_should_be(layer: Any, part: str, dtype: torch.dtype, device: torch.device) -> bool:
    tensor = getattr(layer, part)
    return (tensor.dtype, tensor.device) == (dtype, device) and is_untouched(layer, part)


def places_of(device: torch.device) -> frozenset[torch.device]:
    """What tensors that lie on a device may call it: the CPU goes by two names."""
    return frozenset({device, torch.device("cpu")} if device.type == "cpu" else {device})


def is_untouched(layer: Any, part: str) -> bool:
    """Whether a layer computes with a weight as it holds it."""
    changes = (getattr(layer, f"{part}{kind}", None) for kind in ("_function", "_lowvram_function"))
    return not is_quantized(getattr(layer, part)) and not any(changes)


def is_staged_for(layer: Any, device: torch.device) -> bool:
    """Whether ComfyUI stages a layer's weights for its calls on a device: it does not where they lie there already."""
    return STAGED in layer.__dict__ and bool(layer.weight.device != device)


def is_staged_in(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a weight is a plain tensor that ComfyUI stages in a dtype, whatever it is stored in."""
    return type(tensor) in PLAIN and getattr(tensor, "_model_dtype", tensor.dtype) == dtype


def is_quantized(tensor: torch.Tensor) -> bool:
    """Whether ComfyUI holds a weight in a quantised form."""
    return type(tensor).__name__ == _QUANTIZED


def _cast_layer(name: str, layer: Any, dtype: torch.dtype, device: torch.device) -> Weights:
    with LayerCast(layer, dtype, device) as (weight, bias):
        cast = {f"{name}.weight": weight} | ({f"{name}.bias": bias} if bias is not None else {})
        # The host may use the same staging buffer again for the next layer.
        own = {id(layer.weight), id(getattr(layer, "bias", None))}
        return {key: _plain(tensor) if id(tensor) in own else _plain(tensor).clone() for key, tensor in cast.items()}


_ROUNDED_AS_BY_TORCH = torch.float32, torch.float16, torch.bfloat16
"""Dtypes to which ComfyUI rounds as torch does. To others it rounds at random."""


def cast_once(layer: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Have ComfyUI cast a layer's weights, as a call of the layer would: what streams from RAM is staged then.

    LoRAs are computed by ComfyUI's own code, where it staged their weight, to the same bits as in its cast. What the
    cast does before is left out: it brings a LoRA's tensors to pinned memory and to a buffer on the device, which is
    half of its work. They are read once, since what they make of the weight stays.
    """
    patches, before = _patches_once(layer, dtype), getattr(layer, "_v_signature", None)
    with _left_out(layer, patches), LayerCast(layer, dtype, device) as cast, torch.no_grad():
        if patches and layer._v_signature not in (None, before):
            try:
                for name, tensor in zip(PATCHES, cast, strict=True):
                    if tensor is not None and name in patches and (made := patches[name](tensor)) is not tensor:
                        tensor.copy_(made)
            except BaseException:
                layer._v_signature = None  # the next cast stages it again
                raise


def _patches_once(layer: Any, dtype: torch.dtype) -> dict[str, Any]:
    """ComfyUI's patches of a layer's weights that lie in RAM in a dtype, by the attributes that hold them; none where
    it would do more than compute them."""
    import comfy.model_patcher

    found = {name: patch for name in PATCHES if (patch := getattr(layer, name, None)) is not None}
    weights = [tensor for tensor in (layer.weight, getattr(layer, "bias", None)) if tensor is not None]
    is_simple = dtype in _ROUNDED_AS_BY_TORCH and all(is_staged_in(tensor, dtype) for tensor in weights)
    kind = comfy.model_patcher.LowVramPatch
    return found if is_simple and all(type(patch) is kind for patch in found.values()) else {}


@contextmanager
def _left_out(layer: Any, patches: dict[str, Any]) -> Iterator[None]:
    """Meanwhile the layer's weights are staged without their patches."""
    for name in patches:
        setattr(layer, name, None)
    try:
        yield
    finally:
        for name, patch in patches.items():
            setattr(layer, name, patch)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.dequantize() if is_quantized(tensor) else tensor.detach()


class LayerCast:
    """ComfyUI's cast of one layer, or the layer's own. A newer ComfyUI wants to be told when it is no longer needed:
    what streams from RAM stays pinned in device memory otherwise.

    Args:
        bias_dtype: of the bias, where it is not to be in `dtype`.
    """

    def __init__(
        self, layer: Any, dtype: torch.dtype, device: torch.device, bias_dtype: torch.dtype | None = None
    ) -> None:
        self._layer, self._dtype, self._device = layer, dtype, device
        self._bias_dtype = bias_dtype or dtype
        self._done: tuple[Any, ...] | None = None

    def __enter__(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        import comfy.ops

        options = {"dtype": self._dtype, "device": self._device, "bias_dtype": self._bias_dtype}
        if dequantises(type(self._layer)):
            return _dequantised(self._layer, options)
        if not hasattr(comfy.ops, "uncast_bias_weight"):
            weight, bias = comfy.ops.cast_bias_weight(self._layer, **options)
            return weight, bias
        is_prefetched = PREFETCH in self._layer.__dict__
        try:
            self._done = comfy.ops.cast_bias_weight(self._layer, **options, offloadable=True)
        except BaseException:
            if not is_prefetched:
                _forget_staging(self._layer)
            raise
        weight, bias, _ = self._done
        return weight, bias

    def __exit__(self, *_: object) -> None:
        import comfy.ops

        if self._done is not None:
            comfy.ops.uncast_bias_weight(self._layer, *self._done)
            self._done = None


@contextmanager
def staged_together(layers: Sequence[Any], device: torch.device) -> Iterator[None]:
    """Transfer the weights of several layers at once, as ComfyUI prefetches a block: the GPU goes on with what was
    enqueued before. Until the context ends, casts of these layers use what was transferred.

    Where this ComfyUI has no prefetching, or memory for all of them lacks, nothing is transferred: each cast does it.

    Args:
        layers: whose weights ComfyUI stages, lie elsewhere, and are not being prefetched.
    """
    stream = _transferred(layers, device)
    try:
        yield
    finally:
        if stream is not None:  # later transfers on it may overwrite the memory
            import comfy.model_management as management

            stream.wait_stream(management.current_stream(device))
        for layer in layers:
            _forget_staging(layer)


def _transferred(layers: Sequence[Any], device: torch.device) -> Any:
    """The stream on which ComfyUI transfers the layers' weights; None where there is none, or it could not."""
    import comfy.model_management as management
    import comfy.ops

    if not hasattr(comfy.ops, "cast_modules_with_vbar"):
        return None
    try:
        is_async = management.device_supports_non_blocking(device)
        stream = comfy.ops.cast_modules_with_vbar(layers, None, device, None, is_async)
        management.sync_stream(device, stream)
        return stream
    except Exception as error:  # ComfyUI's buffer cannot grow, or its function takes other arguments
        log.debug("Slipstream: weights are transferred layer by layer: %s", error)
        for layer in layers:
            _forget_staging(layer)
        return None


def _dequantised(layer: Any, options: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A layer's weight and bias by its own method.

    Raises:
        UnsupportedModel: that fails.
    """
    try:
        weight, bias = layer.cast_bias_weight(**options)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a pack raises, it is no engine's fault
        raise UnsupportedModel(f"its weights cannot be dequantised ({type(error).__name__}: {error})") from error
    return weight, bias


PREFETCH = "_prefetch"
"""Of a layer, from the transfer of its weights to the end of their cast."""


def _forget_staging(layer: Any) -> None:
    """Remove a layer's prefetch: other layers use its memory next. If the layer's cast failed midway, or was never
    made, its next call stages the weights anew."""
    prefetch = layer.__dict__.pop(PREFETCH, None)
    if prefetch is not None and prefetch["signature"] is not None:
        if not prefetch.get("resident"):
            layer._v_signature = None
        vbar, address, size = layer._v
        vbar.unpin(address, size)
    for name in PATCHES:
        if (patch := getattr(layer, name, None)) is not None and hasattr(patch, "clear_prepared"):
            patch.clear_prepared()


def _are_as_needed(tensors: Collection[torch.Tensor], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether each is; in a fraction of the time that asking each takes."""
    if set(map(attrgetter("device"), tensors)) != {device}:
        return False
    return all(found == dtype or not found.is_floating_point for found in set(map(attrgetter("dtype"), tensors)))


def _is_as_needed(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device) -> bool:
    return tensor.device == device and (tensor.dtype == dtype or not tensor.is_floating_point())


def as_needed(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor on a device, in a dtype if it holds floating-point numbers; itself where it is so."""
    return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else tensor.dtype)


def _copies_among(made: Weights, own: Weights, wanted: Set[str]) -> Weights:
    """Those that are no layer's own: a cast may give what it was given."""
    if not made:
        return {}
    addresses = {tensor.data_ptr() for tensor in own.values()}
    return {name: tensor for name, tensor in made.items() if name in wanted and tensor.data_ptr() not in addresses}


def _check_kinds(own: Weights) -> None:
    for kind in set(map(type, own.values())) - PLAIN:
        if kind.__name__ != _QUANTIZED:
            raise UnsupportedModel(
                f"The model's weights are of a kind that another extension brought ({kind.__module__}."
                f"{kind.__qualname__}); your model runs without an engine"
            )


def _check_memory(
    own: Weights, casting: dict[str, Any], wanted: Set[str], dtype: torch.dtype, device: torch.device
) -> None:
    if device.type == "cpu":
        return
    copied = [
        tensor
        for name, tensor in own.items()
        if name in wanted
        and _is_copied(name, tensor, casting)
        and not _is_at_hand(name, tensor, casting, dtype, device)
    ]
    needed = sum(tensor.numel() for tensor in copied) * dtype.itemsize
    if needed and needed > (free := memory_beside_sampling(device, needed)):
        raise UnsupportedModel(
            f"The model's weights are not in the engine's form (low VRAM mode, or stored in another dtype), and a copy "
            f"needs {needed >> 20} MB of the {int(free) >> 20} MB that are free on {device}; your model runs "
            "without an engine. A smaller picture or batch, or fewer loaded models, may leave room"
        )


def _is_copied(name: str, tensor: torch.Tensor, casting: dict[str, Any]) -> bool:
    """Whether it is handed out in the engine's dtype: numbers are, and what a layer makes numbers of."""
    return tensor.is_floating_point() or name.rpartition(".")[0] in casting


def _is_at_hand(
    name: str, tensor: torch.Tensor, casting: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> bool:
    layer, _, part = name.rpartition(".")
    if layer in casting and part in ("weight", "bias"):
        return _is_as_it_should_be(casting[layer], part, dtype, device)
    return (tensor.dtype, tensor.device) == (dtype, device)
