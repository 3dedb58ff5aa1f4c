"""docs/step-skipping.md and its chart, from the rows. The same rows give the same bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ...sampling.measured import CFG, MEASURED, closeness
from ...sampling.presets import PRESETS
from ...sampling.samplers import kind_of
from ..page import DOCS, write
from . import protocol
from .curve import Series, curves
from .results import Row, is_judged, read

NAME = "step-skipping"
HELP = DOCS.parent / "web" / "js" / "docs" / "SlipstreamStepSkip" / "en.md"
_BEGIN, _END = "<!-- figures -->", "<!-- end of figures -->"


def write_page(results: Path) -> None:
    """Write page and chart, and the figures that the nodes show."""
    rows = read(results)
    text, picture = page(rows)
    write(DOCS / f"{NAME}.md", text)
    write(DOCS / f"{NAME}.svg", picture)
    write(MEASURED, measured(rows))
    write(HELP, with_figures(HELP.read_text(encoding="utf-8")))


def with_figures(text: str) -> str:
    """Step Skip's help page, its figures renewed from `MEASURED`."""
    before, _, behind = text.partition(_BEGIN)
    _, _, after = behind.partition(_END)
    head = " | ".join(f"of {steps} steps" for steps in protocol.STEPS)
    lines = [f"| Preset | {head} |", "|---" * (1 + len(protocol.STEPS)) + "|"]
    for name in PRESETS:
        lines.append(" | ".join([f"| `{name}`", *(closeness(name, steps) for steps in protocol.STEPS)]) + " |")
    return "\n".join([before + _BEGIN, "", *lines, "", _END + after])


