"""Tables of docs/step-skipping.md, each with what has to be known to read it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from ...sampling.presets import HISTORICAL, PRESETS, Preset
from ...sampling.samplers import kind_of
from . import fit
from .samples import protocol
from .samples.results import Row

_FURTHER = "†"


def presets() -> str:
    lines = [f"| preset | steps computed of {', '.join(map(str, protocol.STEPS))} | |", "|---|---|---|"]
    for preset in PRESETS.values():
        counts = ", ".join(str(len(preset.selection.computed(steps))) for steps in protocol.STEPS)
        lines.append(f"| `{preset.name}` | {counts} | {preset.note} |")
    return "\n".join([*lines, ""])


def in_short(judged: Sequence[Row]) -> str:
    """By sampler and preset the least and the greatest gain over its conditions."""
    if not judged:
        return ""
    lines = [
        "## In short\n",
        "By how many dB a preset is closer to the N-step picture than the closest plain way in the same time: from the "
        "least to\nthe greatest of the conditions with CFG above 1. In bold type: what is shipped, where it reaches "
        "its floor.\n",
        f"| sampler | {' | '.join(f'`{name}`' for name in PRESETS)} |",
        "|---" * (1 + len(PRESETS)) + "|",
    ]
    for sampler, scheduler in protocol.SAMPLERS:
        of_it = [row for row in judged if (row["sampler"], row["scheduler"]) == (sampler, scheduler) and row["cfg"] > 1]
        cells = [_gains([row for row in of_it if row["preset"] == name]) for name in PRESETS]
        lines.append(f"| {sampler}, {scheduler} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _gains(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    gains = [row["gain_db"] for row in rows]
    text = f"{min(gains):+.1f} to {max(gains):+.1f}"
    return f"**{text}**" if all(row["shipped"] for row in rows) else text


def of_samplers(judged: Sequence[Row]) -> Iterator[str]:
    for sampler, scheduler in protocol.SAMPLERS:
        rows = [row for row in judged if (row["sampler"], row["scheduler"]) == (sampler, scheduler)]
        if rows:
            yield "\n".join([f"## {sampler}, {scheduler} ({kind_of(sampler).value})\n", *_of_sampler(rows), ""])


def _of_sampler(rows: Sequence[Row]) -> Iterator[str]:
    yield (
        "| steps | CFG | preset | computed | dB: mean, median, pooled | picture, dB | plain, same time | "
        "dB: mean, median, pooled | gain, dB | worst tenth | to converged: N, preset, plain |"
    )
    yield "|---" * 11 + "|"
    for row in sorted(rows, key=lambda row: (row["steps"], row["cfg"], list(PRESETS).index(row["preset"]))):
        yield f"| {row['steps']} | {row['cfg']:g} | {_cells(row)} | {_converged(row)} |"
    if any(row.get("no_cache_rival") for row in rows):
        yield "\n‡: neither EasyCache nor LazyCache took about the preset's time, so neither is among the rivals."


def _cells(row: Row) -> str:
    tenth = row.get("worst_tenth_gain_db")
    mark = " ‡" if row.get("no_cache_rival") else ""
    return (
        f"`{row['preset']}` | {row['computed']} | {_averages(row, '')} | {_picture(row)} | {row['best_plain']}{mark} | "
        f"{_averages(row, 'best_plain_')} | {_gain(row)} | {'' if tenth is None else format(tenth, '+.1f')}"
    )


def _averages(row: Row, of: str) -> str:
    """Mean, median and pooled, as far as a row has them."""
    mean = row[f"{of}db" if of else "psnr_db"]
    found = [mean, *(row[f"{of}{name}_db"] for name in ("median", "pooled") if f"{of}{name}_db" in row)]
    return ", ".join(f"{each:.1f}" for each in found)


def _picture(row: Row) -> str:
    return f"{row['decoded']['preset']['psnr_db']:.1f}" if "decoded" in row else ""


def _gain(row: Row) -> str:
    text = f"{row['gain_db']:+.2f} [{row['ci_low']:+.2f}, {row['ci_high']:+.2f}]"
    return f"**{text}**" if row["ci_low"] > 0 else text


def _converged(row: Row) -> str:
    last = row.get("converged_db")
    if not last:
        return ""
    figures = ", ".join(f"{last[name]:.1f}" for name in ("full", "preset", "best_plain"))
    return f"{figures} {_FURTHER}" if is_further(row) else figures


def is_further(row: Row) -> bool:
    """Whether the full run itself is further from the converged picture than the closest plain way."""
    last = row.get("converged_db")
    return last is not None and bool(last["full"] < last["best_plain"])


def further(judged: Sequence[Row]) -> str:
    """What the mark means; nothing where no row has it."""
    marked = [row for row in judged if is_further(row)]
    if not marked:
        return ""
    return (
        f"{_FURTHER} ({len(marked)} rows): the plain way is closer to the converged picture than the full run itself. "
        "There the full run has not settled, and how close a preset comes to it says little.\n"
    )


def control(judged: Sequence[Row]) -> str:
    with_random = [row for row in judged if "random_db" in row]
    if not with_random:
        return ""
    behind = sorted(row["psnr_db"] - row["random_db"] for row in with_random)
    masks = max(len(row.get("random_db_each", [0])) for row in with_random)
    places = "at random places" if masks == 1 else f"at random places, the mean of {masks} draws"
    return (
        "## Negative control\n\n"
        f"The same number of steps as `balanced`, {places}: {behind[0]:.1f} to {behind[-1]:.1f} dB behind it, "
        f"{behind[len(behind) // 2]:.1f} dB in the median of {len(behind)} conditions.\n"
    )


def beside(title: str, about: str, rows: Sequence[Row]) -> str:
    """A section of rows beside the grid."""
    if not rows:
        return ""
    lines = [
        f"## {title}\n",
        f"{about}\n",
        "| sampler | preset | computed | dB | picture, dB | plain, same time | dB | gain, dB | worst tenth |",
        "|---" * 9 + "|",
        *(f"| {row['sampler']}, {row['scheduler']} | {_cells(row)} |" for row in rows),
    ]
    return "\n".join([*lines, ""])


def floors(judged: Sequence[Row], closer: Sequence[Row]) -> str:
    """How close the decoded pictures of what is shipped come, and where that is too little."""
    if not judged:
        return ""
    lines = [
        _FLOORS,
        f"| sampler | preset | floor | CFG | {' | '.join(f'of {steps}' for steps in protocol.STEPS)} |",
        "|---" * (4 + len(protocol.STEPS)) + "|",
    ]
    for (sampler, scheduler), preset, cfg in itertools.product(protocol.SAMPLERS, PRESETS.values(), protocol.CFGS):
        found = [row for row in judged if _is_of(row, sampler, scheduler, cfg, preset.name) and row["shipped"]]
        if found and preset.name != HISTORICAL:
            cells = [_against_floor(row, preset, closer) for row in sorted(found, key=lambda row: float(row["steps"]))]
            lines.append(
                f"| {sampler}, {scheduler} | `{preset.name}` | {preset.floor:g} | {cfg:g} | {' | '.join(cells)} |"
            )
    return "\n".join([*lines, ""])


def _is_of(row: Row, sampler: str, scheduler: str, cfg: float, preset: str) -> bool:
    return (row["sampler"], row["scheduler"], row["cfg"], row["preset"]) == (sampler, scheduler, cfg, preset)


def _against_floor(row: Row, preset: Preset, closer: Sequence[Row]) -> str:
    reached = row["decoded"]["preset"]["psnr_db"]
    if reached >= preset.floor:
        return f"{reached:.1f}"
    name = row["condition"], preset.name
    more = next((each for each in closer if (each["condition"], each["preset"]) == name), None)
    if more is None:
        return f"{reached:.1f} ✗"
    return f"{reached:.1f} ✗, with {more['computed']} steps {more['decoded']['preset']['psnr_db']:.1f}"


def closer(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    lines = [
        _CLOSER,
        "| sampler | CFG | steps | preset | computed | dB: mean, median, pooled | picture: mean, median, pooled | "
        "plain, as many steps | dB | gain, dB |",
        "|---" * 10 + "|",
    ]
    for row in rows:
        lines.append(
            f"| {row['sampler']}, {row['scheduler']} | {row['cfg']:g} | {row['steps']} | `{row['preset']}` | "
            f"{row['computed']} | {_averages(row, '')} | {_averages(row['decoded']['preset'], '')} | "
            f"{row['best_plain']} | {row['best_plain_db']:.1f} | {_gain(row)} |"
        )
    return "\n".join([*lines, ""])


def image_to_image(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    powers = list(rows[0]["by_power"])
    heads = [f"power {power}" for power in powers]
    lines = [
        _IMAGE_TO_IMAGE.format(samples=max(row["samples"] for row in rows), size=rows[0]["size"]),
        f"| sampler | CFG | denoise | begins with | computed | {' | '.join(heads)} | plain, as many steps | gain, dB |",
        "|---" * (7 + len(powers)) + "|",
    ]
    for row in rows:
        cells = [_averages(row["decoded"][each], "") for each in (*powers, "best_plain")]
        lines.append(
            f"| {row['sampler']}, {row['scheduler']} | {row['cfg']:g} | {row['denoise']:g} | {row['begins_with']} | "
            f"{row['computed']} of {row['steps']} | {' | '.join(cells)} | {_gain(row)} |"
        )
    return "\n".join([*lines, ""])


def fitted(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    lines = [f"## How rules and powers were chosen\n\n{_FIT}\n", *fit.table(rows)]
    return "\n".join([*lines, ""])


def hackathon(rows: Sequence[Row]) -> str:
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


def overhead(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    lines = ["## What a skipped step costs\n", "At the size of SDXL's latents, [1, 4, 128, 128]:\n"]
    lines += ["| rule | GPU, ms | host, ms |", "|---|---|---|"]
    for rule, cost in rows[-1]["rules"].items():
        lines.append(f"| {rule} | {cost['device_ms']:.3f} | {cost['host_ms']:.3f} |")
    return "\n".join([*lines, ""])


_FIT = """On captions that no preset is judged on, by share of the steps: rule and power that are closest to the full
run in the mean of the conditions, and the closest plain way in the same time. `least ahead`: the smallest lead of the
closest over the plain way in any of the conditions, and where that is. Dashes: rows of before medians and pooled errors
were kept.

