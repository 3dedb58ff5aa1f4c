"""docs/benchmarks.md and its charts: what was measured, how, and how to do it oneself.

The same rows give the same bytes, so that a test can tell whether the page is up to date.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from ...runtime.settings.model_settings import BackendChoice
from ..in_server import from_scratch
from ..in_server.rows import PREFIX
from ..subjects.cases import CASES
from ..subjects.rows import RESULTS, Row, gpu_of, is_of_cold, is_of_job, is_of_skipped, is_of_switched, read
from ..subjects.variants import LADDER_CASE, OURS
from . import cold_page, patches_page, published, scratch_page, server_page, switch_page
from .chart import chart
from .cold_page import cold_starts
from .ladder import FILE as LADDER_FILE
from .ladder import Ladder, is_nothing_else, ladders, section
from .ladder import picture as ladder_picture
from .server_summary import read_rows
from .switch_page import switches
from .tables import Group, described, escaped, tables

DOCS = Path(__file__).resolve().parents[2] / "docs"


def main() -> int:
    """Write page and charts; 1 where a row cannot be read."""
    try:
        rows, served = read_all(RESULTS), read_rows(RESULTS)
    except ValueError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    climbed = ladders(rows)
    scratch = scratch_page.read_rows(RESULTS)
    page, picture = report(newest(rows), climbed, switches(rows), cold_starts(rows), served, scratch)
    DOCS.mkdir(exist_ok=True)
    write(DOCS / "benchmarks.md", page)
    write(DOCS / "benchmarks.svg", picture)
    if climbed:
        write(DOCS / LADDER_FILE, ladder_picture(climbed, _title(LADDER_CASE)))
    return 0


def write(file: Path, text: str) -> None:
    """With the same line ends on every system."""
    file.write_bytes(text.encode())
    print(file)


def read_all(folder: Path) -> list[Row]:
    """The rows of all files but those about servers, the oldest first: file names end in their day.

    Raises:
        ValueError: a line is no row.
    """
    files = sorted(folder.glob("*-????-??-??.jsonl"), key=lambda file: (file.stem[-len("2026-01-31") :], file.name))
    others = PREFIX, from_scratch.PREFIX
    return [row for file in files if not file.name.startswith(others) for row in read(file)]


def newest(rows: Iterable[Row]) -> list[Group]:
    """Of each GPU and case the last run; GPUs by name, cases in the order in which they are offered.

    A TensorRT may need a Python of its own, in which the other variants do not run: its runs stand beside the others.
    Runs of the ladder alone have a table of their own, see `ladder`, and so have changes between pictures and
    cold starts.
    """
    by_run: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if not is_of_switched(row) and not is_of_cold(row):
            by_run.setdefault((gpu_of(row), row["case"], row["run"]), []).append(row)
    runs = {key: found for key, found in by_run.items() if not is_nothing_else(found)}
    last = {(gpu, case, _is_of_tensorrt(found)): found for (gpu, case, _), found in runs.items()}
    order = {name: number for number, name in enumerate(CASES)}
    ordered = sorted(last, key=lambda key: (key[0], order.get(key[1], len(order)), *key[1:]))
    return [Group(gpu, case, tuple(last[gpu, case, ours])) for gpu, case, ours in ordered]


def _is_of_tensorrt(rows: Sequence[Row]) -> bool:
    return any(row["variant"].startswith(f"{OURS}:{BackendChoice.TENSORRT.value}") for row in rows)


def report(
    groups: Sequence[Group],
    climbed: Sequence[Ladder] = (),
    switched: Sequence[Row] = (),
    cold: Sequence[Row] = (),
    served: Sequence[Row] = (),
    scratch: Sequence[Row] = (),
) -> tuple[str, str]:
    """The page in Markdown, and the chart of `groups` in SVG.

    Args:
        switched: rows of changes between pictures.
        cold: rows of cold starts.
        served: rows of pictures from a ComfyUI server, which come first.
        scratch: rows of models without any engine yet, which follow them.
    """
    how = [_HOW, _HOW_JOBS] if any(group.is_job for group in groups) else [_HOW]
    if any(is_of_skipped(row) for group in groups for row in group.rows):
        how.append(_HOW_SKIPPED)
    parts = [
        section(climbed, _title(LADDER_CASE), [_circumstances_of(ladder.rows[0]) for ladder in climbed]),
        switch_page.section(switched, map(_circumstances_of, switched)),
        cold_page.section(cold, map(_circumstances_of, cold)),
        published.section(groups),
    ]
    of_servers = [server_page.section(served), patches_page.section(served), scratch_page.section(scratch)]
    first = [_HEAD, *filter(None, of_servers), *_measured(groups)]
    body = [*first, *filter(None, parts), *how, _variants(groups), _YOURSELF]
    return "\n".join(body), chart([(f"{group.gpu}: {_title(group.case)}", group.sound) for group in groups])


# Tables


def _measured(groups: Sequence[Group]) -> list[str]:
    if not groups:
        return ["Nothing has been measured yet.\n"]
    gpus = dict.fromkeys(group.gpu for group in groups)
    return [_CHART, *(_section(gpu, [group for group in groups if group.gpu == gpu]) for gpu in gpus)]


def _section(gpu: str, groups: Sequence[Group]) -> str:
    lines = [f"## {gpu}\n", tables(groups)]
    failed = [row for group in groups for row in group.rows if "failed" in row]
    if failed:
        lines.append("\nNot to be trusted:\n")
        lines += [f"- {row['case']}, `{row['variant']}`: {escaped(row['failed'])}" for row in failed]
    if blind := [f"`{group.case}`" for group in groups if group.is_blind]:
        *others, last = blind
        lines.append(_BLIND.format(cases=f"{', '.join(others)} and {last}" if others else last))
    lines.append(f"\n{_circumstances(groups)}\n")
    lines += [note.read_text(encoding="utf-8") for note in _notes(gpu)]
    return "\n".join(lines)


def _notes(gpu: str) -> list[Path]:
    """What is to be known of the rows of this GPU: written by hand, beside them."""
    return sorted(RESULTS.glob(f"{gpu.lower().replace(' ', '-')}-*.md"))


def _circumstances(groups: Sequence[Group]) -> str:
    """One sentence for all that was alike; where runs differ, each of them is named."""
    found = dict.fromkeys(_circumstances_of(_with_all_versions(group.rows)) for group in groups)
    return "  \n".join(found)


def _with_all_versions(rows: Sequence[Row]) -> Row:
    """The first, with the versions of what only others need."""
    found = dict(rows[0])
    for row in rows[1:]:
        found["versions"] = {**row["versions"], **found["versions"]}
    return found


def _circumstances_of(row: Row) -> str:
    names = {"torch": "torch", "triton": "Triton", "cuda": "CUDA", "cudnn": "cuDNN", "comfyui": "ComfyUI"}
    names |= {name: name for name in ("diffusers", "torchao", "sageattention")}
    names |= {"tensorrt": "TensorRT", "tensorrt-rtx": "TensorRT-RTX"}
    parts = [f"{title} {row['versions'][name]}" for name, title in names.items() if name in row["versions"]]
    driver = f", driver {row['driver']}" if row["driver"] else ""
    commit = f", commit {row['commit'][:12]}" if row["commit"] else ""
    what = "starts" if is_of_cold(row) else "pictures" if is_of_job(row) else "calls"
    calls = f"median of {row['repeats']} {what} after {row['warmup']}"
    return f"{', '.join(parts)}{driver}; Slipstream {row['versions']['slipstream']}{commit}; {calls}."


def _title(case: str) -> str:
    return CASES[case].title if case in CASES else case


# Words


def _variants(groups: Sequence[Group]) -> str:
    cases = dict.fromkeys(group.case for group in groups)
    variants = dict.fromkeys(row["variant"] for group in groups for row in group.rows)
    lines = [f"- `{case}`: {_title(case)}" for case in cases] + [f"- `{name}`: {described(name)}" for name in variants]
    return "\n".join(["## Cases and variants\n", *lines, ""]) if lines else ""


_HEAD = """# Benchmarks

