"""The arguments of the command line: `slipstream build | list | show | verify | prune | delete | export | import |
push | pull | trust | bench | ui`.

Each command's code is imported when it runs, so that `--help` and mistakes are answered at once.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from ..core.errors import SlipstreamError
from ..core.spec import Optimize
from ..core.version import __version__
from ..runtime.settings.model_settings import AUTO, MAX_BATCH, MAX_TOKENS, PRECISIONS, BackendChoice, ShapeChoice
from .errors import FAILED, INTERRUPTED, OK, USAGE
from .output import Output, set_up_logging, until_ready
from .words import count, one_line, prefix, resolutions, size_in_bytes, span, text_length


def run(words: list[str]) -> int:
    """Run one command; returns the exit status, see `errors`."""
    parser = make_parser()
    try:
        options = parser.parse_args(words)
    except SystemExit as end:  # argparse has printed why
        return end.code if isinstance(end.code, int) else USAGE
    if options.command is None:
        parser.print_help(sys.stderr)
        return USAGE
    if mistake := _mistake(options):
        print(f"slipstream: {mistake}", file=sys.stderr)
        return USAGE
    return _run_guarded(options)


def _mistake(options: Namespace) -> str | None:
    """What is wrong with arguments that depend on each other."""
    if options.command == _BENCH and options.optimize == _BLOCKS:
        return (
            "bench times engines of whole models: choose another --optimize. What engines of blocks gain is told by "
            "the node in ComfyUI, once it has made pictures"
        )
    if options.command != _BUILD:
        return None
    if sum(each is not None for each in (options.model, options.workflow, options.matrix)) != 1:
        return "name what to build for: one of --model, --workflow and --matrix"
    if options.model is not None and options.resolution is None:
        return "name the picture sizes: --resolution 512x512,768x512"
    if options.model is not None and options.optimize == _BLOCKS and (reason := _why_not_for_blocks(options)):
        return reason
    if options.ray and not options.remote:
        return "--ray needs --remote URL: a store that all machines of the cluster reach"
    return None


def _why_not_for_blocks(options: Namespace) -> str | None:
    """What `build --optimize blocks` does not do: which engines a model's blocks want shows only when it runs."""
    if options.check:
        return "--check knows engines of whole models; for those of blocks use --workflow FILE --check"
    if options.remote:
        return "--remote is for engines of whole models; build those of blocks without it, then slipstream push"
    return None


def _run_guarded(options: Namespace) -> int:
    stream = sys.stdout
    try:
        set_up_logging(options.verbose)
        with contextlib.redirect_stdout(sys.stderr):  # whatever libraries print is no result
            status = _handle(options, Output(options.json, stream))
        stream.flush()
        return status
    except KeyboardInterrupt as stop:
        return _say(str(stop) or "Cancelled.", INTERRUPTED, options, stream)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return OK
    except (SlipstreamError, OSError) as error:
        return _say(one_line(error), FAILED, options, stream)


def _handle(options: Namespace, output: Output) -> int:
    module, function = options.command
    with until_ready("Loading torch, and looking at the engines…"):
        from .home import open_store

        handler = getattr(importlib.import_module(f".{module}", __package__), function)
        store = open_store(options)
    return int(handler(store, output, options))


def _say(message: str, status: int, options: Namespace, stream: TextIO) -> int:
    print(f"slipstream: {message}", file=sys.stderr)
    if options.json:
        Output(True, stream).show({"error": message}, lambda: None)
    return status


def make_parser() -> ArgumentParser:
    """The parser of all commands."""
    parser = ArgumentParser(
        prog="slipstream", description="Builds and manages the engines that speed up diffusion models."
    )
    parser.add_argument("--version", action="version", version=f"slipstream {__version__}")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for add in (_add_build, _add_list, _add_show, _add_verify, _add_prune, _add_delete, _add_bench, _add_ui):
        add(commands.add_parser)
    for add in (_add_export, _add_import, _add_push, _add_pull, _add_trust):
        add(commands.add_parser)
    return parser


_BUILD, _BENCH = ("fleet.command", "build"), ("bench", "bench")
_BLOCKS = Optimize.BLOCKS.value
_AddParser = Callable[..., ArgumentParser]


