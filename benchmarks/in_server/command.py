"""The command: starts ComfyUI servers, has each variant make pictures, and adds a row for each of its turns."""

from __future__ import annotations

import argparse
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import uuid
from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from pathlib import Path

from ...core.errors import SlipstreamError
from ...core.version import __version__
from ...runtime.checking.measure import commit
from ..measuring.deadline import Deadline
from ..model_files.checkpoints import NoRoom, make, missing
from ..model_files.families import FAMILIES, ModelFile
from ..patching.patches import PATCHES
from ..subjects.arguments import count, list_of
from ..subjects.references import References
from ..subjects.rows import RESULTS
from .block import Bench, Schedule
from .cases import CASES, HEADLINE, PictureCase, forget_references
from .from_scratch import measure as measure_from_scratch
from .gpu import Monitor, all_but, find_driver
from .plan import ServerRun, left_out, plan
from .process import Installation
from .session import Session
from .variants import OURS, PLAIN, TORCH_COMPILE, Flags, ServerVariant, flags_text

OK, FAILED, INTERRUPTED = 0, 1, 130
PROGRAM = Path(__file__).resolve().parent.parent / "server.py"
MODELS = Path.home() / ".cache" / "slipstream" / "benchmark-models"

_FLAG_SETS = 'flags of ComfyUI, one server for each set, as in --flag-sets="default;--fast;--fast --use-ck-attention"'
_LIMIT = "for the whole command, after which it ends with all rows that were measured; default: there is none"
_PICTURE_LIMIT = "for one picture, the builds of a first one included, before its server is given up; default: 1800"
_FREE_GB = "another process holds the rest of the GPU's memory, as if this were a smaller card; default: none does"
_FROM_SCRATCH = "instead: pictures for so long from an empty store on, each variant in a server of its own"
_PROFILES = "of tables of where each variant's sampler spends its time, by kernel and by function; default: none"
_PATCHES = f"all, or some of {', '.join(PATCHES)}: each variant without them and with each, in one server"
_PACKS = "other authors' packs, as custom_nodes has them; those that --patches and --cases need are loaded"
_ENGINES = "Slipstream's store, so that engines of an earlier command serve; default: none, they are built anew"


def main(words: Sequence[str]) -> int:
    """Measure; 0: every row may be trusted, 1: something failed or is missing, 2: wrong usage, 130: interrupted."""
    parser = make_parser()
    options = parser.parse_args(words)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # whoever ends the command ends its server, too
    try:
        checkout = _checkout(options)
        if options.make_models:
            return _make_models_here(checkout, options)
        if reason := _why_not(options):
            parser.error(reason)
        return _measure(checkout, options)
    except KeyboardInterrupt:
        return INTERRUPTED
    except (SlipstreamError, OSError, ValueError, subprocess.SubprocessError) as error:
        _say(str(error))
        return FAILED


def make_parser() -> argparse.ArgumentParser:
    """Return the command's options."""
    says = "Times whole pictures in a real ComfyUI server: plain, with ComfyUI's rivals, and with Slipstream's nodes."
    parser = argparse.ArgumentParser(prog="benchmarks/server.py", description=says)
    add = parser.add_argument
    cases, variants = ",".join(HEADLINE), ",".join((PLAIN, TORCH_COMPILE, OURS))
    add("--cases", type=list_of(_case), default=cases, metavar="A,B", help=f"of {', '.join(CASES)}; default: {cases}")
    add("--variants", type=list_of(ServerVariant.of), default=variants, metavar="A,B", help="default: %(default)s")
    add("--flag-sets", type=_flag_sets, default="default", metavar="A;B", help=_FLAG_SETS)
    add("--pictures", type=count, default=5, metavar="N", help="timed ones of each variant's turn; default: 5")
    add("--warmup", type=_at_least_two, default=2, metavar="N", help="pictures before them; default: 2, the least")
    add("--turns", type=count, default=1, metavar="N", help="of each variant in each server's flags; default: 1")
    add("--patches", type=_patches, default=(), metavar="A,B", help=_PATCHES)
    add("--packs", type=Path, metavar="FOLDER", help=_PACKS)
    add("--from-scratch", type=count, metavar="SECONDS", help=_FROM_SCRATCH)
    add("--rest", type=count, default=10, metavar="SECONDS", help="after each of those pictures; default: 10")
    add("--free-gb", type=count, metavar="N", help=_FREE_GB)
    add("--synchronised", action="store_true", help="one more picture a turn, with the GPU waited for in each step")
    add("--profiles", type=Path, metavar="FOLDER", help=_PROFILES)
    add("--comfyui", type=Path, metavar="FOLDER", help="default: COMFYUI_DIR, else the one that this pack lies in")
    add("--python", type=Path, default=Path(sys.executable), help="that starts ComfyUI; default: this one")
    add("--cpu", action="store_true", help="servers compute on the CPU")
    add("--models", type=Path, default=MODELS, metavar="FOLDER", help="of model files, made where they are missing")
    add("--models-only", action="store_true", help="make the cases' model files, and measure nothing")
    add("--engines", type=Path, metavar="FOLDER", help=_ENGINES)
    add("--out", type=Path, default=RESULTS, metavar="FOLDER", help="default: benchmarks/results")
    add("--logs", type=Path, metavar="FOLDER", help="of the servers; default: none are kept")
    add("--limit", type=count, metavar="SECONDS", help=_LIMIT)
    add("--picture-limit", type=count, default=1800, metavar="SECONDS", help=_PICTURE_LIMIT)
    add("--commit", help="of the code that is measured, where its folder is no git clone")
    add("--make-models", action="store_true", help=argparse.SUPPRESS)
    return parser


