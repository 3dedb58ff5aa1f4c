"""What became of the blocks' calls in one call of their network."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

_ON_THEIR_WAY = "their engines are on their way, or are being compared"


@dataclass
class BlockShare:
    """What became of the blocks' calls in one call of the network.

    Attributes:
        engine: calls that engines computed.
        apart: those of them that no graph repeats, since their engine casts their weights itself.
        outside: those of them of which something was called out.
        waiting: calls whose engine is on its way, or is being compared.
        eager: calls by the reason for which the block computed itself.
        without: those of them for which there is no engine in this run.
    """

    engine: int = 0
    apart: int = 0
    outside: int = 0
    waiting: int = 0
    without: int = 0
    eager: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        """All calls."""
        return self.engine + self.waiting + self.eager.total()

    def add(self, other: BlockShare) -> None:
        """Count those of another one as well."""
        self.engine += other.engine
        self.apart += other.apart
        self.outside += other.outside
        self.waiting += other.waiting
        self.without += other.without
        self.eager.update(other.eager)

    @property
    def is_by_engines(self) -> bool:
        """Whether engines computed all blocks, and graphs may repeat what they did."""
        return self.engine > 0 and not (self.apart or self.waiting or self.eager)

    @property
    def is_by_engines_alone(self) -> bool:
        """Whether a graph may repeat all of it."""
        return self.is_by_engines and not self.outside

    @property
    def is_fruitless(self) -> bool:
        """Whether no block will have an engine in this run, for calls like this one."""
        return 0 < self.without == self.eager.total() and not self.engine and not self.waiting

    @property
    def why_none(self) -> str:
        """The reason for which most blocks computed themselves."""
        reasons = self.eager + Counter({_ON_THEIR_WAY: self.waiting})
        return max(reasons, key=lambda reason: reasons[reason], default="none of them was called")

    def __str__(self) -> str:
        return f"{self.engine} of {self.total} calls of blocks on engines"
