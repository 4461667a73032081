"""Which address a member gives to others."""

from __future__ import annotations

import errno
import fcntl
import socket
import struct

import pytest

from mq import addresses

INTERFACES = {"lo": "127.0.0.1", "dummy0": "", "ib0": "10.9.8.7"}


@pytest.fixture
def without_a_default_route(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with these interfaces, on a network that leads nowhere else."""

    def address_of(fd: int, request: int, argument: bytes) -> bytes:
        found = INTERFACES[argument.rstrip(b"\0").decode()]
        if not found:
            raise OSError(errno.EADDRNOTAVAIL, "no address")
        return struct.pack("20s4s", argument, socket.inet_aton(found))

    monkeypatch.setattr(addresses, "_own_ip", lambda family, elsewhere: "")
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(INTERFACES)))
    monkeypatch.setattr(fcntl, "ioctl", address_of)


@pytest.mark.usefixtures("without_a_default_route")
@pytest.mark.parametrize(
    "host", ["0.0.0.0", "0", "*", "[::]", "[::0]", "[::ffff:0.0.0.0]", "[::ffff:0:0]"]
)
def test_a_wildcard_without_a_default_route_is_an_interface_to_others(
    host: str,
) -> None:
    """Not this host's loopback, where no other host finds anybody."""
    assert addresses.reachable_host(host) == "10.9.8.7"


@pytest.mark.usefixtures("without_a_default_route")
def test_a_wildcard_of_a_host_without_a_network_is_its_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is nothing else; members of one host meet there."""
    monkeypatch.delitem(INTERFACES, "ib0")
    assert addresses.reachable_host("0.0.0.0") == "127.0.0.1"


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.1", True),
        ("127.1\0", False),
        ("[::1]", True),
        ("[::ffff:127.0.0.1]", True),
        ("localhost", True),
        ("10.1", False),
        ("0", False),
        ("[fe80::1%lo]", False),
        ("h\u00f6st", False),
    ],
)
def test_loopback_is_known_in_each_spelling(host: str, expected: bool) -> None:
    """Else it would be dialled from other hosts, where it is their own."""
    assert addresses.is_loopback(host) is expected


@pytest.mark.parametrize("zone", ["2", "eth0", "eth0.7", "br-lan", "docker_gw"])
def test_a_zone_is_the_name_of_any_interface(zone: str) -> None:
    """Or its number; there is one of each address, and it is not empty."""
    host = f"[fe80::1%{zone}]"
    assert addresses.split_host_port(f"{host}:5") == (host, 5)
    for wrong in ("[fe80::1%]:5", f"[fe80::1%{zone}%1]:5", f"[%{zone}]:5"):
        assert addresses.split_host_port(wrong) is None