def _measure(checkout: Path, options: Namespace) -> int:
    deadline, version = Deadline(options.limit), version_of(checkout)
    _make_models(checkout, options, deadline)
    if options.models_only:
        return OK
    references = References(options.models)
    runs = _runs(options, [name for name in _names(options) if not references.has(name, version)])
    common = {"commit": options.commit or commit(), "run": uuid.uuid4().hex, "versions": {"slipstream": __version__}}
    with tempfile.TemporaryDirectory(prefix="slipstream-server-", ignore_cleanup_errors=True) as folder:
        installation = _installation(checkout, options, Path(folder))
        installation.prepare()
        if options.from_scratch:
            driver = find_driver()
            machine = {"gpu": getattr(driver, "gpu", None), "comfyui": version}
            names = [variant.name for variant in options.variants]
            troubles = measure_from_scratch(
                installation, _names(options), names, options.from_scratch, options.rest, {**common, **machine},
                options.out, deadline, _say,
            )  # fmt: skip
            return FAILED if troubles else OK
        with all_but(options.free_gb, options.python), Monitor(find_driver()) as monitor:
            schedule = Schedule(options.warmup, options.pictures, options.synchronised, options.profiles)
            bench = Bench(schedule, references, References(Path(folder) / "patched"), monitor, version)
            session = Session(
                installation, bench, deadline, options.picture_limit, options.out, common, _say, options.free_gb
            )
            session.measure(runs)
    for trouble in session.troubles:
        _say(f"FAILED {trouble}")
    return FAILED if session.troubles else OK


def _runs(options: Namespace, lacking: Sequence[str]) -> list[ServerRun]:
    for line in left_out(_names(options), options.variants):
        _say(line)
    patches = [name for name in options.patches if _has_pack(name, options.packs)]
    runs = plan(options.flag_sets, _names(options), options.variants, options.turns, lacking, patches)
    _say(f"{sum(len(run.blocks) for run in runs)} blocks in {len(runs)} starts of ComfyUI:")
    for run in runs:
        names = ", ".join(dict.fromkeys(f"{block.case} {block.variant}" for block in run.blocks))
        found = dict.fromkeys(block.patch for block in run.blocks if block.patch)
        _say(f"  {flags_text(run.flags)}: {names}{'; with ' if found else ''}{', '.join(found)}")
    return runs


def _has_pack(patch: str, packs: Path | None) -> bool:
    """Whether a patch's pack is at hand; says so where it is not."""
    pack = PATCHES[patch].pack
    found = _is_at_hand(pack, packs)
    if not found:
        _say(f"{patch} is left out: {pack} is not in the folder that --packs names")
    return found


def _is_at_hand(pack: str, packs: Path | None) -> bool:
    """Whether a pack can be loaded; ComfyUI itself, which has no name here, always can."""
    return not pack or (packs is not None and (packs / pack).is_dir())


def _installation(checkout: Path, options: Namespace, work: Path) -> Installation:
    engines, logs = options.engines or work / "engines", options.logs or work / "logs"
    common: Flags = ("--cpu",) if options.cpu else ()
    named = {PATCHES[name].pack for name in options.patches} | {FAMILIES[case.family].pack for case in options.cases}
    named.discard("")
    packs = tuple(folder for name in sorted(named) if (folder := (options.packs or work) / name).is_dir())
    return Installation(checkout, options.python, options.models, engines, work, logs.resolve(), common, packs=packs)


