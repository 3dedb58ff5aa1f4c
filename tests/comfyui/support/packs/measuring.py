"""One feature of a pack on tiny models: the picture without Slipstream and with it, and who computed it."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from slipstream.core.spec import Optimize
from slipstream.hosts.comfy.accelerate import accelerate_model
from slipstream.hosts.comfy.block_calls.block_calls import BlockCalls
from slipstream.hosts.comfy.block_calls.block_share import BlockShare
from slipstream.runtime.module import AcceleratedModule
from slipstream.runtime.provider import EngineProvider
from slipstream.runtime.settings.model_settings import BuildPolicy, Settings
from slipstream.tests.comfyui.support.models import tiny
from slipstream.tests.tensors import distance

from .loading import PackFailed

Patcher = Any
ORDERS = ("before", "after", "later")
"""Before or after Accelerate Model in the workflow; later: after, and a picture without the pack's node came first."""
BY_BLOCKS = "by blocks"
"""In the place of an order: after, with engines of blocks alone."""


def unchanged(patcher: Patcher) -> Patcher:
    return patcher


@dataclass(frozen=True)
class Feature:
    """What one node of a pack does to a model.

    Attributes:
        name: for people, as the pack calls it.
        apply: the node; given a model, it returns the model that is sampled.
        family: of the tiny model.
        options: for sampling; made anew for each picture.
        sample: takes the place of ComfyUI's own KSampler where the pack samples by itself.
        baseline: what is compared with where the pack gives something else than a latent.
        make: takes the place of the family's tiny model where the pack loads models.
        changes: whether the picture becomes another one; a pack's faster attention does not change it.
    """

    name: str
    apply: Callable[[Patcher], Patcher] = unchanged
    family: str = "sd15"
    options: Callable[[], dict[str, Any]] = dict
    sample: Callable[[Patcher], torch.Tensor] | None = None
    baseline: Callable[[], torch.Tensor] | None = None
    make: Callable[[], Patcher] | None = None
    changes: bool = True

    @property
    def used(self) -> bool:
        """Whether a node of the pack takes part."""
        return not (self.apply is unchanged and self.sample is None and self.make is None)

    def model(self) -> Patcher:
        """A new model, so that nothing is left of the picture before."""
        if self.make is not None:
            return self.make()
        return tiny.transformer(self.family) if self.family in tiny.TRANSFORMERS else tiny.model(self.family)

    def plain_picture(self, patcher: Patcher) -> torch.Tensor:
        """By ComfyUI's own sampler."""
        return tiny.sample(patcher, self.family, **{"steps": STEPS, **self.options()})

    def picture(self, patcher: Patcher) -> torch.Tensor:
        """As the pack samples it."""
        return self.sample(patcher) if self.sample else self.plain_picture(patcher)


STEPS = 6


@dataclass
class Row:
    """What was measured of a feature in one order.

    Attributes:
        effect: how far the pack's node takes the picture from the one without it; relative, as the errors are.
        error: of the accelerated picture against the one that ComfyUI makes with the pack's node alone.
        error_afterwards: of a further picture by the accelerated model without the pack's node, against what
            ComfyUI makes of that model then.
        used: whether a node of the pack was.
        changes: whether it is meant to change the picture.
        broken: why the pack itself fails in this ComfyUI; nothing was measured then.
        blocks: calls of blocks in the picture, by blocks.
        blocks_on_engines: those of them that engines computed.
    """

    pack: str
    feature: str
    family: str
    order: str
    effect: float = 0.0
    error: float = 0.0
    error_afterwards: float = 0.0
    engine_calls: int = 0
    eager_calls: int = 0
    reasons: list[str] = field(default_factory=list)
    used: bool = True
    changes: bool = True
    broken: str = ""
    blocks: int = 0
    blocks_on_engines: int = 0

    def to_json(self) -> dict[str, Any]:
        """As a line of the file of rows."""
        return asdict(self)


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """How far two pictures are apart."""
    if found.shape != wanted.shape:
        return float("inf")
    return distance(found, wanted)


