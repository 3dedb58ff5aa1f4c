"""docs/step-skipping.md and its chart, from the rows. The same rows give the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...sampling.measured import MEASURED, read_again
from ..pages.page import DOCS, write
from . import fit, tables
from .beside import INPAINTING, UNTESTED_SAMPLERS
from .closer import CLOSER
from .curve import Series, curves
from .image_to_image import IMAGE_TO_IMAGE
from .samples import protocol
from .samples.results import EXEMPT, Row, condition_of, disagreements, is_first_look, is_judged, read
from .shown import measured as shown_figures
from .shown import with_figures

NAME = "step-skipping"
HELP = DOCS.parent / "web" / "js" / "docs" / "SlipstreamStepSkip"
"""Step Skip's help, a page a language."""


def write_page(results: Path, folder: Path | None = None) -> None:
    """Write page and chart, and the figures that the nodes show; say where presets and rows disagree.

    Args:
        folder: for all of them; default: where they belong. Help pages elsewhere tell what `sampling.measured` has.
    """
    rows = read(results)
    text, picture = page(rows)
    figures = shown_figures(rows)
    docs, shown, helps = DOCS, MEASURED, HELP
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        docs, shown, helps = folder, folder / MEASURED.name, folder
    write(docs / f"{NAME}.md", text)
    write(docs / f"{NAME}.svg", picture)
    write(shown, figures)
    read_again()
    for file in sorted(HELP.glob("*.md")):
        write(helps / file.name, with_figures(file.read_text(encoding="utf-8"), file.stem))
    for disagreement in disagreements(rows):
        print(f"PRESETS and the rows disagree. {disagreement}")


def page(rows: Sequence[Row]) -> tuple[str, str]:
    """The page in Markdown, and the chart in SVG."""
    judged = [row for row in rows if is_judged(row)]

    def of(case: str) -> list[Row]:
        return [row for row in rows if row.get("case") == case]

    parts = [
        _HEAD,
        _FIRST_LOOK if any(is_first_look(row) for row in judged) else _EQUAL_TIME,
        tables.presets(),
        _circumstances(of("machine"), judged),
        tables.in_short(judged),
        tables.floors(judged, of(CLOSER)),
        tables.closer(of(CLOSER)),
        tables.further(judged),
        *tables.of_samplers(judged),
        tables.beside("Samplers that the grid leaves out", _UNTESTED, of(UNTESTED_SAMPLERS)),
        tables.beside("Inpainting", _INPAINTING, of(INPAINTING)),
        tables.image_to_image(of(IMAGE_TO_IMAGE)),
        tables.control(judged),
        tables.fitted(of(fit.CASE)),
        tables.hackathon(of("hackathon")),
        tables.overhead(of("overhead")),
        _YOURSELF,
    ]
    return "\n".join(part for part in parts if part), curves(_series(judged))


def _circumstances(machine: Sequence[Row], judged: Sequence[Row]) -> str:
    if not machine or not judged:
        return "Nothing has been measured yet.\n"
    on = machine[-1]
    driver = f", driver {on['driver']}" if on.get("driver") else ""
    engines = ", on engines" if on.get("engines") else ""
    samples = max(row["samples"] for row in judged)
    commits = ", ".join(sorted({str(row["commit"])[:12] for row in judged}))
    done, wanted = len({condition_of(row) for row in judged}), len(protocol.conditions())
    text = (
        f"{on['gpu']}{driver}, {on['precision']}{engines}, torch {on['torch']}, ComfyUI {on['comfyui']}, {samples} "
        f"samples a row, commit {commits}. {done} of the protocol's {wanted} conditions are measured.\n"
    )
    return text + "\n![closeness against computed steps](step-skipping.svg)\n"


def _series(judged: Sequence[Row]) -> list[tuple[str, list[Series]]]:
    """For the chart: a panel a sampler, at the CFG and number of steps that most people use."""
    panels = []
    for sampler, scheduler in protocol.SAMPLERS:
        chosen = [row for row in judged if (row["sampler"], row["scheduler"], row["cfg"]) == (sampler, scheduler, 4.0)]
        twenty = [row for row in chosen if row["steps"] in (20, 21) and row["preset"] != EXEMPT]
        if twenty:
            twenty.sort(key=lambda row: float(row["computed"]))
            panels.append((f"{sampler}, {scheduler}", [_points("presets", twenty, "psnr_db"), _plain(twenty)]))
    return panels


def _points(name: str, rows: Sequence[Row], field: str) -> Series:
    return Series(name, tuple((float(row["computed"]), float(row[field])) for row in rows))


def _plain(rows: Sequence[Row]) -> Series:
    points = {(float(row["best_plain_computed"]), float(row["best_plain_db"])) for row in rows}
    return Series("closest plain way, same time", tuple(sorted(points)))


_HEAD = """# Step skipping, measured

All steps of the sampler are kept; the model is computed in some of them. How close is the picture to the one with every
step computed, and is there a plain way to come closer in the same time? [The protocol](../benchmarks/step_skipping.md)
was written down first.

The figures are of the demo model, 256×256, and of nothing else: on your own model, ask Skip Calibrate. Closeness is
PSNR in dB of the final latent to the N-step picture's; `picture`, of the decoded one. Beside the mean of dB stand the
median and the pooled figure, PSNR of the mean squared error of all samples, in which the worst samples count most. A
gain in bold type lies above 0 with 95 % confidence. `worst tenth`: the gain in the tenth of the samples that gained
least.
"""

_FIRST_LOOK = """> **These figures are a first look, not the verdict.** Their `same time` is not the same: most
> rivals were given one to three steps more than the preset's time pays for; of samplers with costly steps of their own
> (DEIS, SDE) the time was not looked at, which errs the other way. Their captions have since had a part in the design.
> What is shipped is to be decided on new samples, timed as [the protocol](../benchmarks/step_skipping.md) now says.
"""

_EQUAL_TIME = """Equal time is measured: a rival has the most steps that fit into the preset's run, by the seconds of
a computed step of its own sampler, of a skipped one and of what every run costs besides.
"""

_UNTESTED = """`balanced` with samplers whose kind was measured and they were not, 20 steps, CFG 4, against the same
sampler in the same time: does what is decided for the kind hold for them?"""

_INPAINTING = """The steps of `balanced`, 20 steps, CFG 4, the right half of a picture painted anew, against the same
sampler in the same time. Only the painted half is compared."""

_YOURSELF = """## Measure it yourself

    python benchmarks/step_skipping.py --plan     # how much there is to compute
    python benchmarks/step_skipping.py            # times, samples and scores; hours without a GPU
    python benchmarks/step_skipping.py --page     # writes this page
"""
