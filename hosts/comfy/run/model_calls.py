"""The calls of a diffusion model in one sampling run: to an engine, to its two halves, or to the plain model."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ....core.errors import SlipstreamError
from ....core.formatting import say_share
from ....core.protocols import Tensors
from ....core.spec import Optimize
from ....runtime.checking.step_timers import is_on_purpose
from ....runtime.checking.verify import LIMITS, limit_of, relative_error
from ....runtime.loaded.device_clock import disturb
from ....runtime.module import AcceleratedModule, Run
from ....runtime.planning.plan import CallShape
from ....runtime.settings.model_settings import BackendChoice, Parallel, Settings, ShapeChoice
from ...control_residuals import kinds_of, residuals_of
from ...live_model.account import why_changed
from ...live_model.held_weights import Hold
from ...model_patches import why_not_in_this_mode, why_not_these_tensors
from ...stand_in import Plain, undisturbed
from ..block_calls.block_calls import BlockCalls
from ..blocks.cached_blocks import CachedCall
from ..models.diffusion_model import called
from ..models.fallback_reasons import ON_ANOTHER_GPU, why_not_this_call
from ..models.model_classes import ModelClass
from ..models.unet_halves import DECODER, ENCODER, ComfyUNetHalfSource, can_be_halved, is_for_halves
from ..models.unet_source import ComfyUNetSource
from ..process.build_waiting import waiting_hooks
from .asked_once import sigmas_asked_once
from .wrapper_keys import BLOCK_CACHE

log = logging.getLogger(__name__)

_REUSED = "Step Skip's block cache has the model computed block by block"


class NotServed(SlipstreamError):
    """No engine answered a call that only engines may answer."""


class ModelCalls:
    """The calls of a model.

    Args:
        whole: the run of the whole model.
        run_veto: why no call of this run may go to an engine.
        halves: those of its halves; None where they are not wanted.
        blocks: those of its blocks, where no engine of the whole model answers; None where they are not wanted.

    Attributes:
        join: called when a call needs the ControlNet's residuals; until then another stream may still compute them.
        engines_only: raise `NotServed` instead of asking the plain model.
        options: `transformer_options` of the last call.
        kinds: what `_kind_of` gave for each call so far.
    """

    def __init__(
        self,
        whole: Run,
        source: ComfyUNetSource,
        run_veto: str | None,
        halves: Halves | None,
        blocks: BlockCalls | None = None,
    ) -> None:
        self.whole = whole
        self.source = source
        self.halves = halves
        self.join: Callable[[], None] = lambda: None
        self.engines_only = False
        self.options: dict[str, Any] = {}
        self.kinds: list[Hashable] = []
        self._in_whole_step = False
        self._is_unchanged = False
        """Whether it was found in this call that nobody changed the model."""
        self._wholes: dict[CallShape, bool] = {}
        self._kind: ModelClass = source.architecture.kind
        self._run_veto = run_veto
        self._hold = Hold()
        self._blocks = blocks
        if blocks is not None:
            whole.by_blocks = blocks.answer

    def __call__(self, module: Any, plain: Plain, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """See `stand_in.Compute`."""
        try:
            given = self._kind.arguments(args, kwargs)
        except (TypeError, ValueError) as error:  # an extension replaced the method by one of another form
            reason = self.veto_of_run or f"{self._kind.name} is called in an unknown way ({error})"
            return self.whole({}, lambda: self._by_blocks(plain, args, kwargs), reason)["out"]
        options = given.get("transformer_options") or {}
        if (cached := options.get(BLOCK_CACHE)) is not None:
            plain = functools.partial(_with_blocks_reused, cached, plain)
        if module is not self.source.unet:  # such as another GPU's copy, which is called in another thread
            return self._of_another_module(lambda: self._plain(plain, args, kwargs))
        self.options = options
        control = given.pop("control", None)
        inputs = {name: value for name, value in given.items() if torch.is_tensor(value)}
        self.kinds.append(_kind_of(inputs, control))
        self._is_unchanged = False
        no_blocks = self._why_no_blocks(inputs)
        if is_on_purpose():
            return self.whole(inputs, lambda: self._plain(plain, args, kwargs))["out"]
        # Where blocks are reused, calls of a shape compute now these and now those.
        shape = CallShape.of(inputs) if self._blocks is not None and cached is None else None
        by_blocks = functools.partial(self._by_blocks, plain, args, kwargs, why_not=no_blocks, shape=shape)
        if control is None and self._run_veto is None and self.whole.is_served_by_none(inputs):
            self.join()  # and nothing else that would cost the plain model time
            has_graphs = self._blocks is not None and self._blocks.may_have_graphs(shape)
            alone = inputs if has_graphs and not self._why_not(inputs, given) else None
            return self.whole(inputs, lambda: by_blocks(alone))["out"]
        veto, coming = self._why_not(inputs, given), None
        if veto is None and self.halves is not None and self._in_whole_step:
            reference = functools.partial(self._undisturbed, plain, args, kwargs)
            answer = self.halves(inputs, control, self, reference)
            if isinstance(answer, torch.Tensor):
                return answer
            coming = answer
        self.join()
        residuals: Tensors | str = {}
        if veto is None and control:
            residuals = residuals_of(control, inputs["x"])
        if isinstance(residuals, str):
            veto, residuals = residuals, {}
        inputs |= residuals
        tensors_alone = inputs if veto is None else None
        if coming is not None and not self._has_whole(inputs):
            veto = veto or coming
        beside = None if self.engines_only else functools.partial(self._undisturbed, plain, args, kwargs)
        return self.whole(inputs, lambda: by_blocks(tensors_alone), veto, beside)["out"]

    @property
    def runs(self) -> list[Run]:
        """Of the model as a whole and of its halves."""
        return [self.whole, *(self.halves.runs if self.halves is not None else [])]

    @property
    def are_answered(self) -> bool:
        """Whether there was a call, or a step that was replayed in its place."""
        return any(run.answers for run in self.runs)

    def _has_whole(self, inputs: Tensors) -> bool:
        """Whether there is an engine for the whole model; none is built for calls whose halves' are on their way."""
        call = CallShape.of(inputs)
        if call not in self._wholes:
            self._wholes[call] = self.whole.why_not(inputs, may_build=False) is None
        return self._wholes[call]

    @contextmanager
    def whole_steps(self) -> Iterator[None]:
        """Meanwhile calls are parts of steps that can be replayed as a whole: only there halves gain anything."""
        before, self._in_whole_step = self._in_whole_step, True
        try:
            yield
        finally:
            self._in_whole_step = before

    def _of_another_module(self, compute: Callable[[], Tensors]) -> torch.Tensor:
        reason = self._run_veto or ON_ANOTHER_GPU  # TorchCompileModel exchanges the module, and is a veto
        if self._blocks is not None:
            self._blocks.passed(reason)
        return self.whole({}, compute, reason)["out"]

    def _why_not(self, inputs: Tensors, given: dict[str, Any]) -> str | None:
        if veto := self.veto_of_run:
            return veto
        self._is_unchanged = True
        if BLOCK_CACHE in self.options:
            return _REUSED
        if "x" not in inputs:
            return f"{self._kind.name} is called in an unknown way"
        if veto := why_not_these_tensors(inputs.values()):
            return veto
        return why_not_this_call({name: value for name, value in given.items() if name not in inputs})

    def _why_no_blocks(self, inputs: Tensors) -> str | None:
        """Why this call's blocks run as they are; None where they may run on engines."""
        settings = self.whole.settings
        if settings.optimize is Optimize.BLOCKS or not settings.resolutions or "x" not in inputs:
            return None
        return settings.why_not_wanted({name: tuple(tensor.shape) for name, tensor in inputs.items()})

    @property
    def veto_of_run(self) -> str | None:
        """Why no call of the run may go to an engine from here on; asked at each, as others may change the model."""
        return self.veto_at_once or why_changed(self.source.unet, self.source.architecture, hold=self._hold)

    @property
    def veto_at_once(self) -> str | None:
        """As much of it as takes no time: all but whether others changed the model."""
        return self._run_veto or self.whole.wrong or why_not_in_this_mode(self.source.device)

    def _by_blocks(
        self,
        plain: Plain,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors_alone: Tensors | None = None,
        why_not: str | None = None,
        shape: CallShape | None = None,
    ) -> Tensors:
        """The plain model, whose blocks may be on engines.

        Args:
            tensors_alone: all tensors of the call by name, where nothing else has to do with what the model gives.
            why_not: why no engine of blocks has a part in it.
            shape: see `BlockCalls`.
        """
        if self._blocks is None:
            return self._plain(plain, args, kwargs)
        if why_not is not None:
            self._blocks.passed(why_not)
            return self._plain(plain, args, kwargs)
        with sigmas_asked_once(self.options):
            if tensors_alone is None or self.engines_only:
                return self._blocks(lambda: self._plain(plain, args, kwargs), self._is_unchanged, shape)
            compute = functools.partial(self._undisturbed, plain, args, kwargs)
            return self._blocks.whole(compute, tensors_alone, called, self.options, shape)

    def end(self) -> None:
        """The run is over; nothing refers to itself any more, so that its model can go without garbage collection."""
        self.options = {}
        if self._blocks is not None:
            self._blocks.settle_graphs(self.runs)

    def _plain(self, plain: Plain, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensors:
        if self.engines_only:
            raise NotServed("the plain model would have to answer")
        return {"out": plain(*args, **kwargs)}

    def _undisturbed(self, plain: Plain, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensors:
        """The plain model's answer; it empties the lists of residuals that it is given."""
        return self._plain(functools.partial(undisturbed, plain), (args, kwargs), {})


def _with_blocks_reused(cached: CachedCall, plain: Plain, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The plain model, of which blocks may be left out. The others are led to engines around this."""
    with cached.leading():
        return plain(*args, **kwargs)


def _kind_of(inputs: Tensors, control: Any) -> Hashable:
    """Equal for calls that are about the same work for an engine, and for the model: same shapes, dtypes and residuals.

    Lengths of prompts count in steps of two for each doubling: some models have another number of tokens for each
    prompt, and steps of every one would be computed without engines, to compare.
    """
    given = control if isinstance(control, Mapping) else {}
    others = CallShape.of({name: tensor for name, tensor in inputs.items() if name not in _OF_THE_PROMPT})
    lengths = [(name, round(2 * math.log2(_tokens_of(inputs[name])))) for name in _OF_THE_PROMPT if name in inputs]
    return others, tuple(lengths), tuple(sorted((kind, len(given[kind])) for kind in kinds_of(given)))


_OF_THE_PROMPT = "context", "attention_mask"


def _tokens_of(given: torch.Tensor) -> int:
    return max(1, given.shape[1]) if given.ndim > 1 else 1


class Halves:
    """A UNet with ControlNet as two engines, between which a step waits for the ControlNet.

    Args:
        settings: of the run that they are a part of.
        ending: closes the runs of the halves, which begin with the first call.

    Attributes:
        is_refused: the halves are not used in this run; the model runs as a whole.
    """

    _proved: set[tuple[str, str]] = set()
    """Architecture and weights of models whose halves together matched the whole model in this process."""

    def __init__(self, module: AcceleratedModule, settings: Settings, patcher: Any, ending: ExitStack) -> None:
        self._module, self._patcher, self._ending = module, patcher, ending
        self._settings = settings
        self._runs: dict[str, Run] = {}
        self.sources: dict[str, ComfyUNetHalfSource] = {}
        self.is_refused = False
        self._missing: dict[CallShape, str | None] = {}

    def __call__(
        self,
        inputs: Tensors,
        control: Any,
        calls: ModelCalls,
        reference: Callable[[], Tensors],
    ) -> torch.Tensor | str | None:
        """One call of the model; why to wait, where engines for it are being built; None where the model runs whole.

        Args:
            calls: whose call it is.
            reference: the plain model's answer to the same call.
        """
        if not is_for_halves(control):
            return None
        call = CallShape.of(inputs)
        if call in self._missing or self.is_refused:
            return self._missing.get(call)
        run = self.run(ENCODER)
        middle = run.ask(inputs)
        if isinstance(middle, str):
            is_coming = run.is_coming(inputs)
            self._missing[call] = self._with_second(middle, inputs, control, calls) if is_coming else None
            return self._missing[call]
        rest = self._rest(middle, inputs, control, calls)
        if rest is None:
            return None
        run = self.run(DECODER)
        result = run.ask(rest)
        if isinstance(result, str):
            self.is_refused = True  # in this run: else each step would compute the first half in vain
            self._missing[call] = result if run.is_coming(rest) else None
            return self._missing[call]
        if not self._is_right(result, reference):
            return None
        return result["out"]

    def _with_second(self, reason: str, inputs: Tensors, control: Any, calls: ModelCalls) -> str | None:
        """Have the second half built while the first is: the live one shows what it will be given.

        Args:
            reason: why the first has no engine yet.

        Returns:
            Why to wait for both; None where the second cannot be had.
        """
        try:
            rest = self._rest(self.sources[ENCODER].eager(inputs), inputs, control, calls)
        except waiting_hooks().interruptions:
            raise
        except Exception as error:  # whatever ComfyUI's or other nodes' code raises: the whole model will show it
            log.debug("Slipstream: the model's first half by itself: %s", error)
            return None
        if rest is None:
            return None
        run = self.run(DECODER)
        missing = run.why_not(rest)
        if missing is None:
            return reason
        return missing if run.is_coming(rest) else None

    def _rest(self, middle: Tensors, inputs: Tensors, control: Any, calls: ModelCalls) -> Tensors | None:
        """What the second half is given, once the ControlNet is done; None where it takes no such residuals."""
        calls.join()
        residuals = residuals_of(control, inputs["x"])
        text = {"context": inputs["context"]} if "context" in inputs else {}
        return None if isinstance(residuals, str) else {**middle, **text, **residuals}

    @property
    def runs(self) -> list[Run]:
        """Those that have begun."""
        return list(self._runs.values())

    def half_of(self, run: Run) -> str | None:
        """Whose run it is."""
        return next((half for half, each in self._runs.items() if each is run), None)

    def answers(self, run: Run) -> bool:
        """Whether a run is that of the second half, which gives the model's answer."""
        return self.half_of(run) == DECODER

    def run(self, half: str) -> Run:
        """Of this half."""
        if half not in self._runs:
            source = ComfyUNetHalfSource(self._patcher, self._module.provider.weights_memo, half)
            self.sources[half] = source
            is_part = half == ENCODER  # both together are one call of the model
            run = self._module.run(source, waiting_hooks(), settings=self._settings, is_part=is_part)
            self._runs[half] = self._ending.enter_context(run)
        return self._runs[half]

    def _is_right(self, result: Tensors, reference: Callable[[], Tensors]) -> bool:
        """Each engine was compared with its half; whether the halves are the whole is asked once in a process."""
        if self.is_proved:
            return True
        disturb()
        error = relative_error(result, reference())
        source = self.sources[DECODER]
        precision, quantised = self._settings.compute_precision(source.precision), self._settings.quantised
        limit = max(LIMITS[source.precision], limit_of(precision, quantised))
        self.is_refused = not error <= limit
        if self.is_refused:
            self._module.status.note(
                f"the model in two halves differs from the whole by {say_share(error)}; it runs whole"
            )
        else:
            self._proved.add(self._case)
        return not self.is_refused

    @property
    def is_proved(self) -> bool:
        """Whether they were found to be what the whole model is."""
        return self._case in self._proved

    @property
    def _case(self) -> tuple[str, str]:
        source = self.sources[DECODER]
        return source.architecture.fingerprint.architecture, source.weights_digest()


def halves_of(
    module: AcceleratedModule,
    settings: Settings,
    source: ComfyUNetSource,
    patcher: Any,
    ending: ExitStack,
) -> Halves | None:
    """The halves of a model where they are wanted: on a GPU, where a ControlNet can run beside the first."""
    kind, wanted = source.architecture.kind, settings.levers.parallel
    if wanted == Parallel.OFF or (wanted == Parallel.AUTO and source.device.type != "cuda"):
        return None
    if settings.backend is BackendChoice.TENSORRT or settings.shapes is not ShapeChoice.EACH or settings.bake:
        return None
    return Halves(module, settings, patcher, ending) if can_be_halved(kind, source.architecture.config) else None
