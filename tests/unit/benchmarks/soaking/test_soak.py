"""What a soak draws, and what it makes of figures that it was given."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from PIL import Image

from slipstream.benchmarks.in_server.client import Picture
from slipstream.benchmarks.in_server.process import ServerDied
from slipstream.benchmarks.soaking import command, servers
from slipstream.benchmarks.soaking.account import Account, Report, slope
from slipstream.benchmarks.soaking.subjects import SUBJECTS, Subject
from slipstream.benchmarks.soaking.wishes import prompt_of, wish_of

DEFAULTS = {
    "SlipstreamAccelerateModel": {"optimize": "auto", "precision": "auto", "build": "off"},
    "SlipstreamAccelerateControlNet": {"optimize": "auto", "build": "off"},
    "SlipstreamAccelerateVAE": {"build": "off"},
}


class PretendedServer:
    """A server that is nothing but its name; its client gives grey pictures, each with its own value."""

    shades: Mapping[str, float]

    def __init__(self, made: Any, flags: tuple[str, ...], name: str) -> None:
        self.name, self.pid = name, 0
        assert ("--force-fp32" in flags) == (name == "exact")

    def __enter__(self) -> PretendedServer:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def start(self, deadline: Any) -> None:
        pass


class PretendedClient:
    def __init__(self, server: PretendedServer, deadline: Any, picture_limit: float) -> None:
        self.server = server

    def __enter__(self) -> PretendedClient:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def node_info(self, name: str) -> dict[str, Any]:
        return {"input": {"required": {}}}

    def run(self, prompt: Any) -> Picture:
        is_fast = any(node["class_type"] == "SlipstreamAccelerateModel" for node in prompt.values())
        made_by = "exact" if self.server.name == "exact" else "fast" if is_fast else "plain"
        return Picture(files=[{"filename": made_by}])

    def fetch(self, path: str) -> bytes:
        shade = self.server.shades[path.rpartition("=")[2]]
        file = io.BytesIO()
        Image.new("RGB", (8, 8), (round(shade * 255),) * 3).save(file, "PNG")
        return file.getvalue()


DEMO: Subject = SUBJECTS["demo"](None)


def pretend(monkeypatch: pytest.MonkeyPatch, **shades: float) -> None:
    """Have servers pretended whose pictures have these shades, by what made them."""
    monkeypatch.setattr(servers, "Server", PretendedServer)
    monkeypatch.setattr(servers, "Client", PretendedClient)
    monkeypatch.setattr(PretendedServer, "shades", shades, raising=False)


def run(soak: servers.SoakServers, number: int) -> dict[str, Any]:
    """One picture's prompt."""
    return soak.run(replace(wish_of(7, number, DEMO), batch=1, event=""))


@pytest.fixture
def account() -> Account:
    return Account(
        seed=1, commit="abc", device="cpu", subject="demo", comfyui="0.33.0", wanted=100, tolerance=0.01,
        rss_growth_limit_mb=5.0, handles_growth_limit=1.0,
    )  # fmt: skip


def report_of(account: Account, folder: Path, memory: list[float], handles: int = 20) -> Report:
    report = Report(account, folder / "soak.json", folder / "soak.jsonl")
    for rss in memory:
        account.prompts += 1
        account.engine_calls += 9
        account.eager_calls += 1
        report.add({"number": account.prompts, "rss_mb": rss, "handles": handles}, seconds=float(account.prompts))
    return report


def test_a_prompt_is_the_same_whichever_others_are_run() -> None:
    subject = SUBJECTS["demo"](None)
    assert [wish_of(7, number, subject) for number in range(50)][13] == wish_of(7, 13, subject)
    assert wish_of(7, 13, subject) != wish_of(8, 13, subject)
    events = {wish_of(7, number, subject).event for number in range(300)}
    assert events == {"", "cancel", "free", "delete", "second_server"}


@pytest.mark.parametrize("name", SUBJECTS)
def test_the_eager_twin_differs_by_the_accelerate_nodes_alone(name: str) -> None:
    subject: Subject = SUBJECTS[name]("fast build")
    wish = replace(wish_of(7, 0, subject), has_control=True, has_skip=True, lora_strength=0.5)
    fast, plain = (prompt_of(wish, subject, defaults) for defaults in (DEFAULTS, None))
    classes, plain_classes = ([node["class_type"] for node in prompt.values()] for prompt in (fast, plain))
    assert sorted(classes) == sorted([*plain_classes, *DEFAULTS])
    chosen = {node["class_type"]: node["inputs"] for node in fast.values()}
    assert chosen["SlipstreamAccelerateModel"]["optimize"] == "fast build"
    assert "optimize" not in chosen["SlipstreamAccelerateVAE"], "a node gets no input that it does not have"
    assert all(chosen[node]["build"] == "first use" for node in DEFAULTS)


