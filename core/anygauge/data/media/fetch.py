"""Fetch media over HTTP: from public addresses only, within one deadline."""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import Any

from anygauge.config.schema import Media as Settings
from anygauge_hooks.errors import MediaError

__all__ = ["fetch", "is_public"]

_BLOCK = 2**16
_NAT64 = IPv6Network("64:ff9b::/96")
"""Its last 32 bits are the IPv4 address that a gateway connects to (RFC 6052)."""
_UNICAST = IPv6Network("2000::/3")
"""All addresses of the internet. Python also calls others global: gateways of a site (64:ff9b:1::/48), old
site-local ones (fec0::/10), and IPv4 addresses in disguise (::/96, ::ffff:0:0:0/96)."""
_AZURE = IPv4Address("168.63.129.16")
"""Answers virtual machines alone, with what they are configured with."""


def fetch(address: str, settings: Settings) -> bytes:
    """Download a URL.

    :raises MediaError: The URL is not allowed, takes too long, or is not public; a clause. A file of more
        than ``media.max_bytes`` comes back cut, but still longer than that.
    """
    if not settings.allow_urls:
        raise MediaError(
            "is an address, and media.allow_urls is false.",
            hint="Download the files, or set media.allow_urls = true.",
        )
    from aiohttp import ClientError

    try:
        with ThreadPoolExecutor(1) as thread:  # in the caller's, an event loop may be running already
            return thread.submit(_run, address, settings).result()
    except (OSError, ValueError, ClientError) as error:
        raise _problem(error, settings) from error


def _problem(error: Exception, settings: Settings) -> MediaError:
    """Return why an address was not fetched; never the address itself, which may hold a signature."""
    from aiohttp import ClientResponseError

    refused = getattr(error, "os_error", error)
    if isinstance(refused, _NotPublicError):
        return MediaError(
            f"leads to {refused}, which is not a public address.",
            hint="Download the file, or set media.allow_private_urls = true if rows and agents may make this "
            "host fetch from its own networks.",
        )
    text = f"{error}" or "timed out"
    if isinstance(error, ClientResponseError):
        text = f"{error.status} {error.message}"
    return MediaError(
        f"cannot be fetched within {settings.timeout_s:g} s: {text}.",
        hint="Download the file, or raise media.timeout_s.",
    )


def is_public(address: str) -> bool:
    """Return whether an IP address is on the internet, not on this host or in a private network."""
    ip: IPv4Address | IPv6Address = ip_address(address)
    if isinstance(ip, IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour
        if ip in _NAT64:
            inner = IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is None and ip not in _UNICAST:
            return False
        ip = inner or ip
    return ip.is_global and not ip.is_multicast and ip != _AZURE


class _NotPublicError(OSError):
    """A connection was refused here, because of the address."""


def _run(address: str, settings: Settings) -> bytes:
    # Not asyncio.run, which would wait for a name that is still being looked up.
    with closing(asyncio.new_event_loop()) as loop:
        return loop.run_until_complete(_fetch(address, settings))


async def _fetch(address: str, settings: Settings) -> bytes:
    from aiohttp import ClientSession, ClientTimeout, TCPConnector

    # The socket is made for the very address that is then connected to: no name, redirect or second answer of
    # a name server leads past this check.
    factory = None if settings.allow_private_urls else _socket
    content = bytearray()
    async with (
        asyncio.timeout(settings.timeout_s),
        ClientSession(
            connector=TCPConnector(socket_factory=factory),
            timeout=ClientTimeout(),  # the deadline above is of all together
            auto_decompress=False,  # what is compressed once more could be any size
            headers={"Accept-Encoding": "identity"},
            raise_for_status=True,
            trust_env=settings.allow_private_urls,
        ) as session,
        session.get(address) as answer,
    ):
        async for block in answer.content.iter_chunked(_BLOCK):
            content += block
            if len(content) > settings.max_bytes:
                break  # the size is checked where it is opened
    return bytes(content)


def _socket(info: tuple[Any, ...]) -> socket.socket:
    family, kind, protocol, _, address = info
    if not is_public(str(address[0])):
        raise _NotPublicError(str(address[0]))
    return socket.socket(family, kind, protocol)
