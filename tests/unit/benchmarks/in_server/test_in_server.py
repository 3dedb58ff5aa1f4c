"""The command that has ComfyUI servers make pictures, with a stand-in for ComfyUI."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from slipstream.benchmarks.in_server import command, from_scratch
from slipstream.benchmarks.in_server.cases import CASES
from slipstream.benchmarks.in_server.rows import FIELDS, counts_as_headline
from slipstream.benchmarks.subjects.rows import Row, read

FAKE = Path(__file__).with_name("fake_comfyui") / "main.py"
TINY, CANNY, TEXT = "tiny-64-3", "tiny-canny-64-3", "t5-base-encode"


@pytest.fixture
def measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run the command on a stand-in for ComfyUI; gives its exit status and rows."""
    checkout = tmp_path / "ComfyUI"
    (checkout / "comfy").mkdir(parents=True)
    shutil.copy(FAKE, checkout / "main.py")
    (checkout / "comfyui_version.py").write_text('__version__ = "1.2.3"\n')
    for case in (TINY, CANNY, TEXT):
        for file in CASES[case].files:
            (tmp_path / "models" / file.folder).mkdir(parents=True, exist_ok=True)
            (tmp_path / "models" / file.path).touch()
    monkeypatch.setattr(command, "find_driver", lambda: None)
    monkeypatch.setattr("slipstream.benchmarks.in_server.client._UNLOADING_SECONDS", 0)

    def run(*words: str, **fake: Any) -> tuple[int, list[Row]]:
        monkeypatch.setenv("FAKE_COMFYUI", json.dumps(fake))
        folders = [f"--{name}={tmp_path / name}" for name in ("models", "out", "logs")]
        status = command.main(["--comfyui", str(checkout), "--cases", TINY, "--commit", "abc", *folders, *words])
        return status, [row for file in sorted((tmp_path / "out").glob("*")) for row in read(file)]

    return run


def test_the_command_writes_a_row_for_each_turn(measure, tmp_path: Path) -> None:
    status, rows = measure("--variants", "plain,slipstream", "--turns", "2", "--pictures", "3", "--synchronised")
    assert status == command.OK and [(row["variant"], row["turn"]) for row in rows] == [
        ("plain", 1), ("slipstream", 1), ("plain", 2), ("slipstream", 2)
    ]  # fmt: skip
    (file,) = (tmp_path / "out").iterdir()
    assert file.name.startswith("server-fake-gpu-") and {tuple(row) for row in rows} == {FIELDS}
    plain, ours = rows[:2]
    assert (plain["sampler_s"], plain["decoder_s"], plain["before_s"], plain["after_s"]) == (1.5, 0.5, 0.25, 0.125)
    assert plain["step_ms"] == plain["step_ms_synchronised"] == 375.0 and plain["model_calls"] == 3
    assert len(plain["samples"]["client_s"]) == plain["pictures"] == 3 and plain["client_s"] > 0
    assert (plain["error"], plain["engine_calls"], plain["died"]) == (0.0, None, False)
    assert (ours["engine_calls"], ours["eager_calls"]) == (18, 6), "two nodes' runs in each of three pictures"
    assert ours["reasons"] == {"a rare shape": 6}
    assert ours["error"] == pytest.approx(0.01, rel=1e-3) and not counts_as_headline(ours)
    assert ours["versions"] == {"torch": "2.11.0", "python": "3.12.3", "comfyui": "1.2.3", **ours["versions"]}
    assert len({row["run"] for row in rows}) == 1 and ours["commit"] == "abc" and ours["gpu"] == "Fake GPU"


def test_texts_are_compared_when_each_length_was_met_often(measure) -> None:
    status, rows = measure("--cases", TEXT, "--variants", "plain,slipstream,torch-compile", "--pictures", "3")
    assert status == command.OK and [row["variant"] for row in rows] == ["plain", "slipstream"]
    for row in rows:
        assert (row["encoder_s"], row["sampler_s"], row["decoder_s"]) == (0.25, None, None)
        assert len(row["samples"]["warmup_s"]) == 25 and row["samples"]["encoder_s"] == [0.25] * 3
    assert [row["errors"] for row in rows] == [{"text": 0.0}, {"text": pytest.approx(0.01, rel=1e-3)}]
    assert (rows[1]["engine_calls"], rows[1]["eager_calls"]) == (18, 6)


