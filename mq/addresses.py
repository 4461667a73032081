"""Rules for listen addresses that every link over sockets shares."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import os
import re
import socket
import stat
import struct
from collections.abc import Iterator, Sequence
from typing import Any

SOCKET_PATH_BYTES = 107
"""The longest path of a unix socket."""

_FILE_SCHEMES = ("ipc", "shm")
_SIOCGIFFLAGS = 0x8913
_SIOCGIFADDR = 0x8915
_IFF_RUNNING = 0x40
_IPV6 = r"\[[0-9A-Za-z:.]+(?:%[0-9A-Za-z_.-]+)?\]"  # with a zone, an interface's name
_HOST_PORT = re.compile(rf"({_IPV6}|[^\[\]:;/\s]+):(\*|\d{{1,5}})")


def split_host_port(text: str) -> tuple[str, int] | None:
    """The host, IPv6 in brackets, and the port of ``host:port``; None: malformed.

    A port of ``*`` is 0, as is usual for "any free port".
    """
    match = _HOST_PORT.fullmatch(text)
    if match is None:
        return None
    port = 0 if match[2] == "*" else int(match[2])
    return (match[1], port) if port < 65536 else None


def split(address: str) -> tuple[str, int]:
    """The host, IPv6 in brackets, and the port of ``scheme://host:port``.

    Raises:
        ValueError: It is not of that form.
    """
    wire, _, rest = address.partition("://")
    parts = split_host_port(rest)
    if parts is None:
        raise ValueError(f"{address!r} is not of the form {wire or 'tcp'}://host:port")
    return parts


def origin(address: str) -> str:
    """Where a peer at this address comes from, which for who floods is all one.

    Its host; of IPv6 the network of 64 bits, all of which one host may use. An address
    that has none, as of a unix socket, is an origin of its own.
    """
    parts = split_host_port(address.partition("://")[2])
    host = address if parts is None else parts[0]
    number = None if parts is None else _number(host)
    if isinstance(number, ipaddress.IPv6Address):
        return str(ipaddress.IPv6Network((number, 64), strict=False))
    return host if number is None else str(number)


def bracketed(host: str) -> str:
    """A host as it stands before a port: a number of IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


def check(address: str, wires: Sequence[str], engine: str) -> None:
    """Refuse what a link of these wires can neither listen on nor dial.

    Raises:
        ValueError: The address is of another scheme, or malformed.
    """
    wire, _, rest = address.partition("://")
    if wire not in wires or not rest:
        forms = " or ".join(f"{wire}://..." for wire in wires)
        raise ValueError(
            f"{address!r} is not of the form {forms}, which {engine} needs"
        )
    if wire != "ipc":
        split(address)


def is_routable(address: str, wires: Sequence[str]) -> bool:
    """Whether other hosts could reach a listener on an address of these wires."""
    wire = address.partition("://")[0]
    if wire in _FILE_SCHEMES or wire not in wires:
        return False
    return not is_loopback(split(address)[0])


def rank(candidates: Sequence[str], wires: Sequence[str], same_host: bool) -> list[str]:
    """The addresses that can be dialled, those of the first wire first."""
    order = {wire: place for place, wire in enumerate(wires)}
    usable = [
        address
        for address in candidates
        if address.partition("://")[0] in order
        and is_whole(address)
        and (same_host or is_routable(address, wires) or _is_file_here(address))
    ]
    return sorted(usable, key=lambda address: order[address.partition("://")[0]])


