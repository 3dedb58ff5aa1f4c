"""The page's routes on a real server: what each answers, what is refused, and what no request can do."""

from __future__ import annotations

import contextlib
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.core.protocols import Artifact
from slipstream.engine_cache import BuildRecord, EngineStore, Entry, Speed, Verification
from slipstream.engine_cache.manifest import MANIFEST_NAME
from slipstream.nodes.routes import all_routes
from slipstream.tests.comfyui.support.malformed import ADDRESSES, malformed_requests
from slipstream.tests.comfyui.support.raw_http import Answer, Connection
from slipstream.tests.comfyui.support.server import ComfyServer
from slipstream.tests.unit.cli.support import current_key

PREFIX = "/slipstream/v1"
ABSENT = "0" * 64
ENGINE = {
    "digest", "label", "role", "backend", "precision", "optimize", "bytes", "created", "build_s", "last_used", "error",
    "speedup", "engine_ms", "eager_ms", "timed_by", "caution", "retired", "trusted", "adoptable", "base", "state",
    "reasons", "gpu", "resolution", "batch",
}  # fmt: skip
CHECKED = Verification(1e-6, 2e-6, 2, "fp32")
REQUESTS = 2400


@pytest.fixture
def store(comfy_server: ComfyServer) -> EngineStore:
    """Of the server."""
    return EngineStore(comfy_server.home)


@pytest.fixture
def put(store: EngineStore, tmp_path: Path) -> Iterator[Callable[..., Entry]]:
    """Store an engine of 1000 bytes, the one that was used longest ago; all are gone after the test."""
    (tmp_path / "engine.bin").write_bytes(bytes(1000))
    made: list[Entry] = []

    def put(height: int = 64, **environment: Any) -> Entry:
        artifact = Artifact(tmp_path, ("engine.bin",), {})
        key = current_key(height, **environment)
        entry = store.put(key, artifact, label="Tiny", build=BuildRecord(3.5), verifications={"1" * 64: CHECKED})
        store.record_speed(entry, Speed(2.0, 5.0))
        used = entry.directory / ".last_used"
        used.touch()
        os.utime(used, (len(made), len(made)))
        made.append(entry)
        return entry

    yield put
    for entry in made:
        store.delete(entry.digest)


@pytest.fixture
def web(comfy_server: ComfyServer) -> Iterator[Connection]:
    with Connection(comfy_server.port) as connection:
        yield connection


def get(web: Connection, path: str) -> Any:
    answer = web.ask("GET", PREFIX + path)
    assert answer.status == 200, answer
    return answer.json


def post(web: Connection, path: str, fields: dict[str, Any] | None = None, **headers: str) -> Answer:
    body = json.dumps(fields or {}).encode()
    return web.ask("POST", PREFIX + path, body, {"Content-Type": "application/json", **headers})


def refused(answer: Answer) -> str:
    """The code of an error, which says what to do."""
    assert answer.json.keys() == {"error"} and answer.json["error"].keys() == {"code", "message"}
    assert len(answer.json["error"]["message"]) > 10
    return str(answer.json["error"]["code"])


def test_the_list(web: Connection, put: Callable[..., Entry], store: EngineStore) -> None:
    ours, old = put(64), put(72, torch="2.6.0")
    data = get(web, "/engines")
    assert data["store"] == str(store.root) and data["free_bytes"] > 0 and data["limit_bytes"] > 10**9
    engines = {engine["digest"]: engine for engine in data["engines"]}
    assert data["bytes"] == sum(engine["bytes"] for engine in engines.values())
    assert set(engines[ours.digest]) == ENGINE | {"models"}
    shown = {name: engines[ours.digest][name] for name in ("state", "speedup", "engine_ms", "resolution", "batch")}
    assert shown == {"state": "ok", "speedup": 2.5, "engine_ms": 2.0, "resolution": "512×512", "batch": "2"}
    assert engines[old.digest]["state"] == "stale" and "torch" in engines[old.digest]["reasons"][0]


def test_every_address_is_there_under_api_too(web: Connection, put: Callable[..., Entry]) -> None:
    digest = put().digest
    for path in ("/engines", f"/engines/{digest}", "/settings", "/system", "/log?after=0"):
        assert web.ask("GET", f"/api{PREFIX}{path}").status == 200


def test_show(web: Connection, put: Callable[..., Entry]) -> None:
    entry = put()
    data = get(web, f"/engines/{entry.digest}")
    assert ENGINE < set(data) and data["in_use"] is False and data["factors"]["spec"]["role"] == "unet"
    with entry.hold():
        assert get(web, f"/engines/{entry.digest}")["in_use"] is True


