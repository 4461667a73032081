"""Rules for listen addresses that every link over sockets shares."""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import socket

SOCKET_PATH_BYTES = 107
"""The longest path of a unix socket."""

_HOST_PORT = re.compile(r"(\[[0-9A-Za-z:.%]+\]|[^\[\]:;/\s]+):(\*|\d{1,5})")


def split_host_port(text: str) -> tuple[str, int] | None:
    """The host, IPv6 in brackets, and the port of ``host:port``; None: malformed.

    A port of ``*`` is 0, as is usual for "any free port".
    """
    match = _HOST_PORT.fullmatch(text)
    if match is None:
        return None
    port = 0 if match[2] == "*" else int(match[2])
    return (match[1], port) if port < 65536 else None


def is_loopback(host: str) -> bool:
    """Whether only processes of the same host reach a listener on this host."""
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def reachable_host(host: str) -> str:
    """The host, or for a wildcard the address under which others see this machine.

    That of the default route; looking it up sends nothing.
    """
    if host == "[::]" and (own := _own_ip(socket.AF_INET6, "2001:db8::1")):
        return f"[{own}]"
    if host in ("0.0.0.0", "[::]", "*"):
        return _own_ip(socket.AF_INET, "192.0.2.1") or "127.0.0.1"
    return host


def _own_ip(family: socket.AddressFamily, elsewhere: str) -> str:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((elsewhere, 9))
            return str(probe.getsockname()[0])
    except OSError:  # no route
        return ""


def numeric_host(host: str) -> str:
    """The IP address of a host name, for engines that listen on nothing else.

    Raises:
        OSError: The name is unknown.
    """
    if "[" in host or host == "*" or any(host == name for _, name in _interfaces()):
        return host
    family, *_, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    return f"[{address[0]}]" if family == socket.AF_INET6 else str(address[0])


def _interfaces() -> list[tuple[int, str]]:
    try:
        return socket.if_nameindex()
    except OSError:
        return []


def check_socket_path(path: str) -> None:
    """Refuse a path on which no unix socket can listen.

    Raises:
        OSError: It is too long, or somebody listens there.
    """
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES:
        raise OSError(
            errno.ENAMETOOLONG,
            f"the path of a unix socket has at most {SOCKET_PATH_BYTES} bytes; choose "
            f"a shorter directory than that of {path}",
        )
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        if probe.connect_ex(path) in (0, errno.EAGAIN):
            raise OSError(errno.EADDRINUSE, f"somebody listens on {path} already")
