"""How NNG's TLS streams come to be: those who dial, those who listen, certificates."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from pynng import ffi, lib

from mq import forks
from mq.stream.sockets import inode, listening
from transports._nng_aio import Operation
from transports._nng_pair import check, explain

At: TypeAlias = tuple[str, int]

_SWITCHED_ON = (b"tcp-nodelay", b"tcp-keepalive")
"""Which NNG has on over TCP alone, and off where TLS is on top of it."""


def address_of(get: Callable[[Any, bytes, Any], int], of: Any, option: bytes) -> At:
    """Host and port that NNG tells, as `socket` has them; none: it does not tell.

    Args:
        get: NNG's function for it.
        of: The stream or the listener.
        option: Which address.
    """
    found = ffi.new("nng_sockaddr *")
    if get(of, option, found):
        return "", 0
    if found.s_family == lib.NNG_AF_INET:
        family, at = socket.AF_INET, found.s_in
    else:
        family, at = socket.AF_INET6, found.s_in6
    host = bytes(ffi.buffer(ffi.addressof(at, "sa_addr")))
    return socket.inet_ntop(family, host), socket.ntohs(int(at.sa_port))


class Dialler:
    """One attempt to connect.

    Raises:
        OSError: NNG does not take the address.
    """

    def __init__(self, address: str, config: Any) -> None:
        self._operation = Operation()
        self._dialer: Any = None
        made = ffi.new("nng_stream_dialer **")
        try:
            check(lib.nng_stream_dialer_alloc(made, address.encode()))
            self._dialer = made[0]
            check(lib.nng_stream_dialer_set_ptr(self._dialer, b"tls-config", config))
            for option in _SWITCHED_ON:
                check(lib.nng_stream_dialer_set_bool(self._dialer, option, True))
        except OSError:
            self.close()
            raise
        self._operation.begin(lambda aio: lib.nng_stream_dialer_dial(self._dialer, aio))

    def fileno(self) -> int:
        """Readable when it has ended."""
        return self._operation.fd

    def stream(self) -> Any:
        """The stream, once.

        Raises:
            OSError: It could not connect.
        """
        check(self._operation.finish())
        return self._operation.output()

    def close(self) -> None:
        """Free everything but the stream that was taken."""
        operation = self._operation
        if operation.running:
            lib.nng_stream_dialer_close(self._dialer)
            operation.wait()
            if not operation.code():
                lib.nng_stream_free(operation.output())
        operation.close()
        if self._dialer is not None:
            lib.nng_stream_dialer_free(self._dialer)
            self._dialer = None


class Listener:
    """A listening address, and the connections that come to it.

    Raises:
        OSError: It cannot be listened on.
    """

    def __init__(self, address: str, config: Any) -> None:
        self._fd = -1
        self._inode = 0
        forks.register(self)
        self._operation = Operation()
        self._listener: Any = None
        made = ffi.new("nng_stream_listener **")
        try:
            check(lib.nng_stream_listener_alloc(made, address.encode()))
            self._listener = made[0]
            check(
                lib.nng_stream_listener_set_ptr(self._listener, b"tls-config", config)
            )
            for option in _SWITCHED_ON:
                check(lib.nng_stream_listener_set_bool(self._listener, option, True))
            check(lib.nng_stream_listener_listen(self._listener))
        except OSError:
            self.close()
            raise
        get = lib.nng_stream_listener_get_addr
        at = address_of(get, self._listener, b"local-address")
        self.port = at[1]
        self._fd = listening(at)
        self._inode = inode(self._fd)

    def listen(self, backlog: int = 0) -> None:
        """Have the next connection taken; NNG decides how many may wait."""
        self._operation.begin(
            lambda aio: lib.nng_stream_listener_accept(self._listener, aio)
        )

    def fileno(self) -> int:
        """Readable when somebody has connected."""
        return self._operation.fd

    def accept(self) -> tuple[Any, At]:
        """The next connection's stream, and who is at its other end.

        Raises:
            BlockingIOError: There is none.
            OSError: It could not be accepted; after that `listen` is needed again.
        """
        operation = self._operation
        if not operation.has_ended():
            raise BlockingIOError
        check(operation.finish())
        stream = operation.output()
        self.listen()
        return stream, address_of(lib.nng_stream_get_addr, stream, b"remote-address")

    def close(self) -> None:
        """Stop listening."""
        operation = self._operation
        if self._listener is not None:
            lib.nng_stream_listener_close(self._listener)
        if operation.running:
            operation.wait()
            if not operation.code():
                lib.nng_stream_free(operation.output())
        operation.close()
        if self._listener is not None:
            lib.nng_stream_listener_free(self._listener)

    def abandon(self) -> None:
        """Let go of it in a forked child."""
        if self._fd >= 0 and inode(self._fd) == self._inode:
            os.close(self._fd)


class TlsOptions:
    """How members prove who they are, as NNG's configurations for both roles.

    Args:
        paths: PEM files, by option: certificate, private_key, authorities.
        server_name: The name to ask every dialled member for; empty: its host.

    Raises:
        OSError: A file cannot be read, or is not what it must be.
    """

    def __init__(self, paths: Mapping[str, str], server_name: str) -> None:
        self._texts = []
        self._paths = paths
        for path in paths.values():
            with open(path, "rb") as file:
                self._texts.append(file.read())
        self._server_name = server_name
        self._clients: dict[str, Any] = {}
        self.server = self._configure(lib.NNG_TLS_MODE_SERVER)

    def client(self, host: str) -> Any:
        """The configuration to dial a host with."""
        name = self._server_name or host.strip("[]")
        if name not in self._clients:
            self._clients[name] = self._configure(lib.NNG_TLS_MODE_CLIENT, name)
        return self._clients[name]

    def _configure(self, mode: int, name: str = "") -> Any:
        certificate, key, authorities = self._texts
        made = ffi.new("nng_tls_config **")
        check(lib.nng_tls_config_alloc(made, mode))
        config = made[0]
        own = lib.nng_tls_config_own_cert(config, certificate, key, ffi.NULL)
        chain = lib.nng_tls_config_ca_chain(config, authorities, ffi.NULL)
        for code, option in ((own, "certificate"), (chain, "authorities")):
            if code:
                lib.nng_tls_config_free(config)
                raise OSError(
                    0,
                    f"nng:tls: NNG does not accept {option} {self._paths[option]!r}, "
                    f"which OpenSSL does ({explain(code)}); every key in it must be "
                    "one that NNG has: RSA, or of the curve P-256, P-384 or P-521. "
                    "Others need the transport tls",
                )
        check(lib.nng_tls_config_auth_mode(config, lib.NNG_TLS_AUTH_MODE_REQUIRED))
        if name:
            check(lib.nng_tls_config_server_name(config, name.encode()))
        return config

    def close(self) -> None:
        """Free them."""
        for config in (self.server, *self._clients.values()):
            lib.nng_tls_config_free(config)
        self._clients.clear()