@pytest.mark.parametrize("path", ["", "/verify", "/delete"])
def test_an_engine_that_is_not_there(web: Connection, path: str) -> None:
    for name, code in ((ABSENT, "not_found"), ("abc", "bad_request"), ("A" * 64, "bad_request")):
        answer = post(web, f"/engines/{name}{path}") if path else web.ask("GET", f"{PREFIX}/engines/{name}")
        assert refused(answer) == code


def unsigned(entry: Entry, **maker: Any) -> Entry:
    """The engine, as if it had been built before engines were signed, or with another seal."""
    path = entry.directory / MANIFEST_NAME
    facts = {**json.loads(path.read_bytes()), "seal": None, "signature": None, **maker}
    path.write_text(json.dumps(facts), encoding="utf-8")
    return entry


def test_engines_of_nobody_are_trusted_by_a_person(web: Connection, put: Callable[..., Entry]) -> None:
    sealed = f"{'0' * 16}:{'0' * 64}"
    entries = [unsigned(put(64)), unsigned(put(72), seal=sealed)]
    digests = [entry.digest for entry in entries]
    told = {engine["digest"]: engine for engine in get(web, "/engines")["engines"]}
    assert [(told[name]["adoptable"], told[name]["trusted"]) for name in digests] == [
        ("unsigned", False),
        ("elsewhere", False),
    ]
    assert post(web, "/engines/adopt", {"digests": digests}).json == {"adopted": digests}
    for name in digests:
        shown = get(web, f"/engines/{name}")
        assert shown["trusted"] and shown["adoptable"] is None and shown["state"] == "ok"


def test_engines_that_no_person_may_vouch_for_here(web: Connection, put: Callable[..., Entry]) -> None:
    """Of several, none is trusted when one may not be."""
    of_nobody, changed, damaged = unsigned(put(64)), put(72), unsigned(put(80))
    path = changed.directory / MANIFEST_NAME
    facts = {**json.loads(path.read_bytes()), "label": "Another", "signature": None}
    path.write_text(json.dumps(facts), encoding="utf-8")
    signed = put(88)
    for digests, code in (
        ([of_nobody.digest, changed.digest], "conflict"),
        ([of_nobody.digest, signed.digest], "conflict"),
        ([of_nobody.digest, ABSENT], "not_found"),
        ([of_nobody.digest, "../x"], "bad_request"),
        ([], "bad_request"),
        ("all", "bad_request"),
        ([1], "bad_request"),
    ):
        assert refused(post(web, "/engines/adopt", {"digests": digests})) == code
    assert post(web, "/engines/adopt", {"digests": [of_nobody.digest]}, Origin="http://evil.example").status == 403
    assert get(web, f"/engines/{of_nobody.digest}")["adoptable"] == "unsigned"
    (damaged.directory / "engine.bin").write_bytes(b"x" * 1000)
    assert refused(post(web, "/engines/adopt", {"digests": [damaged.digest]})) == "failed"


def test_verify(web: Connection, put: Callable[..., Entry]) -> None:
    good, bad = put(64), put(72)
    bad.path("engine.bin").write_bytes(bytes(999) + b"x")
    assert post(web, f"/engines/{good.digest}/verify").json == {"digest": good.digest, "problem": None}
    answer = post(web, f"/engines/{bad.digest}/verify").json
    assert "engine.bin" in answer["problem"] and not bad.directory.exists()


def test_verify_all(web: Connection, put: Callable[..., Entry]) -> None:
    good, bad = put(64), put(72)
    bad.path("engine.bin").write_bytes(b"short")
    problems = post(web, "/engines/verify").json["problems"]
    assert problems[good.digest] is None and "5 bytes" in problems[bad.digest]


def test_delete_and_its_event(web: Connection, put: Callable[..., Entry], client) -> None:
    entry = put()
    with entry.hold():
        answer = post(web, f"/engines/{entry.digest}/delete")
        assert answer.status == 409 and refused(answer) == "conflict" and entry.directory.is_dir()
    assert post(web, f"/engines/{entry.digest}/delete").json == {"deleted": entry.digest}
    assert not entry.directory.exists()
    client.wait_for_event("slipstream.engines", 10)


def test_prune(web: Connection, put: Callable[..., Entry], store: EngineStore) -> None:
    oldest, next_one = put(64), put(72)
    limit = store.size_bytes() - 1
    answer = post(web, "/engines/prune", {"limit_bytes": limit})
    assert answer.json == {"removed": [oldest.digest], "bytes": 1000}
    assert next_one.directory.is_dir()
    for wrong in ({}, {"limit_bytes": -1}, {"limit_bytes": "1GB"}, {"limit_bytes": 1.5}, {"limit_bytes": True}):
        assert refused(post(web, "/engines/prune", wrong)) == "bad_request"


