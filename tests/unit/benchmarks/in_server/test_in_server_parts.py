"""Pictures in a server: figures, references, the GPU's driver and the websocket."""

from __future__ import annotations

import itertools
import socket
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.benchmarks.in_server import gpu
from slipstream.benchmarks.in_server.process import Installation
from slipstream.benchmarks.in_server.rows import counts_as_headline, figures_of, medians_of, of_readings
from slipstream.benchmarks.in_server.websocket import WebSocket
from slipstream.benchmarks.model_files import adapter, motion_module
from slipstream.benchmarks.subjects.references import References
from slipstream.tests.unit.benchmarks.support import server_row

SD15 = "sd15-512-20"


def test_figures_of_a_picture_with_two_samplers() -> None:
    one = {"node": "sampler", "seconds": 2.0, "calls": 3, "before": 0.5, "steps": [0.1, 0.2], "after": 0.25}
    other = {"node": "sampler", "seconds": 3.0, "calls": 4, "before": 0.25, "steps": [0.3, 0.5, 0.4], "after": 0.5}
    found = figures_of(6.0, [one, other, {"node": "decoder", "seconds": 0.75}])
    seconds = {"client_s": 6.0, "sampler_s": 5.0, "decoder_s": 0.75, "before_s": 0.75, "after_s": 0.75}
    assert found == {**seconds, "first_step_ms": 300.0, "step_ms": 400.0}
    assert "step_ms" not in figures_of(1.0, [{**one, "calls": 1, "steps": []}])
    assert figures_of(1.0, [{"node": "encoder", "seconds": 0.5}] * 2) == {"client_s": 1.0, "encoder_s": 1.0}
    medians = medians_of([found, {"client_s": 7.0}, {"client_s": 9.0}])
    assert medians["client_s"] == 7.0 and medians["samples"]["client_s"] == [6.0, 7.0, 9.0]
    assert medians["samples"]["step_ms"] == [400.0]


@pytest.mark.parametrize(
    ("fields", "counts"),
    [
        ({}, True),
        ({"engine_calls": 95, "eager_calls": 5}, True),
        ({"engine_calls": 94, "eager_calls": 6}, False),
        ({"engine_calls": None}, False),
        ({"engine_calls": 0, "eager_calls": 0}, False),
        ({"error": None}, False),
        ({"error": float("nan")}, False),
        ({"died": True}, False),
        ({"patch": ""}, False),
        ({"patch": "pag"}, False),
        ({"failed": "no room"}, False),
        ({"variant": "plain", "engine_calls": None, "eager_calls": None}, True),
        ({"variant": "plain", "error": None}, False),
    ],
)
def test_which_rows_are_a_variants_speed(fields: dict[str, Any], counts: bool) -> None:
    assert counts_as_headline(server_row(**{"variant": "slipstream", **fields})) == counts


def test_references(tmp_path: Path) -> None:
    references, latent = References(tmp_path), np.array([[3.0, 4.0]], dtype=np.float32)
    assert references.errors(SD15, "0.33.0", {"latent": latent}) == {}
    references.keep(SD15, "0.33.0", {"latent": latent})
    assert references.has(SD15, "0.33.0") and not references.has(SD15, "0.3.64")
    assert references.errors(SD15, "0.33.0", {"latent": latent + [[0.0, 0.5]], "picture": latent}) == {"latent": 0.1}
    for broken in (latent * np.nan, latent[:, :1]):
        assert references.errors(SD15, "0.33.0", {"latent": broken}) == {"latent": float("inf")}
    references.forget("sd15")
    assert references.has(SD15, "0.33.0"), "another case's name begins so"
    references.forget(SD15)
    assert not references.has(SD15, "0.33.0")


def test_an_adapter_is_as_wide_as_the_layers_that_it_stands_beside() -> None:
    """SDXL's files number their 70 layers from the input over the output to the middle, SD1.5's by the block."""
    depths = {"input_blocks.4": 2, "input_blocks.8": 10, "output_blocks.0": 10, "middle_block": 10}
    keys = {
        f"{block}.1.transformer_blocks.{layer}.attn2.to_k.weight": torch.zeros(6 if block == "middle_block" else 4, 8)
        for block, depth in depths.items()
        for layer in range(depth)
    }
    found = adapter.make("sdxl", keys, 1)
    widths = {name: weight.shape[0] for name, weight in found.items() if name.endswith("to_k_ip.weight")}
    assert len(widths) == 32 and list(widths)[:2] == ["ip_adapter.1.to_k_ip.weight", "ip_adapter.3.to_k_ip.weight"]
    assert widths["ip_adapter.139.to_k_ip.weight"] == 6 and widths["ip_adapter.49.to_k_ip.weight"] == 4
    assert found["image_proj.proj.weight"].shape == (4 * 8, adapter.EMBEDDING_WIDTH)
    one = {"input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight": torch.zeros(4, 8)}
    one |= {"middle_block.1.transformer_blocks.0.attn2.to_k.weight": torch.zeros(6, 8)}
    numbers = [int(name.split(".")[1]) for name in adapter.make("sd15", one, 1) if "to_k_ip" in name]
    assert numbers == [1, 31]