def _command(add_parser: _AddParser, name: str, help: str, module: str, function: str) -> ArgumentParser:
    """Add the command `name`, which calls `function` of the module `module` of this folder."""
    parser = add_parser(name, help=help, description=f"{help[0].upper()}{help[1:]}.")
    parser.add_argument(
        "--home", type=Path, metavar="DIR", help="the engine store; default: SLIPSTREAM_HOME, else ComfyUI's"
    )
    parser.add_argument(
        "--comfyui", type=Path, metavar="DIR", help="the ComfyUI to work with; default: COMFYUI_DIR, else its own"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    parser.add_argument("--verbose", action="store_true", help="log details to stderr")
    parser.set_defaults(command=(module, function))
    return parser


def _add_list(add_parser: _AddParser) -> None:
    parser = _command(
        add_parser, "list", "list all engines, and whether they would be used now", "engines", "list_engines"
    )
    parser.add_argument(
        "--wide", action="store_true", help="also how, when and in what time each was built, its size and its error"
    )


def _add_show(add_parser: _AddParser) -> None:
    _add_id(_command(add_parser, "show", "show all that is known about one engine", "engines", "show_engine"))


def _add_verify(add_parser: _AddParser) -> None:
    parser = _command(
        add_parser, "verify", "compare the engines' files with their checksums", "engines", "verify_engines"
    )
    _add_ids(parser)
    parser.add_argument("--all", action="store_true", help="every engine")


def _add_prune(add_parser: _AddParser) -> None:
    parser = _command(add_parser, "prune", "remove the least recently used engines", "engines", "prune_engines")
    parser.add_argument(
        "--limit", type=size_in_bytes, metavar="SIZE", help="what may stay, such as 5GB; default: the store's limit"
    )
    parser.add_argument(
        "--older-than", type=span, metavar="TIME", help="also all that were not used for so long, such as 30d"
    )


def _add_delete(add_parser: _AddParser) -> None:
    parser = _command(add_parser, "delete", "delete engines", "engines", "delete_engines")
    parser.add_argument("ids", nargs="+", type=prefix, metavar="ID", help="first digits of an engine's id")
    parser.add_argument("--yes", action="store_true", help="do not ask")


def _add_export(add_parser: _AddParser) -> None:
    parser = _command(
        add_parser, "export", "write engines into one file for other machines", "travel", "export_engines"
    )
    parser.add_argument("target", type=Path, metavar="FILE", help="the file to write")
    _add_ids(parser)
    parser.add_argument(
        "--folder", action="store_true", help="write a folder, which can be a base of other stores (SLIPSTREAM_BASE)"
    )


def _add_import(add_parser: _AddParser) -> None:
    parser = _command(add_parser, "import", "take in the engines of a file or folder", "travel", "import_from")
    parser.add_argument("source", type=Path, metavar="FILE", help="what export has written, or another engine store")


def _add_push(add_parser: _AddParser) -> None:
    parser = _command(add_parser, "push", "send engines to a remote store", "travel", "push")
    _add_ids(parser)
    _add_remote(parser)
    parser.add_argument("--again", action="store_true", help="also what seems to be there already")


def _add_pull(add_parser: _AddParser) -> None:
    parser = _command(add_parser, "pull", "bring engines from a remote store", "travel", "pull")
    _add_ids(parser)
    _add_remote(parser)


def _add_trust(add_parser: _AddParser) -> None:
    parser = _command(add_parser, "trust", "say whose engines are loaded on this machine", "trust", "trust")
    parser.add_argument(
        "action",
        choices=("list", "show", "add", "remove", "adopt", "export-key", "import-key"),
        help="list the keys; show this user's public key; add or remove the key of another maker; adopt engines that "
        "were built here before engines were signed; write or read the secret key",
    )
    parser.add_argument("values", nargs="*", metavar="VALUE", help="a public key, ids of engines, or a file")
    parser.add_argument("--name", default="", help="whose key it is, for you")
    parser.add_argument("--yes", action="store_true", help="do not ask")


def _add_ids(parser: ArgumentParser) -> None:
    parser.add_argument(
        "ids", nargs="*", type=prefix, metavar="ID", help="first digits of an engine's id; default: all"
    )


def _add_remote(
    parser: ArgumentParser, help: str = "such as s3://bucket/engines; default: the first of SLIPSTREAM_REMOTE"
) -> None:
    parser.add_argument("--remote", metavar="URL", help=help)


def _add_build(add_parser: _AddParser) -> None:
    parser = _command(
        add_parser, "build", "build engines for a model or workflow, so that ComfyUI finds them there", *_BUILD
    )
    _add_model(parser, required=False)
    add = parser.add_argument
    add("--workflow", type=Path, metavar="FILE", help="build what this workflow needs, by a test run in ComfyUI")
    add("--matrix", type=Path, metavar="FILE", help="build for all models of a YAML file; see docs/command-line.md")
    add("--check", action="store_true", help="say what is missing (status 3) and build nothing")
    _add_remote(
        parser, "a store that is shared with other machines: what it has is pulled, what is built is sent there"
    )
    add("--server", metavar="URL", help="with --workflow: a ComfyUI that runs already; default: one is started")
    add("--comfyui-args", default="", metavar="TEXT", help="with --workflow: further arguments of ComfyUI's main.py")
    add("--ray", metavar="ADDRESS", help="with --matrix: build on the machines of this Ray cluster; needs --remote")
    add("--attempts", type=count, default=2, metavar="N", help="with --matrix: for each engine; default: %(default)s")


def _add_bench(add_parser: _AddParser) -> None:
    parser = _command(add_parser, "bench", "time one call of the model, with and without Slipstream", *_BENCH)
    _add_model(parser)
    parser.add_argument("--repeats", type=count, default=20, metavar="N", help="calls to time; default: %(default)s")
    parser.add_argument("--warmup", type=count, default=3, metavar="N", help="calls before; default: %(default)s")


def _add_ui(add_parser: _AddParser) -> None:
    parser = _command(add_parser, "ui", "manage the engines on a page in the browser; needs Gradio", "ui", "ui")
    add = parser.add_argument
    add(
        "--listen",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="where to listen; any other than this machine's own asks for a password, which SLIPSTREAM_UI_PASSWORD "
        "sets; default: %(default)s",
    )
    add("--port", type=count, metavar="N", help="default: the first free one from 7860 on")
    add("--open", action="store_true", help="show the page in the browser")
    add(
        "--model",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="a model that the page offers beside those in ComfyUI's folders; may be given several times",
    )


def _add_id(parser: ArgumentParser) -> None:
    parser.add_argument("id", type=prefix, metavar="ID", help="first digits of the engine's id")


def _add_model(parser: ArgumentParser, required: bool = True) -> None:
    add = parser.add_argument
    add(
        "--model",
        required=required,
        metavar="FILE",
        help="a checkpoint or UNet file, or demo for the built-in tiny model",
    )
    add(
        "--resolution",
        required=required,
        type=resolutions,
        metavar="WxH[,WxH]",
        help="picture sizes, such as 512x512,768x512",
    )
    add("--batch", type=count, default=2, help="samples in one call: 2 for one picture with CFG; default: %(default)s")
    add(
        "--tokens",
        type=count,
        default=77,
        help="length of the text: 77 for up to 75 words or so, then 154; default: %(default)s",
    )
    add(
        "--precision",
        default=AUTO,
        choices=PRECISIONS,
        help="default: the model's own, as ComfyUI chose it; fp8 and int8: large linear layers in 8 bits, details of "
        "pictures differ",
    )
    add(
        "--optimize",
        type=_with_spaces,
        default=Optimize.BALANCED.value,
        choices=[each.value for each in Optimize],
        help="build time to spend; max: several times as long, for a few per cent; blocks, of build alone: engines of "
        "the model's blocks, for any size; default: %(default)s",
    )
    backends = [each.value for each in BackendChoice if each is not BackendChoice.OFF]
    add("--backend", default=BackendChoice.AUTO.value, choices=backends, help="default: the first that works here")
    _add_shapes(parser)
    add(
        "--bake",
        action="store_true",
        help="TensorRT only: put the weights into the engine instead of refitting it; it then serves one checkpoint, "
        "without LoRA",
    )


def _add_shapes(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--engines",
        type=_with_spaces,
        default=ShapeChoice.EACH.value,
        choices=[each.value for each in ShapeChoice],
        help="TensorRT only: whether one engine is for all resolutions; default: %(default)s",
    )
    add(
        "--max-batch",
        type=count,
        default=MAX_BATCH,
        metavar="N",
        help="the most samples that an engine for several resolutions takes at once; default: %(default)s",
    )
    add(
        "--max-tokens",
        type=text_length,
        default=MAX_TOKENS,
        metavar="N",
        help="the longest text that such an engine takes, a multiple of 77; default: %(default)s",
    )


def _with_spaces(text: str) -> str:
    return text.replace("-", " ")