class Measurement:
    """Accelerates models with engines of one provider."""

    def __init__(self, pack: str, provider: EngineProvider) -> None:
        self.pack = pack
        self.provider = provider

    @torch.inference_mode()  # as ComfyUI runs nodes
    def rows(self, feature: Feature, orders: tuple[str, ...] = ORDERS) -> list[Row]:
        """Measure a feature in each order."""
        try:
            plain = feature.baseline() if feature.baseline else feature.plain_picture(feature.model())
            wanted = feature.picture(feature.apply(feature.model()))
        except Exception as failure:  # whatever a pack raises
            return [Row(self.pack, feature.name, feature.family, orders[0], broken=_last_line(failure))]
        effect = relative(wanted, plain)
        return [self._row(feature, order, wanted, effect) for order in orders]

    @torch.inference_mode()
    def row_by_blocks(self, feature: Feature) -> Row:
        """Measure a feature with engines of blocks alone.

        A picture without the pack's node comes first. With it one later than the first is measured, in which engines
        are built, and the next ones, in which those of all sizes that come up are compared.
        """
        row = Row(self.pack, feature.name, feature.family, BY_BLOCKS, used=feature.used, changes=feature.changes)
        try:
            plain = feature.baseline() if feature.baseline else feature.plain_picture(feature.model())
            eager = feature.apply(feature.model())
            wanted = [feature.picture(eager) for _ in range(_WARM + 1)][-1]  # some packs keep things for the next one
        except Exception as failure:  # whatever a pack raises
            row.broken = _last_line(failure)
            return row
        module = AcceleratedModule(self.provider, Settings(policy=BuildPolicy.FIRST_USE, optimize=Optimize.BLOCKS))
        fast = accelerate_model(feature.model(), module)
        feature.plain_picture(fast)
        patched = feature.apply(fast)
        for _ in range(_WARM):
            feature.picture(patched)
        before = _counts(module)
        with _share_of_calls() as share:
            found = feature.picture(patched)
        after = _counts(module)
        row.effect, row.error = relative(wanted, plain), relative(found, wanted)
        row.blocks_on_engines, row.blocks = share.engine, share.engine + share.waiting + share.eager.total()
        row.engine_calls, row.eager_calls = (new - old for new, old in zip(after[:2], before[:2], strict=True))
        reasons = [*share.eager, *(["their engines were on their way"] if share.waiting else [])]
        row.reasons = reasons or [why for why, count in after[2].items() if count > before[2].get(why, 0)]
        return row

    def _row(self, feature: Feature, order: str, wanted: torch.Tensor, effect: float) -> Row:
        row = Row(self.pack, feature.name, feature.family, order, effect)
        row.used, row.changes = feature.used, feature.changes
        model = feature.model()
        module = AcceleratedModule(self.provider, Settings(policy=BuildPolicy.FIRST_USE))
        if order == "before":
            fast = patched = accelerate_model(feature.apply(model), module)
        else:
            fast = accelerate_model(model, module)
            if order == "later":
                feature.plain_picture(fast)
            patched = feature.apply(fast)
        before = _counts(module)
        found = feature.picture(patched)
        after = _counts(module)
        row.engine_calls, row.eager_calls = (new - old for new, old in zip(after[:2], before[:2], strict=True))
        row.reasons = [why for why, count in after[2].items() if count > before[2].get(why, 0)]
        row.error = relative(found, wanted)
        if order == "later":
            row.error_afterwards = relative(feature.plain_picture(fast), feature.plain_picture(model))
        return row


_WARM = 2
"""Pictures before the one whose calls of blocks are counted."""


@contextmanager
def _share_of_calls() -> Iterator[BlockShare]:
    """What becomes of all calls of blocks meanwhile."""
    sum_of, call = BlockShare(), BlockCalls.__call__

    def counted(calls: BlockCalls, *args: Any, **kwargs: Any) -> Any:
        result = call(calls, *args, **kwargs)
        sum_of.engine += calls.share.engine
        sum_of.waiting += calls.share.waiting
        sum_of.eager += calls.share.eager
        return result

    BlockCalls.__call__ = counted  # type: ignore[method-assign]
    try:
        yield sum_of
    finally:
        BlockCalls.__call__ = call  # type: ignore[method-assign]


def _counts(module: AcceleratedModule) -> tuple[int, int, dict[str, int]]:
    status = module.status.to_json()
    return status["engine_calls"], status["eager_calls"], dict(status["reasons"])


def _last_line(failure: Exception) -> str:
    if isinstance(failure, PackFailed):
        return str(failure)
    where = traceback.extract_tb(failure.__traceback__)[-1]
    return f"{type(failure).__name__}: {str(failure)[:200]} ({where.filename.rsplit('/', 1)[-1]}:{where.lineno})"
