"""Weights that ComfyUI stages on demand (dynamic VRAM), used where they lie.

ComfyUI reserves addresses for a model's large weights once, and puts memory behind them page by page, as layers are
called; where memory is short it takes pages away again. Small weights are moved to the device at each load of a model.
For an engine all pages of the model are held at once, so nothing is copied and nothing moves while it computes; the
small weights, a few megabytes, are copied to places that stay. Nothing is held between runs: ComfyUI may take the
pages for other models, and what it took is staged again by ComfyUI's own code.

What ComfyUI does at each load of a model, 20 to 200 ms, is left out where it is done already.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch

from ....core.protocols import BoundWeights
from ...architecture import Remembered
from ...live_model.held_weights import CHANGES_AT_CALLS, PLAIN, HeldWeights, are_same
from ...live_model.layer_walk import layers_of
from .current_weights import cast_once, current_weights, is_staged_for, is_untouched, places_of, weights_token
from .free_memory import available
from .staged_pages import Pages, hold, is_dynamic, letting_go, to_be_held

log = logging.getLogger(__name__)

_SMALL_BYTES = 64 << 10
"""A weight up to this size is copied to a place that stays."""

_versions = itertools.count(1)


# ------------------------------------------------------------------------------------------------- binding


class _Look:
    """What a network's weights are like; it keeps none of them in memory.

    Tensors and functions are told apart by weak references, and what lies in the pages by the signatures that ComfyUI
    makes, one each time that it stages a layer: nothing new can be mistaken for one that is gone. Values that are
    exchanged by `.data` are noticed by their address alone. Patches that are applied while weights are staged are part
    of the token, since each load of a model makes new functions for them.
    """

    def __init__(self, token: Hashable, pages: Pages, network: torch.nn.Module) -> None:
        layers = layers_of(network)
        self._facts = token, pages.serials
        self._held = HeldWeights(layers, with_values=True, changes=CHANGES_AT_CALLS)
        self._staged = [layer.__dict__.get("_v_signature") for layer in layers.values()]

    def finds(self, other: _Look) -> bool:
        """Whether nothing was staged anew, loaded, replaced or written to between the two."""
        is_held = self._facts == other._facts and self._held.are(other._held)
        return is_held and are_same(self._staged, other._staged)


@dataclass
class _Staged:
    """The weights of one network in one dtype, as they were bound last.

    Attributes:
        look: at them, once all were found.
        small: copies of small weights, in places that stay.
        version: see `BoundWeights`.
    """

    look: _Look | None = None
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    small: dict[str, torch.Tensor] = field(default_factory=dict)
    version: int = 0


_staged: Remembered[_Staged] = Remembered()


def bind_weights(
    patcher: Any,
    network: torch.nn.Module,
    names: Set[str],
    dtype: torch.dtype,
    token: Hashable | None = None,
    owner: str = "",
    prefix: str = "",
) -> BoundWeights:
    """The weights of a loaded model in `dtype` on its device, by `current_weights`, or where ComfyUI streams them held.

    Args:
        token: see `current_weights.current_weights`.

    See `bind_staged` for the other arguments and what is raised.
    """
    if is_dynamic(patcher):
        return bind_staged(patcher, network, names, dtype, owner, prefix)
    found = current_weights(network, names, dtype, torch.device(patcher.load_device), token, owner)
    return BoundWeights({prefix + name: tensor for name, tensor in found.items()})


def bind_staged(
    patcher: Any,
    network: torch.nn.Module,
    names: Set[str],
    dtype: torch.dtype,
    owner: str = "",
    prefix: str = "",
) -> BoundWeights:
    """Hold a loaded model's weights where they lie.

    Args:
        network: of the patcher's model, whose weights are wanted.
        names: of them, by its state dict.
        owner: see `current_weights.current_weights`.
        prefix: put before each name.

    Raises:
        torch.OutOfMemoryError: they do not fit into the device's memory beside what sampling needs.
        UnsupportedModel: some are missing, or copies of those that are not used where they lie do not fit.
    """
    device = torch.device(patcher.load_device)
    if (pages := _held(patcher, device)) is None:
        raise torch.OutOfMemoryError(
            "The model's weights do not all fit into VRAM beside what sampling needs: ComfyUI streams them"
        )
    try:
        known = _staged.get(network, (dtype, device, owner, prefix), _Staged)
        token = weights_token(patcher)
        if token is None or known.look is None or not known.look.finds(_Look(token, pages, network)):
            known.look = None
            found = _found(known.small, network, names, dtype, device, pages, token, owner)
            known.tensors = {prefix + name: tensor for name, tensor in found.items()}
            known.look, known.version = _Look(token, pages, network), next(_versions)
        return BoundWeights(known.tensors, known.version, pages.release)
    except BaseException:
        pages.release()
        raise


def _held(patcher: Any, device: torch.device) -> Pages | None:
    """All pages of a loaded model; None where memory does not suffice for them beside what sampling needs."""
    if not leaves_memory(device, to_be_held(patcher)) or (pages := hold(patcher)) is None:
        return None
    with ExitStack() as undo:
        undo.callback(pages.release)
        if leaves_memory(device):
            undo.pop_all()
            return pages
    return None


def _found(
    small: dict[str, torch.Tensor],
    network: torch.nn.Module,
    names: Set[str],
    dtype: torch.dtype,
    device: torch.device,
    pages: Pages,
    token: Hashable,
    owner: str,
) -> dict[str, torch.Tensor]:
    staged = _staged_weights(network, names, dtype, device, pages)
    rest = current_weights(network, names - staged.keys(), dtype, device, token, owner)
    _copy_small(small, {name: tensor for name, tensor in rest.items() if tensor.nbytes <= _SMALL_BYTES})
    return {**rest, **staged, **small}


def weights_in_place(
    patcher: Any, network: torch.nn.Module, dtype: torch.dtype, ending: ExitStack
) -> Mapping[str, torch.Tensor]:
    """Those weights of a loaded model that lie on its device, by their names in the network.

    No copies but of small ones where ComfyUI stages the others: it moves those at each load.

    Args:
        dtype: that the network computes in; weights may be stored in another one.
        network: of the patcher's model.
        ending: closed when they are not used any more; until then what ComfyUI stages is held.
    """
    device, token = torch.device(patcher.load_device), weights_token(patcher)
    if token is None:  # they may be others from one call to the next
        return {}
    if not is_dynamic(patcher):
        is_streamed = getattr(patcher, "is_dynamic", bool)()  # in pages that cannot be held
        return {} if is_streamed else _own_weights(network, device)
    if (pages := _held(patcher, device)) is None:
        return {}
    ending.callback(pages.release)
    known = _staged.get(network, (dtype, device, "in place"), _Staged)
    if known.look is None or not known.look.finds(_Look(token, pages, network)):
        names = {f"{name}.weight" for name in layers_of(network)}
        staged = _staged_weights(network, names, dtype, device, pages, is_any_form=True)
        own = _own_weights(network, device)
        _copy_small(known.small, {name: tensor for name, tensor in own.items() if tensor.nbytes <= _SMALL_BYTES})
        known.tensors = {**own, **known.small, **staged}
        known.look = _Look(token, pages, network)
    return known.tensors


def _own_weights(network: torch.nn.Module, device: torch.device) -> dict[str, torch.Tensor]:
    """What layers hold on the device, and nothing changes at their calls."""
    places = places_of(device)
    return {
        f"{name}.{part}" if name else part: tensor.detach()
        for name, layer in layers_of(network).items()
        for part, tensor in chain(layer._parameters.items(), layer._buffers.items())
        if tensor is not None and (type(tensor) in PLAIN and tensor.device in places) and is_untouched(layer, part)
    }


def _staged_weights(
    network: torch.nn.Module,
    names: Set[str],
    dtype: torch.dtype,
    device: torch.device,
    pages: Pages,
    is_any_form: bool = False,
) -> dict[str, torch.Tensor]:
    """Those that ComfyUI stages in the dtype that is wanted, or in any, by name; LoRAs are part of them."""
    found: dict[str, torch.Tensor] = {}
    for name, layer in layers_of(network).items():
        if f"{name}.weight" not in names or not is_staged_for(layer, device) or _is_changed_at_calls(layer):
            continue
        if not pages.hold_weights_of(layer):
            cast_once(layer, dtype, device)
        parts = {"weight": getattr(layer, "_v_weight", None), "bias": getattr(layer, "_v_bias", None)}
        if pages.hold_weights_of(layer) and all(
            _is_plain(tensor, None if is_any_form else dtype) for tensor in parts.values()
        ):
            found |= {f"{name}.{part}": tensor.detach() for part, tensor in parts.items() if tensor is not None}
    return found


def _is_changed_at_calls(layer: Any) -> bool:
    """Whether functions change what is staged at every call of the layer."""
    return any(getattr(layer, name, None) for name in CHANGES_AT_CALLS)


def _is_plain(tensor: torch.Tensor | None, dtype: torch.dtype | None) -> bool:
    return tensor is None or (type(tensor) in PLAIN and dtype in (None, tensor.dtype))


def _copy_small(places: dict[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    """Bring the places up to date; one whose weight has another form now is made anew."""
    for name in [name for name in places if name not in tensors]:
        del places[name]
    _copy_into(places, tensors)


def _copy_into(places: dict[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    with torch.inference_mode(False), torch.no_grad():
        for name, tensor in tensors.items():
            place = places.get(name)
            if place is None or (place.shape, place.dtype, place.device) != (tensor.shape, tensor.dtype, tensor.device):
                places[name] = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        if tensors:
            torch._foreach_copy_([places[name] for name in tensors], [tensor.detach() for tensor in tensors.values()])


def leaves_memory(device: torch.device, wanted: int = 0) -> bool:
    """Whether sampling has what it needs beside this model, and `wanted` bytes; what is staged of others gives way."""
    import comfy.model_management as management

    return available(device) >= wanted + management.minimum_inference_memory()


# ------------------------------------------------------------------------------------------------- loading


class _Layers:
    """The layers of a model's network, and the weights that they hold; it keeps none of them in memory.

    Schedules lie outside of the network: those of ModelSampling nodes work wherever they lie.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        layers = layers_of(getattr(model, "diffusion_model", model))
        self._layers, self._held = [*map(ref, layers.values())], HeldWeights(layers)

    def are(self, others: _Layers) -> bool:
        """Whether none was exchanged or moved between the two."""
        return are_same(self._layers, others._layers) and self._held.are(others._held)


