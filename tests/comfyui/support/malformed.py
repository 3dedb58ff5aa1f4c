"""Requests that nobody should send, drawn at random; none of them is a valid change."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

_PREFIXES = ("/slipstream/v1", "/api/slipstream/v1")
_READS = ("/engines", "/settings", "/system", "/log", "/builds", "/nodes", "/health", "/models", "/step-skip")
_OF_ONE_READ = ("/engines/{}",)
_OF_ONE = ("/engines/{}/verify", "/engines/{}/delete", "/engines/{}/try_again", "/builds/{}/cancel")
_NODE = {"class_type": "SlipstreamAccelerateModel", "inputs": {"backend": "auto", "model": ["1", 0]}}
_FIELDS_OF: dict[str, dict[str, Any]] = {
    "/engines/verify": {},
    "/engines/prune": {"limit_bytes": 10**12},
    "/engines/adopt": {"digests": ["0" * 64]},
    "/hit": {"width": 512, "height": 512, "batch": 2, "tokens": 77},
    "/settings": {
        "folder": None, "limit_bytes": 10**12, "backend": "auto", "precision": "auto", "background": "idle",
        "notifications": True,
    },
    "/dry-run": {"prompt": {"4": _NODE}, "node": "4"},
    "/models/build": {"model": "none.safetensors", "width": 512, "height": 512},
    "/ui": {},
}  # fmt: skip
"""The fields that each change takes, with values of the right form."""
_CHANGES = tuple(_FIELDS_OF)
ADDRESSES = {*(("GET", path) for path in (*_READS, *_OF_ONE_READ)), *(("POST", path) for path in (*_CHANGES, *_OF_ONE))}
"""Method and path of all that is asked for; `{}` stands for a digest."""
_METHODS = ("PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "FOO", "get", "POST", "GET")
_PARTS = (
    *("..", "%2e%2e", "%2E%2E%2F", "..%2f..%2f", "%2e%2e%5c", "..\\..", "....//", ".", "%00", "%0a", "%0d%0aX:%20y"),
    *("canary.txt", "engines", "manifest.json", "etc/passwd", "C:%5CWindows", "%ff%fe", "%c0%ae%c0%ae", "%", "%zz"),
    *("a" * 63, "a" * 65, "A" * 64, "g" * 64, "0" * 3000, "%F0%9F%98%80", "~root", "*", "?", "#", ";", "NUL", "con"),
)
_STRANGE: tuple[Any, ...] = (
    *(None, -1, 1.5, 1e300, "", "x", "../..", "\x00", "\ud800", [], {}, [[]], {"a": 1}, 10**30, -(10**30), "a" * 5000),
    *("/etc/passwd", "relative/folder", "/proc/nope/nope", "\\\\host\\share", "～"),
)
_WRONG: tuple[Any, ...] = (
    *(-1, 1.5, 1e300, -(10**30), 10**30, "../..", "\x00", "\ud800", "/proc/nope/nope", "a" * 5000),
    *([], [[]], {"a": 1}, {"a": None}, [{"a": [1, "\x00"]}]),
)
"""Of these no field takes any."""
_QUERIES = {
    "/log": ("after",),
    "/models": ("sizes",),
    "/step-skip": (
        "steps",
        "denoise",
        "start_at_step",
        "end_at_step",
        "cfg",
        "share",
        "computed_steps",
        "power",
        "step_list",
        "preset",
        "sampler",
        "scheduler",
        "files",
    ),
}
_TEXTS = (
    "-1", "0", "2", "10000", "99999999", "nan", "inf", "-inf", "1e308", "1e-308", "%00", "x", "0,1,2", "9" * 5000, "",
)  # fmt: skip
_FIELDS = (
    "width",
    "height",
    "batch",
    "tokens",
    "limit_bytes",
    "digests",
    "backend",
    "precision",
    "background",
    "path",
    "prompt",
)
_TYPES = ("", "text/plain", "application/jsonp", "multipart/form-data", "application/json; charset=utf-16", "a" * 300)
_ORIGINS = ("null", "http://evil.example", "file://", "http://127.0.0.1:1", "http://a@127.0.0.1", "\x7f")
# Not addresses that cannot be read, such as "http://[::1": at these ComfyUI's own check of origins breaks, before ours.


def malformed_requests(draw: Random, number: int, port: int) -> Iterator[bytes]:
    """
    Args:
        port: of the server, for the header Host.
    """
    kinds: tuple[Callable[[Random, int], bytes], ...] = (
        _bad_path, _bad_path, _bad_method, _bad_json, _bad_json, _bad_fields, _bad_values, _bad_values, _bad_header,
        _bad_header, _bad_query, _odd_query, _bad_length, _garbage,
    )  # fmt: skip
    for _ in range(number):
        yield draw.choice(kinds)(draw, port)


def _request(method: str, path: str, port: int, body: bytes = b"", **headers: str) -> bytes:
    given = {"Host": f"127.0.0.1:{port}", "Content-Type": "application/json", "Content-Length": str(len(body))}
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in {**given, **headers}.items()]
    head = "\r\n".join([f"{method} {path} HTTP/1.1", *lines])
    return head.encode("latin-1", "replace") + b"\r\n\r\n" + body


def _path(draw: Random) -> str:
    return draw.choice(_PREFIXES) + draw.choice(_READS + _CHANGES)


def _change(draw: Random) -> str:
    path = draw.choice(_CHANGES + _OF_ONE)
    return draw.choice(_PREFIXES) + path.format(f"{draw.getrandbits(256):064x}")


def _bad_path(draw: Random, port: int) -> bytes:
    parts = "/".join(draw.choice(_PARTS) for _ in range(draw.randint(1, 4)))
    end = draw.choice(("", "/verify", "/delete", "/cancel"))
    base = draw.choice(("/engines/", "/builds/", "/", "/../", "/engines/../"))
    return _request(draw.choice(("GET", "POST")), f"{draw.choice(_PREFIXES)}{base}{parts}{end}", port, b"{}")


def _bad_method(draw: Random, port: int) -> bytes:
    return _request(draw.choice(_METHODS[:-2]), _path(draw), port, b"{}")


def _bad_json(draw: Random, port: int) -> bytes:
    deep = draw.choice((100, 2000, 20_000))
    bodies = (
        *(b"", b"{", b"}", b"[]", b"null", b'"x"', b"1", b"NaN", b"{'a': 1}", b'{"a": 1,}', b'{"a": NaN}'),
        *(b'{"width": 1e999}', b'{"width": ' + b"9" * 6000 + b"}", b'{"a": 1, "a": 2}', b"\x00"),
        *(b"\xff\xfe{}", b'{"a": "\xc3"}', b"\xef\xbb\xbf{}"),
        *(b"[" * deep + b"]" * deep, b'{"a":' * deep + b"1" + b"}" * deep, b'{"prompt":' + b"[" * deep),
        bytes(draw.getrandbits(8) for _ in range(draw.randint(1, 200))),
    )
    return _request("POST", _change(draw), port, draw.choice(bodies))


def _bad_fields(draw: Random, port: int) -> bytes:
    fields = {draw.choice(_FIELDS): draw.choice(_STRANGE) for _ in range(draw.randint(1, 4))}
    fields[draw.choice(("unknown", "__proto__", "a" * 3000, "\x00", "\ud800"))] = draw.choice(_STRANGE)
    return _request("POST", _change(draw), port, json.dumps(fields).encode())


def _bad_values(draw: Random, port: int) -> bytes:
    """All of a change's own fields, so that their values are looked at; at least one of them is wrong."""
    path = draw.choice([path for path, fields in _FIELDS_OF.items() if fields])
    fields = copy.deepcopy(_FIELDS_OF[path])
    for name in draw.sample(sorted(fields), draw.randint(1, len(fields))):
        fields[name] = draw.choice(_WRONG)
    if path == "/dry-run" and draw.random() < 0.5:
        fields = {"prompt": {"4": {**_NODE, draw.choice(sorted(_NODE)): draw.choice(_WRONG)}}, "node": "4"}
    return _request("POST", draw.choice(_PREFIXES) + path, port, json.dumps(fields).encode())


