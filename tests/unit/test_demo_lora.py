"""The demo model's LoRA: its file, the scenes it is trained on, and that training makes the same one again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from safetensors.torch import load_file  # noqa: E402

from slipstream.demo import model, scenes, train_lora  # noqa: E402
from slipstream.demo.pipeline import Pipeline  # noqa: E402

FILE = model.WEIGHTS / "night.safetensors"


@pytest.fixture
def pipeline() -> Pipeline:
    return Pipeline.load(with_controlnet=False)


def test_the_file_is_small_and_fits_the_model(pipeline: Pipeline) -> None:
    assert FILE.stat().st_size < 1_000_000
    stored = load_file(FILE)
    wanted = train_lora.exported(train_lora.add_lora(pipeline.unet, 4), 4)
    assert {key: value.shape for key, value in stored.items()} == {key: value.shape for key, value in wanted.items()}
    assert all(bool(torch.isfinite(value).all()) for value in stored.values())
    assert all(value.any() for key, value in stored.items() if "lora_up" in key)


def test_nights_are_dark_and_shapes_are_not() -> None:
    some = scenes.sample(32, 5)
    day, night = scenes.draw(some, 64, 64), scenes.draw(some, 64, 64, night=True)
    assert night.min() >= 0 and night.max() <= 1
    corner = (..., slice(0, 4), slice(0, 4))
    assert night[corner].mean() < 0.5 * day[corner].mean()
    middles = (some.centre[:, 0] * 64).long()
    rows = torch.arange(len(some))
    plain = (some.shape[:, 0] != scenes.SHAPES.index("ring")) & (some.shape[:, 1] != scenes.SHAPES.index("star"))
    change = (day - night)[rows, :, middles[:, 1], middles[:, 0]].abs().amax(1)
    assert change[plain].max() < 1e-6


def test_an_untrained_lora_changes_nothing(pipeline: Pipeline) -> None:
    inputs = torch.randn(1, 4, 8, 8), torch.tensor([500]), pipeline.text.encode("a red circle")
    before = pipeline.unet(*inputs, return_dict=False)[0]
    loras = train_lora.add_lora(pipeline.unet, 4)
    assert torch.equal(pipeline.unet(*inputs, return_dict=False)[0], before)
    torch.nn.init.ones_(next(iter(loras.values())).up.weight)
    assert not torch.equal(pipeline.unet(*inputs, return_dict=False)[0], before)


def trained(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(train_lora, "POOLS", ((32, 16, 2), (64, 16, 1)))
    monkeypatch.setattr(train_lora, "sheet", lambda *_: torch.zeros(1, 256, 256, 3, dtype=torch.uint8))
    train_lora.main(["--out", str(folder), "--steps", "3", "--pictures", "1"])
    assert (folder / "night.png").is_file()
    return load_file(folder / "night.safetensors")


def test_training_makes_the_same_file_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    try:
        first, second = (trained(tmp_path / name, monkeypatch) for name in ("first", "second"))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert any(value.any() for key, value in first.items() if "lora_up" in key)
