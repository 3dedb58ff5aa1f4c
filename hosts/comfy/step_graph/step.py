"""One step of a sampling run: what it consists of, and how it is computed as a whole."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ....core.protocols import Tensors
from ....core.streams import Branch
from ....runtime.loaded.cuda_graphs import inlined
from ....runtime.loaded.engine_pool import LoadedEngine
from ....runtime.module import AcceleratedModule, Served, noted
from ....runtime.settings.model_settings import Levers
from ..run.model_calls import ModelCalls, NotServed
from ..run.step_contents import Conditions, behind, conds_of, kind_of_control, kind_of_sampling

SERIAL, PARALLEL = "one after the other", "at the same time"
_WAIT = "called a synchronizing"
"""In torch's warning of an operation that waits for the GPU."""


class WaitsOnHost(RuntimeError):
    """A step asks the GPU for a number in its midst: no graph can hold that."""


@dataclass
class Pattern:
    """What a step turned out to be.

    Attributes:
        order: which prompts make up a batch, as ComfyUI put it together: 0 the prompt, 1 the negative one.
        served: calls of engines, of which the model's answer owns the graphs.
        is_known: whether pictures after this one may begin with it, see `first_step`.
        kinds: of the model's calls, see `ModelCalls`.
        residuals: shapes and dtypes of what ControlNets give, once known.
    """

    order: tuple[int, ...]
    served: list[Served]
    owner: LoadedEngine
    is_halved: bool
    way: str = SERIAL
    is_chosen: bool = False
    checked: bool = False
    is_known: bool = False
    residuals: dict[str, list[Any]] = field(default_factory=dict)
    kinds: tuple[Hashable, ...] = ()

    @property
    def engines(self) -> list[LoadedEngine]:
        """In the order of their calls."""
        return [each.offer.engine for each in self.served if each.offer.engine is not None]