def measured(rows: Sequence[Row]) -> str:
    """What `sampling.measured` reads: dB to the N-step picture by preset and steps, from the least close sampler to the
    closest."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in (row for row in rows if is_judged(row) and row["cfg"] == CFG):
        nominal = min(protocol.STEPS, key=lambda steps: abs(steps - row["steps"]))  # ddim_uniform has one more or less
        found.setdefault(row["preset"], {}).setdefault(str(nominal), []).append(row["psnr_db"])
    ranges = {
        preset: {steps: [round(min(each)), round(max(each))] for steps, each in sorted(by_steps.items())}
        for preset, by_steps in found.items()
    }
    return json.dumps(ranges, indent=2) + "\n"


def page(rows: Sequence[Row]) -> tuple[str, str]:
    """The page in Markdown, and the chart in SVG."""
    judged = [row for row in rows if is_judged(row)]
    by_case = {case: [row for row in rows if row.get("case") == case] for case in ("machine", "overhead", "hackathon")}
    parts = [
        _HEAD,
        _presets(),
        _circumstances(by_case["machine"], judged),
        *_sections(judged),
        _control(judged),
        _hackathon(by_case["hackathon"]),
        _overhead(by_case["overhead"]),
        _YOURSELF,
    ]
    return "\n".join(part for part in parts if part), curves(_series(judged))


def _presets() -> str:
    lines = [f"| preset | steps computed of {', '.join(map(str, protocol.STEPS))} | |", "|---|---|---|"]
    for preset in PRESETS.values():
        counts = ", ".join(str(len(preset.selection.computed(steps))) for steps in protocol.STEPS)
        lines.append(f"| `{preset.name}` | {counts} | {preset.note} |")
    return "\n".join([*lines, ""])


def _circumstances(machine: Sequence[Row], judged: Sequence[Row]) -> str:
    if not machine or not judged:
        return "Nothing has been measured yet.\n"
    on = machine[-1]
    driver = f", driver {on['driver']}" if on.get("driver") else ""
    samples = max(row["samples"] for row in judged)
    commits = ", ".join(sorted({str(row["commit"])[:12] for row in judged}))
    done, wanted = len({_condition(row) for row in judged}), len(protocol.conditions())
    text = (
        f"{on['gpu']}{driver}, {on['precision']}, torch {on['torch']}, ComfyUI {on['comfyui']}, {samples} samples a "
        f"row, commit {commits}. {done} of the protocol's {wanted} conditions are measured.\n"
    )
    return text + "\n![closeness against computed steps](step-skipping.svg)\n"


def _sections(judged: Sequence[Row]) -> Iterator[str]:
    for sampler, scheduler in protocol.SAMPLERS:
        rows = [row for row in judged if (row["sampler"], row["scheduler"]) == (sampler, scheduler)]
        if rows:
            yield "\n".join([f"## {sampler}, {scheduler} ({kind_of(sampler).value})\n", *_table(rows), ""])


def _table(rows: Sequence[Row]) -> Iterator[str]:
    yield "| steps | CFG | preset | computed | dB | plain, same time | dB | gain, dB | to converged: N, preset, plain |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in sorted(rows, key=lambda row: (row["steps"], row["cfg"], list(PRESETS).index(row["preset"]))):
        last = row.get("converged_db")
        converged = ", ".join(f"{last[name]:.1f}" for name in ("full", "preset", "best_plain")) if last else ""
        yield (
            f"| {row['steps']} | {row['cfg']:g} | `{row['preset']}` | {row['computed']} | {row['psnr_db']:.1f} | "
            f"{row['best_plain']} | {row['best_plain_db']:.1f} | {_gain(row)} | {converged} |"
        )


def _gain(row: Row) -> str:
    text = f"{row['gain_db']:+.2f} [{row['ci_low']:+.2f}, {row['ci_high']:+.2f}]"
    return f"**{text}**" if row["ci_low"] > 0 else text


def _control(judged: Sequence[Row]) -> str:
    with_random = [row for row in judged if "random_db" in row]
    if not with_random:
        return ""
    behind = sorted(row["psnr_db"] - row["random_db"] for row in with_random)
    return (
        "## Negative control\n\n"
        f"The same number of steps as `balanced`, at random places: {behind[0]:.1f} to {behind[-1]:.1f} dB behind it, "
        f"{behind[len(behind) // 2]:.1f} dB in the median of {len(behind)} conditions.\n"
    )


def _hackathon(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    lines = [
        _HACKATHON,
        "| CFG | 10 computed steps | latent, dB | picture, dB | SSIM | the list ahead, dB |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['cfg']:g} | {row['way']} | {row['psnr_db']:.1f} | {row['decoded_psnr_db']:.1f} | "
            f"{row['ssim']:.3f} | {_ahead(row)} |"
        )
    return "\n".join([*lines, ""])


def _ahead(row: Row) -> str:
    if row["list_ahead_db"] is None:
        return ""
    return f"{row['list_ahead_db']:+.2f} [{row['ci_low']:+.2f}, {row['ci_high']:+.2f}]"


def _overhead(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    lines = ["## What a skipped step costs\n", "At the size of SDXL's latents, [1, 4, 128, 128]:\n"]
    lines += ["| rule | GPU, ms | host, ms |", "|---|---|---|"]
    for rule, cost in rows[-1]["rules"].items():
        lines.append(f"| {rule} | {cost['device_ms']:.3f} | {cost['host_ms']:.3f} |")
    return "\n".join([*lines, ""])


def _series(judged: Sequence[Row]) -> list[tuple[str, list[Series]]]:
    """For the chart: a panel a sampler, at the CFG and number of steps that most people use."""
    panels = []
    for sampler, scheduler in protocol.SAMPLERS:
        chosen = [row for row in judged if (row["sampler"], row["scheduler"], row["cfg"]) == (sampler, scheduler, 4.0)]
        twenty = sorted((row for row in chosen if row["steps"] in (20, 21) and row["preset"] != "hackathon"), key=_cost)
        if twenty:
            panels.append((f"{sampler}, {scheduler}", [_points("presets", twenty, "psnr_db"), _plain(twenty)]))
    return panels


def _points(name: str, rows: Sequence[Row], field: str) -> Series:
    return Series(name, tuple((float(row["computed"]), float(row[field])) for row in rows))


def _plain(rows: Sequence[Row]) -> Series:
    points = {(float(row["best_plain_computed"]), float(row["best_plain_db"])) for row in rows}
    return Series("closest plain way, same time", tuple(sorted(points)))


def _cost(row: Row) -> Any:
    return row["computed"]


def _condition(row: Row) -> tuple[Any, ...]:
    return row["sampler"], row["scheduler"], row["cfg"], row["steps"]


_HEAD = """# Step skipping, measured

All steps of the sampler are kept; the model is computed in some of them. How close is the picture to the one with every
step computed, and is there a plain way to come closer in the same time? [The protocol](../benchmarks/step_skipping.md)
was written down first.

The figures are of the demo model, 256×256, and of nothing else: on your own model, ask Skip Calibrate. Closeness is
PSNR in dB of the final latent to the N-step picture's. A gain in bold type lies above 0 with 95 % confidence.
"""

_HACKATHON = """## The hackathon's list

Canny ControlNet, 20 steps of DDIM on `ddim_uniform`, whose 20 steps begin at timestep 951 and whose 10 at 901: 10 plain
steps begin at another noise level than the 20, so that part of their distance comes before any step is left out. `every
other of the 20` begins where the 20 do. With DDIM and Euler the list, each step held, is exactly DDIM on the sigmas of
the listed steps: a schedule. `the list ahead` is its PSNR less the other's.
"""

_YOURSELF = """## Measure it yourself

    python benchmarks/step_skipping.py            # samples and scores; hours without a GPU
    python benchmarks/step_skipping.py --page     # writes this page
"""
