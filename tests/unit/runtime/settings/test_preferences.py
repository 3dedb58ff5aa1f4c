"""What a user chose for all of Slipstream."""

from __future__ import annotations

import json
import logging
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from slipstream.core.spec import Precision, Quantised
from slipstream.runtime.provider import EngineProvider
from slipstream.runtime.settings.model_settings import PRECISIONS, BackendChoice, Settings
from slipstream.runtime.settings.preferences import Background, Preferences
from slipstream.runtime.settings.preferences_file import PreferencesFile
from slipstream.runtime.settings.store_folder import engines_folder, open_store, preferences_file
from slipstream.tests.fakes import FIRST_USE, FakeSource, run_once

ROOT = Path(__file__).resolve().parents[4]
DEFAULTS = {
    **{"folder": None, "limit_bytes": 20 * 2**30, "backend": "auto", "precision": "auto"},
    **{"background": "idle", "notifications": True},
}


@pytest.fixture
def file(tmp_path: Path) -> PreferencesFile:
    return PreferencesFile(tmp_path / "models" / "slipstream")


def test_nothing_was_chosen(file: PreferencesFile) -> None:
    assert file.read() == Preferences() and Preferences().to_json() == DEFAULTS
    assert not file.path.exists()


def test_a_change_is_kept(file: PreferencesFile, tmp_path: Path) -> None:
    folder = str(tmp_path / "elsewhere" / "engines")
    values = {"folder": folder, "limit_bytes": 10**9, "backend": "off", "precision": "bf16", "background": "always"}
    changed = file.change(values)
    assert changed == file.read() == PreferencesFile(file.path.parent).read()
    assert changed.to_json() == {**DEFAULTS, **values}
    assert Path(folder).is_dir() and not list(Path(folder).iterdir())
    assert file.change({"folder": None}).folder is None
    assert [path.name for path in file.path.parent.iterdir()] == ["settings.json"]


def test_changes_at_the_same_time_do_not_undo_each_other(file: PreferencesFile) -> None:
    values = {"limit_bytes": 10**9, "backend": "off", "precision": "bf16", "background": "always"}
    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            list(pool.map(file.change, [{name: value} for name, value in values.items()]))
            assert file.read().to_json() == {**DEFAULTS, **values}
            file.change({name: DEFAULTS[name] for name in values})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("limit_bytes", value) for value in (0, -1, 1.5, True, "5GB", None, 10**30)),
        *(("backend", value) for value in ("fastest", None, 1, [], {"a": 1})),
        *(("precision", value) for value in ("fp4", "FP8", None, 16, [])),
        *(("background", value) for value in ("never", None, True)),
        *(("notifications", value) for value in (1, "yes", None)),
        *(("folder", value) for value in ("relative", "../up", 5, ["/tmp"], "/\x00", "/\ud800", "/" + "a" * 5000)),
        ("colour", "red"),
    ],
)
def test_a_value_that_does_not_do(file: PreferencesFile, name: str, value: Any) -> None:
    file.change({"notifications": False})
    before = file.path.read_bytes()
    with pytest.raises(ValueError, match=name):
        file.change({"limit_bytes": 10**9, name: value})
    assert file.path.read_bytes() == before