def _odd_query(draw: Random, port: int) -> bytes:
    path = draw.choice(sorted(_QUERIES))
    names = draw.sample(_QUERIES[path], draw.randint(1, len(_QUERIES[path])))
    query = "&".join(f"{name}={draw.choice(_TEXTS)}" for name in names)
    return _request("GET", f"{draw.choice(_PREFIXES)}{path}?{query}", port)


def _bad_header(draw: Random, port: int) -> bytes:
    headers: tuple[dict[str, str], ...] = (
        {"Content_Type": draw.choice(_TYPES)},
        {"Origin": draw.choice(_ORIGINS)},
        {"Sec_Fetch_Site": draw.choice(("cross-site", "same-site"))},
        {"Content_Encoding": draw.choice(("gzip", "deflate", "br", "nonsense"))},
        {"X": "a" * draw.choice((8000, 9000, 40_000)), "Origin": "null"},
        {"Transfer_Encoding": draw.choice(("chunked", "gzip, chunked", "nonsense"))},
        {"Host": draw.choice(("", "evil.example")), "Origin": f"http://127.0.0.1:{port}"},
        {"Upgrade": "websocket", "Connection": "Upgrade", "Content_Type": "text/plain"},
    )  # fmt: skip
    return _request("POST", _change(draw), port, b"{}", **draw.choice(headers))


def _bad_query(draw: Random, port: int) -> bytes:
    queries = ("after=-1", "after=x", "after=%00", "after=" + "9" * 5000, "a=1", "after=1&after=2&b", "=", "%")
    query = draw.choice(queries)
    return _request("GET", f"{_path(draw)}?{query}", port)


def _bad_length(draw: Random, port: int) -> bytes:
    lengths = ("-1", "abc", "1e3", str(10**12), "99999999999999999999999", "1, 2")
    size = draw.choice((70_000, 300_000))
    if draw.random() < 0.3:
        return _request("POST", _change(draw), port, b'{"a": "' + b"x" * size + b'"}')
    return _request("POST", _change(draw), port, b"", Content_Length=draw.choice(lengths))


def _garbage(draw: Random, port: int) -> bytes:
    lines = (b"GET\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"POST  HTTP/1.1\r\n\r\n")
    path = _path(draw).encode()
    odd = (b"GET " + path + b"\x00 HTTP/1.1\r\n\r\n", b"GET " + path + b" HTTP/1.1\r\nHost\r\n\r\n")
    return draw.choice(lines + odd)
