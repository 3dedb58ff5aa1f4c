"""Which ComfyUI, which store, and what is said where a ComfyUI cannot be used."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from slipstream.cli.home import open_store, preferences
from slipstream.core.errors import BackendUnavailable
from slipstream.core.spec import Precision
from slipstream.engine_cache import DEFAULT_LIMIT_BYTES, WeightsMemo
from slipstream.hosts.comfy.building import without_server
from slipstream.hosts.standalone.model_by_file import load_model
from slipstream.runtime.settings.model_settings import Settings
from slipstream.runtime.settings.preferences_file import PreferencesFile


def make_comfyui(folder: Path, code: str = "") -> Path:
    (folder / "comfy").mkdir(parents=True)
    (folder / "main.py").touch()
    (folder / "comfy" / "__init__.py").write_text(code, encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Instead of the user's own cache folder."""
    monkeypatch.setattr(without_server, "CACHE", tmp_path / "cache")
    return tmp_path / "cache"


def options(home: Path | None = None, comfyui: Path | None = None):
    from argparse import Namespace

    return Namespace(home=home, comfyui=comfyui)


def test_the_order_in_which_a_comfyui_is_looked_for(tmp_path: Path, cache: Path, monkeypatch) -> None:
    assert without_server.find_checkout() is None
    cached = make_comfyui(cache / "ComfyUI-2")
    make_comfyui(cache / "ComfyUI-1")
    (cache / "ComfyUI-3").mkdir()  # not a checkout
    assert without_server.find_checkout() == cached
    own = make_comfyui(tmp_path / "own")
    monkeypatch.setattr(sys, "argv", [str(own / "custom_nodes" / "slipstream")])
    assert without_server.find_checkout() == own
    first = make_comfyui(tmp_path / "first")
    monkeypatch.setenv("COMFYUI_DIR", f"{first}{os.pathsep}{cached}")
    assert without_server.find_checkout() == first
    named = make_comfyui(tmp_path / "named")
    assert without_server.find_checkout(named) == named


def test_what_is_named_must_be_a_comfyui(tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(BackendUnavailable, match="--comfyui names .*no main.py"):
        without_server.find_checkout(tmp_path)
    monkeypatch.setenv("COMFYUI_DIR", str(tmp_path))
    with pytest.raises(BackendUnavailable, match="COMFYUI_DIR names"):
        without_server.models_folder()


def test_the_order_in_which_a_store_is_looked_for(tmp_path: Path, cache: Path, monkeypatch) -> None:
    make_comfyui(cache / "ComfyUI-1")  # for developers: no store of anybody's
    assert open_store(options()).root == tmp_path / "user" / ".cache" / "slipstream" / "engines"
    base = tmp_path / "Documents" / "ComfyUI"  # as ComfyUI Desktop has it: apart from the code
    (base / "models").mkdir(parents=True)
    monkeypatch.setattr(sys, "argv", [str(base / "custom_nodes" / "slipstream" / "__main__.py")])
    assert open_store(options()).root == base / "models" / "slipstream"
    comfyui = make_comfyui(tmp_path / "ComfyUI")
    monkeypatch.setenv("COMFYUI_DIR", str(comfyui))
    assert open_store(options()).root == comfyui / "models" / "slipstream"
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path / "configured"))
    assert open_store(options()).root == tmp_path / "configured"
    assert open_store(options(home=tmp_path / "home")).root == tmp_path / "home"


def test_what_was_chosen_on_the_page_counts_here_too(tmp_path: Path, monkeypatch) -> None:
    comfyui = make_comfyui(tmp_path / "ComfyUI")
    monkeypatch.setenv("COMFYUI_DIR", str(comfyui))
    preferred = tmp_path / "preferred"
    PreferencesFile(comfyui / "models" / "slipstream").change(
        {"folder": str(preferred), "limit_bytes": 10**9, "precision": "bf16"}
    )
    store = open_store(options())
    assert (store.root, store.limit_bytes) == (preferred, 10**9)
    assert preferences(options()).applied_to(Settings()).precision is Precision.BF16
    named = open_store(options(home=tmp_path / "home"))
    assert (named.root, named.limit_bytes) == (tmp_path / "home", DEFAULT_LIMIT_BYTES), "it is no store of ComfyUI's"
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path / "configured"))
    assert open_store(options()).root == tmp_path / "configured"


def test_no_engines_out_of_comfyuis_folder_for_uploads(tmp_path: Path, monkeypatch) -> None:
    comfyui = make_comfyui(tmp_path / "ComfyUI")
    monkeypatch.setenv("COMFYUI_DIR", str(comfyui))
    PreferencesFile(comfyui / "models" / "slipstream").change({"folder": str(comfyui / "input" / "x")})
    assert open_store(options()).root == comfyui / "models" / "slipstream"


def build(process, *words: object, **environment: str):
    return process("build", "--resolution", "64x64", *words, **environment)


def test_a_missing_package_names_the_python_to_use(process, tmp_path: Path) -> None:
    comfyui = make_comfyui(tmp_path / "portable" / "ComfyUI", "import einops_that_nobody_has")
    file = tmp_path / "x.safetensors"
    file.touch()
    words = ("--model", file, "--comfyui", comfyui, "--home", tmp_path / "store")
    done = build(process, *words)
    assert done.status == 1 and not done.out
    assert "No module named 'einops_that_nobody_has'" in done.err
    assert f"-m pip install -r {comfyui / 'requirements.txt'}" in done.err
    python = comfyui / "venv" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    python.parent.mkdir(parents=True)
    shutil.copy(sys.executable, python)
    done = build(process, *words)
    assert f"ComfyUI's Python: {python} " in done.err
    assert not (tmp_path / "store").exists()


def test_a_model_is_found_by_its_path_or_its_name(tmp_path: Path, monkeypatch) -> None:
    comfyui = make_comfyui(tmp_path / "ComfyUI")
    (comfyui / "models" / "checkpoints" / "sd15").mkdir(parents=True)
    named = comfyui / "models" / "checkpoints" / "sd15" / "a.safetensors"
    named.touch()
    assert without_server.find_file("sd15/a.safetensors", comfyui) == named
    monkeypatch.chdir(comfyui / "models")
    assert without_server.find_file("checkpoints/sd15/a.safetensors", comfyui) == named


def test_a_missing_model_is_reported_before_comfyui_is_loaded(process, tmp_path: Path) -> None:
    comfyui = make_comfyui(tmp_path / "ComfyUI", "import einops_that_nobody_has")
    done = build(process, "--model", "b.safetensors", "--comfyui", comfyui)
    assert done.status == 1 and "einops" not in done.err and not done.out
    assert f"There is no file {tmp_path / 'b.safetensors'}" in done.err


def test_without_a_comfyui(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailable, match="No ComfyUI was found.*--comfyui DIR or COMFYUI_DIR"):
        load_model("x.safetensors", None, WeightsMemo(tmp_path))


def test_the_demo_without_any_host(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BackendUnavailable, match="No ComfyUI was found"):
        load_model("demo", None, WeightsMemo(tmp_path))
