"""What is read of the classes that ComfyUI has loaded."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from slipstream.hosts.comfy.dry_run.node_types import loaded_kinds
from slipstream.hosts.comfy.dry_run.prompt_links import NodeKind


class Plain:
    RETURN_TYPES = ("LATENT", ["a", "b"])


class Saves:
    RETURN_TYPES = ()
    OUTPUT_NODE = True


class Paid:
    RETURN_TYPES = ("IMAGE",)
    OUTPUT_NODE, API_NODE = False, True


class _Fails:
    def __get__(self, *_: object) -> object:
        raise RuntimeError("another pack's fault")


class Broken:
    RETURN_TYPES, OUTPUT_NODE, API_NODE = None, _Fails(), _Fails()


def test_what_classes_make_save_and_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    classes = {kind.__name__: kind for kind in (Plain, Saves, Paid, Broken)}
    monkeypatch.setitem(sys.modules, "nodes", SimpleNamespace(NODE_CLASS_MAPPINGS=classes))
    assert loaded_kinds() == {
        "Plain": NodeKind(("LATENT", "COMBO")),
        "Saves": NodeKind((), is_output=True),
        "Paid": NodeKind(("IMAGE",), is_api=True),
        "Broken": NodeKind(),
    }
