"""A ControlNet whose network runs on engines, and the calls of its network in one sampling run.

ComfyUI copies a ControlNet each time that it is applied, and calls it between `pre_run` and `cleanup` of a run.
The accelerated one is a ControlNet in all else: hints, strengths, timing and chains are ComfyUI's own code.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from comfy.controlnet import ControlNet, StrengthType
from comfy.patcher_extension import CallbacksMP

from ....core.protocols import Tensors
from ....core.spec import Optimize
from ....runtime.checking.step_timers import is_on_purpose, on_purpose
from ....runtime.checking.step_times import TimedStep
from ....runtime.module import AcceleratedModule, Run
from ....runtime.planning.plan import CallShape
from ....runtime.settings.model_settings import are_blocks_welcome
from ...live_model.held_weights import version_of
from ...model_patches import why_not_these_tensors
from ..block_calls.block_calls import BlockCalls, block_calls_of
from ..models.controlnet import ComfyControlNetSource, residuals_by_kind, residuals_by_name
from .model_calls import NotServed
from .run_start import RunRecorder, begin_run, recorded
from .wrapper_keys import ACCELERATE

log = logging.getLogger(__name__)

_PICTURES_KEPT = 4
"""Hints of one ControlNet whose embeddings are kept in a run; more than so many in one chain are rare."""

_COLD_CALLS = 2
"""At the beginning of a run, which are not timed."""

_EVERY_STEP = 999999999.0, 0.0
"""Bounds of the noise level beyond which ComfyUI's windows reach where they leave no step out."""

_COMPARED = 2
"""Calls of a network that it computes by itself in a run in which that is due."""

BLOCKS_ALONE = "ControlNets of this kind have engines of blocks alone"
NOT_CHOSEN = (
    "ControlNets of this kind have compiled engines of blocks alone, in the ControlNet's own precision: choose backend "
    "auto and precision auto"
)

_Picture = tuple[torch.Tensor, int, tuple[int, ...]]
"""A hint, its version, and a Union's types."""


class ControlNetAcceleration:
    """What copies of an accelerated ControlNet share: they are called in turn, and one engine serves all."""

    def __init__(self, module: AcceleratedModule, after_run: RunRecorder | None) -> None:
        self.module = module
        self._after_run = after_run
        self._calls: dict[torch.nn.Module, ControlCalls] = {}
        self._users: dict[torch.nn.Module, set[int]] = {}

    def __deepcopy__(self, memo: object) -> ControlNetAcceleration:
        return self

    def follow_to(self, copy: Any) -> None:
        """Accelerate what another pack makes of an accelerated ControlNet, or copies from one."""
        kind: Any = type(copy)
        if is_advanced(kind):
            copy.acceleration, copy.__class__ = self, accelerated_class(kind)

    @contextmanager
    def leading(self, control: Any) -> Iterator[None]:
        """Meanwhile the calls of the run that is under way are in the place of the network."""
        network = control.control_model
        control.control_model = self.calls_of(control)
        try:
            yield
        finally:
            control.control_model = network

    def calls_of(self, control: Any) -> ControlCalls:
        """Of the run that is under way, which begins with the first of them."""
        network = control.control_model
        if network not in self._calls:
            self._calls[network] = ControlCalls(control, self.module, self._after_run)
        self._users.setdefault(network, set()).add(id(control))
        return self._calls[network]

    @property
    def runs(self) -> list[Run]:
        """Those that are under way and may use engines."""
        return [calls.run for calls in self._calls.values() if calls.run is not None]

    def leave_after_run(self, control: Any, model: Any) -> None:
        """Have `control` leave when the run ends.

        After an error or a cancel ComfyUI does not clean ControlNets up, but models it does.
        """
        patcher = getattr(model, "current_patcher", None)
        if patcher is None:
            return
        key = f"{ACCELERATE} {id(control)}"

        def leave(patcher: Any) -> None:
            patcher.remove_callbacks_with_key(CallbacksMP.ON_CLEANUP, key)
            self.leave(control)

        patcher.remove_callbacks_with_key(CallbacksMP.ON_CLEANUP, key)
        patcher.add_callback_with_key(CallbacksMP.ON_CLEANUP, key, leave)

    def leave(self, control: Any) -> None:
        """`control` is called no more in this run."""
        network = control.control_model
        users = self._users.get(network, set())
        users.discard(id(control))
        if not users:
            self._users.pop(network, None)
            if network in self._calls:
                self._calls.pop(network).close()