def _is_file_here(address: str) -> bool:
    """Whether it is of a socket file that this process finds.

    A container may share the directory, and still have a boot id of its own.
    """
    scheme, _, path = address.partition("://")
    try:
        return scheme in _FILE_SCHEMES and stat.S_ISSOCK(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def is_whole(address: str) -> bool:
    """Whether it is well-formed: over TCP it has a host and a port, if only 0."""
    scheme, _, rest = address.partition("://")
    if scheme in _FILE_SCHEMES:
        return bool(rest)
    return split_host_port(rest) is not None


def is_any_port(address: str) -> bool:
    """Whether it is one to listen on only: it asks for any free port."""
    scheme, _, rest = address.partition("://")
    return scheme not in _FILE_SCHEMES and (split_host_port(rest) or ("", 1))[1] == 0


def is_loopback(host: str) -> bool:
    """Whether only processes of the same host reach a listener on this host."""
    number = _number(host)
    return host == "localhost" if number is None else number.is_loopback


def is_wildcard(host: str) -> bool:
    """Whether it stands for all addresses of a machine, however it is spelt."""
    number = _number(host)
    return host == "*" if number is None else number.is_unspecified


def _number(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address that a host is, of IPv4 where IPv6 has that mapped; None: a name.

    Also in the short forms that the system's resolver takes, such as 0 and 127.1.
    """
    try:
        number = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        try:
            return ipaddress.IPv4Address(socket.inet_aton(host))
        except (OSError, ValueError):  # a NUL is no OSError
            return None
    return getattr(number, "ipv4_mapped", None) or number


def reachable_host(host: str) -> str:
    """The host, or for a wildcard the address under which others see this machine.

    That of the default route, looking up which sends nothing; where there is none,
    that of the first interface to other hosts.
    """
    if not is_wildcard(host):
        return host
    is_ipv6 = isinstance(_number(host), ipaddress.IPv6Address)
    if is_ipv6 and (own := _own_ip(socket.AF_INET6, "2001:db8::1")):
        return f"[{own}]"
    return _own_ip(socket.AF_INET, "192.0.2.1") or _interface_ip() or "127.0.0.1"


def _own_ip(family: socket.AddressFamily, elsewhere: str) -> str:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((elsewhere, 9))
            return str(probe.getsockname()[0])
    except OSError:  # no route
        return ""


def _interface_ip() -> str:
    own = (host for _, host in interface_hosts() if not is_loopback(host))
    return next(own, "")


def interface_hosts() -> list[tuple[str, str]]:
    """Names of this machine's network interfaces, with the IPv4 address of each."""
    found = []
    for _, name in _interfaces():
        with contextlib.suppress(OSError):  # it has no IPv4 address
            found.append((name, socket.inet_ntoa(_ask(name, _SIOCGIFADDR)[4:8])))
    return found


def has_link(interface: str) -> bool:
    """Whether a network interface of this machine is up, and carries."""
    try:
        (flags,) = struct.unpack_from("h", _ask(interface, _SIOCGIFFLAGS))
    except OSError:
        return False
    return bool(flags & _IFF_RUNNING)


def _ask(interface: str, what: int) -> bytes:
    """What the kernel has in its `struct ifreq` behind the name (netdevice(7))."""
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return fcntl.ioctl(probe.fileno(), what, request)[16:]


def look_up(
    host: str, port: int | None = None, flags: int = 0
) -> list[tuple[int, tuple[Any, ...]]]:
    """Families and socket addresses of a host, a name or an IP address.

    Raises:
        OSError: The name is unknown; names it.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    except (OSError, UnicodeError) as error:  # the latter for names that none can have
        raise OSError(
            f"the host {host!r} cannot be looked up: {error}; give an IP address, or a "
            "name that this machine knows"
        ) from error
    return [(entry[0], entry[4]) for entry in found]


def numeric_host(host: str) -> str:
    """The IP address of a host name, for engines that listen on nothing else.

    Raises:
        OSError: The name is unknown.
    """
    if "[" in host or host == "*" or any(host == name for _, name in _interfaces()):
        return host
    _, address = look_up(host)[0]
    return bracketed(address[0])


def _interfaces() -> list[tuple[int, str]]:
    try:
        return socket.if_nameindex()
    except OSError:
        return []


def of_scheme(address: str, scheme: str) -> str:
    """An address given as ``tcp://...``, as a link over TCP has it.

    So that a program which names addresses need not change them with its backend.
    """
    rest = address.removeprefix("tcp://")
    return address if rest == address else f"{scheme}://{rest}"


def absolute(address: str) -> str:
    """An address to listen on, with the whole path where it is a file's.

    Others have other working directories, as this process may have when it closes.

    Raises:
        ValueError: No socket file can have that path.
    """
    scheme, _, path = address.partition("://")
    if scheme not in _FILE_SCHEMES:
        return address
    # To libzmq "*" is a file of its choice, and "@" begins a name that is no file's.
    if "\0" in path or path == "*" or path.startswith("@"):
        raise ValueError(
            f"cannot listen on {address!r}, which is no path of a file; leave listen "
            "out for a new file"
        )
    # Only then: the working directory may have been removed.
    if not os.path.isabs(path):
        path = os.path.join(os.getcwd(), path)
    return f"{scheme}://{path}"


@contextlib.contextmanager
def listening(address: str, failure: type[Exception] = OSError) -> Iterator[None]:
    """Have the error of what cannot be listened on name the address.

    Args:
        address: As the user gave it.
        failure: What an engine raises in place of OSError.

    Raises:
        OSError: It cannot be listened on.
    """
    try:
        yield
    except (OSError, failure) as error:
        # Of a name that cannot be looked up there is none, nor of some engines'.
        number = getattr(error, "errno", None) or errno.EADDRNOTAVAIL
        raise OSError(number, f"cannot listen on {address}: {error}") from error


def check_socket_path(path: str) -> None:
    """Refuse a path on which no unix socket can listen.

    Raises:
        OSError: It is too long, its directory is missing, somebody listens there, or
            it is another file's, which an engine may take for what is left of a socket,
            and remove.
    """
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES:
        raise OSError(
            errno.ENAMETOOLONG,
            f"the path of a unix socket has at most {SOCKET_PATH_BYTES} bytes; choose "
            f"a shorter directory than that of {path}",
        )
    try:
        os.stat(directory := os.path.dirname(path))
    except FileNotFoundError as error:
        told = f"there is no directory {directory}; make it, or leave listen out"
        raise OSError(errno.ENOENT, told) from error
    if has_listener(path):
        raise OSError(errno.EADDRINUSE, f"somebody listens on {path} already")
    if os.path.lexists(path) and not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise OSError(errno.EADDRINUSE, f"{path} is there already, and is no socket")


def has_listener(path: str) -> bool:
    """Whether somebody listens on a unix socket, if only in a process that is stopped.

    Raises:
        OSError: This process has no descriptor left.
    """
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        return probe.connect_ex(path) in (0, errno.EAGAIN)
