"""A VAE whose decoder and encoder run on engines.

ComfyUI's own code goes on loading the model, cutting pictures into tiles, scaling and moving them. Only
`first_stage_model` is a stand-in, which shares everything with the real one but computes by engines.
"""

from __future__ import annotations

import copy
import functools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any
from weakref import WeakSet

import torch

from ...core.dtypes import dtype_of
from ...core.errors import SlipstreamError
from ...core.protocols import Tensors
from ...runtime.checking.verify import is_finite
from ...runtime.loaded.device_clock import disturb
from ...runtime.module import AcceleratedModule, Run
from ..model_patches import why_not_in_this_mode
from .block_calls.block_calls import block_calls_of
from .block_calls.block_share import BlockShare
from .models.autoencoders import DECODER, ENCODER, HALVES, Half
from .models.vae import ComfyVaeSource, plain_method, source_of
from .models.vae_fallback_reasons import why_not_this_call, why_nothing_of_it
from .process.dynamic_vram import loading_once
from .run.run_start import RunRecorder, begin_run, recorded
from .run.vae_memory import memory_needed

log = logging.getLogger(__name__)

_MODEL = "first_stage_model"
_BY_ITSELF = "another extension replaced what the VAE computes by, so that no engine is asked"
_OVERFLOWED = "its engines computed NaN or Inf from finite numbers"

_overflowed: WeakSet[torch.nn.Module] = WeakSet()
"""VAEs of which that was seen: their blocks run as they are from then on."""


def accelerate_vae(vae: Any, module: AcceleratedModule, after_run: RunRecorder | None = None) -> Any:
    """A copy of a `comfy.sd.VAE` that decodes and encodes through `module`; the weights are the same.

    Args:
        after_run: given what happened in each call of the VAE, see `Status.since`.
    """
    made = copy.copy(vae)
    kind: type = type(vae)
    made.__class__ = _accelerated(kind)
    made.slipstream = VaeAcceleration(module, after_run)
    if not module.settings.is_off and (reason := _why_never(vae)):
        module.status.note(f"eager: {reason}")
        log.warning("Slipstream: %s", reason)
    return made


def accelerated_vae_module(vae: Any) -> AcceleratedModule | None:
    """The module that `accelerate_vae` put into this VAE or one it was copied from."""
    return vae.slipstream.module if isinstance(vae, AcceleratedVae) else None


def _why_never(vae: Any) -> str | None:
    """Why engines can stand for neither half as a whole, or not for one."""
    try:
        for half in HALVES.values():
            source_of(vae, half).precision  # noqa: B018  an unsupported dtype is a reason too
    except SlipstreamError as error:
        return str(error)
    return None


# ------------------------------------------------------------------------------------------------ ComfyUI's VAE


def _memory_estimate(name: str, half: Half) -> property:
    """ComfyUI's attribute of this name: a function that gives bytes, for what an engine or the model's half takes."""

    def get(vae: AcceleratedVae) -> Any:
        return vae._memory_used(half, vars(vae)[name])

    def put(vae: AcceleratedVae, estimate: Any) -> None:
        vars(vae)[name] = estimate

    return property(get, put)


class AcceleratedVae:
    """Mixed into ComfyUI's `VAE`. Copies of it are accelerated as well, each with its own patcher and device."""

    slipstream: VaeAcceleration

    @property
    def first_stage_model(self) -> Any:
        model = vars(self).get(_MODEL)
        return None if model is None else _stand_in(model, self)

    @first_stage_model.setter
    def first_stage_model(self, model: Any) -> None:
        vars(self)[_MODEL] = model.slipstream_model if isinstance(model, StandIn) else model

    memory_used_decode = _memory_estimate("memory_used_decode", DECODER)
    memory_used_encode = _memory_estimate("memory_used_encode", ENCODER)

    def decode(self, *args: Any, **kwargs: Any) -> Any:
        return self._in_one_run(super().decode, args, kwargs)  # type: ignore[misc]

    def encode(self, *args: Any, **kwargs: Any) -> Any:
        return self._in_one_run(super().encode, args, kwargs)  # type: ignore[misc]

    def decode_tiled(self, *args: Any, **kwargs: Any) -> Any:
        return self._in_one_run(super().decode_tiled, args, kwargs, tiled=True)  # type: ignore[misc]

    def encode_tiled(self, *args: Any, **kwargs: Any) -> Any:
        return self._in_one_run(super().encode_tiled, args, kwargs, tiled=True)  # type: ignore[misc]

    def _in_one_run(
        self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], tiled: bool = False
    ) -> Any:
        patcher = None if self.slipstream.module.settings.is_off else getattr(self, "patcher", None)
        with self.slipstream.session(self, tiled) as session, loading_once(patcher):
            result = method(*args, **kwargs)
            session.tell_if_not_asked()
            return result

    def _memory_used(self, half: Half, estimate: Any) -> Any:
        if self.slipstream.is_tiling(self):  # asked for the whole picture, of which no engine sees more than a tile
            return estimate
        return functools.partial(memory_needed, self, self.slipstream.module, half, estimate)