‡: in some conditions the shortened schedule was tried with a power of 2 alone, and what is closest has another one. Its
rival of the same power may be closer than the plain way that is shown, so the lead is at most what is written. (With
Euler, holding is the shortened schedule; where it was tried with other powers, that counts.) Where fewer conditions
were tried than with other shares, the row's figures cannot be compared with theirs."""

_FLOORS = """## The floor

To be closer than plain ways is not to be close. PSNR in dB of the decoded picture to that of all steps, the mean of the
samples, by CFG and steps, of what is shipped by its gains. A preset computes every step where it misses its floor (✗),
unless more steps reach it. Runs between two of these cases are taken for the harder one; samplers that were not
measured for the least close of their kind. `hackathon`, which is not judged by its gains, has a floor of 30, too.
"""

_CLOSER = """## More steps where a preset misses its floor

Steps that reach it were looked for on the judged captions themselves, on a CPU, with few samples.
"""

_IMAGE_TO_IMAGE = """## Image to image

Runs that begin with a picture (denoise below 1, hires fix): {samples} of the captions, pictures of {size}×{size}, on a
CPU. PSNR in dB of the decoded picture to that of all steps (mean, median, pooled) with the steps of `balanced` spread
by several powers: 1 spreads them evenly, 1.5 is `balanced` as it is. `gain`, of the latent, is that of `balanced` as it
is over the closer plain way with as many steps.

`balanced` as it is reaches its floor of 40 dB in each of these runs of 20 steps and is closer than both plain ways.
Spread evenly it is closer in two of them, in which nobody sees a difference (both above 50 dB), and as far off as 30 dB
where the picture becomes another one. A preset does not know which it will be, so it is the same in all runs. Runs of
fewer than 20 steps of their own are left to `custom`.
"""

_HACKATHON = """## The hackathon's list

Canny ControlNet, 20 steps of DDIM on `ddim_uniform`, whose 20 steps begin at timestep 951 and whose 10 at 901: 10 plain
steps begin at another noise level than the 20, so that part of their distance comes before any step is left out. `every
other of the 20` begins where the 20 do. With DDIM and Euler the list, each step held, is exactly DDIM on the sigmas of
the listed steps: a schedule. `the list ahead` is its PSNR less the other's.
"""
