"""What a request of the page must look like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from slipstream.nodes.routes.rules import (
    Refused,
    check_digest,
    check_names,
    check_origin,
    is_same_machine,
    parse_object,
    whole_number,
)


def code_of(attempt: Callable[[], Any]) -> str:
    with pytest.raises(Refused) as found:
        attempt()
    return found.value.code


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("127.0.0.1:8188", "http://127.0.0.1:8188"),
        ("LocalHost:8188", "http://localhost:8188"),
        ("comfy.example", "https://comfy.example"),
        ("comfy.example:443", "https://comfy.example"),
        ("comfy.example", "http://comfy.example:80"),
        ("[::1]:8188", "http://[::1]:8188"),
    ],
)
def test_our_own_page(host: str, origin: str) -> None:
    check_origin(host, [origin], "same-origin")
    check_origin(host, [origin], "")
    check_origin(host, [origin], "none")


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("comfy.example", "https://comfy.example:8443"),
        ("127.0.0.1:8188", "https://comfy.example"),
        ("upstream", "https://comfy.example:8443"),
        ("comfy.example:8188", "https://comfy.example:8443"),
        ("", "https://comfy.example"),
    ],
)
def test_behind_a_proxy_the_browser_says_whose_page_it_is(host: str, origin: str) -> None:
    check_origin(host, [origin], "same-origin")
    check_origin(host, [origin], "Same-Origin ")
    assert code_of(lambda: check_origin(host, [origin], "cross-site")) == "forbidden"


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("192.168.1.5", "http://192.168.1.5:8080"),
        ("comfy.example:8188", "http://comfy.example"),
        ("Comfy.Example:80", "https://comfy.example"),
    ],
)
def test_a_proxy_that_drops_the_port_of_a_page_without_https(host: str, origin: str) -> None:
    """Where browsers send no Sec-Fetch-Site."""
    check_origin(host, [origin], "")


@pytest.mark.parametrize("host", ["upstream:8188", "comfyui", "192.168.1.5:8188", "[fd00::5]:8188"])
def test_a_proxy_that_writes_its_own_host_is_let_pass_where_comfyui_lets_it(host: str) -> None:
    """Without https browsers do not say whose page it is; and they send no JSON for others without asking first."""
    check_origin(host, ["http://comfy.example"], "")
    for origins in (["null"], ["http://a.example", "http://b.example"], ["file://"], [""], ["http://127.0.0.1:8188"]):
        assert code_of(lambda origins=origins: check_origin(host, origins, "")) == "forbidden"


@pytest.mark.parametrize("site", ["", "cross-site", "same-site"])
def test_other_pages_that_the_user_lets_use_comfyui(site: str) -> None:
    """By --enable-cors-header."""
    host, friend, other = "127.0.0.1:8188", "https://friend.example", "https://other.example"
    check_origin(host, [friend], site, friend)
    check_origin(host, [other], site, "*")
    for origins in ([other], [friend, other], [f"{friend}.other.example"]):
        assert code_of(lambda origins=origins: check_origin(host, origins, site, friend)) == "forbidden"


def test_programs_send_no_origin() -> None:
    check_origin("127.0.0.1:8188", [], "")
    check_origin("127.0.0.1:8188", [], "none")


@pytest.mark.parametrize(
    ("host", "origins", "site"),
    [
        ("127.0.0.1:8188", ["http://evil.example"], ""),
        ("127.0.0.1:8188", ["http://127.0.0.1:8189"], "same-site"),
        ("127.0.0.1:8188", ["http://127.0.0.1:8189"], ""),
        ("127.0.0.1:8188", ["http://localhost:8188"], ""),
        ("127.0.0.1:8188", ["http://127.0.0.1:8188.evil.example"], ""),
        ("127.0.0.1:8188", ["http://user@127.0.0.1:8188"], ""),
        ("127.0.0.1:8188", ["http://127.0.0.1:8188", "http://evil.example"], ""),
        ("127.0.0.1:8188", ["null"], ""),
        ("127.0.0.1:8188", ["file://"], ""),
        ("127.0.0.1:8188", ["http://[::1"], ""),
        ("127.0.0.1:8188", ["http://127.0.0.1:99999"], ""),
        ("127.0.0.1:8188", [""], ""),
        ("", ["http://"], ""),
        ("[::1", ["http://127.0.0.1:8188"], ""),
        ("127.0.0.1:8188", [], "cross-site"),
        ("127.0.0.1:8188", [], "Same-Site"),
        ("127.0.0.1:8188", ["http://127.0.0.1:8188"], "cross-site"),
        ("127.9.9.9:8188", ["http://evil.example"], ""),
        ("x.localhost:8188", ["http://evil.example"], ""),
        ("[::1]:8188", ["http://evil.example"], ""),
        ("192.168.1.5:8188", ["http://evil.example"], "cross-site"),
    ],
)
def test_another_page(host: str, origins: list[str], site: str) -> None:
    assert code_of(lambda: check_origin(host, origins, site)) == "forbidden"


def test_a_refusal_names_what_differs() -> None:
    with pytest.raises(Refused, match=r"'http://evil\.example' is not '127\.0\.0\.1:8188'.* Behind a proxy"):
        check_origin("127.0.0.1:8188", ["http://evil.example"], "")
    with pytest.raises(Refused) as found:
        check_origin("h" * 5000, ["o" * 5000], "")
    assert len(str(found.value)) < 500


@pytest.mark.parametrize(
    ("peer", "local", "same"),
    [
        *(("127.0.0.1", "127.0.0.1", True), ("127.0.0.9", None, True), ("::1", "::1", True)),
        *(("::ffff:127.0.0.1", "::ffff:127.0.0.1", True), ("192.168.1.5", "192.168.1.5", True)),
        *(("192.168.1.6", "192.168.1.5", False), ("::ffff:10.0.0.1", "::1", False), ("fe80::1%eth0", "fe80::2", False)),
        *((None, None, False), ("", "", False), ("unix", "unix", False)),
    ],
)
def test_whether_a_browser_runs_on_the_servers_machine(peer: str | None, local: str | None, same: bool) -> None:
    assert is_same_machine(peer, local) is same


def test_an_object() -> None:
    assert parse_object('{"a": [1, 2.5, null, "é"], "b": {"c": true}}'.encode()) == {
        "a": [1, 2.5, None, "é"],
        "b": {"c": True},
    }
    assert parse_object(b'{"seed": 18446744073709551615}') == {"seed": 2**64 - 1}


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b"null", b'"x"', b"1", b"{'a': 1}", b"\xff\xfe{}", b'{"a": "\xc3"}', b"\xef\xbb\xbf{}"),
        *(b'{"a": NaN}', b'{"a": -Infinity}', b'{"a": 1e999}', b'{"a": ' + b"9" * 50 + b"}", b'{"a": 1, "a": 2}'),
        *(b'{"a": ' + b"9" * 10_000 + b"}", b"[" * 100_000, b'{"a":' * 100 + b"1" + b"}" * 100),
        b'{"a":' + b"[" * 900 + b"]" * 900 + b"}",
    ],
    ids=lambda body: body[:20].decode("latin-1"),
)
def test_what_is_no_object(body: bytes) -> None:
    assert code_of(lambda: parse_object(body)) == "bad_request"


def test_unknown_names_are_named() -> None:
    check_names(["a"], ("a", "b"))
    with pytest.raises(Refused, match="Unknown field: 'c'. Known here: a, b"):
        check_names(["a", "c"], ("a", "b"))
    with pytest.raises(Refused) as found:
        check_names(["\ud800", "x" * 5000], ())
    assert len(str(found.value)) < 200 and str(found.value).encode()


@pytest.mark.parametrize(
    "text", ["", "a" * 63, "a" * 65, "A" * 64, "../" + "a" * 61, "a" * 63 + "\n", "a" * 63 + "\x00"]
)
def test_no_digest(text: str) -> None:
    assert code_of(lambda: check_digest(text)) == "bad_request"
    assert check_digest("0a" * 32) == "0a" * 32


@pytest.mark.parametrize("value", [None, True, 1.0, "1", [], 0, 11, 10**30])
def test_no_whole_number(value: Any) -> None:
    assert code_of(lambda: whole_number({"n": value}, "n", 1, 10)) == "bad_request"
    assert whole_number({"n": 10}, "n", 1, 10) == 10
    assert code_of(lambda: whole_number({}, "n", 1, 10)) == "bad_request"
