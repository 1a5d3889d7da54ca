"""The group of a weight sync by ``distributed``, and who reaches the store where it meets."""

from __future__ import annotations

import socket

import pytest

from anygauge.weight_sync.broadcast import Rendezvous, address_toward


def test_a_store_for_servers_on_this_host_listens_on_loopback_alone() -> None:
    """SGLang joins with torch's own client, which has no secret: the address is all that keeps others off."""
    rendezvous = Rendezvous(address_toward("http://127.0.0.1:1"), timeout_s=5)
    assert rendezvous.host == "127.0.0.1"
    socket.create_connection((rendezvous.host, rendezvous.port), 5).close()
    with pytest.raises(ConnectionRefusedError):
        # another address of this host; a store on every interface would answer there too
        socket.create_connection(("127.0.0.2", rendezvous.port), 5)
