"""What a model runs is what its files say, or no engine is used for it."""

from __future__ import annotations

import functools
import importlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from slipstream.core.errors import UnsupportedModel
from slipstream.hosts.live_model import source_code
from slipstream.hosts.live_model.layer_walk import layers_of
from slipstream.hosts.live_model.source_code import HostCode, source_digest

OWNER = __name__


def why_replaced(model: torch.nn.Module) -> str | None:
    """Asked anew, as nobody keeps what was found."""
    return HostCode(model, layers_of(model)).why_replaced()


def says(what: str) -> str:
    """The reason where this file replaced something."""
    return f"another extension ({OWNER}) replaced {what}; start without it to use engines"


FILES = {
    "__init__": "",
    "layers": """
import functools
from dataclasses import dataclass
import torch
from . import unrelated
from .exports import scale
try:
    from .no_such_module import offset
except ImportError:
    def offset(x):
        return x

def twice(function):
    @functools.wraps(function)
    def wrapper(*args):
        return 2 * function(*args)
    return wrapper

@dataclass
class Settings:
    size: int = 1

class Block(torch.nn.Module):
    @torch.no_grad()
    def forward(self, x):
        return offset(self.doubled(scale(x)))

    @twice
    def doubled(self, x):
        return x

class Model(Block):
    def __init__(self):
        super().__init__()
        self.inner = Block()
        self.linear = torch.nn.Linear(2, 2)
""",
    "exports": "from .helpers import scale\nfrom .unrelated import other",
    "helpers": "from .deeper import factor\ndef scale(x):\n    return x * factor()",
    "deeper": "def factor():\n    return 2.0",
    "unrelated": "def other():\n    return 1",
}


class Host:
    """A package with a model, as an extension sees it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "tiny_host"
        self.folder.mkdir()
        for name, text in FILES.items():
            self.write(name, text)

    def write(self, name: str, text: str) -> None:
        (self.folder / f"{name}.py").write_text(text)

    def module(self, name: str) -> ModuleType:
        return importlib.import_module(f"tiny_host.{name}")

    def model(self) -> torch.nn.Module:
        made: torch.nn.Module = self.module("layers").Model()
        return made


def forget() -> None:
    """As in the next process."""
    for cached in (source_code._written, source_code._modules_behind, source_code._is_installed):
        cached.cache_clear()


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    forget()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(source_code, "STARTED", time.time() + 1000)
    yield Host(tmp_path)
    forget()
    for name in [name for name in sys.modules if name.partition(".")[0] == "tiny_host"]:
        del sys.modules[name]


# ------------------------------------------------------------------------------------------------ the files


@pytest.mark.parametrize("name", ["layers", "helpers", "deeper"])
def test_code_that_the_model_runs_is_part_of_its_digest(host: Host, name: str) -> None:
    before = source_digest(host.model())
    assert source_digest(host.model()) == before
    host.write(name, FILES[name] + "\nCHANGED = True\n")
    forget()
    assert source_digest(host.model()) != before


def test_other_code_is_not(host: Host) -> None:
    before = source_digest(host.model())
    host.write("unrelated", "def other():\n    return 2\n")
    forget()
    assert source_digest(host.model()) == before


def test_the_digest_is_of_the_files_alone(host: Host) -> None:
    """The build process makes the same one, whatever this one has loaded and changed."""
    before = source_digest(host.model())
    host.module("layers").scale = host.module("unrelated").other
    forget()
    assert source_digest(host.model()) == before


def test_a_file_that_was_changed_under_a_running_host(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    model = host.model()
    monkeypatch.setattr(source_code, "STARTED", time.time() - 1000)
    with pytest.raises(UnsupportedModel, match=r"layers\.py was changed after this program started; restart it"):
        source_digest(model)
    assert "restart it to use engines" in str(why_replaced(model))


def test_a_file_that_is_gone(host: Host) -> None:
    model = host.model()
    (host.folder / "helpers.py").unlink()
    with pytest.raises(UnsupportedModel, match="The source of tiny_host.helpers cannot be read"):
        source_digest(model)


@pytest.mark.parametrize("text", ["def broken(", "from ......elsewhere import nothing\n", "x = 1\x00\n"])
def test_a_file_that_cannot_be_understood(text: str, host: Host) -> None:
    model = host.model()
    host.write("helpers", text)
    forget()
    assert "The source of tiny_host.helpers cannot be read" in str(why_replaced(model))


# ----------------------------------------------------------------------------------------- what is in memory


def test_the_hosts_own_code_passes(host: Host) -> None:
    assert why_replaced(host.model()) is None


def test_a_replaced_function(host: Host) -> None:
    model = host.model()
    host.module("layers").scale = lambda x: x
    assert why_replaced(model) == says("tiny_host.layers.scale")


def test_a_function_that_was_replaced_where_it_is_defined(host: Host) -> None:
    model = host.model()
    host.module("deeper").factor = lambda: 3.0
    assert why_replaced(model) == says("tiny_host.deeper.factor")


def test_a_function_that_was_replaced_everywhere(host: Host) -> None:
    model = host.model()

    def ours() -> float:
        return 3.0

    host.module("deeper").factor = host.module("helpers").factor = ours
    assert why_replaced(model) == says("tiny_host.deeper.factor")


def test_a_replaced_method(host: Host) -> None:
    model = host.model()
    host.module("layers").Block.forward = lambda self, x: x
    assert why_replaced(model) == says("tiny_host.layers.Block.forward")


def test_a_method_replaced_by_one_that_passes_for_it(host: Host) -> None:
    model = host.model()
    block = host.module("layers").Block
    before = block.forward

    @functools.wraps(before)
    def forward(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = before(self, 2 * x)
        return result

    block.forward = forward
    assert why_replaced(model) == says("tiny_host.layers.Block.forward")


def test_layers_of_an_extension(host: Host) -> None:
    model = host.model()

    class Mine(host.module("layers").Block):  # type: ignore[misc]
        pass

    model.inner = Mine()
    reason = why_replaced(model)
    assert reason is not None and reason.startswith("another extension brought its own layers") and "Mine" in reason