def test_patches_are_measured_in_one_server(measure, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is compared with plain's picture with the same patch; what the server or the folder lacks is left out."""
    (tmp_path / "packs" / "sd-perturbed-attention").mkdir(parents=True)
    words = ("--patches", "pag,hypertile,seg,pladis,block-cfg", "--packs", str(tmp_path / "packs"), "--pictures", "3")
    modules = {"SmoothedEnergyGuidanceAdvanced": "custom_nodes.sd-perturbed-attention"}
    fake = {"patches": ["PerturbedAttentionGuidance"], "lacks": ["HyperTile"], "modules": modules}
    status, rows = measure("--variants", "plain,slipstream+blocks", "--warmup", "4", *words, **fake)
    assert status == command.OK and [(row["variant"], row["patch"]) for row in rows] == [
        ("plain", ""), ("slipstream+blocks", ""), ("plain", "pag"), ("slipstream+blocks", "pag"),
        ("plain", "seg"), ("slipstream+blocks", "seg"),
    ]  # fmt: skip
    assert [row["effect"] for row in rows] == [None, None, 1.0, None, 0.0, None]
    assert [row["error"] for row in rows] == pytest.approx([0.0, 0.01] * 3, rel=1e-3)
    assert [len(row["samples"]["warmup_s"]) for row in rows] == [4, 4, 1, 4, 1, 4]
    assert [(row["blocks"], row["blocks_on_engines"]) for row in rows[2:4]] == [(None, None), (120, 90)]
    assert not any(map(counts_as_headline, rows)) and len(list((tmp_path / "logs").iterdir())) == 1
    said = capsys.readouterr().err
    assert "hypertile is left out: the server has no node HyperTile" in said
    assert "pladis is left out: the server's node PLADIS is of nodes" in said
    assert "block-cfg is left out: ComfyUI-bleh is not in the folder that --packs names" in said


def test_a_patch_with_which_plain_fails_is_given_up(measure) -> None:
    words = ("--variants", "plain,slipstream+blocks", "--patches", "pag,hypertile")
    status, rows = measure(*words, fails=["PerturbedAttentionGuidance"])
    assert status == command.FAILED and [(row["variant"], row["patch"], row.get("failed")) for row in rows[2:]] == [
        ("plain", "pag", "PerturbedAttentionGuidance: OutOfMemoryError no room"),
        ("plain", "hypertile", None),
        ("slipstream+blocks", "hypertile", None),
    ]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--variants", "slipstream", "--patches", "pag"), "compares with plain"),
        (("--cases", "flux-1024-4", "--patches", "pag"), "none that is for flux-1024-4"),
        (("--patches", "magic"), "'magic' is no patch"),
    ],
)
def test_patches_that_make_no_sense(
    words: tuple[str, ...], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "main.py").touch()
    (tmp_path / "comfy").mkdir()
    with pytest.raises(SystemExit):
        command.main(["--comfyui", str(tmp_path), *words])
    assert why in capsys.readouterr().err


def test_from_scratch_pictures_follow_each_other_until_the_time_is_over(measure) -> None:
    status, rows = measure("--variants", "plain,slipstream", "--from-scratch", "2", "--rest", "1")
    assert status == command.OK and [row["variant"] for row in rows] == ["plain", "slipstream"]
    for row in rows:
        assert len(row["pictures"]) >= 2 and "failed" not in row
        assert [picture["at_s"] for picture in row["pictures"]] == sorted(
            picture["at_s"] for picture in row["pictures"]
        )
        assert all(picture["step_ms"] == 375.0 for picture in row["pictures"])
    assert rows[1]["pictures"][0]["eager_calls"] == 2 and "engine_calls" not in rows[0]["pictures"][0]


def test_builds_are_read_from_a_log() -> None:
    log = "x\n[INFO] Slipstream: built blocks SDXL ResBlock 320 in 30 s (start 9, export 2, compile 19)\nbuilt in 3 s\n"
    found = from_scratch.builds_in(log)
    assert found == [{"what": "blocks SDXL ResBlock 320", "seconds": 30, "parts": "start 9, export 2, compile 19"}]