def test_memory_that_grows_at_first_is_flat(account: Account, tmp_path: Path) -> None:
    report_of(account, tmp_path, [600.0 + 4 * min(n, 40) for n in range(100)])
    assert account.rss_growth_mb == 0.0 and account.handles_growth == 0.0 and account.failures() == []
    assert account.rss_first_mb == account.rss_last_mb == 760.0


def test_a_leak_fails_the_soak(account: Account, tmp_path: Path) -> None:
    report_of(account, tmp_path, [600.0 + 0.08 * n for n in range(100)])
    assert account.rss_growth_mb == pytest.approx(8.0) and len(account.failures()) == 1


def test_memory_that_free_gives_back_for_a_while_is_no_growth(account: Account, tmp_path: Path) -> None:
    report_of(account, tmp_path, [700.0 - 64 * (50 < n < 60) for n in range(100)])
    assert account.rss_growth_mb == 0.0 and account.failures() == []


def test_what_comfyui_grows_by_itself_is_not_ours(account: Account, tmp_path: Path) -> None:
    account.host_growth_mb = 4.0
    report_of(account, tmp_path, [600.0 + 0.08 * n for n in range(100)])
    assert account.failures() == [], "8 MB, of which 4 are ComfyUI's"
    account.host_growth_mb = 2.0
    assert len(account.failures()) == 1


def test_a_soak_without_slipstream_measures_comfyui_alone(account: Account, tmp_path: Path) -> None:
    account.is_plain = True
    report_of(account, tmp_path, [600.0 + 0.08 * n for n in range(100)])
    account.engine_calls = account.eager_calls = 0
    assert account.failures() == [] and account.rss_growth_mb == pytest.approx(8.0)


def test_what_was_found_so_far_is_in_the_files(account: Account, tmp_path: Path) -> None:
    report_of(account, tmp_path, [600.0] * 30)
    written = json.loads((tmp_path / "soak.json").read_text(encoding="utf-8"))
    rows = [json.loads(line) for line in (tmp_path / "soak.jsonl").read_text(encoding="utf-8").splitlines()]
    assert (written["prompts"], written["wanted"], len(rows)) == (30, 100, 30)
    assert written["rss_growth_mb"] is None, "before half of the prompts were run nothing is said of growth"


@pytest.mark.parametrize("name", ["wrong", "errors", "deaths", "stale_engines"])
def test_each_trouble_fails_the_soak(name: str, account: Account, tmp_path: Path) -> None:
    report_of(account, tmp_path, [600.0] * 100)
    assert account.failures() == []
    setattr(account, name, 1)
    assert len(account.failures()) == 1


def test_more_than_a_few_pictures_that_half_precision_spoils_fail_the_soak(account: Account, tmp_path: Path) -> None:
    report_of(account, tmp_path, [600.0] * 100)
    account.compared_with_exact = 5
    assert account.failures() == []
    account.compared_with_exact = 6
    assert len(account.failures()) == 1


def test_few_prompts_tell_of_growth_as_well(account: Account, tmp_path: Path) -> None:
    account.wanted = 60
    report_of(account, tmp_path, [600.0 + 0.2 * n for n in range(60)])
    assert account.rss_growth_mb == pytest.approx(20.0) and len(account.failures()) == 1