class Step:
    """One step of a run, and how it is computed.

    Args:
        chain: of ControlNets, in the order in which they are computed.
        active: which of them this step is for.
        shape: of the latent.

    Attributes:
        kind: equal for steps that are the same work.
        calls: of the run.
    """

    def __init__(
        self,
        guider: Any,
        model_options: dict[str, Any],
        chain: list[Any],
        active: tuple[bool, ...],
        calls: ModelCalls,
        shape: torch.Size,
    ) -> None:
        self.guider = guider
        self.chain = chain
        self.active = active
        self.calls = calls
        self._options = model_options.get("transformer_options", {})
        self._model = guider.inner_model
        controls = tuple(
            kind_of_control(control) for control, is_active in zip(chain, active, strict=True) if is_active
        )
        prompts = bool(guider.conds.get("negative")), bool(model_options.get("disable_cfg1_optimization"))
        self.kind: Hashable = (
            kind_of_sampling(self._model), guider.cfg, prompts, calls.source.precision, active, controls, tuple(shape)
        )  # fmt: skip

    @property
    def levers(self) -> Levers:
        """As they were when the run began."""
        return self.calls.whole.settings.levers

    @property
    def used(self) -> list[Any]:
        """The ControlNets whose windows this step lies in."""
        return [control for control, is_active in zip(self.chain, self.active, strict=True) if is_active]

    def eager_calls(self, module: AcceleratedModule) -> int:
        """Calls so far that no engine of a whole model answered."""
        modules = {id(each): each for each in (module, *(control.acceleration.module for control in self.chain))}
        return sum(each.status.eager_calls + each.status.block_calls for each in modules.values())

    def pattern(self, served: list[Served]) -> Pattern | None:
        """What a step consisted of; None where that is not one call of each part."""
        order, halves = self.calls.options.get("cond_or_uncond"), self.calls.halves
        controls = {id(control.calls().run) for control in self.used}
        of_model = [each for each in served if id(each.run) not in controls]
        answers = [each for each in of_model if not each.run.is_part]
        if order is None or len(answers) != 1 or len(served) - len(of_model) != len(self.used):
            return None
        owner = answers[0].offer.engine
        is_halved = halves is not None and halves.answers(answers[0].run)
        if owner is None or sorted(order) not in ([0], [0, 1]) or len(of_model) != 1 + is_halved:
            return None
        return Pattern(tuple(order), list(served), owner, is_halved)

    def fits(self, pattern: Pattern, x: torch.Tensor) -> bool:
        """Whether engines and hints are those that the pattern was found with, so that nothing has to be made anew."""
        if not all(each.run.offers(each.offer) for each in pattern.served):
            return False
        return all(_fits(control, x, len(pattern.order)) for control in self.used)

    def generation(self, pattern: Pattern) -> Hashable:
        """Changes when an address that a captured graph reads is invalidated."""
        sampling = self._model.model_sampling
        tables = tuple(tensor.data_ptr() for tensor in (*sampling.parameters(), *sampling.buffers()))
        return tables, tuple(engine.engine.generation for engine in pattern.engines)

    def hints(self) -> Tensors:
        """The embedded hints by name, as they are in this run."""
        found: Tensors = {}
        for place, control in enumerate(self.used):
            for name, tensor in control.calls().embedding_of(control.cond_hint).items():
                found[f"hint_{place}_{name}"] = tensor
        return found

    def compute(self, pattern: Pattern, way: str, **tensors: torch.Tensor) -> Tensors:
        """The step by ComfyUI's own code, on engines alone and without a wait.

        Args:
            tensors: x, sigma, what conditions the model, and embedded hints.

        Raises:
            WaitsOnHost: ComfyUI's code asks the GPU for a number.
            NotServed: an engine did not answer.
        """
        with ExitStack() as ending:
            ending.enter_context(inlined())
            ending.enter_context(self.calls.whole_steps())
            served = ending.enter_context(noted())
            ending.enter_context(self._engines_only())
            self._decide(ending, tensors)
            if not pattern.checked and tensors["x"].device.type == "cuda":
                ending.enter_context(_without_waits())
            result = self._denoised(pattern, way, tensors)
            if [each.offer.engine for each in served] != pattern.engines:
                raise NotServed("a part of it did not run on its engine")
        pattern.checked = True
        return {"denoised": result}

    def _decide_windows(self, ending: ExitStack) -> None:
        for control, is_active in zip(self.chain, self.active, strict=True):
            ending.enter_context(control.decided(is_active))

    def _decide(self, ending: ExitStack, tensors: Tensors) -> None:
        self._decide_windows(ending)
        for place, control in enumerate(self.used):
            given = behind(f"hint_{place}_", tensors)
            ending.enter_context(control.calls().given(control.cond_hint, given))

    @contextmanager
    def _engines_only(self) -> Iterator[None]:
        self.calls.engines_only = True
        try:
            yield
        finally:
            self.calls.engines_only = False
            self.calls.join = lambda: None

    def prepare_hints(self, order: tuple[int, ...], tensors: Tensors) -> None:
        """Have all hints embedded, which a first step does in passing.

        Args:
            tensors: x, sigma, and what conditions the model.

        Raises:
            NotServed: an engine may not answer.
        """
        if not any(self.active):
            return
        with ExitStack() as ending:
            self._decide_windows(ending)
            for control in self.used:
                ending.enter_context(control.calls().hint_only())
            batch, times, given = self._as_batch(order, tensors)
            self.chain[-1].get_control(batch, times, given, len(order), given["transformer_options"])

    def _as_batch(self, order: tuple[int, ...], tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """The latents, their noise, and everything else that the model is called with."""
        x, sigma = tensors["x"], tensors["sigma"]
        given: dict[str, Any] = Conditions.named(tensors)
        uuids = [cond.get("uuid") for cond in conds_of(self.guider, order)]
        options = {**self._options, "cond_or_uncond": list(order), "uuids": uuids}
        given["transformer_options"] = {**options, "sigmas": sigma}
        return torch.cat([x] * len(order)), torch.cat([sigma] * len(order)), given

    def _denoised(self, pattern: Pattern, way: str, tensors: Tensors) -> torch.Tensor:
        x = tensors["x"]
        batch, times, given = self._as_batch(pattern.order, tensors)
        if any(self.active):
            given["control"] = self._control(pattern, way, batch, times, given)
        parts = self._model.apply_model(batch, times, **given).chunk(len(pattern.order))
        self.calls.join()
        predicted = dict(zip(pattern.order, parts, strict=True))
        without = predicted.get(1, torch.zeros_like(x))
        result: torch.Tensor = without + (predicted[0] - without) * self.guider.cfg
        return result

    def _control(
        self, pattern: Pattern, way: str, batch: torch.Tensor, times: torch.Tensor, given: dict[str, Any]
    ) -> dict[str, list[Any]]:
        def ask() -> dict[str, list[Any]]:
            options = given["transformer_options"]
            found: dict[str, list[Any]] = self.chain[-1].get_control(batch, times, given, len(pattern.order), options)
            return found

        if way == SERIAL or not pattern.residuals:
            control = ask()
            pattern.residuals = {kind: [_like(tensor) for tensor in control[kind]] for kind in control}
            return control
        return self._beside(pattern, ask, batch.device)

    def _beside(self, pattern: Pattern, ask: Callable[[], dict[str, list[Any]]], device: torch.device) -> Any:
        """The ControlNets on a second stream, until the model needs what they give."""
        places = {
            kind: [made if made is None else torch.empty_strided(*made[0], **made[1]) for made in entries]
            for kind, entries in pattern.residuals.items()
        }
        branch = Branch(device)
        with branch.begin():
            _copy_all(ask(), places)
        self.calls.join = branch.join
        return places


def _fits(control: Any, x: torch.Tensor, count: int) -> bool:
    hint, scale = control.cond_hint, control.compression_ratio
    if hint is None or not control.calls().embedding_of(hint):
        return False
    sizes = [side * scale for side in x.shape[-2:]]
    return hint.shape[0] in (1, count * x.shape[0]) and list(hint.shape[-2:]) == sizes


def _copy_all(control: dict[str, list[Any]], places: dict[str, list[Any]]) -> None:
    """A function of its own: what was allocated for `control` is free again when it ends."""
    for kind, entries in places.items():
        for place, tensor in zip(entries, control[kind], strict=True):
            if place is not None:
                place.copy_(tensor)


def _like(tensor: torch.Tensor | None) -> Any:
    """How to allocate a tensor of the same kind."""
    if tensor is None:
        return None
    return (tuple(tensor.shape), tensor.stride()), {"dtype": tensor.dtype, "device": tensor.device}


@contextmanager
def _without_waits() -> Iterator[None]:
    """
    Raises:
        WaitsOnHost: something inside waited for the GPU.
    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
    waits = [str(warning.message) for warning in heard if _WAIT in str(warning.message)]
    if waits:
        raise WaitsOnHost(f"a part of it waits for the GPU ({waits[0]})")