How long pictures take in a ComfyUI server, and how long single calls of a model take: plain, compiled by torch, and on
Slipstream's engines. This page is made by `python benchmarks/report.py` from the rows in `benchmarks/results`; do not
edit it by hand.
"""

_CHART = """![Milliseconds of one call, the less the better](benchmarks.svg)
"""

_HOW = """## How it was measured

Each case is a model at its real size, made by ComfyUI's own classes, with random weights, in a process of its own. One
call is timed, between two CUDA events, its inputs already on the GPU; a picture of 20 steps makes 20 such calls. All
variants of a case are set up and warmed up first, then take turns call by call, so that a busy moment hits every one
of them. "ms" is the median.

"error" is ‖variant − fp32‖ / ‖fp32‖, where fp32 is the eager model in full fp32 (no TF32). Inputs change from call to
call, and the error is the largest over all of them, before and after the timed calls, and on inputs never seen before.
What is not finite is given no time; nor is an engine that is off by more than it may be, or did not serve every call.

"over eager" and "over torch.compile" say how many times as fast a variant is as the eager model, and as the best of
torch's own modes in the same run. "build s" is a first time with empty caches: for torch it comes back with every start
of the host (or a part of it, where torch finds its own cache), for an engine it is paid once, and later starts take
"load s". "VRAM MB" is what the process reserves at most for the model and this variant alone.
"""

_HOW_JOBS = """Where "ms in all" is given, a case is a whole picture, or several at once: ComfyUI's own sampling and
VAE, from noise that is there to pixels that are there, by the clock, with all that the host does in between. In rows of
`torch.compile` and of Slipstream, UNet, ControlNet and VAE decoder are compiled or run on engines. Errors are those of
the finished latent and of the picture, against the same picture in fp32 from end to end. They grow from step to step,
so a row may be three times as far off as the eager model in its own precision, and 5e-2 at least. "nearest other" is
how far pictures are apart that differ in one input alone (noise, prompts or hint), the least of these.
"""

_HOW_SKIPPED = """Where "steps" says that fewer were computed, Step Skip filled in the others. Such a row may be further
off, but not as far as "nearest other", or as three times the eager model's error if that is more: in many steps, a
model of random numbers makes another picture of the smallest difference. What a preset does to pictures is told by
[benchmarks/step_skipping.md](../benchmarks/step_skipping.md) alone.
"""

_BLIND = """
Of {cases} the times count, not the errors: in so many steps a model of random numbers makes another picture of the
smallest difference. There the eager model in half precision is so far from itself in fp32 that a picture of another
prompt would pass as well. That engines computed, and how many calls, was counted all the same.
"""

_YOURSELF = """## Measure it yourself