def test_a_server_of_full_precision_that_dies_takes_no_other_one_with_it(
    account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(server: PretendedServer, deadline: Any) -> None:
        if server.name == "exact":
            raise ServerDied("it ended")

    monkeypatch.setattr(PretendedServer, "start", start)
    pretend(monkeypatch, fast=0.6, plain=0.5)
    account.device = "cuda"
    with ExitStack() as ending:
        soak = servers.SoakServers(cast(Any, None), (), DEMO, account, ending)
        for number in (0, 1):
            run(soak, number)
        assert [*soak._servers] == ["first"] and (account.wrong, account.deaths) == (2, 0)


def test_too_few_engine_calls_fail_the_soak(account: Account, tmp_path: Path) -> None:
    report_of(account, tmp_path, [600.0] * 100)
    account.eager_calls = account.engine_calls
    assert account.failures() == ["engines made 900 of 1800 calls only"]


@pytest.mark.parametrize(
    ("device", "fast", "plain", "exact", "is_held", "wrong"),
    [
        ("cuda", 0.500, 0.504, 0.9, False, 0),  # alike
        ("cuda", 0.500, 0.540, 0.52, True, 0),  # both half way to what full precision gives
        ("cuda", 0.560, 0.520, 0.50, True, 0),
        ("cuda", 0.600, 0.520, 0.50, True, 1),
        ("cuda", 0.600, 0.500, 0.50, True, 1),
        ("cpu", 0.500, 0.540, 0.52, False, 1),  # which computes in full precision
    ],
)
def test_a_picture_that_half_precision_spoils_is_held_against_full_precision(
    device: str,
    fast: float,
    plain: float,
    exact: float,
    is_held: bool,
    wrong: int,
    account: Account,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(monkeypatch, fast=fast, plain=plain, exact=exact)
    account.device = device
    with ExitStack() as ending:
        row = run(servers.SoakServers(cast(Any, None), (), DEMO, account, ending), 0)
    assert account.wrong == wrong and len(account.problems) == wrong
    assert ("from_exact" in row) is is_held and account.compared_with_exact == is_held


def chosen(*words: str) -> tuple[list[int], Path]:
    options = command._options(["--comfyui", "x", *words])
    return command._numbers(options), command._out(options)


def test_any_thirty_are_repeated_by_one_command_and_the_account_of_all_stays() -> None:
    """`docs/scaling.md` names these."""
    assert chosen() == (list(range(1000)), command.RESULTS)
    assert chosen("--device", "cuda", "--prompts", "300") == (list(range(300)), command.ON_GPU)
    numbers, out = chosen("--any", "30")
    assert len(set(numbers)) == 30 and set(numbers) <= set(range(1000)) and out == command.AGAIN
    assert chosen("--any", "30")[0] != numbers, "others each time"
    assert chosen("--first", "970", "--prompts", "30") == (list(range(970, 1000)), command.AGAIN)
    assert chosen("--only", "13", "7") == ([13, 7], command.AGAIN)
    assert chosen("--only", "13", "--out", "mine.json")[1] == Path("mine.json")
    for wrong in ("0", "1001"):
        with pytest.raises(SystemExit):
            chosen("--any", wrong)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_soak_from_its_command_to_its_report(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Servers are pretended; which flags they get, and what the report says, is not."""
    given: list[Any] = []

    class Servers:
        def __init__(self, made: Any, flags: Any, subject: Subject, account: Account, ending: Any) -> None:
            given.append((flags, subject))
            self.account = account

        def run(self, wish: Any) -> dict[str, Any]:
            self.account.prompts += 1
            self.account.engine_calls += 9
            self.account.eager_calls += 1
            return {"number": wish.number, "event": wish.event, "rss_mb": 700.0, "handles": 27}

        def objects(self) -> dict[str, float]:
            return {}

        def stale_engines(self) -> int:
            return 0

    monkeypatch.setattr(command, "SoakServers", Servers)
    monkeypatch.setattr(command, "_installation", lambda *_: None)
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    (tmp_path / "comfyui_version.py").write_text('__version__ = "0.33.0"')
    out = tmp_path / "soak.json"
    words = ["--comfyui", str(tmp_path), "--device", device, "--any", "30", "--out", str(out), "--commit", "abc"]
    assert command.main(words) == 0, capsys.readouterr().err
    told, rows = json.loads(out.read_text()), (tmp_path / "soak.jsonl").read_text().splitlines()
    wanted = {
        "prompts": 30, "wrong": 0, "errors": 0, "rss_first_mb": 700.0, "rss_last_mb": 700.0, "handles_first": 27,
        "handles_last": 27, "engine_calls": 270, "eager_calls": 30, "deaths": 0, "seed": 20261, "commit": "abc",
        "device": device,
    }  # fmt: skip
    assert wanted.items() <= told.items() and len(rows) == 30
    flags, subject = given[0]
    assert ("--cpu" in flags) is (device == "cpu")
    assert subject._changed.get("optimize") == (None if device == "cuda" else "fast build")
    assert command.main([*words, "--optimize", "blocks"]) == 0 and given[1][1]._changed["optimize"] == "blocks"


def test_slope() -> None:
    assert slope((1, 2, 3), (5, 7, 9)) == pytest.approx(2.0)