@functools.cache
def _accelerated(kind: type) -> type:
    return kind if issubclass(kind, AcceleratedVae) else type(f"Accelerated{kind.__name__}", (AcceleratedVae, kind), {})


# -------------------------------------------------------------------------------------------------- its model


class StandIn:
    """Mixed into the class of an autoencoder. It has the very attributes of the real one, parameters included."""

    __slots__ = ("slipstream_model", "slipstream_vae")

    slipstream_model: Any
    slipstream_vae: Any

    def decode(self, *args: Any, **kwargs: Any) -> Any:
        vae = self.slipstream_vae
        return vae.slipstream.compute(vae, self.slipstream_model, DECODER, args, kwargs)

    def encode(self, *args: Any, **kwargs: Any) -> Any:
        vae = self.slipstream_vae
        return vae.slipstream.compute(vae, self.slipstream_model, ENCODER, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:  # a copy is one of the real model
        return self.slipstream_model.__reduce_ex__(protocol)


def _stand_in(model: Any, vae: Any) -> Any:
    """Made anew each time that it is asked for, so that it belongs to no other copy of the VAE."""
    kind: type = type(model)
    made: Any = object.__new__(_standing_in(kind))
    object.__setattr__(made, "__dict__", vars(model))
    object.__setattr__(made, "slipstream_model", model)
    object.__setattr__(made, "slipstream_vae", vae)
    return made


@functools.cache
def _standing_in(kind: type) -> type:
    return type(kind.__name__, (StandIn, kind), {"__slots__": ()})


# ------------------------------------------------------------------------------------------------------ runs


class VaeAcceleration:
    """What copies of an accelerated VAE share."""

    def __init__(self, module: AcceleratedModule, after_run: RunRecorder | None) -> None:
        self.module = module
        self._after_run = after_run
        self._local = threading.local()

    def __deepcopy__(self, memo: object) -> VaeAcceleration:
        return self

    def compute(self, vae: Any, model: Any, half: Half, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of the stand-in: part of a call of the VAE, or a run of its own where other nodes make it."""
        with self.session(vae, self.is_tiling(vae)) as session:
            return session.compute(model, half, args, kwargs)

    @contextmanager
    def session(self, vae: Any, tiled: bool) -> Iterator[Session]:
        """The session that is open for this VAE in this thread, or a new one."""
        if (known := self._open.get(id(vae))) is not None:
            yield known
            return
        with recorded(self.module, self._after_run), closing(Session(self.module, vae, tiled)) as session:
            self._open[id(vae)] = session
            try:
                yield session
            finally:
                del self._open[id(vae)]

    def is_tiling(self, vae: Any) -> bool:
        return id(vae) in self._open and self._open[id(vae)].tiled

    @property
    def _open(self) -> dict[int, Session]:
        if not hasattr(self._local, "open"):
            self._local.open = {}
        found: dict[int, Session] = self._local.open
        return found


class Session:
    """One call of a VAE, whole or in tiles: a run for each half, which begins once ComfyUI has loaded the model."""

    def __init__(self, module: AcceleratedModule, vae: Any, tiled: bool) -> None:
        self.tiled = tiled
        self._module = module
        self._vae = vae
        self._halves: dict[Half, _HalfCalls | str] = {}
        self._ending = ExitStack()
        self._is_asked = False

    def compute(self, model: Any, half: Half, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._is_asked = True
        plain = functools.partial(plain_method(model, half), model)
        found = self._calls(half)
        if isinstance(found, str):
            self._tell(found)
            return plain(*args, **kwargs)
        given = args[0] if args else None
        if (veto := _why_not(found.source, given, args, kwargs)) is None:
            assert given is not None
            return _one_by_one(found, half, given, plain)
        if found.blocks is None:
            self._tell(veto)
            return plain(*args, **kwargs)
        # Whole batches: what others changed may look at all pictures of one.
        return found.run({}, lambda: found.by_blocks(lambda: plain(*args, **kwargs), given), veto)["out"]

    def tell_if_not_asked(self) -> None:
        """Another extension computes in the model's place."""
        if not self._is_asked:
            self._tell(_BY_ITSELF)

    def close(self) -> None:
        """Give the engines back."""
        self._ending.close()

    def _calls(self, half: Half) -> _HalfCalls | str:
        """Or why every call goes to the plain model."""
        if half not in self._halves:
            begun = begin_run(
                self._module, lambda: ComfyVaeSource(self._vae, half), self._ending, finite_only=True, cold_calls=0
            )
            if isinstance(begun, str):
                self._halves[half] = begun
            else:
                self._halves[half] = _HalfCalls(self._module, *begun, self._vae.patcher, self._ending)
        return self._halves[half]

    def _tell(self, reason: str) -> None:
        if self._module.status.count_eager(reason):
            log.warning("Slipstream runs your VAE without an engine: %s", reason)


class _HalfCalls:
    """The calls of one half in a session.

    Args:
        ending: closed when the session is over.

    Attributes:
        blocks: those of the half's blocks, where no engine of the whole half answers; None where they are not wanted.
    """

    def __init__(
        self, module: AcceleratedModule, run: Run, source: ComfyVaeSource, patcher: Any, ending: ExitStack
    ) -> None:
        self.run, self.source = run, source
        self.blocks = None
        if why_nothing_of_it(patcher, source.network) is None:
            self.blocks = block_calls_of(source.network, source, module, run.settings, patcher, ending)
        if self.blocks is not None:
            run.by_blocks = self.blocks.answer

    def by_blocks(self, plain: Callable[[], Any], given: Any) -> Tensors:
        """The half itself, whose blocks may be on engines.

        Args:
            given: what it is called with.
        """
        if self.blocks is None:
            return {"out": plain()}
        if self.source.network not in _overflowed:
            found = self.blocks(lambda: {"out": plain()})
            if not (self.blocks.share.engine and _has_overflowed(found["out"], given)):
                return found
            disturb()
            if not is_finite(again := {"out": plain()}):  # the VAE's own doing
                return again
            _overflowed.add(self.source.network)
            self.blocks.share = BlockShare(eager=Counter({_OVERFLOWED: 1}))
            return again
        self.blocks.share = BlockShare(eager=Counter({_OVERFLOWED: 1}))
        return {"out": plain()}


def _has_overflowed(found: Any, given: Any) -> bool:
    """Whether finite numbers gave NaN or Inf."""
    return torch.is_tensor(found) and not is_finite({"out": found}) and is_finite({"in": given})


def _why_not(source: ComfyVaeSource, given: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    extra = kwargs or args[1:]
    if reason := why_not_in_this_mode(source.device) or source.why_not():
        return reason
    return why_not_this_call(given, extra, source.architecture.channels, dtype_of(source.precision), source.device)


def _one_by_one(
    calls: _HalfCalls, half: Half, given: torch.Tensor, plain: Callable[[torch.Tensor], torch.Tensor]
) -> Any:
    """Picture by picture, so that one engine serves every batch."""

    def compute(picture: torch.Tensor) -> torch.Tensor:
        def eager() -> Tensors:
            return {"out": plain(picture)}

        def by_blocks() -> Tensors:
            return calls.by_blocks(lambda: plain(picture), picture)

        return calls.run({half.input: picture.contiguous()}, by_blocks, beside=eager)["out"]

    first, *others = given.split(1)
    result = compute(first)
    if not others:
        return result
    results = result.new_empty((len(given), *result.shape[1:]))
    results[:1] = result
    for number, picture in enumerate(others, 1):
        results[number : number + 1] = compute(picture)
    return results