def test_the_grid_of_models(web: Connection, put: Callable[..., Entry]) -> None:
    put(72)
    data = get(web, "/models?sizes=768x512")
    assert {"512x512", "512x576", "768x512", "1024x1024"} <= set(data["sizes"])
    demo = next(row for row in data["models"] if row["model"] == "demo")
    assert len(demo["cells"]) == len(data["sizes"])
    assert {cell["state"] for cell in demo["cells"]} == {"missing"}, "no file is known to have used an engine"
    asked = {"model": "demo", "width": 512, "height": 512}
    assert refused(post(web, "/models/build", {**asked, "model": "none.safetensors"})) == "not_found"
    assert refused(post(web, "/models/build", {**asked, "width": 513})) == "bad_request"
    assert refused(post(web, "/models/build", {**asked, "model": 3})) == "bad_request"


def test_which_steps_are_computed(web: Connection) -> None:
    data = get(web, "/step-skip?preset=balanced&steps=20&sampler=euler&cfg=7.5")
    assert data["steps"] == 20 and len(data["computed"]) == 14 and data["reason"] == ""
    assert data["presets"]["fast"] == {"computed": 10, "reason": ""} and data["picture_db"] == pytest.approx(
        46.8, abs=0.1
    )
    assert data["offered"][:5] == ["quality", "balanced", "fast", "custom", "extreme"], "and what users saved"
    assert "hackathon" in data["presets"] and "hackathon" not in data["offered"]
    karras = get(web, "/step-skip?preset=balanced&steps=20&sampler=dpmpp_2m&scheduler=karras&cfg=8")
    assert len(karras["computed"]) == 17 and karras["offered"][:2] == ["balanced", "custom"]
    normal = get(web, "/step-skip?preset=balanced&steps=20&sampler=dpmpp_2m&scheduler=normal&cfg=8")
    assert len(normal["computed"]) == 20 and "35.0 dB, where 40 are asked for" in normal["reason"]
    turbo = "/step-skip?steps=20&sampler=euler&cfg=7&files=base.safetensors|loras/sdxl_lightning_4step.safetensors"
    assert "a distilled model (sdxl_lightning_4step.safetensors)" in get(web, f"{turbo}&preset=balanced")["reason"]
    custom = get(web, f"{turbo}&preset=custom&share=0.5")
    assert len(custom["computed"]) == 10 and custom["remark"].startswith("this is a distilled model")
    data = get(web, "/step-skip?preset=balanced&steps=8&sampler=euler&cfg=7")
    assert data["computed"] == list(range(8)) and "short" in data["reason"]
    part = get(web, "/step-skip?preset=balanced&steps=12&denoise=0.6&scheduler=normal&sampler=euler&cfg=5")
    assert len(part["computed"]) == 12 and part["reason"].startswith("a run of 12 steps is short"), (
        "its own steps count"
    )
    longer = get(web, "/step-skip?preset=balanced&steps=19&scheduler=ddim_uniform&sampler=euler&cfg=5")
    assert longer["steps"] == 20 and len(longer["computed"]) == 14, "as many as the run will have"
    masked = get(web, "/step-skip?preset=balanced&steps=20&sampler=euler&cfg=5&mask=true")
    assert len(masked["computed"]) == 20 and "with a mask for inpainting" in masked["reason"]
    assert len(get(web, "/step-skip?preset=custom&steps=20&sampler=euler&cfg=5&share=0.5")["computed"]) == 10
    for told in ("", "&steps=20&sampler=euler", "&steps=20&cfg=5", "&sampler=heun&cfg=5"):
        unknown = get(web, f"/step-skip?preset=balanced{told}")
        assert (unknown["steps"], unknown["computed"], unknown["reason"], unknown["presets"]) == (None, None, "", {})
        assert unknown["offered"][:4] == ["quality", "balanced", "fast", "extreme"]
    for wrong in ("preset=none", "steps=0", "steps=many", "denoise=2", "denoise=nan", "preset=custom&step_list=x"):
        assert refused(web.ask("GET", f"{PREFIX}/step-skip?{wrong}")) == "bad_request"


