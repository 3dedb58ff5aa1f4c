"""The pages in which ComfyUI stages a model's weights (dynamic VRAM), held in device memory for as long as wanted."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

log = logging.getLogger(__name__)

_PAGE_BYTES = 32 << 20
"""ComfyUI's unit of staging."""


def is_dynamic(patcher: Any) -> bool:
    """Whether ComfyUI stages this patcher's model on demand, in pages that can be held."""
    asked = getattr(patcher, "is_dynamic", None)
    return asked is not None and bool(asked()) and counts_holders()


@functools.cache
def counts_holders() -> bool:
    """Whether a page stays until all who hold it let go; with an older comfy-aimdo any cast of ComfyUI's lets it go."""
    try:
        version = importlib.metadata.version("comfy-aimdo")
    except importlib.metadata.PackageNotFoundError:
        version = "0"
    counts = tuple(map(int, re.findall(r"\d+", version)[:2])) >= (0, 3)
    if not counts:
        log.info("Slipstream: engines copy weights that ComfyUI stages; with comfy-aimdo 0.3 or newer they need not")
    return counts


@dataclass(frozen=True)
class Pages:
    """All pages of a model's weights, held in device memory until they are released.

    Attributes:
        serials: of each page; another one means that the page was taken away and came back without its content.
    """

    vbar: Any
    size: int
    serials: tuple[int, ...]

    def release(self) -> None:
        """ComfyUI may take them away again."""
        _held.pop(id(self), None)
        self.vbar.unpin(self.vbar.base_addr, self.size)

    def hold_weights_of(self, layer: Any) -> bool:
        """Whether a layer's weights lie in these pages as ComfyUI staged them."""
        signature = getattr(layer, "_v_signature", None)
        if signature is None or getattr(layer, "_v_weight", None) is None:
            return False
        _, address, size = layer._v
        start = address - self.vbar.base_addr
        pages = self.serials[start // _PAGE_BYTES : -(-(start + size) // _PAGE_BYTES)]
        return tuple(signature[: len(pages)]) == pages


def hold(patcher: Any) -> Pages | None:
    """Hold all pages of a loaded model; None where memory does not suffice.

    Ask `to_be_held` first whether it does: ComfyUI makes room for some of them by giving up others.
    """
    vbar = patcher.model.dynamic_vbars[patcher.load_device]
    size = int(vbar.offset)
    vbar.prioritize()  # memory that others needed since the last load may have closed even pages that are held
    try:
        found = vbar.fault(vbar.base_addr, size)
    except RuntimeError as error:
        log.debug("Slipstream: the weights' pages cannot be had: %s", error)
        found = None
    if found is None:
        vbar.prioritize()  # those that were given up may come back
        return None
    pages = Pages(vbar, size, tuple(found)[: _pages_of(vbar)])
    _held[id(pages)] = pages
    return pages


_held: dict[int, Pages] = {}


def _pages_of(vbar: Any) -> int:
    return -(-int(vbar.offset) // _PAGE_BYTES)


def to_be_held(patcher: Any) -> int:
    """Bytes that do not give way any more, or are needed more, once all pages of a loaded model are held."""
    vbar = patcher.model.dynamic_vbars[patcher.load_device]
    is_held = any(pages.vbar is vbar for pages in [*_held.values()])
    return _pages_of(vbar) * _PAGE_BYTES - (int(vbar.loaded_size()) if is_held else 0)


def kept_free() -> int:
    """Bytes of each device that the user wants to be left free beside what ComfyUI needs."""
    import comfy.cli_args

    wanted = getattr(comfy.cli_args.args, "vram_headroom", 0)
    if not wanted:  # as with older ComfyUIs, which stage no weights
        return 0
    import comfy.memory_management

    return int(wanted * (1 << 30)) if getattr(comfy.memory_management, "aimdo_enabled", False) else 0


def loaded_on(device: torch.device) -> Iterator[Any]:
    """The patchers of ComfyUI's models on a device, engines among them."""
    import comfy.model_management as management

    patchers = (patcher for patcher in management.loaded_models() if patcher is not None)  # None: it is gone already
    return (patcher for patcher in patchers if patcher.load_device == device)


def yielding(device: torch.device) -> int:
    """Return the bytes on a device that staged weights give back by themselves: all but those of held pages."""
    return sum(int(vbar.loaded_size()) for vbar in _not_held(device))


def _not_held(device: torch.device) -> list[Any]:
    """The pages of ComfyUI's models on a device, without models of which somebody holds pages; last loaded first."""
    models = filter(is_dynamic, loaded_on(device))
    staged = (getattr(patcher.model, "dynamic_vbars", {}).get(device) for patcher in models)
    vbars = {id(vbar): vbar for vbar in staged if vbar is not None}
    for pages in [*_held.values()]:
        vbars.pop(id(pages.vbar), None)
    return [*vbars.values()]


@contextmanager
def given_back(device: torch.device, wanted: int) -> Iterator[None]:
    """Free `wanted` bytes of a device for other processes until the context ends, as far as pages that nobody holds
    suffice. ComfyUI stages their weights again at their next use. The device must not be computing.
    """
    vbars = _not_held(device)[::-1] if wanted > 0 else []
    try:
        for vbar in vbars:
            if wanted > 0:
                wanted -= int(vbar.free_memory(wanted))
        yield
    finally:
        for vbar in vbars:  # pages may be staged again, those of the model that was loaded last first
            vbar.prioritize()


@contextmanager
def letting_go() -> Iterator[None]:
    """Meanwhile no page is held: ComfyUI counts memory then, and warns of each page that is.

    Raises:
        RuntimeError: a page was taken away meanwhile.
    """
    held = [*_held.values()]
    for pages in held:
        pages.vbar.unpin(pages.vbar.base_addr, pages.size)
    try:
        yield
    finally:
        for pages in held:
            found = pages.vbar.fault(pages.vbar.base_addr, pages.size)
            if found is None or tuple(found)[: len(pages.serials)] != pages.serials:
                raise RuntimeError("ComfyUI took weights away while an engine used them; please report this")