@dataclass
class _Load:
    """How a model was loaded last while one of our runs looked on.

    Attributes:
        state: see `_state_of`; None where nobody looked on, or others had a part in it.
        layers: as it left them.
        buffers: copies of its layers' small buffers, in places that stay.
    """

    state: Hashable = None
    layers: _Layers | None = None
    buffers: WeakKeyDictionary[torch.nn.Module, dict[str, torch.Tensor]] = field(default_factory=WeakKeyDictionary)


_loads: Remembered[_Load] = Remembered()


@contextmanager
def loading_once(*patchers: Any) -> Iterator[None]:
    """Meanwhile ComfyUI does not load those of these models again that are loaded as they are to be.

    Args:
        patchers: of models; what is none is left alone.
    """
    with ExitStack() as ending:
        for patcher in patchers:
            if is_dynamic(patcher) and isinstance(patcher.model, torch.nn.Module):
                ending.enter_context(_loading_once(patcher))
        yield


@contextmanager
def _loading_once(patcher: Any) -> Iterator[None]:
    count, load, known = patcher.get_free_memory, patcher.partially_load, _loads.get(patcher.model, None, _Load)

    def get_free_memory(device: Any) -> Any:
        with letting_go():
            return count(device)

    def partially_load(device_to: Any, extra_memory: float = 0, force_patch_weights: bool = False) -> Any:
        if not force_patch_weights and _still_loaded(patcher, device_to, known):
            return None
        known.state = None
        result = load(device_to, extra_memory, force_patch_weights=force_patch_weights)
        _keep_buffers_in_place(patcher, known)
        _note_load(patcher, known)
        return result

    with _instead(patcher, "get_free_memory", get_free_memory), _instead(patcher, "partially_load", partially_load):
        yield


