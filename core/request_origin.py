"""Which page of a browser sends a request: our own, or any other that the user has open."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection
from urllib.parse import urlsplit


def why_not_own_page(host: str, origins: Collection[str], fetch_site: str) -> str | None:
    """Why a request does not come from the page that the same server gave out, in words; None where it may.

    Programs that are no browser send no `Origin`, and may ask as well.

    Args:
        host: the header Host.
        origins: all headers Origin; browsers send one with whatever another page makes them post.
        fetch_site: the header Sec-Fetch-Site, or "". No script of a page can set it, and proxies hand it on, while
            they may write another Host.
    """
    site = fetch_site.strip().lower()
    if site == "same-origin":
        return None
    if site in ("cross-site", "same-site"):
        return "another page asked"
    if len(origins) > 1 or any(not _is_same(origin, host) for origin in origins):
        return f"{', '.join(origins)!r:.100} is not {host!r:.100}"
    return None


def host_name(host: str) -> str:
    """Of a header Host, without the port; empty where it is none."""
    try:
        return (urlsplit(f"//{host.strip()}").hostname or "").removesuffix(".")
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """Whether a header Host is an address or name that leads to the browser's own machine, wherever that is."""
    name = host_name(host)
    address = _address(name)
    if address is None:
        return name == "localhost" or name.endswith(".localhost")
    return address.is_loopback or address.is_unspecified


def is_of_this_machine(host: str, local: str | None) -> bool:
    """Whether a header Host is the address that was connected to, or a name that this machine has by itself.

    All other addresses are what a proxy or forwarder was asked by, and all other names are of somebody who may have
    them lead anywhere: a page of theirs that has its name lead here passes for ours by its origin (DNS rebinding).

    Args:
        local: the address that was connected to; None where there is none.
    """
    name, address = host_name(host), _address(host_name(host))
    if is_loopback(host) or (address is not None and address == _address(local or "")):
        return True
    ours = socket.gethostname().lower()
    return name in (ours, f"{ours}.local", ours.partition(".")[0])


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _is_same(origin: str, host: str) -> bool:
    """Proxies drop ports, so these count only where both sides have one."""
    try:
        theirs, ours = urlsplit(origin.strip()), urlsplit(f"//{host.strip()}")
        if theirs.scheme not in ("http", "https") or theirs.username is not None or not theirs.hostname:
            return False
        ports = {port for port in (theirs.port, ours.port) if port is not None}
        return theirs.hostname == ours.hostname and len(ports) < 2
    except ValueError:  # a port that is none
        return False
