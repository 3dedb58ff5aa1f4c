"""Checks of requests, independent of any server."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ...core.request_origin import host_name, is_loopback, why_not_own_page
from ...engine_cache import is_digest

STATUS = {
    "bad_request": 400,
    "forbidden": 403,
    "not_found": 404,
    "conflict": 409,
    "too_large": 413,
    "unsupported": 415,
    "failed": 500,
}
_DEEPEST = 64
_DIGITS = 40


class Refused(Exception):
    """A request that is answered by an error.

    Args:
        code: one of `STATUS`.
        message: what to do.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.status = STATUS[code]


def check_origin(host: str, origins: Collection[str], fetch_site: str, allowed: str | None = None) -> None:
    """Only ComfyUI's own page, and programs that are no browser, change anything; see `why_not_own_page`.

    Like ComfyUI's own check it lets pass what a proxy may have made of such a request: without Sec-Fetch-Site, another
    Origin than Host where neither is the browser's own machine, of whose pages browsers always tell. A page of
    elsewhere cannot send that: browsers ask before they send JSON for it, and ComfyUI allows none but `allowed`.

    Args:
        allowed: the origin of other pages that may use this ComfyUI, "*" for all; see `allowed_origin`.

    Raises:
        Refused: the request comes from another page.
    """
    reason = why_not_own_page(host, origins, fetch_site)
    if reason is None or allowed == "*" or (allowed and list(origins) == [allowed]):
        return
    scheme, _, sender = next(iter(origins), "").partition("://")
    is_page = len(origins) == 1 and scheme in ("http", "https") and host_name(sender) and not is_loopback(sender)
    if is_page and not fetch_site.strip() and host_name(host) and not is_loopback(host):
        return
    raise Refused(
        "forbidden",
        f"Only ComfyUI's own page may change this, and {reason}: reload ComfyUI, or open it at this very address. "
        "Behind a proxy, use https, or let it hand on the header Host.",
    )


def is_same_machine(peer: str | None, local: str | None) -> bool:
    """Whether a connection comes from the machine that it leads to.

    Args:
        peer: address that it comes from, None where it has none.
        local: address that it was made to.
    """
    if not peer:
        return False
    try:
        address = ipaddress.ip_address(peer)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return peer == local or (mapped or address).is_loopback


def parse_object(content: bytes) -> dict[str, Any]:
    """A body's JSON object.

    Raises:
        Refused: it is none, or holds what plain data has not: NaN, endless nesting, a name twice.
    """
    try:
        data = json.loads(
            content.decode("utf-8"),
            object_pairs_hook=_without_doubles,
            parse_int=_short_int,
            parse_float=_finite,
            parse_constant=_finite,
        )
    except (ValueError, RecursionError) as error:
        raise Refused("bad_request", f"The body is no JSON that can be read ({_brief(error)}).") from None
    if not isinstance(data, dict):
        raise Refused("bad_request", 'The body must be a JSON object, such as {"limit_bytes": 1000}.')
    if _depth_exceeds(data, _DEEPEST):
        raise Refused("bad_request", f"The body is nested more than {_DEEPEST} deep.")
    return data


def check_names(given: Iterable[str], allowed: Collection[str], what: str = "field") -> None:
    """Check that only known names are given.

    Args:
        what: that is named, for people.

    Raises:
        Refused: a name that is not `allowed`.
    """
    unknown = sorted(set(given) - set(allowed))
    if unknown:
        named = ", ".join(f"{name!r:.60}" for name in unknown[:5])
        known = ", ".join(sorted(allowed)) or "none"
        raise Refused("bad_request", f"Unknown {what}: {named}. Known here: {known}.")


def check_digest(text: str) -> str:
    """The digest, once its form is checked.

    Raises:
        Refused: no engine has such a name.
    """
    if not is_digest(text):
        raise Refused("bad_request", "Engines are named by their digests: 64 digits from 0 to 9 and a to f.")
    return text


def whole_number(fields: Mapping[str, Any], name: str, least: int, most: int) -> int:
    """The integer field `name`, from `least` to `most`.

    Raises:
        Refused: the field is missing, no whole number, or out of range.
    """
    value = fields.get(name)
    if type(value) is not int or not least <= value <= most:
        raise Refused("bad_request", f"{name} must be a whole number from {least} to {most}.")
    return value


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name occurs twice in an object")
    return made


def _short_int(text: str) -> int:
    if len(text) > _DIGITS:
        raise ValueError(f"a number has more than {_DIGITS} digits")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if value - value != 0:  # NaN or infinite
        raise ValueError(f"{text:.20} is no finite number")
    return value


def _depth_exceeds(data: Any, most: int) -> bool:
    level = [data]
    for _ in range(most):
        level = [child for node in level for child in _children(node)]
        if not level:
            return False
    return True


def _children(node: Any) -> Iterable[Any]:
    if isinstance(node, dict):
        return node.values()
    return node if isinstance(node, list) else ()


def _brief(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "it is no UTF-8"
    return "it is nested too deep" if isinstance(error, RecursionError) else str(error)[:100]
