"""The benchmark of a ComfyUI server: its command on a real one, on the CPU, and the probe's arithmetic."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.benchmarks.in_server.probe import clocks, timing
from slipstream.benchmarks.in_server.rows import FIELDS, counts_as_headline
from slipstream.benchmarks.model_files.checkpoints import t5_of
from slipstream.benchmarks.model_files.families import FAMILIES

CASE = "tiny-64-3"
STEPS = 3

Row = dict[str, Any]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the command makes its model files, and keeps the pictures that others are compared with."""
    return tmp_path_factory.mktemp("benchmark-models")


def measure(root: Path, comfyui_dir: Path, models: Path, folder: Path, *words: str) -> tuple[str, list[Row]]:
    """Run the command; gives what it says, and its rows."""
    folders = [f"--models={models}", f"--engines={folder / 'engines'}", f"--out={folder / 'out'}"]
    command = [sys.executable, str(root / "benchmarks" / "server.py"), "--cpu", "--commit", "abc", "--cases", CASE]
    words = (*folders, f"--logs={folder / 'logs'}", f"--comfyui={comfyui_dir}", "--pictures", "2", *words)
    environment = {name: value for name, value in os.environ.items() if name != "COMFYUI_DIR"}
    done = subprocess.run([*command, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr
    (file,) = (folder / "out").iterdir()
    return done.stderr, [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_pictures_of_a_real_server(
    root: Path, comfyui_dir: Path, comfyui_version, models: Path, tmp_path: Path
) -> None:
    tables = tmp_path / "tables"
    words = ("--variants", "plain,slipstream", "--turns", "2", "--synchronised", "--limit", "560")
    words = (*words, "--profiles", str(tables))
    said, rows = measure(root, comfyui_dir, models, tmp_path, *words)
    assert [(row["variant"], row["turn"]) for row in rows] == [
        ("plain", 1), ("slipstream", 1), ("plain", 2), ("slipstream", 2)
    ], said  # fmt: skip
    for row in rows:
        assert tuple(row) == FIELDS and not row["died"] and row["gpu"] is None and row["pictures"] == 2
        assert row["comfyui"] == row["versions"]["comfyui"] == ".".join(map(str, comfyui_version))
        spent = row["before_s"] + row["step_ms"] / 1000 * (STEPS - 1) + row["after_s"] + row["decoder_s"]
        assert 0 < spent < row["sampler_s"] + row["decoder_s"] < row["client_s"] < 60
        assert row["step_ms_synchronised"] > 0 and row["model_calls"] == STEPS
        assert len(row["samples"]["client_s"]) == 2
        assert counts_as_headline(row) and row["error"] < 1e-2
    plain, ours, later, _ = rows
    assert plain["error"] == later["error"] == 0.0 and plain["engine_calls"] is None
    assert (ours["engine_calls"], ours["eager_calls"]) == (2 * (STEPS + 1), 0)
    for what, name in (("kernels", "aten::"), ("functions", "apply_model")):
        found = [tables / f"{CASE}-{each['variant']}-{each['turn']}-{what}.txt" for each in rows]
        assert all(name in file.read_text(encoding="utf-8") for file in found)
    assert 0 < ours["errors"]["latent"] and 0 < ours["errors"]["picture"] and ours["build_s"] > 10
    assert_is_gone(tmp_path / "logs")


@pytest.mark.slow
def test_texts_of_a_real_server(root: Path, comfyui_dir: Path, models: Path, tmp_path: Path) -> None:
    words = ("--cases", "t5-base-encode", "--variants", "plain,slipstream", "--limit", "560")
    said, rows = measure(root, comfyui_dir, models, tmp_path, *words)
    assert [row["variant"] for row in rows] == ["plain", "slipstream"], said
    assert all(0 < row["encoder_s"] < row["client_s"] < 60 and row["sampler_s"] is None for row in rows)
    plain, ours = rows
    assert plain["errors"] == {"text": 0.0} and 0 < ours["errors"]["text"] < 1e-4
    assert ours["engine_calls"] + ours["eager_calls"] == 2 and ours["build_s"] > 10


@pytest.mark.slow
def test_torch_compile_with_previews_and_comfyuis_fast_flag(
    root: Path, comfyui_dir: Path, models: Path, tmp_path: Path
) -> None:
    words = ("--variants", "plain,torch-compile,fast", "--flag-sets", "default;--preview-method auto")
    _, rows = measure(root, comfyui_dir, models, tmp_path, *words)
    assert [(row["flags"], row["variant"]) for row in rows] == [
        ([], "plain"),
        ([], "torch-compile"),
        (["--fast"], "fast"),
        (["--preview-method", "auto"], "plain"),
        (["--preview-method", "auto"], "torch-compile"),
    ]
    assert all(map(counts_as_headline, rows)) and rows[1]["build_s"] > rows[0]["build_s"]
    assert rows[3]["error"] == 0.0, "a preview changes no picture"
    assert_is_gone(tmp_path / "logs")


@pytest.mark.slow
def test_patches_in_one_server(root: Path, comfyui_dir: Path, models: Path, tmp_path: Path) -> None:
    """A node that has nothing to do with blocks, and one that changes how their attention is called."""
    words = ("--variants", "plain,slipstream+blocks", "--patches", "rescale-cfg,hypertile", "--warmup", "3")
    said, rows = measure(root, comfyui_dir, models, tmp_path, *words)
    names = [(row["patch"], row["variant"]) for row in rows]
    assert names == [(patch, name) for patch in ("", "rescale-cfg", "hypertile") for name in words[1].split(",")], said
    assert rows[2]["effect"] > 1e-3 and all(row["error"] < 1e-3 for row in rows)
    base, rescaled, tiled = (row["blocks"] for row in rows[1::2])
    assert base == rescaled < tiled, "attentions with functions before them have engines of their own"
    assert all(row["blocks_on_engines"] == row["blocks"] for row in rows[1::2])
    assert not any(map(counts_as_headline, rows)) and len(list((tmp_path / "logs").iterdir())) == 1


@pytest.mark.parametrize(("family", "model", "part"), [("t5-xxl", "T5_XXL", "t5xxl"), ("t5-base", "T5_BASE", "t5base")])
def test_comfyui_knows_the_text_encoders(family: str, model: str, part: str) -> None:
    """All weights that it has are in the file, of the same shapes, and nothing else is."""
    import comfy.sd

    meta = torch.device("meta")
    weights = t5_of(family, meta).state_dict()
    assert comfy.sd.detect_te_model(weights) is comfy.sd.TEModel[model]
    kind = comfy.sd.CLIPType[FAMILIES[family].clip_type.upper()]
    clip = comfy.sd.load_text_encoder_state_dicts(
        [dict(weights)], clip_type=kind, model_options={"initial_device": meta}
    )
    (found,) = clip.cond_stage_model.children()
    assert found is getattr(clip.cond_stage_model, part)
    wanted = found.transformer.state_dict()
    assert {name: each.shape for name, each in weights.items()} == {name: each.shape for name, each in wanted.items()}
    assert weights["shared.weight"].shape[1] == FAMILIES[family].width


def test_a_text_has_as_many_tokens_as_asked() -> None:
    from comfy.text_encoders.pixart_t5 import PixArtTokenizer

    from slipstream.benchmarks.in_server.probe.random_inputs import RandomText

    (text,), (other,) = (RandomText.execute(seed, 0, tokens=77).result for seed in (1, 2))
    assert text != other and len(PixArtTokenizer().tokenize_with_weights(text)["t5xxl"][0]) == 77


def assert_is_gone(logs: Path) -> None:
    """No server that wrote a log answers any more."""
    for log in logs.iterdir():
        (port,) = re.findall(r"http://127\.0\.0\.1:(\d+)", log.read_text(encoding="utf-8", errors="replace"))[:1]
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", int(port)), timeout=5).close()


# ---------------------------------------------------------------------------------- the probe's clocks on a GPU


class Gpu:
    """A GPU that runs behind its host: work is queued, and an event is reached when all before it is done."""

    def __init__(self) -> None:
        self.host = self.done = 0.0
        self.waits = 0

    def work(self, host: float, device: float) -> None:
        """Queue work that takes so many seconds of each."""
        self.host += host
        self.done = max(self.done, self.host) + device

    def synchronize(self) -> None:
        self.host = max(self.host, self.done)
        self.waits += 1

    def event(self, enable_timing: bool) -> Event:
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, device: Gpu) -> None:
        self.device, self.at = device, -1.0

    def record(self) -> None:
        self.at = max(self.device.done, self.device.host)

    def synchronize(self) -> None:
        self.device.host = max(self.device.host, self.at)

    def elapsed_time(self, end: Event) -> float:
        assert self.device is end.device, "invalid resource handle"
        assert self.device.host >= end.at, "the event was not reached"
        return 1000 * (end.at - self.at)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    found = Gpu()
    monkeypatch.setattr(clocks, "_is_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", found.event)
    monkeypatch.setattr(torch.cuda, "synchronize", found.synchronize)
    monkeypatch.setattr(clocks.time, "perf_counter", lambda: found.host)
    return found


def test_marks_on_two_gpus_are_told_apart_by_the_hosts_clock() -> None:
    marks = [clocks.Mark(host, Event(Gpu())) for host in (1.0, 3.5)]  # type: ignore[arg-type]
    assert clocks.seconds_between(*marks) == 2.5


def sampler_of(probe: timing.Probe, device: Gpu, calls: int):
    """A sampler node whose host needs 0.25 s before its calls, which take the GPU 0.5 s each, and 0.125 s behind."""
    call = probe.around_call(lambda: device.work(host=0.0625, device=0.5))

    def sample(model: str):
        device.work(host=0.25, device=0.0)
        for _ in range(calls):
            call()
        device.work(host=0.0, device=0.125)
        return ({"samples": torch.zeros(1)},)

    return probe.around_sampler(sample)


@pytest.fixture
def told() -> list[dict[str, Any]]:
    """What the probe tells."""
    return []


@pytest.fixture
def probe(told: list[dict[str, Any]], tmp_path: Path) -> timing.Probe:
    return timing.Probe(told.append, tmp_path)


def test_events_time_a_gpu_that_runs_behind_its_host(device: Gpu, probe: timing.Probe, told, tmp_path: Path) -> None:
    sampler_of(probe, device, calls=3)(model="m")
    seconds = 0.25 + 0.0625 + 3 * 0.5 + 0.125
    figures = {"calls": 3, "before": 0.25, "steps": [0.5625, 0.5], "after": 0.125}
    assert told == [{"node": "sampler", "seconds": seconds, **figures}]
    assert device.waits == 2, "at the node's begin and at its end"
    assert list(tmp_path.iterdir()) == [], "nobody asked for the latent"


def test_a_synchronised_picture_waits_around_each_call(device: Gpu, probe: timing.Probe, told) -> None:
    probe.take_wishes({"extra_data": {timing.EVENT: {"synchronised": True}}})
    sampler_of(probe, device, calls=3)(model="m")
    (figures,) = told
    assert (figures["before"], figures["steps"], figures["after"]) == (0.25, [0.5625, 0.5625], 0.125)
    probe.take_wishes({"prompt": {}})
    assert probe.wishes == {}, "wishes are one prompt's"


def test_calls_outside_of_a_sampler_node_are_left_alone(device: Gpu, probe: timing.Probe, told) -> None:
    assert probe.around_call(lambda x: x + 1)(1) == 2 and not told and device.waits == 0
    assert probe.around_decoder(lambda: (torch.zeros(1), device.work(0.0, 2.0)))()[0].shape == (1,)
    assert told == [{"node": "decoder", "seconds": 2.0}]


def test_a_sampler_within_another_is_a_part_of_it(device: Gpu, probe: timing.Probe, told, tmp_path: Path) -> None:
    probe.take_wishes({"extra_data": {timing.EVENT: {"keep": True}}})
    inner = sampler_of(probe, device, calls=2)
    outer = probe.around_sampler(lambda: {"ui": {}, "result": ("model", *inner("m"), *inner("m"))})
    outer()
    (figures,) = told
    assert figures["calls"] == 4 and figures["seconds"] == device.host and device.waits == 2
    assert np.load(tmp_path / "slipstream-benchmark-latent.npy").shape == (1,)


def test_a_sampler_of_another_pack_is_timed_from_when_it_is_asked_for(
    device: Gpu, probe: timing.Probe, told, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nodes

    class Static:
        FUNCTION = "doit"

        @staticmethod
        def doit(latent: torch.Tensor):
            return ({"samples": latent},)

    class Usual(Static):
        def doit(self, latent: torch.Tensor):
            return ({"samples": latent},)

    monkeypatch.setitem(sys.modules, "server", SimpleNamespace(PromptServer=None))
    from slipstream.benchmarks.in_server.probe.install import take_wishes

    for kind in (Static, Usual):
        monkeypatch.setitem(nodes.NODE_CLASS_MAPPINGS, kind.__name__, kind)
        for _ in range(2):
            take_wishes(probe, {"extra_data": {timing.EVENT: {"sampler": kind.__name__}}})
        assert kind().doit(latent=torch.zeros(1))[0]["samples"].shape == (1,)
    assert [figures["node"] for figures in told] == ["sampler"] * 2 and device.waits == 4


def test_an_encoded_text_is_timed_and_kept(device: Gpu, probe: timing.Probe, told, tmp_path: Path) -> None:
    probe.take_wishes({"extra_data": {timing.EVENT: {"keep": True}}})
    probe.around_encoder(lambda: ([[torch.ones(1, 3, 4, dtype=torch.float16), {}]], device.work(0.25, 2.0)))()
    assert told == [{"node": "encoder", "seconds": 2.25}] and device.waits == 2
    kept = np.load(tmp_path / "slipstream-benchmark-text.npy")
    assert kept.shape == (1, 3, 4) and kept.dtype == np.float32


def test_the_probe_leaves_what_whole_steps_ask_about(probe: timing.Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slipstream replays whole steps only where ComfyUI's own functions make them up."""
    import comfy.model_base
    import comfy.samplers

    import nodes
    from slipstream.hosts.comfy.run.step_contents import why_other_code

    model_of_steps = comfy.samplers.KSamplerX0Inpaint
    methods = (nodes.KSampler, "sample"), (nodes.VAEDecode, "decode"), (nodes.CLIPTextEncode, "encode")
    for owner, name in (*methods, (model_of_steps, "__call__")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # afterwards it is as it was
    monkeypatch.setitem(sys.modules, "server", SimpleNamespace(PromptServer=None))
    from slipstream.benchmarks.in_server.probe.install import wrap

    model = object.__new__(comfy.model_base.BaseModel)
    torch.nn.Module.__init__(model)
    assert why_other_code(model) is None
    wrap(probe)
    assert why_other_code(model) is None and nodes.KSampler.sample.__wrapped__ is not None