def _note_load(patcher: Any, known: _Load) -> None:
    """Note how a model was loaded just now, unless others had a part in that."""
    try:
        if _is_simple(patcher):
            known.layers = _Layers(patcher.model)
            known.state = _state_of(patcher)
    except Exception as error:  # whatever others made of its layers
        log.debug("Slipstream: ComfyUI loads the model as ever: %s", error)


def _keep_buffers_in_place(patcher: Any, known: _Load) -> None:
    """Give a model that was just loaded its small buffers where earlier loads put them: graphs read them there."""
    import comfy.utils

    for name, own in getattr(patcher, "backup_buffers", {}).items():
        try:
            module, attribute = comfy.utils.resolve_attr(patcher.model, name)
            tensor = getattr(module, attribute)
            if tensor is not own and type(tensor) in PLAIN and tensor.nbytes <= _SMALL_BYTES:
                places = known.buffers.setdefault(module, {})
                _copy_into(places, {attribute: tensor})
                comfy.utils.set_attr_buffer(patcher.model, name, places[attribute])
        except Exception as error:  # another ComfyUI may keep them otherwise
            log.debug("Slipstream: a buffer lies where ComfyUI put it: %s", error)


@contextmanager
def _instead(patcher: Any, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Meanwhile the patcher has another method, unless somebody else has seen to that already."""
    if name in vars(patcher):
        yield
        return
    setattr(patcher, name, method)
    try:
        yield
    finally:
        if vars(patcher).get(name) is method:
            delattr(patcher, name)


def _still_loaded(patcher: Any, device: Any, known: _Load) -> bool:
    """Whether the model is as the last load left it; what a load does each time is done then.

    Pages may have been taken away: a load stages none, and ComfyUI stages them again where they are used.
    """
    try:
        if device != patcher.load_device or known.state is None or known.state != _state_of(patcher):
            return False
        if not _is_simple(patcher):
            return False
        with patcher.use_ejected(skip_and_inject_on_exit_only=True):
            patcher.unpatch_model(patcher.offload_device, unpatch_weights=False)
            patcher.patch_model(load_weights=False)
        if known.layers is None or not _Layers(patcher.model).are(known.layers):  # others by an object patch, for one
            return False
        patcher.model.dynamic_vbars[device].prioritize()
        if (pinning := getattr(patcher.model, "dynamic_pins", {}).get(device)) is not None:
            pinning |= {"failed": False, "active": True}
        return True
    except Exception as error:  # whatever it was, a load begins anew
        log.debug("Slipstream: ComfyUI loads the model as ever: %s", error)
        return False


def _is_simple(patcher: Any) -> bool:
    """Whether nobody is to be told of a load, or has a part in it."""
    from comfy.patcher_extension import CallbacksMP

    others = (patcher.injections, patcher.hook_patches, patcher.current_hooks, patcher.forced_hooks)
    return not any(others) and not patcher.get_all_callbacks(CallbacksMP.ON_LOAD)


def _state_of(patcher: Any) -> Hashable:
    """Changes when the model was loaded for other patches, or unloaded; None where this ComfyUI tells otherwise."""
    model = patcher.model
    try:
        loaded = model.current_weight_patches_uuid, str(model.device), int(model.model_loaded_weight_memory)
        patched = patcher.patches_uuid, str(patcher.load_device)
        return patched, loaded, len(patcher.backup), len(patcher.backup_buffers)
    except AttributeError as error:
        log.debug("Slipstream: ComfyUI loads models as ever: %s", error)
        return None