def test_a_folder_that_cannot_be_one(file: PreferencesFile, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="engines cannot be stored in"):
        file.change({"folder": str(tmp_path / "file" / "below")})
    assert not file.path.exists()


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\x00\xff", '{"backend": "fastest", "limit_bytes": []}'])
def test_a_damaged_file_is_as_none_and_said_once(
    file: PreferencesFile, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    file.path.parent.mkdir(parents=True)
    file.path.write_bytes(text.encode("latin-1"))
    with caplog.at_level(logging.WARNING):
        assert [file.read() for _ in range(3)] == [Preferences()] * 3
    assert len(caplog.records) == 1 and "settings.json is damaged" in caplog.text
    assert file.change({"notifications": False}) == Preferences(notifications=False)


def test_one_bad_value_does_not_cost_the_others(file: PreferencesFile, caplog: pytest.LogCaptureFixture) -> None:
    file.path.parent.mkdir(parents=True)
    file.path.write_text(json.dumps({"backend": "fastest", "background": "always", "of_a_newer_version": 1}))
    assert file.read() == Preferences(background=Background.ALWAYS)
    assert "backend must be one of" in caplog.text and "newer" not in caplog.text


def test_what_a_newer_version_wrote_is_kept(file: PreferencesFile) -> None:
    newer = {"colour": {"dark": ["é", None]}, "of_a_newer_version": 1}
    file.path.parent.mkdir(parents=True)
    file.path.write_text(json.dumps({"backend": "off", **newer}))
    assert file.change({"notifications": False}).backend is BackendChoice.OFF
    assert file.change({"limit_bytes": 10**9}).to_json().keys() == DEFAULTS.keys()
    assert json.loads(file.path.read_bytes()) == {
        **DEFAULTS, **newer, "backend": "off", "notifications": False, "limit_bytes": 10**9
    }  # fmt: skip


@pytest.fixture
def uploads(tmp_path: Path) -> Path:
    """A folder that others write into."""
    folder = tmp_path / "comfyui" / "input"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def guarded(uploads: Path) -> PreferencesFile:
    return PreferencesFile(uploads.parent / "models" / "slipstream", lambda: [uploads.parent / "temp", uploads])


@pytest.mark.parametrize("place", ["input", "input/deep/er", ".", "..", "models/../input/x", "link", "link/x", "temp"])
def test_no_engines_where_others_write(guarded: PreferencesFile, uploads: Path, place: str) -> None:
    (uploads.parent / "link").symlink_to(uploads)
    with pytest.raises(ValueError, match="Others may upload files there"):
        guarded.change({"folder": str(uploads.parent / place)})
    assert not guarded.path.exists() and not list(uploads.iterdir()), "nothing is made there either"


def test_an_upload_folder_that_is_a_link_into_the_store(guarded: PreferencesFile, uploads: Path) -> None:
    store = uploads.parents[1] / "store"
    (store / "engines").mkdir(parents=True)
    (uploads.parent / "temp").symlink_to(store / "engines")
    with pytest.raises(ValueError, match="choose a folder apart"):
        guarded.change({"folder": str(store)})


def test_a_folder_beside_them_does(guarded: PreferencesFile, uploads: Path) -> None:
    beside = str(uploads.parent / "input2")
    assert guarded.change({"folder": beside}).folder == guarded.read().folder == beside


def test_a_hand_written_folder_where_others_write(
    guarded: PreferencesFile, uploads: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLIPSTREAM_HOME", raising=False)
    guarded.path.parent.mkdir(parents=True)
    guarded.path.write_text(json.dumps({"folder": str(uploads / "x"), "backend": "off"}))
    with caplog.at_level(logging.WARNING):
        assert [guarded.read() for _ in range(3)] == [Preferences(backend=BackendChoice.OFF)] * 3
    assert len(caplog.records) == 1 and "Others may upload files there" in caplog.text
    assert open_store(guarded.read(), guarded.path.parent).root == guarded.path.parent


def test_a_change_by_a_text_editor_is_seen(file: PreferencesFile) -> None:
    file.change({"backend": "compiled"})
    file.path.write_text('{"backend": "off"}', encoding="utf-8")
    assert file.read().backend is BackendChoice.OFF


def test_auto_means_what_is_preferred() -> None:
    chosen = Preferences(backend=BackendChoice.TENSORRT, precision=Precision.BF16)
    assert chosen.applied_to(Settings()) == Settings(backend=BackendChoice.TENSORRT, precision=Precision.BF16)
    explicit = Settings(backend=BackendChoice.COMPILED, precision=Precision.FP16)
    assert chosen.applied_to(explicit) == explicit
    assert Preferences().applied_to(Settings()) == Settings()


def test_the_page_offers_every_precision() -> None:
    offered = re.search(
        r'name: "precision",.*?options: \{(.*?)\}', (ROOT / "web/js/settings.js").read_text(), re.DOTALL
    )
    assert offered is not None and tuple(re.findall(r"(\w+):", offered[1])) == PRECISIONS
    shown = re.findall(r': "(.*?)"', offered[1])
    for language in ("en", "zh"):
        texts = json.loads((ROOT / "locales" / language / "settings.json").read_text("utf-8"))
        assert list(texts["Slipstream_Precision"]["options"]) == shown


@pytest.mark.parametrize("quantised", list(Quantised))
def test_eight_bits_are_kept_and_applied(file: PreferencesFile, quantised: Quantised) -> None:
    assert file.change({"precision": quantised.value}).to_json()["precision"] == quantised.value
    chosen = file.read()
    assert chosen.precision is quantised
    assert chosen.applied_to(Settings()).quantised is quantised
    assert chosen.applied_to(Settings(precision=Precision.FP16)).quantised is None


def test_the_environment_goes_before_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host, preferred = tmp_path / "host", tmp_path / "preferred"
    monkeypatch.delenv("SLIPSTREAM_HOME", raising=False)
    chosen = Preferences(folder=str(preferred), limit_bytes=10**9)
    assert engines_folder(Preferences(), host) == host
    assert engines_folder(chosen, host) == preferred
    assert open_store(chosen, host).limit_bytes == 10**9
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path / "configured"))
    assert engines_folder(chosen, host) == tmp_path / "configured"
    assert preferences_file(host).path == host / "settings.json", "where it is looked for never depends on itself"


def test_a_provider_asks_anew_each_time(provider: EngineProvider, source: FakeSource) -> None:
    assert provider.with_preferences(FIRST_USE) == FIRST_USE
    provider.preferences = lambda: Preferences(backend=BackendChoice.OFF)
    offer = run_once(provider, source, provider.with_preferences(FIRST_USE))
    assert offer.engine is None and "switched off" in offer.reason


def test_builds_in_the_background_may_run_always(provider: EngineProvider) -> None:
    provider.run_began()
    assert not provider._is_idle()
    provider.preferences = lambda: Preferences(background=Background.ALWAYS)
    assert provider._is_idle()


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="this user may write everywhere")
def test_a_folder_without_permission(file: PreferencesFile, tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(ValueError, match="Permission denied"):
        file.change({"folder": str(tmp_path / "closed")})
