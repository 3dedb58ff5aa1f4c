"""Saved presets: what is written, what is read, and what becomes of a damaged file."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.core.errors import StoreError
from slipstream.sampling import saved
from slipstream.sampling.presets import CUSTOM, PRESETS
from slipstream.sampling.samplers import SamplerKind, rule_for
from slipstream.sampling.saved import SavedPreset
from slipstream.sampling.task import Task

PRESET = SavedPreset("Portraits 1", 20, (0, 1, 2, 5, 9, 19), "SD15", "dpmpp_2m", "karras", 6.5, 41.25, "2025-11-30")
DAMAGED = {
    "not JSON": "{",
    "empty": "",
    "another thing": "[1, 2]",
    "a number": "3",
    "nested without end": "[" * 100_000,
    "of the future": json.dumps(PRESET.record() | {"format": 2}),
    "without steps": json.dumps({key: value for key, value in PRESET.record().items() if key != "steps"}),
    "falling steps": json.dumps(PRESET.record() | {"computed": [0, 3, 2]}),
    "no first step": json.dumps(PRESET.record() | {"computed": [1, 3, 19]}),
    "steps beyond the end": json.dumps(PRESET.record() | {"computed": [0, 20]}),
    "no steps": json.dumps(PRESET.record() | {"computed": []}),
    "steps in words": json.dumps(PRESET.record() | {"computed": "0 1 2"}),
    "half steps": json.dumps(PRESET.record() | {"computed": [0, 1.5, 19]}),
    "a name that is none": json.dumps(PRESET.record() | {"sampler": 7}),
    "CFG in words": json.dumps(PRESET.record() | {"cfg": "much"}),
    "CFG without end": json.dumps(PRESET.record() | {"cfg": 10**400}),
    "sigmas in words": json.dumps(PRESET.record() | {"sigmas": ["high", "low"]}),
    "a mask in words": json.dumps(PRESET.record() | {"has_mask": "no"}),
    "bytes": b"\xff\xfe\x00",
}


def write(folder: Path, name: str, content: str | bytes) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_bytes(content if isinstance(content, bytes) else content.encode())


# ---- what is kept


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there yet"
    assert saved.saved_presets(folder) == {}
    path = saved.save(PRESET, folder)
    assert path == folder / "Portraits 1.json"
    assert [each.name for each in folder.iterdir()] == [path.name], "nothing is left beside it"
    assert saved.load("Portraits 1", folder) == PRESET
    assert saved.saved_presets(folder) == {"Portraits 1": PRESET}


def test_all_of_it_is_kept(tmp_path: Path) -> None:
    inpainting = replace(PRESET, has_mask=True, sigmas=(14.6, 0.1, 0.0))
    saved.save(inpainting, tmp_path)
    assert saved.load(PRESET.name, tmp_path) == inpainting


def test_what_was_saved_before_masks_and_sigmas_were_is_loaded(tmp_path: Path) -> None:
    older = {key: value for key, value in PRESET.record().items() if key not in ("has_mask", "sigmas")}
    write(tmp_path, PRESET.name, json.dumps(older))
    assert saved.load(PRESET.name, tmp_path) == PRESET


def test_lists_are_in_order_and_know_only_presets(tmp_path: Path) -> None:
    for name in ("b", "a", "Ångström"):
        saved.save(replace(PRESET, name=name), tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "a.json.0123.part").write_text("{")
    assert list(saved.saved_presets(tmp_path)) == ["a", "b", "Ångström"]


def test_the_same_name_is_replaced(tmp_path: Path) -> None:
    saved.save(PRESET, tmp_path)
    saved.save(replace(PRESET, cfg=1.0), tmp_path)
    assert saved.load(PRESET.name, tmp_path).cfg == 1.0


def test_what_could_not_be_replaced_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved.save(PRESET, tmp_path)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(StoreError, match="is full"):
        saved.save(replace(PRESET, cfg=1.0), tmp_path)
    assert saved.saved_presets(tmp_path) == {PRESET.name: PRESET}
    assert len(list(tmp_path.iterdir())) == 1


def test_a_folder_that_is_none_is_said_to_be(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(StoreError, match="Saving the preset Portraits 1"):
        saved.save(PRESET, file)
    assert saved.saved_presets(file) == {}
    assert "cannot be read" in caplog.text


def test_a_preset_is_deleted(tmp_path: Path) -> None:
    saved.save(PRESET, tmp_path)
    assert saved.delete(PRESET.name, tmp_path)
    assert not saved.delete(PRESET.name, tmp_path)
    assert saved.saved_presets(tmp_path) == {}
    with pytest.raises(ValueError, match="There is no saved preset 'Portraits 1'"):
        saved.load(PRESET.name, tmp_path)


# ---- what is damaged


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_left_out(content: str | bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved.save(PRESET, tmp_path)
    write(tmp_path, "damaged", content)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert saved.saved_presets(tmp_path) == {PRESET.name: PRESET}
    (record,) = caplog.records
    assert str(tmp_path / "damaged.json") in record.message, "said once, with the file's name"
    with pytest.raises(ValueError, match="Delete it"):
        saved.load("damaged", tmp_path)


def test_a_file_under_the_name_of_a_preset_of_ours_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, "balanced", json.dumps(PRESET.record()))
    assert saved.saved_presets(tmp_path) == {}


# ---- names


@pytest.mark.parametrize("name", ["a", "My preset (v1.2)", "20_steps-x+y", "Ünïcødé", "7", "x" * 100])
def test_good_names(name: str, tmp_path: Path) -> None:
    saved.save(replace(PRESET, name=name), tmp_path)
    assert list(saved.saved_presets(tmp_path)) == [name]


@pytest.mark.parametrize(
    "name",
    ["", " ", ".", "..", "a/b", "a\\b", "../x", "/x", "C:x", "a\0", "a\n", " a", "a ", "a.", ".hidden", "-x", "con",
     "NUL.x", "com1", "x" * 121, "å" * 61, "a*", "a?", 'a"', "a|b", "a<b"],
)  # fmt: skip
def test_bad_names(name: str, tmp_path: Path) -> None:
    for act in (saved.load, saved.delete, lambda name, folder: saved.save(replace(PRESET, name=name), folder)):
        with pytest.raises(ValueError, match="cannot be saved as"):
            act(name, tmp_path / "folder")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [*PRESETS, CUSTOM, "Balanced", "CUSTOM"])
def test_names_that_are_taken(name: str) -> None:
    with pytest.raises(ValueError, match="that Slipstream brings"):
        saved.check_name(name)


# ---- what it does


RUN = Task("dpmpp_2m", 20, sigmas=tuple(float(level) for level in range(20, -1, -1)), cfg=6.5, model="SD15")
"""One that it was calibrated for."""


def test_it_computes_its_steps_in_runs_of_its_length_alone() -> None:
    preset = PRESET.preset()
    assert preset.name == PRESET.name and preset.selection.computed(20) == PRESET.computed
    assert preset.why_not(RUN) is None
    reason = preset.why_not(replace(RUN, steps=30))
    assert reason == (
        "these steps were calibrated for runs of 20 steps, and this one has 30; sample with 20 steps, or calibrate "
        "with 30"
    )
    with pytest.raises(ValueError, match="^These steps were calibrated for runs of 20 steps"):
        preset.selection.computed(30)


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "sampler": ({"sampler": "deis"}, "with dpmpp_2m, and this is deis"),
    "kind of sampler": ({"sampler": "euler_ancestral"}, "with dpmpp_2m, and this is euler_ancestral"),
    "guidance": ({"guided": False, "cfg": 1.0}, "at CFG above 1, and this is CFG 1"),
    "mask": ({"has_mask": True}, "without a mask for inpainting, and this is with one"),
    "parts": ({"has_parts": True}, "on latents of one part, and this has several"),
}


@pytest.mark.parametrize(("changes", "said"), OTHERS.values(), ids=OTHERS)
def test_it_is_for_runs_like_those_of_its_calibration(changes: dict[str, Any], said: str) -> None:
    reason = PRESET.preset().why_not(replace(RUN, **changes))
    assert reason == f"Portraits 1 was calibrated {said}; sample so, or calibrate anew"


def test_it_is_for_whatever_it_was_calibrated_with() -> None:
    for saved_one, run in (
        (replace(PRESET, sampler="of_another_extension"), replace(RUN, sampler="of_another_extension")),
        (replace(PRESET, sampler="ddim"), replace(RUN, sampler="euler")),
        (replace(PRESET, sampler="dpmpp_2m_sde_gpu"), replace(RUN, sampler="dpmpp_2m_sde")),
        (replace(PRESET, cfg=1.0), replace(RUN, guided=False)),
        (replace(PRESET, has_mask=True), replace(RUN, has_mask=True)),
        (PRESET, replace(RUN, is_distilled=True)),
    ):
        assert saved_one.preset().why_not(run) is None
    reason = replace(PRESET, has_mask=True).preset().why_not(RUN)
    assert reason is not None and "with a mask for inpainting, and this is without" in reason
    assert "several times a step" in str(PRESET.preset().why_not(replace(RUN, sampler="heun")))
    assert PRESET.preset().rule_for(RUN) is rule_for(SamplerKind.MULTISTEP)


def test_what_differs_is_remarked() -> None:
    preset = replace(PRESET, sigmas=RUN.sigmas).preset()
    nearly = tuple(level * (1 + 1e-5) for level in RUN.sigmas)
    assert preset.remark(RUN) == preset.remark(replace(RUN, sigmas=nearly)) == ""
    assert preset.remark(replace(RUN, cfg=7.0)) == "calibrated with CFG 6.5"
    other = replace(RUN, sigmas=tuple(level / 2 for level in RUN.sigmas), model="SDXL")
    assert preset.remark(other) == "calibrated with another schedule (karras) and a model of the class SD15"
    unknown = replace(RUN, sigmas=(), cfg=None, model="")
    assert preset.remark(unknown) == PRESET.preset().remark(replace(RUN, sigmas=(1.0, 0.0))) == ""


def test_its_note_says_what_it_is_for() -> None:
    note = PRESET.preset().note
    for part in ("6 of 20 steps", "SD15", "dpmpp_2m", "karras", "CFG 6.5", "41.2 dB", "2025-11-30"):
        assert part in note