def test_a_motion_module_has_the_places_of_sd15(monkeypatch: pytest.MonkeyPatch) -> None:
    places = (("down_blocks", 2, (8, 16, 32, 32)), ("up_blocks", 3, (32, 32, 16, 8)))
    assert [(side, count, len(widths)) for side, count, widths in motion_module.PLACES] == [
        (side, count, len(widths)) for side, count, widths in places
    ]
    monkeypatch.setattr(motion_module, "PLACES", places)
    found = motion_module.make(1)
    tables = {name: table.shape for name, table in found.items() if name.endswith("attention_blocks.0.pos_encoder.pe")}
    assert len(tables) == 4 * 2 + 4 * 3 and all(shape[:2] == (1, 32) for shape in tables.values())
    place = "up_blocks.3.motion_modules.2.temporal_transformer"
    assert found[f"{place}.transformer_blocks.0.ff.net.0.proj.weight"].shape == (64, 8)
    assert {weight.dtype for weight in found.values()} == {torch.float16}


def test_a_pack_is_lent_the_name_that_it_imports_in_vain(tmp_path: Path) -> None:
    packs = tuple(tmp_path / name for name in ("ComfyUI-MagCache", "ComfyUI_PuLID_Flux_ll", "ComfyUI-bleh"))
    for pack in packs:
        pack.mkdir()
        (pack / "__init__.py").write_text("from json import nothing\n")
    work = tmp_path / "work"
    folders = {name: tmp_path / name for name in ("checkout", "models", "engines", "logs")}
    Installation(**folders, python=Path(sys.executable), work=work, packs=packs).prepare()
    texts = [(work / "custom_nodes" / pack.name / "__init__.py").read_text() for pack in packs]
    assert [text.splitlines()[1:] for text in texts] == [
        ["stand_ins.lend('comfy.ldm.lightricks.model.precompute_freqs_cis')", "from json import nothing"],
        ["stand_ins.lend('ftfy.fix_text')", "stand_ins.lend_faces()", "from json import nothing"],
        [],
    ]
    assert (work / "custom_nodes" / packs[0].name / "slipstream_stand_ins.py").is_file()
    assert packs[0].joinpath("__init__.py").read_text() == "from json import nothing\n"


class Driver:
    gpu, version = "NVIDIA H200", "580.1"

    def __init__(self) -> None:
        self._used = itertools.cycle([1000.0, 3000.0, 2000.0])

    def read(self) -> gpu.Reading:
        used = next(self._used)
        if used == 2000.0:
            raise OSError("busy")
        return gpu.Reading(time.monotonic(), used, 400.0, None)


def test_the_gpu_is_looked_at_while_pictures_run() -> None:
    with gpu.Monitor(Driver()) as monitor:
        began = time.monotonic()
        while len(monitor.between(began, time.monotonic())) < 3:
            time.sleep(0.01)
        found = of_readings(monitor.between(began, time.monotonic()))
        assert found == {"peak_mb": 3000.0, "watts": 400.0, "mhz": None}
        assert monitor.between(0, began - 1) == []
    with gpu.Monitor(None) as nothing:
        assert nothing.used_mb() is None and of_readings(nothing.between(0, time.monotonic()))["peak_mb"] is None


def test_nvidia_smi_is_asked_where_there_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.platform == "win32":
        pytest.skip("a shell script stands in for the program")
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\ncase "$*" in *name*) echo "NVIDIA H200, 580.1";; *) echo "12, [N/A], 1980";; esac\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    driver = gpu.find_driver()
    assert driver is not None and (driver.gpu, driver.version) == ("NVIDIA H200", "580.1")
    reading = driver.read()
    assert (reading.used_mb, reading.watts, reading.mhz) == (12.0, None, 1980.0)


def frame(kind: int, content: bytes, last: bool = True) -> bytes:
    length = len(content)
    if length > 0xFFFF:
        size = b"\x7f" + struct.pack(">Q", length)
    else:
        size = bytes([length]) if length < 126 else b"\x7e" + struct.pack(">H", length)
    return bytes([(0x80 if last else 0) | kind]) + size + content


def test_the_websocket_reads_texts_and_nothing_else() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    pongs: list[bytes] = []
    long = "ä" * 40_000

    def serve() -> None:
        connection, _ = server.accept()
        while b"\r\n\r\n" not in connection.recv(4096):
            pass
        connection.sendall(b"HTTP/1.1 101 Switching Protocols\r\n\r\n" + frame(1, b"first"))
        connection.sendall(frame(2, b"a preview" * 20_000) + frame(9, b"hey") + frame(1, b"sec", last=False))
        pongs.append(connection.recv(9))
        split = frame(0, b"ond") + frame(1, ("x" * 200).encode()) + frame(1, long.encode())
        for start in range(0, len(split), 1000):
            connection.sendall(split[start : start + 1000])
        time.sleep(0.3)
        connection.sendall(frame(8, b""))

    thread = threading.Thread(target=serve)
    thread.start()
    client = WebSocket("127.0.0.1", server.getsockname()[1], "/ws")
    assert [client.receive(5) for _ in range(4)] == ["first", "second", "x" * 200, long]
    assert client.receive(0.05) is None
    with pytest.raises(OSError):
        client.receive(5)
    thread.join()
    client.close()
    server.close()
    (pong,) = pongs
    assert pong[:2] == bytes([0x8A, 0x83])
    assert bytes(byte ^ pong[2 + place % 4] for place, byte in enumerate(pong[6:])) == b"hey"
