"""Stands in for ComfyUI's server: answers what the benchmark asks, at once, and dies or fails as it is told.

`FAKE_COMFYUI` in the environment is JSON: `dies` and `fails` are node classes whose prompts end so, `breaks` those
whose pictures have NaN, `patches` those that make them twice as bright, and `lacks` those that it does not know;
`modules` are those of node classes that are not ComfyUI's, `refuses` is a flag with which it does not start, and
`seconds` is how long a prompt takes.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import socketserver
import sys
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import numpy as np
from PIL import Image, PngImagePlugin

LISTS = ("dies", "fails", "breaks", "patches", "lacks")
USUAL = {**{name: [] for name in LISTS}, "modules": {}, "refuses": "", "seconds": 0.0}
WISHES = {**USUAL, **json.loads(os.environ.get("FAKE_COMFYUI", "{}"))}
OUTPUT = Path(sys.argv[sys.argv.index("--base-directory") + 1]) / "output"
EVENT = "slipstream_benchmark"
GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
sockets = []
prompts = []


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if self.path.startswith("/ws"):
            return self.take_websocket()
        if self.path.startswith("/view"):
            return self.answer(picture(prompts[-1]))
        if self.path.startswith("/object_info/"):
            size = ["STRING", {"default": "auto"}]
            required = {"model": ["MODEL", {}], "optimize": [["balanced", "max"], {}], "resolutions": size}
            name = self.path.rsplit("/", 1)[1]
            info = {"input": {"required": required}, "python_module": WISHES["modules"].get(name, "nodes")}
            return self.answer_json({} if name in WISHES["lacks"] else {name: info})
        device = {"type": "cuda", "name": "cuda:0 Fake GPU"}
        system = {"python_version": "3.12.3 (main)", "pytorch_version": "2.11.0"}
        self.answer_json({"system": system, "devices": [device]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/free":
            return self.answer(b"")
        prompts.append(body["prompt"])
        prompt_id = str(len(prompts))
        self.answer_json({"prompt_id": prompt_id})
        run(prompt_id, body["prompt"], body["extra_data"][EVENT])

    def answer_json(self, what):
        self.answer(json.dumps(what).encode())

    def answer(self, content):
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
        self.wfile.flush()

    def take_websocket(self):
        key = self.headers["Sec-WebSocket-Key"] + GUID
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        self.send_header("Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(key.encode()).digest()).decode())
        self.end_headers()
        sockets.append(self.connection)
        while self.connection.recv(1024):
            pass

    def log_message(self, *_):
        pass


def send(kind, prompt_id, **data):
    content = json.dumps({"type": kind, "data": {"prompt_id": prompt_id, **data}}).encode()
    sockets[-1].sendall(bytes([0x81, 126]) + len(content).to_bytes(2, "big") + content)


def run(prompt_id, prompt, wishes):
    classes = [node["class_type"] for node in prompt.values()]
    time.sleep(WISHES["seconds"])
    if set(classes) & set(WISHES["dies"]):
        say("free_impl: invalid argument")
        os._exit(3)
    if found := set(classes) & set(WISHES["fails"]):
        failure = {"node_type": found.pop(), "exception_type": "OutOfMemoryError", "exception_message": "no room"}
        return send("execution_error", prompt_id, **failure)
    for _ in range(classes.count("KSampler")):
        figures = {"calls": 3, "before": 0.25, "steps": [0.5, 0.25], "after": 0.125}
        send(EVENT, prompt_id, node="sampler", seconds=1.5, **figures)
    what, node, seconds = ("text", "encoder", 0.25) if "CLIPTextEncode" in classes else ("picture", "decoder", 0.5)
    send(EVENT, prompt_id, node=node, seconds=seconds)
    if wishes.get("keep"):
        pixels = np.full((1, 8, 8, 3), 1.0 + 0.01 * is_ours(prompt), dtype=np.float32)
        pixels *= 1 + bool(set(classes) & set(WISHES["patches"]))
        if set(classes) & set(WISHES["breaks"]):
            pixels[0, 0, 0, 0] = np.nan
        np.save(OUTPUT / f"slipstream-benchmark-{what}.npy", pixels)
    send("executed", prompt_id, output={"images": [{"filename": "one.png", "subfolder": "", "type": "output"}]})
    send("execution_success", prompt_id)


def say(text):
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def is_ours(prompt):
    return any(node["class_type"].startswith("SlipstreamAccelerate") for node in prompt.values())


def picture(prompt):
    text, stream = PngImagePlugin.PngInfo(), io.BytesIO()
    if is_ours(prompt):
        calls = {"engine_calls": 3, "eager_calls": 1, "reasons": {"a rare shape": 1}}
        calls |= {"blocks": 20, "blocks_on_engines": 15} if "blocks" in json.dumps(prompt) else {}
        text.add_text("slipstream", json.dumps({"run": "a", "5": [calls, calls], "6": [{"step_skipping": {}}]}))
    Image.new("RGB", (8, 8)).save(stream, "png", pnginfo=text)
    return stream.getvalue()


class Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    allow_reuse_address = daemon_threads = True


if WISHES["refuses"] and WISHES["refuses"] in sys.argv:
    say(f"main.py: error: unrecognized arguments: {WISHES['refuses']}")
    sys.exit(2)
(OUTPUT / "starts").open("a").write(" ".join(sys.argv) + "\n")
try:
    Server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
except KeyboardInterrupt:
    pass
