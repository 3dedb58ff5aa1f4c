"""The command's own process: arguments, children that die, files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from slipstream.benchmarks.measuring import command, turns
from slipstream.benchmarks.measuring.building import Builders, Task, tasks_of
from slipstream.benchmarks.measuring.command import main, make_parser, measure_apart, parts, wanted
from slipstream.benchmarks.subjects.cases import CASES
from slipstream.benchmarks.subjects.variants import LADDER
from slipstream.tests.unit.benchmarks.support import row

ROWS = [row("eager", 20.0), row("eager", 10.0), row("torch.compile", 5.0), row("torch.compile", failed="off")]
WORDS = ("--cases", "sd15-512-b2", "--variants", "eager,torch.compile")


def options(out: Path, *words: str) -> Namespace:
    return make_parser().parse_args([*WORDS, "--out", str(out), *words])


def child(tmp_path: Path, *steps: str) -> list[str]:
    """A program that is given what a case's process is; `steps` are lines in which `put` writes a row."""
    lines = textwrap.dedent(
        f"""
        import json, os, sys, time
        part = sys.argv[sys.argv.index("--part") + 1]
        rows = {ROWS!r}
        def put(*lines):
            os.makedirs(os.path.dirname(part), exist_ok=True)
            with open(part, "a") as stream:
                stream.writelines(json.dumps(line) + "\\n" for line in lines)
        """
    )
    script = tmp_path / "child.py"
    script.write_text(lines + "\n".join(steps))
    return [sys.executable, str(script)]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--cases", "sd15"), "'sd15' is no case; there are sd15-512-b2, "),
        (("--cases", ","), "name at least one"),
        (("--variants", "eager,fast"), "'fast' is no variant; there are eager"),
        (("--repeats", "0"), "'0' is no whole number from 1"),
        (("--limit", "soon"), "'soon' is no whole number from 1"),
        (("--precision", "fp12"), "invalid choice: 'fp12'"),
        (("--tables", "--ladder"), "not allowed with argument --tables"),
        (("--ladder", "--switch"), "not allowed with argument --ladder"),
        (("--side-by-side", "--profile"), "times nobody before all are set up: leave out --profile"),
        (("--builders", "2"), "add --side-by-side"),
        (("--lock", "file"), "shared by commands whose cases are set up at once: add --side-by-side"),
        (("--lock", ".", "--side-by-side"), "a file in a folder that is there is wanted"),
        (("--lock", "nowhere/lock", "--side-by-side"), "a file in a folder that is there is wanted"),
        (("--cold-start", "--lock", "file"), "one process after another: leave out"),
        (("--switch", "--cold-start"), "not allowed with argument --switch"),
        (
            ("--cold-start", "--side-by-side"),
            "one process after another: leave out --side-by-side, --lock and --profile",
        ),
        (("--cold-start", "--profile"), "leave out --side-by-side, --lock and --profile"),
        (("--variants", "eager,eager+cold"), "eager+cold is measured by --cold-start"),
    ],
)
def test_a_mistake_is_explained(words: tuple[str, ...], why: str, capsys) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    said = capsys.readouterr().err
    assert end.value.code == 2 and why in said and "Traceback" not in said


def test_options_become_levers_of_our_engines() -> None:
    words = ("--variants", "eager,slipstream:compiled,slipstream:compiled+max", "--optimize", "max")
    assert [each.name for each in wanted(make_parser().parse_args(words))] == ["eager", "slipstream:compiled+max"]
    precise = make_parser().parse_args([*words[:2], "--precision", "bf16"])
    assert [each.name for each in wanted(precise)] == [
        "eager",
        "slipstream:compiled+bf16",
        "slipstream:compiled+max+bf16",
    ]


def plan(*words: str) -> list[tuple[str, list[str]]]:
    return [(name, [each.name for each in variants]) for name, variants in parts(make_parser().parse_args(words))]


def test_tables_are_each_case_by_its_own_variants_and_the_ladder() -> None:
    found = plan("--tables")
    assert [name for name, _ in found] == [*(n for n, case in CASES.items() if case.needs_gpu), "sdxl-1024-b2"]
    assert sorted(found[-1][1]) == sorted(LADDER)
    variants = dict(found[:-1])
    assert "eager+balanced" in variants["sdxl-1024-30steps"] and "eager+balanced" not in variants["sdxl-1024-b8"]
    assert "torch.compile:reduce-overhead" in variants["flux-1024-b1"]