def test_a_death_is_a_row_and_the_rest_goes_on(measure, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--cases", f"{TINY},{CANNY}", "--variants", "plain,slipstream,torch-compile", "--turns", "2")
    status, rows = measure(*words, dies=["SlipstreamAccelerateControlNet"])
    assert status == command.FAILED
    turns = [(row["case"], row["variant"], row["turn"], row["died"]) for row in rows]
    canny = [turn for turn in turns if turn[0] == CANNY]
    assert len(turns) == 6 + 5 and canny == [
        (CANNY, "plain", 1, False),
        (CANNY, "slipstream", 1, True),
        (CANNY, "torch-compile", 1, False),
        (CANNY, "plain", 2, False),
        (CANNY, "torch-compile", 2, False),
    ]
    (dead,) = [row for row in rows if row["died"]]
    assert dead["pictures"] == 0 and dead["client_s"] is None and dead["error"] is None
    assert dead["failed"] == "the server ended with status 3 | free_impl: invalid argument"
    assert capsys.readouterr().err.count("starting ComfyUI") == 2


def test_a_node_that_fails_is_no_death(measure) -> None:
    status, rows = measure("--variants", "plain,torch-compile,slipstream", fails=["TorchCompileModel"])
    assert status == command.FAILED and [row["died"] for row in rows] == [False] * 3
    assert [row.get("failed") for row in rows] == [None, "TorchCompileModel: OutOfMemoryError no room", None]


def test_pictures_that_are_not_finite(measure) -> None:
    status, rows = measure("--variants", "plain,slipstream", breaks=["SlipstreamAccelerateModel"])
    assert status == command.FAILED and [row["error"] for row in rows] == [0.0, None]
    assert rows[1]["failed"] == "the picture is not finite" and rows[1]["pictures"] == 5 and not rows[1]["died"]


def test_flags_with_which_no_server_starts(measure) -> None:
    status, rows = measure("--variants", "plain,ck-attention", "--turns", "2", refuses="--use-ck-attention")
    assert status == command.FAILED
    first, refused, last = rows
    assert (first["variant"], first["turn"], last["variant"], last["turn"]) == ("plain", 1, "plain", 2)
    assert refused["died"] and refused["flags"] == ["--use-ck-attention"] and refused["gpu"] == "Fake GPU"
    assert "unrecognized arguments: --use-ck-attention" in refused["failed"]


def test_the_time_is_over(measure, capsys: pytest.CaptureFixture[str]) -> None:
    """What was measured by then is kept, the pictures of a turn that was cut short among it."""
    began = time.monotonic()
    status, rows = measure("--variants", "plain,slipstream", "--pictures", "99", "--limit", "6", seconds=0.5)
    assert status == command.FAILED and time.monotonic() - began < 12
    (row,) = rows
    assert 1 < row["pictures"] < 99 and not row["died"] and "failed" not in row
    assert "the time was over before these began: tiny-64-3, slipstream" in capsys.readouterr().err


def test_a_server_that_hangs_counts_as_dead(measure) -> None:
    status, (row,) = measure("--variants", "plain", "--picture-limit", "1", seconds=60)
    assert status == command.FAILED and row["died"] and "did not finish a picture in 1 s" in row["failed"]


def test_a_later_command_is_compared_with_the_first_ones_pictures(measure, tmp_path: Path) -> None:
    """References are kept beside the model files; one that is lacking is made at default flags, without a row."""
    status, (row,) = measure("--variants", "slipstream", "--flag-sets=--fast")
    assert status == command.OK and (row["variant"], row["flags"]) == ("slipstream", ["--fast"])
    assert row["error"] == pytest.approx(0.01, rel=1e-3)
    measure("--variants", "slipstream", "--flag-sets=--fast")
    logs = sorted(file.name for file in (tmp_path / "logs").iterdir())
    assert logs == ["01-default.log", "01-fast.log", "02-fast.log"]


@pytest.mark.parametrize("option", [("--free-gb", "8"), ("--profiles", "tables")], ids=lambda option: option[0])
def test_options_that_first_pictures_do_not_heed_are_refused(
    option: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "main.py").touch()
    (tmp_path / "comfy").mkdir()
    with pytest.raises(SystemExit):
        command.main(["--comfyui", str(tmp_path), "--from-scratch", "5", *option])
    assert option[0] in capsys.readouterr().err
