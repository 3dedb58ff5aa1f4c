"""Another look at a model that was looked at before finds what a first look at it finds."""

from __future__ import annotations

import copy
import functools
import importlib
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from slipstream.hosts.live_model.account import LiveModel, _set_on_others, live_model
from slipstream.hosts.live_model.held_weights import HeldWeights, Hold
from slipstream.hosts.live_model.layer_walk import layers_of


class Block(nn.Module):
    """Has settings of all kinds."""

    weight_function: list[Any] = []

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.norm, self.other_norm = nn.GroupNorm(2, 4), nn.GroupNorm(2, 4)
        self.more = nn.Sequential()
        self.factors: list[float] = []
        self.sizes = {"one": [1.0, 2.0], "other": 3.0}
        self.pair = [1.0], 2.0
        self.settings = SimpleNamespace()
        factor = 1.0
        self.scaled = lambda x: x * factor
        self.comfy_note, self.comfy_last_note = "a", "b"  # not read, and written by the host as it likes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.more(self.scaled(self.second(self.norm(self.first(x)))))
        for factor in [*self.factors, *self.sizes["one"], *self.pair[0], *vars(self.settings).values()]:
            x = x * factor
        return self.other_norm(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def untouched(model: Any) -> None:
    pass


def other_dict(model: Any) -> None:
    """Of all that a layer holds."""
    model.blocks[1].norm.__dict__ = {**vars(model.blocks[1].norm), "eps": 0.1}


def other_dict_of_the_model(model: Any) -> None:
    model.__dict__ = {**vars(model), "forward": lambda x: x}


def other_dict_of_parts(model: Any) -> None:
    vars(model.blocks[1])["_modules"] = {**model.blocks[1]._modules, "first": nn.Identity()}


def other_layer(model: Any) -> None:
    model.blocks[0].first = nn.Identity()


def first_part(model: Any) -> None:
    model.blocks[1].more.append(nn.Tanh())


def exchanged_names(model: Any) -> None:
    """The parts and their order stay."""
    block = model.blocks[1]
    parts = [*block._modules.items()]
    block._modules.clear()
    block._modules.update({{"more": "norm", "norm": "more"}.get(name, name): layer for name, layer in parts})


def method_in_place_of_a_note(model: Any) -> None:
    """As many things as before, and the last one is called as before."""
    block = model.blocks[1]
    del block.comfy_note, block.comfy_last_note
    block.forward = lambda x: x
    block.comfy_last_note = "b"


def other_class_behind(model: Any) -> None:
    class Louder(type(model.blocks[0].norm)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model.blocks[0].norm.__class__ = Louder


def first_in_a_list(model: Any) -> None:
    model.blocks[1].factors.append(2.0)


def in_a_list_in_a_dict(model: Any) -> None:
    model.blocks[1].sizes["one"][1] = 4.0


def in_a_list_in_a_tuple(model: Any) -> None:
    model.blocks[1].pair[0][0] = 4.0


def other_name_in_a_dict(model: Any) -> None:
    model.blocks[1].sizes["more"] = model.blocks[1].sizes.pop("other")


def first_setting(model: Any) -> None:
    model.blocks[1].settings.factor = 2.0


def number_of_a_function(model: Any) -> None:
    model.blocks[1].scaled.__closure__[0].cell_contents = 2.0


def code_of_a_function(model: Any) -> None:
    factor = 1.0
    model.blocks[1].scaled.__code__ = (lambda x: x + factor).__code__


def bound_elsewhere(model: Any) -> None:
    model.blocks[1].first.forward = MethodType(nn.Linear.forward, model.blocks[0].first)


CHANGES = [
    other_dict, other_dict_of_the_model, other_dict_of_parts, other_layer, first_part, exchanged_names,
    method_in_place_of_a_note, other_class_behind, first_in_a_list, in_a_list_in_a_dict, in_a_list_in_a_tuple,
    other_name_in_a_dict, first_setting, number_of_a_function, code_of_a_function, bound_elsewhere,
]  # fmt: skip


class NoCode:
    """Nobody replaced any."""

    def __init__(self, *_: Any) -> None:
        pass

    state = "nothing was replaced"

    def why_replaced(self) -> None:
        return None


def account_of(model: nn.Module) -> LiveModel:
    return LiveModel(model, Model, code=NoCode)


@pytest.mark.parametrize("change", [untouched, *CHANGES])
def test_another_look_finds_what_a_first_one_finds(change: Callable[[Any], None]) -> None:
    model = Model()
    account = account_of(model)
    assert account.why_changed() is None and account.why_changed("blocks.1") is None
    change(model)
    wanted = account_of(model)
    assert (wanted.why_changed() is None) == (change is untouched)
    assert account.why_changed() == wanted.why_changed()
    assert account.why_changed("blocks.1") == wanted.why_changed("blocks.1")


PARTS = "blocks.0", "blocks.1"


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_known_of_several_parts_is_what_is_known_of_each(change: Callable[[Any], None]) -> None:
    model = Model()
    account = account_of(model)
    assert account.changed_parts(PARTS) == {}
    model.blocks[0].sizes["other"] = 4
    assert account.changed_parts(PARTS).keys() == {"blocks.0"}
    change(model)
    wanted = account_of(model)
    each = {part: wanted.why_changed(part) for part in PARTS}
    for _ in range(2):
        assert account.changed_parts(PARTS) == {part: reason for part, reason in each.items() if reason is not None}


def test_parts_are_not_looked_at_again_while_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    account = account_of(model)
    model.blocks[1].sizes["other"] = 4
    first = account.changed_parts(PARTS)
    looks: list[str] = []
    why_changed = account.why_changed
    monkeypatch.setattr(account, "why_changed", lambda part="": (looks.append(part), why_changed(part))[1])
    assert account.changed_parts(PARTS) == first and looks == [""]
    model.blocks[0].sizes["other"] = 4
    assert account.changed_parts(PARTS).keys() == {*PARTS} and looks == ["", "", *PARTS]


def test_where_code_was_replaced_each_part_is_asked_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    class Replaced(NoCode):
        state: object = "first"
        said = "replaced"

        def why_replaced(self) -> Any:
            return self.said

    model = Model()
    account = LiveModel(model, Model, code=Replaced)
    assert account.changed_parts(PARTS) == dict.fromkeys(PARTS, "replaced")
    monkeypatch.setattr(Replaced, "said", "replaced otherwise")
    assert account.changed_parts(PARTS) == dict.fromkeys(PARTS, "replaced")
    for state in ("another", None):
        monkeypatch.setattr(Replaced, "state", state)
        monkeypatch.setattr(Replaced, "said", f"replaced: {state}")
        assert account.changed_parts(PARTS) == dict.fromkeys(PARTS, f"replaced: {state}")


def test_a_method_that_was_put_back_is_no_change() -> None:
    """ComfyUI puts the bound method of the class onto a layer from which it takes a LoRA that computes beside it."""
    model: Any = Model()
    layer = model.blocks[1].first
    layer.forward = layer.forward
    account = account_of(model)
    assert "forward" in vars(layer) and account.why_changed() is None
    layer.forward = lambda x: 2 * x
    assert "forward" in str(account.why_changed())
    layer.forward = MethodType(nn.Linear.forward, model.blocks[0].first)
    assert "forward" in str(account.why_changed())
    layer.forward = MethodType(nn.Linear.forward, layer)
    assert account.why_changed() is None


def test_a_function_that_knows_what_is_not_there_yet() -> None:
    model: Any = Model()

    def early(x: torch.Tensor) -> torch.Tensor:
        return x * later

    model.blocks[1].scaled = early
    account = account_of(model)
    assert "scaled" in str(account.why_changed()) and "scaled" in str(account.why_changed())
    later = 2.0


def test_other_bases_of_a_class_are_seen() -> None:
    class Base(nn.Linear):
        pass

    class Louder(nn.Linear):
        pass

    class Kind(Base):
        pass

    seen: list[Any] = []

    def code(_: nn.Module, layers: Any) -> NoCode:
        seen.extend(type(layer).__mro__ for layer in layers.values())
        return NoCode()

    model = Kind(2, 2)
    account = LiveModel(model, functools.partial(Kind, 2, 2), code=code)
    account.why_changed()
    Kind.__bases__ = (Louder,)
    account.why_changed()
    assert [Louder in kinds for kinds in seen] == [False, True]


def test_a_shallow_copy_has_an_account_of_its_own() -> None:
    model = Model()
    architecture = SimpleNamespace(role="unet", fresh=Model())
    assert live_model(model, architecture, code=NoCode).why_changed() is None
    copied: Any = copy.copy(model)
    copied.forward = lambda x: x
    assert "forward" in str(live_model(copied, architecture, code=NoCode).why_changed())
    assert live_model(model, architecture, code=NoCode).why_changed() is None


# -------------------------------------------------------------------------------------------------- its weights


def other_parameter(model: Any) -> None:
    model.blocks[1].first.weight = nn.Parameter(torch.zeros(4, 4))


def other_memory(model: Any) -> None:
    model.blocks[1].first.weight.data = torch.zeros(4, 4)


def none_any_more(model: Any) -> None:
    model.blocks[1].first.bias = None


def other_dict_of_weights(model: Any) -> None:
    layer = model.blocks[1].first
    vars(layer)["_parameters"] = {**layer._parameters, "weight": nn.Parameter(torch.zeros(4, 4))}


def other_dict_and_weights(model: Any) -> None:
    layer = model.blocks[1].first
    parameters = {**layer._parameters, "weight": nn.Parameter(torch.zeros(4, 4))}
    layer.__dict__ = {**vars(layer), "_parameters": parameters}


def exchanged_weights(model: Any) -> None:
    """The tensors and their order stay."""
    norm = model.blocks[1].norm
    weight, bias = norm.weight, norm.bias
    del norm.weight, norm.bias
    norm.bias, norm.weight = weight, bias


def moved_to_another_name(model: Any) -> None:
    layer = model.blocks[1].second
    layer.bias, layer.weight = layer.weight, None


def moved_to_another_layer(model: Any) -> None:
    """Which comes next, and has none."""
    first, second = model.blocks[1].first, model.blocks[1].second
    first.weight, second.weight, second.bias = first.weight, first.bias, second.weight
    first.bias = None


def first_buffer(model: Any) -> None:
    model.blocks[1].register_buffer("scale", torch.ones(()))


def first_function(model: Any) -> None:
    """Of a layer whose class says that it has none."""
    model.blocks[1].weight_function = [torch.neg]


WEIGHTS = [
    other_parameter, other_memory, none_any_more, other_dict_of_weights, other_dict_and_weights, exchanged_weights,
    moved_to_another_name, moved_to_another_layer, first_buffer, first_function,
]  # fmt: skip


@pytest.mark.parametrize("change", [untouched, *WEIGHTS])
def test_other_weights_in_the_midst_of_a_run(change: Callable[[Any], None]) -> None:
    model, hold = Model(), Hold()
    account, held = account_of(model), HeldWeights(layers_of(model))
    assert account.why_changed(hold=hold) is None
    change(model)
    is_same = change is untouched
    assert HeldWeights(layers_of(model)).are(held) == is_same
    for _ in range(2):
        assert ("weights were changed" in str(account.why_changed(hold=hold))) != is_same
    assert account.why_changed(hold=Hold()) is None  # of another run


@pytest.mark.parametrize("to", ["bias_function", "weight_function"])
def test_a_function_that_moves(to: str) -> None:
    model, hold = Model(), Hold()
    for block in model.blocks:
        block.weight_function, block.bias_function = [], []  # type: ignore[assignment]
    model.blocks[0].weight_function = [torch.neg]  # type: ignore[assignment]
    account, held = account_of(model), HeldWeights(layers_of(model))
    assert account.why_changed(hold=hold) is None
    taken = model.blocks[0].weight_function.pop()  # type: ignore[operator, union-attr]
    getattr(model.blocks[to == "weight_function"], to).append(taken)
    assert not HeldWeights(layers_of(model)).are(held)
    assert "weights were changed" in str(account.why_changed(hold=hold))


def test_what_a_host_notes_in_a_run_is_no_change() -> None:
    """It has the model looked at anew, with the same weights."""
    model, hold = Model(), Hold()
    account = account_of(model)
    assert account.why_changed(hold=hold) is None
    for block in model.blocks:
        block.comfy_patched_weights, block.weight_function = True, []  # type: ignore[assignment]
    assert account.why_changed(hold=hold) is None
    other_parameter(model)
    assert "weights were changed" in str(account.why_changed(hold=hold))


def test_what_a_hosts_loading_code_keeps_on_layers_is_known_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = """
        def load(layer, other):
            layer.seed_key = 1
            layer.__dict__.setdefault("_pins", {})["loaded"] = other

        class Loader:
            def __init__(self):
                self.own = 1
                self.__dict__.setdefault("kept", 2)
    """
    (tmp_path / "loading_of_a_host.py").write_text(textwrap.dedent(code), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("loading_of_a_host")
    assert _set_on_others("loading_of_a_host") == {"seed_key", "_pins"}


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of parts that were looked at."""
    seen: list[str] = []
    look_at = LiveModel._look_at

    def noted(self: LiveModel, live: nn.Module, part: str, *args: Any) -> Any:
        seen.append(part)
        return look_at(self, live, part, *args)

    monkeypatch.setattr(LiveModel, "_look_at", noted)
    return seen


def test_what_no_code_of_the_model_reads_may_change_with_each_call(looks: list[str]) -> None:
    """Caches of other packs keep what they know of the step before on the model."""
    model = Model()
    name = "_".join(["cache", "of", "others"])  # which no code of this file reads
    setattr(model, name, 0)
    account = account_of(model)
    for step in range(1, 4):
        assert account.why_changed() is None
        setattr(model, name, torch.full((2,), step))
    assert looks == [""]


def test_a_method_that_is_put_there_anew_at_each_call_is_looked_at_once(looks: list[str]) -> None:
    def louder(model: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    def quieter(model: Any, x: torch.Tensor) -> torch.Tensor:
        return x / 2

    model = Model()
    account = account_of(model)
    for _ in range(3):
        model.forward = MethodType(louder, model)  # type: ignore[method-assign]
        assert "(forward)" in str(account.why_changed())
    assert looks == [""]
    model.forward = MethodType(quieter, model)  # type: ignore[method-assign]
    account.why_changed()
    model.forward = MethodType(louder, Model())  # type: ignore[method-assign]
    account.why_changed()
    assert looks == ["", "", ""]


def test_compiling_a_layer_in_place_is_seen_whatever_lay_there() -> None:
    model = Model()
    model.blocks[0]._compiled_call_impl = None
    account = account_of(model)
    assert account.why_changed() is None
    model.blocks[0]._compiled_call_impl = model.blocks[0].forward
    assert "(compiled)" in str(account.why_changed())
