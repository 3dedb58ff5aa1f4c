"""What a matrix asks for, one by one, and what came of it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PACK = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Task:
    """One model at one size, for one kind of GPU.

    Attributes:
        words: of the command line, for everything but the model and its size.
        gpu: kind of GPU by Ray's name for it; None where any does.
    """

    model: str
    resolution: str
    words: tuple[str, ...] = ()
    gpu: str | None = None

    def command(self, options: Namespace, home: Path | None) -> list[str]:
        """The arguments of `slipstream` that carry it out."""
        line = ["build", "--json", "--model", self.model, "--resolution", self.resolution, *self.words]
        line += ["--home", str(home)] if home else []
        line += ["--comfyui", str(options.comfyui)] if options.comfyui else []
        line += ["--remote", options.remote] if options.remote else []
        return line + (["--check"] if options.check else [])


@dataclass
class Outcome:
    """What came of a task.

    Attributes:
        status: of the last attempt's process.
        where: the machine.
    """

    task: Task
    status: int
    seconds: float
    attempts: int
    where: str = "here"
    engines: list[Mapping[str, Any]] = field(default_factory=list)
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        row = {name: getattr(self, name) for name in ("status", "seconds", "attempts", "where", "engines", "error")}
        return {"model": self.task.model, "resolution": self.task.resolution, "gpu": self.task.gpu, **row}
