"""Ratios that other projects published, beside our own: theirs are of other hardware of their day."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...core.spec import Precision
from ..subjects.variants import EAGER, EAGER_GRAPH, OURS
from .tables import Group

_ENGINE = f"{OURS}:compiled"


@dataclass(frozen=True)
class PublishedRatio:
    """
    Attributes:
        on: the model and the hardware, as far as they are named.
        said: in the project's own figures.
        ratio: how many times as fast as what it was compared with that makes it.
    """

    project: str
    on: str
    said: str
    ratio: float


CLAIMS = (
    PublishedRatio("TensorRT", "not named", "+25 % over PyTorch in fp16", 1.25),
    PublishedRatio("AITemplate", "not named", "+140 % over PyTorch in fp16", 2.4),
    PublishedRatio("VoltaML", "not named", "+150 % over PyTorch in fp16", 2.5),
    PublishedRatio("Diffusion, Fast", "SDXL, 30 steps, A100", "3.31 → 2.54 s, both in bf16", 3.31 / 2.54),
    PublishedRatio("Diffusion, Fast, with int8", "SDXL, 30 steps, A100", "3.31 → 2.43 s", 3.31 / 2.43),
    PublishedRatio("ComfyUI_stable_fast", "SD1.5, 512×512, RTX 3060 Mobile", "7.02 → 10.10 it/s", 10.10 / 7.02),
    PublishedRatio(
        "ComfyUI_stable_fast, TensorRT", "SD1.5, 512×512, RTX 3060 Mobile", "7.02 → 10.95 it/s", 10.95 / 7.02
    ),
    PublishedRatio("stable-fast", "SD1.5, RTX 4080", "29.5 → 51.6 it/s", 51.6 / 29.5),
    PublishedRatio("stable-fast", "SDXL, RTX 4080", "4.6 → 9.1 it/s", 9.1 / 4.6),
    PublishedRatio("stable-fast", "SD1.5, H100", "54.5 → 104.6 it/s", 104.6 / 54.5),
    PublishedRatio("onediff", "SDXL, 1024×1024, RTX 3090", "2.99 → 7.08 it/s", 7.08 / 2.99),
)


def section(groups: Sequence[Group]) -> str:
    """In Markdown; empty where no row of ours may stand beside them.

    Args:
        groups: the newest rows.
    """
    ours = list(_ours(groups))
    if not ours:
        return ""
    claims = [f"| {each.project} | {each.on} | {each.said} | {each.ratio:.2f}× |" for each in CLAIMS]
    return "\n".join([_HEAD, *claims, "", _OWN, *ours, ""])


def _ours(groups: Sequence[Group]) -> Iterator[str]:
    """Single calls in fp16, by each GPU and case."""
    for group in groups:
        times = {row["variant"]: row["ms"] for row in group.sound if row["precision"] == Precision.FP16.value}
        if group.is_job or EAGER not in times or _ENGINE not in times:
            continue
        graph = f"{times[EAGER_GRAPH] / times[_ENGINE]:.2f}×" if EAGER_GRAPH in times else ""
        yield f"| {group.case} | {group.gpu} | {times[EAGER] / times[_ENGINE]:.2f}× | {graph} |"


_HEAD = """## What other projects published

Published by those projects, on other hardware of their day: **none of it was measured by us.** What they compare
themselves with is of that day too, often an old PyTorch, fp32, or one without fused attention. What we measured side by
side stands in the tables above.

| project | model and hardware | published | ratio |
| --- | --- | --- | ---: |"""

_OWN = f"""Our own, of the newest rows in fp16: `{_ENGINE}` over the eager model of the same run. Where the CPU
holds the eager model up, much of that is the CPU's; over `{EAGER_GRAPH}` it is not.

| case | GPU | over `{EAGER}` | over `{EAGER_GRAPH}` |
| --- | --- | ---: | ---: |"""