def test_tables_of_named_cases_have_the_ladder_where_its_case_is_one() -> None:
    assert [name for name, _ in plan("--tables", "--cases", "sd15-512-b8,sd3-1024-b2")] == [
        "sd15-512-b8",
        "sd3-1024-b2",
    ]
    assert [name for name, _ in plan("--tables", "--cases", "sdxl-1024-b2")] == ["sdxl-1024-b2"] * 2
    assert [name for name, _ in plan("--ladder")] == ["sdxl-1024-b2"]


def test_changes_between_pictures_are_measured_of_the_plain_model_and_ours() -> None:
    variants = [f"{name}+switch-{change}" for change in ("size", "batch") for name in ("eager", "slipstream:compiled")]
    assert plan("--switch", "--cases", "tiny-sd15-64-b2") == [("tiny-sd15-64-b2", variants)]
    assert [name for name, _ in plan("--switch")] == [name for name, case in CASES.items() if case.usual]


def test_a_cases_process_is_given_the_variants_of_its_case(tmp_path: Path, monkeypatch, capsys) -> None:
    said = 'put(*[{**rows[0], "variant": name} for name in sys.argv[sys.argv.index("--variants") + 1].split(",")])'
    monkeypatch.setattr(measure_apart, "__defaults__", (child(tmp_path, said),))
    assert main(["--ladder", "--out", str(tmp_path / "out")]) == 0
    (file,) = (tmp_path / "out").iterdir()
    assert sorted(json.loads(line)["variant"] for line in file.read_text().splitlines()) == sorted(LADDER)


@pytest.mark.skipif(turns.why_not() is not None, reason="this system has no lock held together")
def test_cases_side_by_side_share_a_lock_and_keep_all_rows(tmp_path: Path, monkeypatch) -> None:
    case, lock = (f'sys.argv[sys.argv.index("{word}") + 1]' for word in ("--case-in-this-process", "--lock"))
    said = f'import time; time.sleep(1); put({{**rows[0], "case": {case}, "run": {lock}}})'
    monkeypatch.setattr(measure_apart, "__defaults__", (child(tmp_path, said),))
    words = ["--variants", "eager", "--cases", "sd15-512-b2,sdxl-1024-b2", "--side-by-side"]
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
    (file,) = (tmp_path / "out").iterdir()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert sorted(row["case"] for row in rows) == ["sd15-512-b2", "sdxl-1024-b2"]
    assert len({row["run"] for row in rows}) == 1 and Path(rows[0]["run"]).name == "lock"


@pytest.mark.skipif(turns.why_not() is not None, reason="this system has no lock held together")
def test_two_commands_take_turns_by_one_lock(tmp_path: Path, monkeypatch) -> None:
    """The second command's case is set up while the first's waits to be timed; no two are timed at once."""
    told, lock = tmp_path / "told", tmp_path / "shared.lock"
    case, given = (f'sys.argv[sys.argv.index("{word}") + 1]' for word in ("--case-in-this-process", "--lock"))
    said = f"""
import pathlib
sys.path.insert(0, {os.path.dirname(turns.__file__)!r})
from turns import GpuTurn
def tell(what):
    with open({str(told)!r}, "a") as stream:
        print({case}, what, file=stream)
with GpuTurn(pathlib.Path({given})) as place:
    tell("sets up")
    while not all(f"{{name}} sets up" in open({str(told)!r}).read() for name in ("sd15-512-b2", "sdxl-1024-b2")):
        time.sleep(0.05)
    time.sleep(0.5 if {case} == "sd15-512-b2" else 1.5)
    tell("is ready")
    with place.alone():
        tell("begins")
        time.sleep(0.5)
        tell("ends")
put({{**rows[0], "case": {case}}})
"""
    monkeypatch.setattr(measure_apart, "__defaults__", (child(tmp_path, *said.splitlines()),))

    def measure(name: str) -> int:
        words = ["--variants", "eager", "--cases", name, "--side-by-side", "--lock", str(lock)]
        return main([*words, "--out", str(tmp_path / name)])

    with ThreadPoolExecutor(2) as commands:
        assert list(commands.map(measure, ["sd15-512-b2", "sdxl-1024-b2"])) == [0, 0]
    lines = [line.split(maxsplit=1) for line in told.read_text().splitlines()]
    assert [what for _, what in lines[-4:]] == ["begins", "ends"] * 2, lines
    assert {what for _, what in lines[:4]} == {"sets up", "is ready"}


def tasks(*words: str) -> list[tuple[str, str, str]]:
    found = make_parser().parse_args(words)
    wanted_parts = [(name, wanted(command._with(found, each))) for name, each in parts(found)]
    return [(task.case, task.variant, task.part) for task in tasks_of(wanted_parts)]