def test_hit(web: Connection, put: Callable[..., Entry]) -> None:
    ours, other, old = put(64), put(72), put(64, torch="2.6.0")
    asked = {"width": 512, "height": 512, "batch": 2, "tokens": 77}
    data = post(web, "/hit", asked).json
    near = {engine["digest"]: engine["why"] for engine in data["near"]}
    assert {"digest": ours.digest, "label": "Tiny"} in data["hits"] and ours.digest not in near
    assert near[other.digest] == ["it is for 512×576, not for 512×512"]
    assert data.keys() == {"hits", "near", "blocks"} and data["blocks"] == []
    assert any("torch" in why for why in near[old.digest])
    data = post(web, "/hit", {**asked, "batch": 4}).json
    assert ours.digest in {engine["digest"] for engine in data["near"]}
    assert refused(post(web, "/hit", {"width": 512})) == "bad_request"


def test_settings(web: Connection, comfy_server: ComfyServer, store: EngineStore) -> None:
    data = get(web, "/settings")
    before = data["settings"]
    assert set(before) == {"folder", "limit_bytes", "backend", "precision", "background", "notifications"}
    assert before["folder"] == str(comfy_server.home) and "SLIPSTREAM_HOME" in data["fixed"]["folder"]
    try:
        answer = post(web, "/settings", {"limit_bytes": 12 * 10**9, "notifications": False})
        assert answer.json["settings"] == {**before, "limit_bytes": 12 * 10**9, "notifications": False}
        assert not answer.json["restart_needed"]
        assert get(web, "/engines")["limit_bytes"] == 12 * 10**9
        kept = comfy_server.base / "models" / "slipstream" / "settings.json"
        assert json.loads(kept.read_text(encoding="utf-8"))["notifications"] is False
    finally:
        assert post(web, "/settings", before).json["settings"] == before


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"backend": "fastest"}, "backend must be one of: auto, tensorrt, compiled, off"),
        ({"notifications": 1}, "true or false"),
        ({"limit_bytes": 5}, "limit_bytes"),
        ({"Backend": "auto"}, "Unknown field: 'Backend'"),
        ({"folder": "/somewhere/else"}, "SLIPSTREAM_HOME"),
        ({"notifications": True, "precision": "fp4"}, "precision must be one of"),
    ],
)
def test_a_setting_that_does_not_do(web: Connection, fields: dict[str, Any], reason: str) -> None:
    before = get(web, "/settings")
    answer = post(web, "/settings", fields)
    assert answer.status == 400 and refused(answer) == "bad_request" and reason in answer.json["error"]["message"]
    assert get(web, "/settings") == before


def test_another_folder_waits_for_a_restart(start_comfy: Callable[..., ComfyServer], tmp_path: Path) -> None:
    server = start_comfy(environment={"SLIPSTREAM_HOME": ""})
    with Connection(server.port) as web:
        data = get(web, "/settings")
        assert data["settings"]["folder"] is None and data["fixed"] == {} and not data["restart_needed"]
        before = get(web, "/engines")["store"]
        assert before == str(server.base / "models" / "slipstream")
        assert refused(post(web, "/settings", {"folder": "engines"})) == "bad_request"
        assert refused(post(web, "/settings", {"folder": str(server.log_file / "x")})) == "bad_request"
        for name in ("input", "output/deep", "temp", "user", "."):
            answer = post(web, "/settings", {"folder": str(server.base / name)})
            assert refused(answer) == "bad_request" and "upload" in answer.json["error"]["message"]
        folder = str(tmp_path / "elsewhere")
        data = post(web, "/settings", {"folder": folder, "limit_bytes": 10**10}).json
        assert data["restart_needed"] and data["settings"]["folder"] == folder
        assert get(web, "/engines")["store"] == before, "models in use know the folder that they began with"
    server.restart()
    with Connection(server.port) as web:
        data = get(web, "/engines")
        assert data["store"] == folder and data["limit_bytes"] == 10**10
        assert not get(web, "/settings")["restart_needed"]


def test_system(web: Connection) -> None:
    data = get(web, "/system")
    assert data.keys() == {"gpu", "backends", "typical_build_s", "build_s", "version"}
    assert data["gpu"] is None and {"aotinductor", "tensorrt"} <= set(data["backends"])


