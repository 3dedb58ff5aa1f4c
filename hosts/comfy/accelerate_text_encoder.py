"""A text encoder whose layers run on engines.

ComfyUI's own code goes on splitting texts into tokens, loading the model, embedding, weighting and pooling. Only while
it encodes, the calls of layers are led to engines.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from ...core.spec import Optimize
from ...runtime.checking.step_timers import CallTimer
from ...runtime.checking.step_times import TimedStep
from ...runtime.module import AcceleratedModule, ByBlocks, say_plain
from ...runtime.settings.model_settings import SWITCHED_OFF, BackendChoice, Settings
from .block_calls.block_calls import CALLS_BY_HAND, BlockCalls
from .block_calls.block_share import BlockShare
from .models.text_stacks import ComfyTextStack, stacks_of
from .process.dynamic_vram import loading_once, weights_in_place
from .run.run_start import RunRecorder, recorded

log = logging.getLogger(__name__)

_ENCODE = "encode_token_weights"
"""Of a text encoder, which ComfyUI calls once it is loaded."""

_BY_BLOCKS = "text encoders have engines of blocks alone"
_UNKNOWN = "text encoders of this kind ({}) have no engines yet"
_TENSORRT = "TensorRT has no engines for text encoders: choose compiled in the node"
_BY_ITSELF = "another extension encodes in ComfyUI's place, so that no engine is asked"


def accelerate_text_encoder(clip: Any, module: AcceleratedModule, after_run: RunRecorder | None = None) -> Any:
    """A copy of a `comfy.sd.CLIP` whose layers run on engines while it encodes; the weights are the same.

    Args:
        after_run: given what happened in each text, see `Status.since`.
    """
    made = clip.clone()
    _accelerate(made, TextEncoderAcceleration(module, after_run))
    return made


def accelerated_text_encoder_module(clip: Any) -> AcceleratedModule | None:
    """The module that `accelerate_text_encoder` put into this CLIP or one it was cloned from."""
    return clip.slipstream.module if isinstance(clip, AcceleratedClip) else None


def _accelerate(clip: Any, acceleration: TextEncoderAcceleration) -> None:
    kind: type = type(clip)
    clip.__class__ = _accelerated(kind)
    clip.slipstream = acceleration


class AcceleratedClip:
    """Mixed into ComfyUI's `CLIP`. Clones of it, which nodes for LoRAs and skipped layers make, are accelerated too."""

    slipstream: TextEncoderAcceleration

    def clone(self, *args: Any, **kwargs: Any) -> Any:
        made = super().clone(*args, **kwargs)  # type: ignore[misc]
        _accelerate(made, self.slipstream)
        return made

    def encode_from_tokens(self, *args: Any, **kwargs: Any) -> Any:
        return self.slipstream.encode(self, functools.partial(super().encode_from_tokens, *args, **kwargs))  # type: ignore[misc]

    def encode_from_tokens_scheduled(self, *args: Any, **kwargs: Any) -> Any:
        plain = functools.partial(super().encode_from_tokens_scheduled, *args, **kwargs)  # type: ignore[misc]
        return self.slipstream.encode(self, plain)


@functools.cache
def _accelerated(kind: type) -> type:
    if issubclass(kind, AcceleratedClip):
        return kind
    return type(f"Accelerated{kind.__name__}", (AcceleratedClip, kind), {})


class TextEncoderAcceleration:
    """What clones of an accelerated CLIP share."""

    def __init__(self, module: AcceleratedModule, after_run: RunRecorder | None) -> None:
        self.module = module
        self._after_run = after_run
        self._answered: dict[Hashable, TimedStep] = {}
        """By their work: what engines answered last."""

    def __deepcopy__(self, memo: object) -> TextEncoderAcceleration:
        return self

    def encode(self, clip: Any, plain: Callable[[], Any]) -> Any:
        """What `plain` gives, which encodes by `clip`; part of another call where it is made in the midst of one."""
        model = getattr(clip, "cond_stage_model", None)
        if not isinstance(model, torch.nn.Module) or not hasattr(model, _ENCODE) or _is_led(model):
            return plain()
        with recorded(self.module, self._after_run), ExitStack() as ending:
            self.module.provider.run_began()
            ending.callback(self.module.provider.run_ended)
            session = _Session(self.module, clip, model, self._answered, ending)
            with loading_once(None if self.module.settings.is_off else clip.patcher), session.leading():
                result = plain()
            session.tell_if_not_asked()
            return result


def _is_led(model: torch.nn.Module) -> bool:
    """Whether the text encoder encodes by a session of ours."""
    method = getattr(vars(model).get(_ENCODE), "func", None)
    return isinstance(getattr(method, "__self__", None), _Session)


