"""Parses the hosts in `Host` headers and flags, normalises them so that they can be compared, and detects loopback."""

from __future__ import annotations

import ipaddress
import re

_HEADER = re.compile(r"(?:\[([0-9a-f:.]*:[0-9a-f:.]*)\]|([^\[\]:/@\s]+))(?::[0-9]*)?", re.IGNORECASE)
_NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?")


def named_host(header: str) -> str | None:
    """The normalised host in a `Host` header, without the port; None if the header is malformed."""
    match = _HEADER.fullmatch(header.strip())
    return None if match is None else normal_host(match[1] or match[2])


def normal_host(host: str) -> str | None:
    """A name or address, normalised: lower case, without a final dot, IPv6 compressed and without brackets; None if
    it is neither. Names must be ASCII, as browsers send them.
    """
    address = _address(host)
    if address is not None:
        return str(address)
    name = host.lower().removesuffix(".")
    return name if _NAME.fullmatch(name) else None


def is_loopback(host: str) -> bool:
    """Whether a normalised host is a loopback address or `localhost`. Does not ask a name server."""
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