class _AsItsKind(type):
    """Classes that are equal to those that they stand for: Advanced-ControlNet converts what is exactly a ControlNet of
    ComfyUI's, and of all else it silently leaves out masks, weights and keyframes."""

    accelerates: type

    def __eq__(cls, other: object) -> bool:
        return cls is other or other is cls.accelerates

    def __hash__(cls) -> int:
        return hash(cls.accelerates)


class AcceleratedControlNet(ControlNet):
    """A ControlNet as its user sees it; made by changing the class of one, see `accelerated_class`."""

    acceleration: ControlNetAcceleration
    control_model: Any
    timestep_range: Any
    _decided: bool | None = None

    def copy(self) -> AcceleratedControlNet:
        made: AcceleratedControlNet = super().copy()
        made.__class__ = type(self)
        made.acceleration = self.acceleration
        return made

    def copy_to(self, c: Any) -> None:
        super().copy_to(c)
        self.acceleration.follow_to(c)

    def get_control(self, *args: Any, **kwargs: Any) -> Any:
        if self._decided is False:
            before = self.previous_controlnet
            return None if before is None else before.get_control(*args, **kwargs)
        window = self.timestep_range
        if self._decided:
            self.timestep_range = None
        try:
            with self.acceleration.leading(self):
                return super().get_control(*args, **kwargs)
        finally:
            self.timestep_range = window

    def control_merge(self, control: Any, control_prev: Any, output_dtype: Any) -> Any:
        is_as_it_is = self.strength == 1.0 and self.strength_type is StrengthType.CONSTANT
        if is_as_it_is and not self.global_average_pooling and control_prev is None and output_dtype is None:
            # Nothing to scale: a kernel less for each residual.
            return {"input": [], "middle": [], "output": [], **control}
        return super().control_merge(control, control_prev, output_dtype)

    def calls(self) -> ControlCalls:
        """Of the run that is under way."""
        return self.acceleration.calls_of(self)

    def is_active(self, timestep: torch.Tensor) -> bool:
        """Whether a step lies in this ControlNet's window, without a wait where every step does."""
        if self.timestep_range is None:
            return True
        start, end = self.timestep_range
        if start >= _EVERY_STEP[0] and end <= _EVERY_STEP[1]:
            return True
        now = timestep[:1].cpu()[0]  # waits: the only thing that a whole step cannot know beforehand
        return not (bool(now > start) or bool(now < end))

    @contextmanager
    def decided(self, active: bool) -> Iterator[None]:
        """Meanwhile the window is not asked."""
        self._decided = active
        try:
            yield
        finally:
            self._decided = None

    def pre_run(self, model: Any, *args: Any, **kwargs: Any) -> None:
        super().pre_run(model, *args, **kwargs)
        self.acceleration.leave_after_run(self, model)

    def cleanup(self) -> None:
        self.acceleration.leave(self)
        super().cleanup()


class AcceleratedAdvanced:
    """What makes one of Advanced-ControlNet's ControlNets an accelerated one.

    The pack puts methods of its own on each object, which call these.
    """

    acceleration: ControlNetAcceleration

    def copy_to(self, c: Any) -> None:
        super().copy_to(c)  # type: ignore[misc]
        self.acceleration.follow_to(c)

    def get_control_advanced(self, *args: Any, **kwargs: Any) -> Any:
        with self.acceleration.leading(self):
            return super().get_control_advanced(*args, **kwargs)  # type: ignore[misc]

    def pre_run_advanced(self, model: Any, *args: Any, **kwargs: Any) -> None:
        super().pre_run_advanced(model, *args, **kwargs)  # type: ignore[misc]
        self.acceleration.leave_after_run(self, model)

    def cleanup_advanced(self) -> None:
        self.acceleration.leave(self)
        super().cleanup_advanced()  # type: ignore[misc]


_ADVANCED = "ControlNetAdvanced", "ControlNetSD35Advanced"
"""Classes of Advanced-ControlNet that ComfyUI's are converted to."""


