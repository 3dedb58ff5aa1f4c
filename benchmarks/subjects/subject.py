"""What a case is about: a model whose single calls are measured, or a job, which is a whole picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ...core.protocols import Tensors
from ...core.shapes import Shape
from ...core.spec import Precision, Quantised
from .rows import Row


@dataclass(frozen=True)
class Example:
    """Inputs and what fp32 makes of them."""

    inputs: Any
    reference: Tensors


class Judge(Protocol):
    """Says how far off a result is, and whether that is too far."""

    def errors(self, given: Tensors, reference: Tensors) -> dict[str, float]:
        """Relative to fp32, by output."""

    def limit(
        self, output: str, precision: Precision, is_ours: bool, quantised: Quantised | None = None, skips: bool = False
    ) -> float:
        """The largest error of a row that may be trusted.

        Args:
            quantised: what large linear layers multiply in, where not in `precision`.
            skips: steps, and so makes a picture that is a little different on purpose.
        """

    def doubts(self, precision: Precision) -> str | None:
        """What a row may get wrong and still be trusted; None where nothing is known of it."""

    def facts(self, errors: Mapping[str, float]) -> Row:
        """Further fields of a row."""


class Subject(Protocol):
    """
    Attributes:
        sets: of inputs that the calls rotate through.
        unseen: further sets, which are kept for the last check.
        engine_calls: that one call makes where all of it runs on engines.
    """

    @property
    def device(self) -> torch.device: ...
    @property
    def precision(self) -> Precision: ...
    @property
    def shapes(self) -> Mapping[str, Shape]: ...
    @property
    def sets(self) -> int: ...
    @property
    def unseen(self) -> int: ...
    @property
    def engine_calls(self) -> int: ...

    def inputs(self, seed: int) -> Any:
        """What one call takes."""

    def references(self, inputs: Sequence[Any]) -> list[Tensors]:
        """What plain fp32 makes of each."""

    def judge(self, examples: Sequence[Example]) -> Judge:
        """Of this subject's results."""

    def milliseconds(self, compute: Callable[[], object]) -> float:
        """Of one call."""


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
