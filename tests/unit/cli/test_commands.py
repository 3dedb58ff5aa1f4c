"""The words of the command line, its exit statuses, and what goes to which stream."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream import __version__
from slipstream.cli import commands, engines
from slipstream.cli.commands import run
from slipstream.cli.output import until_ready

MISTAKES = {
    ("frobnicate",): "invalid choice: 'frobnicate'",
    ("build", "--resolution", "512x512"): "--model",
    ("build", "--model", "demo"): "--resolution",
    ("build", "--model", "demo", "--resolution", "513x512"): "multiples of 8",
    ("build", "--model", "demo", "--resolution", "large"): "such as 512x768",
    ("build", "--model", "demo", "--resolution", "auto"): "name at least one resolution",
    ("build", "--model", "demo", "--resolution", "64x64", "--batch", "0"): "whole number from 1",
    ("build", "--model", "demo", "--resolution", "64x64", "--precision", "fp64"): "invalid choice",
    ("build", "--model", "demo", "--resolution", "64x64", "--engines", "all"): "invalid choice",
    ("build", "--model", "demo", "--resolution", "64x64", "--max-batch", "0"): "whole number from 1",
    ("build", "--model", "demo", "--resolution", "64x64", "--max-tokens", "100"): "choose a multiple of 77",
    ("build", "--model", "demo", "--workflow", "x.json"): "one of --model",
    ("build", "--matrix", "x.yaml", "--ray", "auto"): "--remote URL",
    ("build", "--model", "demo", "--resolution", "64x64", "--optimize", "all"): "invalid choice",
    ("build", "--model", "demo", "--resolution", "64x64", "--optimize", "blocks", "--check"): "--workflow FILE --check",
    ("build", "--model", "demo", "--resolution", "64x64", "--optimize", "blocks", "--remote", "x"): "slipstream push",
    ("bench", "--model", "demo", "--resolution", "64x64", "--optimize", "blocks"): "engines of whole models",
    ("trust", "everybody"): "invalid choice",
    ("show",): "ID",
    ("show", "xyz"): "no engine; write the first digits",
    ("prune", "--limit", "much"): "5GB",
    ("prune", "--older-than", "yesterday"): "30d",
    ("delete",): "ID",
    (): "usage: slipstream",
}


@pytest.mark.parametrize(("words", "message"), MISTAKES.items(), ids=map(" ".join, MISTAKES))
def test_wrong_usage_is_explained(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(list(words)) == 2
    out, err = capsys.readouterr()
    assert message in err and not out


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"slipstream {__version__}\n"
    assert run(["--help"]) == 0
    shown = capsys.readouterr().out
    for name in ("build", "list", "show", "verify", "prune", "delete", "bench"):
        assert f"\n    {name} " in shown


def test_spaces_in_choices_may_be_hyphens() -> None:
    words = ["build", "--model", "demo", "--resolution", "64x64", "--optimize", "fast-build"]
    assert commands.make_parser().parse_args(words).optimize == "fast build"


def test_mistakes_are_answered_without_torch(root: Path) -> None:
    code = "import sys; from slipstream.cli import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    code = f"import runpy; runpy.run_path({str(root / '__main__.py')!r})['register'](); {code}"
    done = subprocess.run([sys.executable, "-c", code, "frobnicate"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "frobnicate" in done.stderr


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (KeyboardInterrupt(), 130, "slipstream: Cancelled."),
        (PermissionError(13, "Permission denied", "somewhere"), 1, "slipstream: [Errno 13] Permission denied"),
        (commands.SlipstreamError("It went\nwrong"), 1, "slipstream: It went wrong"),
    ],
)
def test_errors_become_one_line_and_a_status(
    error: BaseException, status: int, message: str, cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise error

    monkeypatch.setattr(engines, "list_engines", fail)
    done = cli("list")
    assert done.status == status
    assert done.err.startswith(message) and done.err.count("\n") == 1 and not done.out
    for_machines = cli("list", "--json")
    assert for_machines.status == status and for_machines.err == done.err
    assert for_machines.json == {"error": done.err.removeprefix("slipstream: ").rstrip()}


def test_a_bug_is_not_hidden(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "list_engines", lambda *_: [][1])
    with pytest.raises(IndexError):
        cli("list")


def test_runs_by_the_folder_of_the_pack(process, put, store) -> None:
    entry = put()
    done = process("list", "--json", "--home", store.root)
    assert done.status == 0, done.err
    assert [engine["digest"] for engine in done.json["engines"]] == [entry.digest]
    done = process("show", "0" * 64, "--home", store.root)
    assert done.status == 1 and "slipstream list" in done.err and not done.out


def test_a_linked_pack_under_another_name_finds_its_comfyui(process, root: Path, tmp_path: Path) -> None:
    base = tmp_path / "ComfyUI"
    (base / "custom_nodes").mkdir(parents=True)
    (base / "models").mkdir()
    pack = base / "custom_nodes" / "ComfyUI-Slipstream main"
    try:
        pack.symlink_to(root, target_is_directory=True)
    except OSError:
        pytest.skip("links need a privilege here")
    done = process("list", "--json", pack=pack)
    assert done.status == 0, done.err
    assert Path(done.json["store"]) == base / "models" / "slipstream"


def test_a_reader_that_leaves_early_is_no_error(root: Path, put, store) -> None:
    put()
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, str(root), "list", "--home", str(store.root)]
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_is_waited_for_is_shown_on_a_terminal_and_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, shown in ((Terminal(), "Looking…"), (io.StringIO(), "")):
        monkeypatch.setattr(sys, "stderr", stream)
        with until_ready("Looking…"):
            assert stream.getvalue() == shown
        assert stream.getvalue().rstrip().endswith(shown)


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals there")
def test_a_terminal_shows_something_before_anything_heavy_is_imported(root: Path, store) -> None:
    """In processor time, since the machine may be busy: torch alone takes ten times as long."""
    import pty

    ours, theirs = pty.openpty()
    command = [sys.executable, str(root), "list", "--home", str(store.root)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs)
    os.close(theirs)
    try:
        shown = os.read(ours, 1000).decode()
        used = Path(f"/proc/{process.pid}/stat")
        ticks = sum(map(int, used.read_text().rsplit(")", 1)[1].split()[11:13])) if used.exists() else 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert "looking at the engines" in shown
    assert ticks / os.sysconf("SC_CLK_TCK") <= 0.3
