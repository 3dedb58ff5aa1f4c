"""The script that WebUIs load by its path: one package, whatever else lies on the path."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# A WebUI as far as its loader of scripts: each extension's folder on the path for good, files run under their names.
WEBUI = """
import importlib.util, sys, types
from pathlib import Path
root, other = Path(sys.argv[1]), sys.argv[2]
told = []
def module(name, **contents):
    made = types.ModuleType(name)
    vars(made).update(contents)
    sys.modules[name] = made
    return made
names = ("on_ui_tabs", "on_before_ui", "on_list_unets")
callbacks = module("modules.script_callbacks", **dict.fromkeys(names, told.append))
scripts = module("modules.scripts", Script=type("Script", (), {}), AlwaysVisible=object())
module("modules", script_callbacks=callbacks, scripts=scripts)
if "forge" in sys.argv:
    module("modules_forge")
sys.path = [str(root), other, *sys.path]
def load():
    path = str(root / "scripts" / "slipstream_webui.py")
    spec = importlib.util.spec_from_file_location("slipstream_webui.py", path)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found
"""

CASES = {
    "forge": """
found = load()
script = found.SlipstreamScript()
assert issubclass(found.SlipstreamScript, sys.modules["modules.scripts"].Script)
assert script.title() == "Slipstream" and script.show(False) is sys.modules["modules.scripts"].AlwaysVisible
assert len(told) == 2
assert sys.modules["slipstream"].__path__ == [str(root)]
assert not {"torch", "gradio", "comfy"} & set(sys.modules)
told[0]()
assert str(root) not in sys.path
import nodes
assert nodes.WHOSE == "another extension"
""",
    "forge again": """
first = load()
kept = sys.modules["slipstream"]
load()
assert sys.modules["slipstream"] is kept
""",
    "forge taken": """
import types
foreign = module("slipstream", __file__="/elsewhere/slipstream/__init__.py")
load()
assert sys.modules["slipstream"] is foreign
assert sys.modules["slipstream_webui"].__path__ == [str(root)]
""",
    "a1111": """
found = load()
assert len(told) == 3, "the options of SD Unet"
assert found.SlipstreamScript().ui(False) == []
""",
}


@pytest.mark.parametrize("case", CASES)
def test_a_webui_loads_the_script(case: str, root: Path, tmp_path: Path) -> None:
    (tmp_path / "nodes").mkdir()
    (tmp_path / "nodes" / "__init__.py").write_text("WHOSE = 'another extension'\n", encoding="utf-8")
    command = [sys.executable, "-I", "-c", WEBUI + CASES[case], str(root), str(tmp_path), case.split()[0]]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
