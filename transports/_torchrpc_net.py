"""Addresses: those of the link, and the URLs and interfaces of TensorPipe."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
from collections.abc import Iterator, Sequence
from ipaddress import IPv4Address, IPv6Address
from typing import TypeAlias

from mq import addresses

SCHEME = "torchrpc://"
_INTERFACE = "TP_SOCKET_IFNAME"
_ID = re.compile(r"[0-9a-f]{1,64}")
Remote: TypeAlias = "tuple[str, int]"
_SHM = re.compile(r"[0-9A-Za-z_.:/-]{1,200}")


def split(address: str) -> tuple[str, int, str]:
    """Host, port and link id ("": not known) of ``torchrpc://host:port/id``.

    Raises:
        ValueError: It is none.
    """
    rest, _, id = address.removeprefix(SCHEME).partition("/")
    parts = addresses.split_host_port(rest)
    if (
        not address.startswith(SCHEME)
        or parts is None
        or (id and not _ID.fullmatch(id))
    ):
        raise ValueError(f"{address!r} is not of the form torchrpc://host:port")
    return parts[0].strip("[]"), parts[1], id


def without_id(address: str) -> str:
    """The same of whichever link listens there; what is no address stays as it is."""
    try:
        return address.removesuffix(f"/{split(address)[2]}")
    except ValueError:
        return address


def remote_of(url: str) -> Remote | None:
    """Host and port of an agent's URL; None: it has none."""
    found = addresses.split_host_port(url.partition("://")[2])
    return None if found is None else (found[0].strip("[]"), found[1])


def check_url(url: str, transports: Sequence[str], within_host: bool = True) -> None:
    """Refuse a URL that TensorPipe would abort the process for.

    Args:
        within_host: Whether whoever gave it is a process of this host.

    Raises:
        ValueError: It is malformed, or of a transport that is not in use here, or this
            host cannot connect to it, or would connect to a process of its own.
        OSError: No descriptor is free to find that out.
    """
    scheme, _, rest = url.partition("://")
    if scheme not in transports:
        raise ValueError(f"its TensorPipe transport {scheme!r} is not used here")
    if scheme == "shm":
        stays_within = True
        if _SHM.fullmatch(rest) is None:
            raise _no_url(url)
    else:
        ip, port = _ip_and_port(url)
        stays_within = ip.is_loopback
        _check_route(url, str(ip), port)
    if stays_within and not within_host:
        raise ValueError(
            f"TensorPipe listens for one end on {url}, which no other host reaches, "
            "and the other end is on another; give the first torchrpc queue of that "
            "process a `listen` that other hosts reach"
        )


def _no_url(url: str) -> ValueError:
    return ValueError(f"{url[:100]!r} is no URL of TensorPipe's")


def _ip_and_port(url: str) -> tuple[IPv4Address | IPv6Address, int]:
    """Those of one host, as far as can be told from a number.

    Raises:
        ValueError: There are none.
    """
    host, port = remote_of(url) or ("", 0)
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        raise _no_url(url) from None
    ip = getattr(ip, "ipv4_mapped", None) or ip
    if not port or not url.isascii() or ip.is_multicast or ip.is_unspecified:
        raise _no_url(url)
    return ip, port


def _check_route(url: str, host: str, port: int) -> None:
    """Refuse an address to which libuv's `connect` would fail at once.

    That is a matter of routes, which a datagram socket is told of without sending.
    """
    try:
        (family, target), *_ = addresses.look_up(host, port, socket.AI_NUMERICHOST)
    except OSError:  # of an interface that is not there
        raise _no_url(url) from None
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(target)
        except OSError as error:
            raise ValueError(
                f"no connection can be made to {url}, where TensorPipe listens for one "
                f"end, from the other ({error.strerror}); a process listens there on "
                "the first address of `listen` that other hosts reach, as its first "
                "torchrpc queue gives it: put one first that all members reach"
            ) from error


@contextlib.contextmanager
def listen_on(host: str) -> Iterator[None]:
    """Have the agent that is started in this block listen on this host's interface.

    TensorPipe looks only at its environment variable, and that once per process.

    Raises:
        OSError: No interface of this machine has the address, or it has no link, and
            TensorPipe would take loopback for as long as the process lives.
    """
    if _INTERFACE in os.environ:  # the user has decided
        yield
        return
    interface = interface_of(host)
    if not addresses.has_link(interface):
        raise OSError(
            f"the network interface {interface}, which has the address {host}, is down "
            "or has no link; connect again when it is up, or listen elsewhere"
        )
    os.environ[_INTERFACE] = interface
    try:
        yield
    finally:
        del os.environ[_INTERFACE]


def interface_of(host: str) -> str:
    """The network interface with this IP address.

    Raises:
        OSError: There is none.
    """
    wanted = "127.0.0.1" if addresses.is_loopback(host) else host
    for name, own in addresses.interface_hosts():
        if own == wanted:
            return name
    raise OSError(f"no network interface has the IPv4 address {host}")