class _Session:
    """One text, or several ones of a schedule of hooks.

    Args:
        answered: see `TextEncoderAcceleration`.
        ending: closed when it is over.
    """

    def __init__(
        self,
        module: AcceleratedModule,
        clip: Any,
        model: torch.nn.Module,
        answered: dict[Hashable, TimedStep],
        ending: ExitStack,
    ) -> None:
        self._module, self._patcher, self._model = module, clip.patcher, model
        self._answered, self._ending = answered, ending
        self._is_asked = False
        self._settings = replace(module.settings, optimize=Optimize.BLOCKS)
        self._device = torch.device(clip.patcher.load_device)
        times = module.provider.step_times
        self._timer = None if times is None else CallTimer(times, self._device, 0)

    @contextmanager
    def leading(self) -> Iterator[None]:
        """Meanwhile the model encodes by `_encode`."""
        own = vars(self._model)
        others = own.get(_ENCODE)
        ours = own[_ENCODE] = functools.partial(self._encode, getattr(self._model, _ENCODE))
        try:
            yield
        finally:
            if own.get(_ENCODE) is not ours:  # another extension put its own there meanwhile, or took ours away
                pass
            elif others is None:
                del own[_ENCODE]
            else:
                own[_ENCODE] = others

    def tell_if_not_asked(self) -> None:
        """Another extension computes in the model's place."""
        if not self._is_asked:
            self._module.count_eager(_BY_ITSELF)

    def _encode(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What ComfyUI's method gives, or that of another extension which took its place."""
        self._is_asked = True
        plain = functools.partial(method, *args, **kwargs)
        if isinstance(calls := self._calls, str):
            self._module.count_eager(calls)
            return plain()
        shape = _shape_of(args, kwargs)
        if self._timer is None or shape is None:
            return self._answer(calls, plain)[0]
        return self._timed(self._timer, calls, plain, (*(each.id for each in calls), str(self._device), shape))

    def _timed(self, timer: CallTimer, calls: list[BlockCalls], plain: Callable[[], Any], work: Hashable) -> Any:
        """One text, by the model itself now and then, so that engines serve only where they are faster."""
        times, eager = self._module.provider.step_times, TimedStep(work)
        assert times is not None
        answered = self._answered.get(work)
        if answered is not None and not self._module.by_hand and times.is_due(answered):
            times.has_met(eager)  # the model computed before, until there were engines
            self._module.status.count_on_purpose()
            result = timer(plain, lambda: eager)
        else:
            result, share = timer(lambda: self._answer(calls, plain), lambda: self._step_of(calls, work))
            if share.engine and not share.waiting:
                self._answered[work] = self._step_of(calls, work)
        return result

    def _step_of(self, calls: list[BlockCalls], work: Hashable) -> TimedStep:
        """What computed the text just now."""
        share = _share_of(calls)
        if share.waiting or not share.engine:
            return TimedStep(None)
        return TimedStep(work, tuple(each.id for each in calls if each.share.engine))

    def _answer(self, calls: list[BlockCalls], plain: Callable[[], Any]) -> tuple[Any, BlockShare]:
        """What `plain` gives, and how much of it engines computed."""
        compute, status = plain, self._module.status
        for each in calls:
            compute = functools.partial(each.once, compute)
        result, share = compute(), _share_of(calls)
        for _ in range(CALLS_BY_HAND if self._module.by_hand else 0):
            if not share.waiting:
                break
            result, share = compute(), _share_of(calls)
        if not share.engine:
            if status.count_eager(share.why_none) and not share.waiting:
                say_plain(share.why_none)
            return result, share
        served = next(each.answer() for each in calls if each.share.engine)
        engine = served.engine if isinstance(served, ByBlocks) and not share.waiting else None
        status.count_eager(_BY_BLOCKS)
        status.count_blocks(_BY_BLOCKS, str(share), engine)
        return result, share

    @functools.cached_property
    def _calls(self) -> list[BlockCalls] | str:
        """Of each stack of the model, which is loaded; or why it encodes by itself."""
        if reason := _why_not(self._settings, self._patcher, self._model):
            return reason
        found: list[BlockCalls] = []
        reason = _UNKNOWN.format(type(self._model).__name__)
        for stack in stacks_of(self._model):
            try:
                owner = ComfyTextStack.of(stack)
                owner.fingerprint  # noqa: B018  code that cannot be read is a reason too
            except Exception as error:  # whatever the code of another extension raises, which took a class's place
                reason = str(error)
                continue
            in_place = functools.partial(weights_in_place, self._patcher, stack, ending=self._ending)
            parts = stack, owner, self._device, self._module, self._settings
            found.append(BlockCalls(*parts, in_place, self._ending, is_seldom_called=True))
        return found or reason


def _why_not(settings: Settings, patcher: Any, model: torch.nn.Module) -> str | None:
    import comfy.model_management as management

    if settings.is_off:
        return SWITCHED_OFF
    if settings.backend is BackendChoice.TENSORRT:
        return _TENSORRT
    if getattr(management, "in_training", False):
        return "the model is being trained"
    if patcher.model is not model:
        return "another node replaced the text encoder's model"
    return None


def _share_of(calls: list[BlockCalls]) -> BlockShare:
    """Of the last text, all stacks together."""
    shares = [each.share for each in calls]
    return BlockShare(
        engine=sum(share.engine for share in shares),
        apart=sum(share.apart for share in shares),
        outside=sum(share.outside for share in shares),
        waiting=sum(share.waiting for share in shares),
        without=sum(share.without for share in shares),
        eager=sum((share.eager for share in shares), Counter[str]()),
    )


def _shape_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable:
    """How many tokens each part of a text has, roughly: texts for which that is equal take as long."""
    given: Any = args[0] if args else next(iter(kwargs.values()), ())
    parts = given if isinstance(given, Mapping) else {"": given}
    try:
        return tuple(
            (name, tuple(-(-len(chunk) // _ALIKE) for chunk in chunks), _are_weighted(chunks))
            for name, chunks in parts.items()
        )
    except Exception:  # whatever another extension's tokens raise
        return None


_ALIKE = 64
"""Tokens."""


def _are_weighted(chunks: Any) -> bool:
    """Whether any part of a text counts more or less than the others: an empty text is encoded beside it then."""
    return any(token[1] != 1 for chunk in chunks for token in chunk)