def test_the_log(web: Connection, put: Callable[..., Entry]) -> None:
    entry = put()
    start = get(web, "/log")["next"]
    entry.path("engine.bin").write_bytes(b"short")
    post(web, f"/engines/{entry.digest}/verify")
    data = get(web, f"/log?after={start}")
    assert [line["n"] for line in data["lines"]] == list(range(start + 1, data["next"] + 1))
    line = next(line for line in data["lines"] if entry.digest[:12] in line["text"])
    assert line["level"] == "warning" and abs(line["time"] - time.time()) < 60
    assert get(web, f"/log?after={data['next']}")["lines"] == []
    for wrong in ("after=x", "after=-1", "before=1", "after=" + "9" * 99):
        assert refused(web.ask("GET", f"{PREFIX}/log?{wrong}")) == "bad_request"


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "http://localhost.evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_another_page_changes_nothing(web: Connection, put: Callable[..., Entry], headers: dict[str, str]) -> None:
    entry = put()
    for path in (f"/engines/{entry.digest}/delete", "/engines/verify", "/settings", "/hit"):
        assert post(web, path, {}, **headers).status == 403
    assert entry.directory.is_dir()


def test_a_page_that_has_its_name_lead_here_has_no_code_trusted(web: Connection, put: Callable[..., Entry]) -> None:
    """Its own address is Host and Origin alike, so that ComfyUI takes it for its page (DNS rebinding)."""
    entry, name = unsigned(put()), f"rebound.example:{web.port}"
    answer = post(web, "/engines/adopt", {"digests": [entry.digest]}, Host=name, Origin=f"http://{name}")
    assert refused(answer) == "forbidden" and get(web, f"/engines/{entry.digest}")["adoptable"] == "unsigned"
    assert refused(post(web, "/ui", {}, Host=name, Origin=f"http://{name}")) == "forbidden"


def test_our_own_page_and_programs_may(web: Connection) -> None:
    asked = {"width": 512, "height": 512, "batch": 2, "tokens": 77}
    own = {"Origin": f"http://127.0.0.1:{web.port}", "Sec-Fetch-Site": "same-origin"}
    assert post(web, "/hit", asked, **own).status == 200
    assert post(web, "/hit", asked).status == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_what_a_form_can_send_is_refused(web: Connection, kind: str) -> None:
    answer = web.ask("POST", f"{PREFIX}/engines/verify", b"{}", {"Content-Type": kind})
    assert answer.status == 415 and refused(answer) == "unsupported"


def test_a_large_body(web: Connection) -> None:
    answer = web.ask("POST", f"{PREFIX}/hit", b" " * 70_000, {"Content-Type": "application/json"})
    assert answer.status == 413 and refused(answer) == "too_large"


def test_an_unknown_address_and_method(web: Connection) -> None:
    for method, path in (("GET", "/nothing"), ("PUT", "/engines"), ("DELETE", f"/engines/{ABSENT}"), ("GET", "/hit")):
        answer = web.ask(method, PREFIX + path)
        assert answer.status == 404 and refused(answer) == "not_found"


def test_malformed_requests_go_to_every_address() -> None:
    ours = {(method, path.replace("{digest}", "{}")) for method, path, _ in all_routes()}
    assert ours == ADDRESSES


def test_no_malformed_request_harms(
    web: Connection, put: Callable[..., Entry], store: EngineStore, comfy_server: ComfyServer
) -> None:
    engines = [put(height) for height in (64, 72, 80)]
    canaries = [comfy_server.base / "canary.txt", store.root / "canary.txt", store.root / "engines" / "canary.txt"]
    for canary in canaries:
        canary.write_text("still here")
    get(web, "/engines")
    before = snapshot(comfy_server.base)
    statuses: dict[int, int] = {}
    started = time.monotonic()
    for number, request in enumerate(malformed_requests(random.Random(20261), REQUESTS, web.port)):
        answer = web.send(request)
        statuses[answer.status] = statuses.get(answer.status, 0) + 1
        assert answer.status < 500, (number, request[:300], answer)
        if not request.startswith((b"GET", b"HEAD", b"OPTIONS")):
            assert not 200 <= answer.status < 300, (number, request[:300], answer)
    seconds = time.monotonic() - started
    print(f"{REQUESTS} malformed requests in {seconds:.1f} s: {dict(sorted(statuses.items()))}")  # noqa: T201
    assert statuses.get(400, 0) > REQUESTS / 10 and statuses.get(404, 0) > 50
    assert snapshot(comfy_server.base) == before
    assert {engine["digest"] for engine in get(web, "/engines")["engines"]} >= {entry.digest for entry in engines}
    for canary in canaries:
        canary.unlink()


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file with size and time, but for what ComfyUI itself writes, and locks that were only looked at."""
    found = {}
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in ("custom_nodes", "user", "locks", "in_use", "tmp")]
        for name in files:
            path = Path(place, name)
            with contextlib.suppress(FileNotFoundError):
                if path.name != "comfyui.log":
                    found[str(path)] = (path.stat().st_size, path.stat().st_mtime_ns)
    return found
