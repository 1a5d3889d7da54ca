"""Admission filter of a listening socket: the kernel drops packets from all other hosts.

A store of torch answers whoever connects to it, so what it listens on has to know whom it serves. The filter
is a program of the classic Berkeley packet filter, which needs no privileges; connections that the socket
accepts inherit it. https://www.kernel.org/doc/Documentation/networking/filter.txt
"""

from __future__ import annotations

import ctypes
import ipaddress
import socket
import struct
from collections.abc import Iterator, Sequence

from anygauge_hooks.errors import PlacementError

__all__ = ["admit_only"]

SO_ATTACH_FILTER = 26
NETWORK_HEADER = 0xFFF00000
"""Offsets from here on count from the start of the IP header."""
SOURCE = {4: 12, 6: 8}
"""Offset of the source address in the IP header, by version."""
LOAD_WORD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ACCEPT, DROP = 0xFFFFFFFF, 0

Instruction = tuple[int, int, int, int]
"""Operation, jump if true, jump if false, operand."""


def admit_only(listener: socket.socket, addresses: Sequence[str]) -> None:
    """Let only some hosts connect to a listening socket.

    :param addresses: Addresses of either family; those of another than the socket's are of no use.
    :raises PlacementError: The kernel does not filter sockets.
    """
    version = 6 if listener.family == socket.AF_INET6 else 4
    parsed = [ipaddress.ip_address(text.partition("%")[0]) for text in dict.fromkeys(addresses)]
    allowed = [address for address in parsed if address.version == version]
    program = [step for address in allowed for step in _accept_if_from(address)]
    code = b"".join(struct.pack("HBBI", *step) for step in (*program, (RETURN, 0, 0, DROP)))
    buffer = ctypes.create_string_buffer(code, len(code))
    length = len(code) // struct.calcsize("HBBI")
    try:
        listener.setsockopt(
            socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", length, ctypes.addressof(buffer))
        )
    except OSError as error:
        raise PlacementError(
            f"This host's kernel cannot limit who connects to the rendezvous of the workers: {error}.",
            hint="Run all workers on one node, or on nodes with an ordinary Linux kernel.",
        ) from error


def _accept_if_from(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> Iterator[Instruction]:
    words = struct.unpack(f"!{len(address.packed) // 4}I", address.packed)
    for index, word in enumerate(words):
        yield LOAD_WORD, 0, 0, NETWORK_HEADER + SOURCE[address.version] + 4 * index
        # Two instructions for each word that is left, and the one that accepts.
        yield JUMP_IF_EQUAL, 0, 2 * (len(words) - 1 - index) + 1, word
    yield RETURN, 0, 0, ACCEPT