def is_advanced(kind: type) -> bool:
    """Whether it is a class of Advanced-ControlNet's whose network is called as ComfyUI calls it."""
    return kind.__name__ in _ADVANCED and issubclass(kind, ControlNet) and hasattr(kind, "get_control_advanced")


def is_accelerated(kind: type) -> bool:
    """Whether it is one of `accelerated_class`."""
    return issubclass(kind, (AcceleratedControlNet, AcceleratedAdvanced))


@functools.cache
def accelerated_class(kind: Any) -> type[Any]:
    """What a ControlNet of class `kind` is made to be, which has methods of its own."""
    if is_accelerated(kind):
        return kind
    ours: type = AcceleratedAdvanced if is_advanced(kind) else AcceleratedControlNet
    bases = (ours,) if kind is ControlNet else (ours, kind)
    return _AsItsKind(f"Accelerated{kind.__name__}", bases, {"accelerates": kind})


class ControlCalls:
    """The network's calls in one sampling run; in the network's place while ComfyUI asks for control.

    Attributes:
        dtype: the network's own, by which ComfyUI casts what it hands over.
    """

    def __init__(self, control: Any, module: AcceleratedModule, after_run: RunRecorder | None) -> None:
        self._network = control.control_model
        self.dtype: torch.dtype = self._network.dtype
        self._module = module
        self._ending = ExitStack()
        self._ending.enter_context(recorded(module, after_run))
        self._embedded: list[tuple[_Picture, Tensors]] = []
        self._is_hint_wanted_only = False
        self._to_be_compared: int | None = None
        """How many calls the network computes by itself yet, to compare; None: it is not known whether any."""
        self._given: dict[int, Tensors] = {}
        self._begun = begin_run(module, lambda: ComfyControlNetSource(control), self._ending, cold_calls=_COLD_CALLS)
        self._blocks: BlockCalls | None = None
        if not isinstance(self._begun, str):
            run, source = self._begun
            settings, has_blocks_alone = run.settings, source.architecture.kind.has_blocks_alone
            are_asked_for = settings.optimize is Optimize.BLOCKS
            if has_blocks_alone and are_blocks_welcome():
                settings = replace(settings, optimize=Optimize.BLOCKS)
            self._blocks = block_calls_of(
                source.network, source, module, settings, control.control_model_wrapped, self._ending, are_asked_for
            )
            if self._blocks is not None:
                run.by_blocks = self._blocks.answer
            if has_blocks_alone:
                run.why_not_whole = NOT_CHOSEN if self._blocks is None else BLOCKS_ALONE

    @property
    def run(self) -> Run | None:
        """None where no engine may answer."""
        return None if isinstance(self._begun, str) else self._begun[0]

    def why_not(self) -> str | None:
        """Why no engine of the whole network may answer from here on; asked at each call, as others may change it."""
        if isinstance(self._begun, str):
            return self._begun
        run, source = self._begun
        return run.why_not_whole or source.why_not()

    def __call__(
        self,
        x: torch.Tensor,
        hint: torch.Tensor,
        timesteps: torch.Tensor,
        context: torch.Tensor,
        y: torch.Tensor | None = None,
        **extra: Any,
    ) -> dict[str, list[torch.Tensor]]:
        """As ComfyUI's network: residuals by kind, each a fresh tensor, since ComfyUI scales them in place."""

        def plain() -> dict[str, list[torch.Tensor]]:
            given: dict[str, list[torch.Tensor]] = self._network(
                x=x, hint=hint, timesteps=timesteps, context=context, y=y, **extra
            )
            return given

        def eager() -> Tensors:
            return residuals_by_name(plain())

        if isinstance(self._begun, str):
            if self._module.status.count_eager(self._begun):
                log.warning("Slipstream runs your ControlNet without an engine: %s", self._begun)
            return plain()
        run, source = self._begun
        inputs = {"x": x, "timesteps": timesteps, "context": context}
        veto = source.why_not()
        if run.why_not_whole is None:
            if y is not None and self._network.num_classes is not None:
                inputs["y"] = y
            types = extra.get("control_type")
            veto = veto or _why_not_this_call(inputs, extra) or self._why_not_these_types(types)
            if veto is None:
                inputs |= self._once(source, hint, types)
        if self._is_hint_wanted_only:
            if reason := run.why_not_whole or veto:
                raise NotServed(reason)
            return {}

        def by_blocks() -> Tensors:
            if self._blocks is None or is_on_purpose():
                return eager()
            shape, call = CallShape.of(inputs), inputs
            if source.architecture.kind.has_blocks_alone:
                call = _all_given(x=x, hint=hint, timesteps=timesteps, context=context, y=y, **extra)
            if call and veto is None:
                return self._blocks.whole(eager, call, source.architecture.called, {}, shape)
            return self._blocks(eager, veto is None, shape)

        with on_purpose() if self._is_to_be_compared(run) else nullcontext():
            return residuals_by_kind(run(inputs, by_blocks, veto, eager))

    def _is_to_be_compared(self, run: Run) -> bool:
        """Whether the network itself computes this call, so that engines of blocks serve only where they are faster."""
        times, last = self._module.provider.step_times, run.last
        if self._to_be_compared is None and run.why_not_whole and times is not None and last is not None:
            if is_on_purpose() or not last.engines:
                return False
            self._to_be_compared = _COMPARED if times.is_due(last) else 0
            times.has_met(TimedStep(last.work))  # the network computed before, until there were engines
        if not self._to_be_compared or is_on_purpose():
            return False
        self._to_be_compared -= 1
        return True

    def _why_not_these_types(self, types: list[int] | None) -> str | None:
        """ComfyUI's own code says what is wrong with a type that is none of the network's."""
        if self._network.control_add_embedding is not None and any(
            number >= self._network.num_control_type for number in types or ()
        ):
            return "this ControlNet Union does not know the type that is set"
        return None

    def _once(self, source: ComfyControlNetSource, hint: torch.Tensor, types: list[int] | None) -> Tensors:
        """The embeddings of a picture; ComfyUI hands over the same hint in every step."""
        if (given := self._given.get(id(hint))) is not None:
            return given
        picture = hint, version_of(hint), tuple(types or ())
        for known, embedded in self._embedded:
            if known[0] is picture[0] and known[1:] == picture[1:]:
                return embedded
        found = source.embed(hint, types)
        if self._module.settings.levers.hint_once:
            self._embedded = [(picture, found), *self._embedded[: _PICTURES_KEPT - 1]]
        return found

    def embedding_of(self, hint: torch.Tensor) -> Tensors:
        """What a hint that was used in this run was embedded to; nothing where it is not kept."""
        return next((embedded for picture, embedded in self._embedded if picture[0] is hint), {})

    @contextmanager
    def hint_only(self) -> Iterator[None]:
        """Meanwhile a call embeds its hint and gives nothing, or raises `NotServed` where no engine may answer."""
        self._is_hint_wanted_only = True
        try:
            yield
        finally:
            self._is_hint_wanted_only = False

    @contextmanager
    def given(self, hint: torch.Tensor, embedded: Tensors) -> Iterator[None]:
        """Meanwhile `hint` counts as embedded to these tensors."""
        self._given[id(hint)] = embedded
        try:
            yield
        finally:
            del self._given[id(hint)]

    def close(self) -> None:
        """Give the engines back, and graphs over blocks where the whole network's engine has taken their place."""
        if self._blocks is not None and self.run is not None:
            self._blocks.settle_graphs([self.run])
        self._embedded = []
        self._ending.close()


def _all_given(**given: Any) -> Tensors:
    """The arguments of a network's call without those that are None or an empty list, as a Union's types may be;
    nothing where the others are not all tensors that engines take."""
    tensors = {
        name: value
        for name, value in given.items()
        if value is not None and not (isinstance(value, list) and not value)
    }
    are_tensors = all(isinstance(value, torch.Tensor) for value in tensors.values())
    return tensors if are_tensors and why_not_these_tensors(tensors.values()) is None else {}


def _why_not_this_call(inputs: Tensors, extra: dict[str, Any]) -> str | None:
    if strange := [name for name, value in extra.items() if name != "control_type" and value is not None]:
        return f"the ControlNet is given {strange[0]!r}, which engines do not take"
    return why_not_these_tensors(inputs.values())