def _files(options: Namespace) -> list[ModelFile]:
    """The model files that are loaded."""
    found = [file for case in options.cases for file in case.files]
    for patch in (PATCHES[name] for name in options.patches):
        families = [case.family for case in options.cases if case.family in patch.families]
        found += [ModelFile(folder, family) for folder in patch.node.folders for family in families]
    return found


def _names(options: Namespace) -> list[str]:
    return [case.name for case in options.cases]


def _why_not(options: Namespace) -> str | None:
    """Why these options make no sense together."""
    if options.from_scratch and (options.free_gb or options.profiles):
        return "--from-scratch tells of neither a GPU's memory nor a sampler's time; leave --free-gb and --profiles out"
    if options.patches and (options.from_scratch or not any(each.kind == PLAIN for each in options.variants)):
        return "--patches compares with plain, which --variants has to name, and is nothing for --from-scratch"
    for case in options.cases if options.patches else ():
        if not case.steps or not any(PATCHES[name].is_for(case.family, case.has_control) for name in options.patches):
            return f"--patches has none that is for {case.name}"
    for case in options.cases:
        if not _is_at_hand(pack := FAMILIES[case.family].pack, options.packs):
            return f"{case.name} needs the pack {pack} in the folder that --packs names"
    slow = [case.name for case in options.cases if case.needs_gpu]
    if options.cpu and slow and not options.models_only:
        return f"{slow[0]} would take minutes a picture on a CPU; tiny-64-3 runs on any machine"
    return None


def _checkout(options: Namespace) -> Path:
    """
    Raises:
        ValueError: there is no ComfyUI.
    """
    from ...hosts.comfy.building import without_server

    found = without_server.find_checkout(options.comfyui)
    if found is None:
        raise ValueError("No ComfyUI was found; name the folder of yours with --comfyui FOLDER or COMFYUI_DIR")
    return found


def version_of(checkout: Path) -> str:
    """Return the version of a ComfyUI, "unknown" where it does not say."""
    file = checkout / "comfyui_version.py"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    found = re.search(r'__version__\s*=\s*"([^"]+)"', text)
    return found[1] if found else "unknown"


# Model files


def _make_models(checkout: Path, options: Namespace, deadline: Deadline) -> None:
    """Make the files that are missing, in a process of its own that leaves no memory behind.

    Raises:
        ValueError: one cannot be made; the process has said why.
    """
    if not missing(_files(options), options.models):
        return
    what = ["--make-models", "--cases", ",".join(_names(options))]
    what += ["--patches", ",".join(options.patches)] if options.patches else []
    where = ["--models", str(options.models), "--comfyui", str(checkout)]
    limit = deadline.seconds_left if options.limit else None
    if subprocess.run([str(options.python), str(PROGRAM), *what, *where], timeout=limit).returncode:
        raise ValueError("not all model files could be made")


def _make_models_here(checkout: Path, options: Namespace) -> int:
    """Make them in this process."""
    from ..subjects.cases import enter

    enter(checkout)
    try:
        for file in missing(_files(options), options.models):
            _say(f"making {options.models / file.path}")
            make(file, options.models)
            forget_references(file, options.models)
    except NoRoom as reason:
        _say(str(reason))
        return FAILED
    return OK


# Words


def _case(text: str) -> PictureCase:
    if text not in CASES:
        raise ValueError(f"{text!r} is no case; there are {', '.join(CASES)}")
    return CASES[text]


def _patches(text: str) -> tuple[str, ...]:
    return tuple(PATCHES) if text.strip() == "all" else list_of(_patch)(text)


def _patch(text: str) -> str:
    if text not in PATCHES:
        raise ValueError(f"{text!r} is no patch; there are {', '.join(PATCHES)}")
    return text


def _flag_sets(text: str) -> tuple[Flags, ...]:
    sets = [part.strip() for part in text.split(";")]
    return tuple(dict.fromkeys(() if part in ("", "default") else tuple(shlex.split(part)) for part in sets))


def _at_least_two(text: str) -> int:
    if count(text) < 2:
        raise ArgumentTypeError("one picture builds or compiles, and another is compared: 2 at least")
    return int(text)


def _say(text: str) -> None:
    print(f"benchmarks: {text}", file=sys.stderr, flush=True)