def test_what_there_is_to_build() -> None:
    """Each engine once: not again for the presets, whose steps run on the same."""
    picture, call, ours = "tiny-sd15-canny-64-3steps", "tiny-sd15-64-b2", "slipstream:compiled"
    variants = f"eager,{ours},{ours}+balanced,{ours}+max+fast,torch.compile"
    assert tasks("--cases", f"{picture},{call}", "--variants", variants) == [
        (picture, ours, "model"),
        (picture, ours, "others"),
        (picture, f"{ours}+max", "model"),
        (picture, f"{ours}+max", "others"),
        (call, ours, "model"),
        (call, f"{ours}+max", "model"),
    ]
    assert not tasks("--cold-start", "--cases", picture)


@pytest.mark.skipif(turns.why_not() is not None, reason="this system has no lock held together")
def test_engines_are_built_into_the_cases_store(tmp_path: Path, monkeypatch, capsys) -> None:
    of = 'sys.argv[len(sys.argv) - sys.argv[::-1].index("{}")]'
    told = tmp_path / "told"
    said = f"""
with open({str(told)!r}, "a") as stream:
    print({of.format("--store")}, {of.format("--lock")}, {of.format("--variants")},
          {of.format("--engines-of")} if "--engines-of" in sys.argv else "-", file=stream)
if "--engines-of" in sys.argv:
    sys.exit({of.format("--engines-of")} == "others")
time.sleep(3)
put({{**rows[0], "variant": "eager"}}, {{**rows[0], "variant": "slipstream:compiled"}})
"""
    program = child(tmp_path, *said.splitlines())
    monkeypatch.setattr(measure_apart, "__defaults__", (program,))
    monkeypatch.setattr(command, "PROGRAM", program)
    words = ["--cases", "tiny-sd15-canny-64-3steps", "--variants", "eager,slipstream:compiled"]
    assert main([*words, "--side-by-side", "--builders", "2", "--out", str(tmp_path / "out")]) == 0
    lines = [line.split() for line in told.read_text().splitlines()]
    assert len({(store, lock) for store, lock, *_ in lines}) == 1
    assert sorted(line[2:] for line in lines) == [
        ["eager,slipstream:compiled", "-"],
        ["slipstream:compiled", "model"],
        ["slipstream:compiled", "others"],
    ]
    said = capsys.readouterr().err
    assert "slipstream:compiled, engines of model: done" in said
    assert "slipstream:compiled, engines of others: its process ended with status 1" in said


@pytest.mark.skipif(turns.why_not() is not None, reason="this system has no lock held together")
def test_nobody_is_timed_beside_a_builder_and_none_begins_in_vain(tmp_path: Path) -> None:
    """In vain: after the limit, for a case that has ended, and after an interrupt."""
    lock, begun, said = tmp_path / "lock", list[tuple[str, int | None]](), list[str]()

    def build(task: Task, limit: int | None) -> str | None:
        begun.append((task.case, limit))
        with open(lock, "ab") as stream, pytest.raises(BlockingIOError):
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        raise OSError("no more processes")

    import fcntl

    builders = Builders(lock, 60, build, said.append)
    builders(Task("one", "slipstream:compiled", "model"))
    builders.ended.add("one")
    builders(Task("one", "slipstream:compiled", "others"))
    Builders(lock, 0, build, said.append)(Task("late", "slipstream:compiled", "model"))
    builders.stop()
    builders(Task("other", "slipstream:compiled", "model"))
    assert begun == [("one", 60)] and said == ["one, slipstream:compiled, engines of model: no more processes"]
    with open(lock, "ab") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.skipif(turns.why_not() is not None, reason="this system has no lock held together")
