"""NNG's TLS over TCP: the only transport but `tls` that encrypts by itself.

Connections are NNG's TLS streams, not sockets of its patterns: see `_nng_tls`.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any, ClassVar

from pynng import ffi, lib

from mq import addresses
from mq.credentials import asked_name, check_dates, pem_files
from mq.errors import TransportUnavailable
from mq.mesh.poller import Poller
from mq.transport import Capabilities, Conn, What
from transports._nng_conns import NngConn
from transports._nng_pair import Channel, engine
from transports._nng_streams import Dialler, Listener, TlsOptions
from transports._nng_tls import TlsChannel
from transports.nng import NngLink

_SCHEME = "tls+tcp"
_AS_NUMBERS = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV


class NngTlsLink(NngLink):
    """NNG's TLS 1.2 and 1.3 over TCP; both ends must show a certificate.

    Args:
        certificate: PEM file of this member's certificate, and of those that lead from
            it to an authority.
        private_key: PEM file of its key, without a password.
        authorities: PEM file of the certificates that peers' must be signed by.
        server_name: The name in the certificate of every member that is dialled; None:
            the host of the address, so that it must be in the certificate.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        reach="network", survives_fork=False, encrypted=True, engine_stays=True
    )
    scheme = _SCHEME

    def __init__(
        self,
        *,
        certificate: str = "",
        private_key: str = "",
        authorities: str = "",
        server_name: str | None = None,
    ) -> None:
        super().__init__(wires=("tcp",))
        self._paths = pem_files("nng:tls", certificate, private_key, authorities)
        self._wires = (_SCHEME,)
        self._server_name = asked_name(server_name)
        self._tls: TlsOptions | None = None

    def open(
        self, poller: Poller, listen: Sequence[str], directory: str | None
    ) -> list[str]:
        self._files.check(listen, self._wires)
        check_dates("nng:tls", self._paths)  # NNG would not say which file is wrong
        engine.use()
        # Not in `unusable`: even this question starts NNG, which forks do not survive.
        if ffi.string(lib.nng_tls_engine_name()) == b"none":
            raise TransportUnavailable(
                "transport 'nng:tls' cannot run here: this build of pynng has no TLS; "
                "the wheels on PyPI have"
            )
        self._tls = TlsOptions(self._paths, self._server_name)
        return super().open(poller, listen, directory)

    def _listen(self, address: str) -> str:
        assert self._tls is not None
        host, port = addresses.split(address)
        with addresses.listening(address):
            numeric = addresses.numeric_host("0.0.0.0" if host == "*" else host)
            listener = Listener(f"{_SCHEME}://{numeric}:{port}", self._tls.server)
        self._hear(listener)
        return f"{_SCHEME}://{addresses.reachable_host(host)}:{listener.port}"

    def channel(self, stream: Any) -> Channel:
        return TlsChannel(stream, self.largest)

    def dial(self, address: str) -> Conn:
        addresses.check(address, self._wires, "nng")
        assert self._tls is not None
        host, port = addresses.split(address)
        conn = self._new(address, What.OPENED)
        try:
            # NNG would dial the first address of a name only; this one is tried.
            conn.target = at = self._names.targets(host, port)[0][1]
            numeric = addresses.bracketed(socket.getnameinfo(at, _AS_NUMBERS)[0])
            client = self._tls.client(host)  # which asks for the name
            dialler = Dialler(f"{_SCHEME}://{numeric}:{port}", client)
        except OSError as error:
            conn.fail(f"cannot dial {address}: {error}")
        else:
            conn.wait(dialler, lambda: self._dialled(conn, dialler))
        return conn

    def _dialled(self, conn: NngConn, dialler: Dialler) -> None:
        try:
            stream = dialler.stream()
        except OSError as error:
            conn.fail(f"cannot dial {conn.address}: {error}")
        else:
            conn.start(stream)
        finally:
            dialler.close()

    def _free(self) -> None:
        super()._free()
        if self._tls is not None:
            self._tls.close()
            self._tls = None