```
python benchmarks/run.py                                          # the usual cases, the usual variants
python benchmarks/run.py --cases sd15-512-b2 --variants eager,slipstream:compiled
python benchmarks/run.py --tables                                 # every case by the variants of its table: hours
python benchmarks/run.py --tables --side-by-side                  # the same, set up at once: where memory is enough
python benchmarks/run.py --tables --side-by-side --builders 6     # engines are built beside that, six at a time
CUDA_VISIBLE_DEVICES=1 python benchmarks/run.py --cases sd15-512-b2 --side-by-side --lock turns   # one for each GPU
python benchmarks/run.py --ladder                                 # SDXL rung by rung
python benchmarks/run.py --switch                                 # changes of size and of batch
python benchmarks/run.py --cold-start                             # from a process's start to its first picture
python benchmarks/run.py --cases sdxl-1024-b2 --variants eager,slipstream:compiled,diffusers,diffusers:compile
python benchmarks/server.py                                       # whole pictures in a real ComfyUI server
python benchmarks/server.py --profiles profiles                   # and tables of where samplers spend their time
python benchmarks/server.py --turns 3 --flag-sets "default;--fast;--use-ck-attention;--fast --use-ck-attention"
python benchmarks/server.py --cases sdxl-1024-20,flux-third-1024-20,wan-512-20 --variants plain,slipstream+blocks \\
  --patches all --packs custom_nodes
python benchmarks/report.py                                       # this page
```

Use the Python that starts ComfyUI; `COMFYUI_DIR` names its folder. `--help` lists cases and options. Rows are added to
`benchmarks/results`, or to the folder that `--out` names.
"""
