"""Hosts as `Host` headers and flags name them: one spelling to compare, and which of them are this machine."""

from __future__ import annotations

import ipaddress
import re

_HEADER = re.compile(r"(?:\[([0-9a-f:.]*:[0-9a-f:.]*)\]|([^\[\]:/@\s]+))(?::[0-9]*)?", re.IGNORECASE)
_NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?")


def named_host(header: str) -> str | None:
    """The host that a `Host` header names, in its one spelling and without the port; None where it names none."""
    match = _HEADER.fullmatch(header.strip())
    return None if match is None else normal_host(match[1] or match[2])


def normal_host(host: str) -> str | None:
    """The one spelling of a name or an address: lower case, no dot at the end, IPv6 without brackets and short; None
    for what is neither. Names are ASCII, as browsers send them.
    """
    address = _address(host)
    if address is not None:
        return str(address)
    name = host.lower().removesuffix(".")
    return name if _NAME.fullmatch(name) else None


def is_loopback(host: str) -> bool:
    """Whether a host, in its one spelling, is this machine itself, whatever a name server says."""
    address = _address(host)
    if address is None:
        return host == "localhost"
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