def test_interrupted_side_by_side_everything_ends_and_rows_are_kept(tmp_path: Path) -> None:
    case = 'sys.argv[sys.argv.index("--case-in-this-process") + 1]'
    program = child(tmp_path, f'put({{**rows[0], "case": {case}}}); open(part + ".there", "w"); time.sleep(600)')
    script = f"""
import sys
from slipstream.benchmarks.measuring import command
command.measure_apart.__defaults__ = ({program!r},)
sys.exit(command.main({["--variants", "eager", "--cases", "sd15-512-b2,sdxl-1024-b2", "--side-by-side"]!r}
    + ["--out", {str(tmp_path / "out")!r}]))
"""
    process = subprocess.Popen([sys.executable, "-c", script])
    deadline = time.monotonic() + 120
    while len(list(tmp_path.glob("out/*.there"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == command.INTERRUPTED
    (file,) = tmp_path.glob("out/*.jsonl")
    assert sorted(json.loads(line)["case"] for line in file.read_text().splitlines()) == ["sd15-512-b2", "sdxl-1024-b2"]


def test_the_last_row_of_a_variant_counts(tmp_path: Path) -> None:
    program = child(tmp_path, "put(rows[0], rows[2], rows[1])")
    outcome = measure_apart("sd15-512-b2", options(tmp_path / "out"), WORDS, program)
    assert [(found["variant"], found["ms"]) for found in outcome.rows] == [("eager", 10.0), ("torch.compile", 5.0)]
    assert not outcome.trouble and not list((tmp_path / "out").iterdir())


def test_a_child_that_dies_keeps_what_it_had(tmp_path: Path) -> None:
    program = child(tmp_path, "put(rows[0])", "open(part, 'a').write('{\"case\": ')", "sys.exit(7)")
    outcome = measure_apart("sd15-512-b2", options(tmp_path), WORDS, program)
    assert [found["ms"] for found in outcome.rows] == [20.0]
    assert outcome.trouble == ("sd15-512-b2: its process ended with status 7; not reached: torch.compile",)


def test_a_child_that_takes_too_long_keeps_what_it_had(tmp_path: Path) -> None:
    program = child(tmp_path, "put(rows[0])", "time.sleep(100)")
    started = time.monotonic()
    outcome = measure_apart("sd15-512-b2", options(tmp_path, "--limit", "2"), WORDS, program)
    assert time.monotonic() - started < 30
    assert [found["ms"] for found in outcome.rows] == [20.0]
    assert outcome.trouble == ("sd15-512-b2: was not done after 2 s, and ended; not reached: torch.compile",)


def test_a_child_that_forgets_a_variant_is_told_on(tmp_path: Path) -> None:
    outcome = measure_apart("sd15-512-b2", options(tmp_path), WORDS, child(tmp_path, "put(rows[1])"))
    assert outcome.trouble == ("sd15-512-b2: the process left variants out; not reached: torch.compile",)


def test_a_variant_that_was_left_out_for_a_reason_is_not_missed(tmp_path: Path) -> None:
    left_out = 'put(rows[1], {"case": "a", "variant": "torch.compile", "left_out": "why"})'
    outcome = measure_apart("sd15-512-b2", options(tmp_path), WORDS, child(tmp_path, left_out))
    assert len(outcome.rows) == 1 and not outcome.trouble


def test_a_row_that_failed_fails_the_command(tmp_path: Path, monkeypatch, capsys) -> None:
    program = child(tmp_path, "put(rows[1], rows[3])")
    monkeypatch.setattr(measure_apart, "__defaults__", (program,))
    out = tmp_path / "out"
    words = ("--cases", "sd15-512-b2,sdxl-1024-b2", "--variants", "eager,torch.compile", "--out", str(out))
    assert main(words) == 1
    (file,) = out.iterdir()
    assert [json.loads(line).get("failed") for line in file.read_text().splitlines()] == [None, "off"] * 2
    said = capsys.readouterr().err
    assert "FAILED sd15-512-b2, torch.compile: off" in said and "FAILED sdxl-1024-b2, torch.compile: off" in said
    assert f"2 rows added to {file}" in said


def test_all_good_is_status_0(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(measure_apart, "__defaults__", (child(tmp_path, "put(rows[1], rows[2])"),))
    assert main([*WORDS, "--out", str(tmp_path / "out")]) == 0


def test_no_comfyui_is_said_in_words(monkeypatch, tmp_path: Path, capsys) -> None:
    monkeypatch.setattr("slipstream.hosts.comfy.building.without_server.find_checkout", lambda named: None)
    words = [*WORDS, "--case-in-this-process", "sd15-512-b2", "--part", str(tmp_path / "part")]
    assert main(words) == command.FAILED
    assert "No ComfyUI was found; name the folder of yours" in capsys.readouterr().err


def test_a_gpu_is_missed_in_words(monkeypatch, tmp_path: Path, capsys) -> None:
    monkeypatch.setattr("slipstream.hosts.comfy.building.without_server.find_checkout", lambda named: tmp_path)
    monkeypatch.setattr(command, "enter", lambda checkout: None)
    monkeypatch.setattr(command, "_has_gpu", lambda: False)
    assert main([*WORDS, "--case-in-this-process", "sd15-512-b2", "--part", str(tmp_path / "part")]) == 1
    assert "sd15-512-b2 needs a CUDA GPU, and there is none; tiny-sd15-64-b2" in capsys.readouterr().err
