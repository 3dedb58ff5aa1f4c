"""Counting numbers by the head of a file."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from slipstream.hosts.weight_files import parameter_count


def test_what_lies_under_a_prefix(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"unet.a": torch.zeros(2, 3), "unet.b": torch.zeros(5), "vae.a": torch.zeros(7)}, file)
    assert parameter_count(file, "unet.") == 11 and parameter_count(file, "other.") == 18


def test_other_files_count_by_their_size(tmp_path: Path) -> None:
    (tmp_path / "model.ckpt").write_bytes(bytes(10))
    assert parameter_count(tmp_path / "model.ckpt", "unet.") == 5


def test_what_cannot_be_read(tmp_path: Path) -> None:
    for name, content in (("a", b""), ("b", b"\xff" * 20), ("c", b"\x02" + bytes(7) + b"[]")):
        file = tmp_path / f"{name}.safetensors"
        file.write_bytes(content)
        assert parameter_count(file, "") is None
    assert parameter_count(tmp_path / "gone.safetensors", "") is None
