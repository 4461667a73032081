"""TLS over TCP, by the standard library's ssl: members show each other certificates.

Messages are framed as on `tcp`; this file is what lies between the frames and the
socket. OpenSSL works on memory here, not on the socket: that saves two system calls for
each record of 16 KiB, and a message that the socket does not take yet is encrypted all
the same, so that nothing need be repeated.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

from mq import addresses
from mq.credentials import asked_name, check_dates, contexts, explain, pem_files
from mq.mesh.poller import Poller
from mq.openssl import undivided
from mq.sigpipe import QUIET
from mq.stream.conn import StreamConn
from mq.stream.link import StreamLink
from mq.stream.tcp import TcpStreamLink
from mq.transport import Capabilities, What

_VERSIONS: Final = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}
_PIECE_BYTES: Final = 64 * 1024
"""Encrypted, or decrypted, at a time: it stays in the processor's cache."""
_RECORD_BYTES: Final = 16 * 1024
_SMALL_BYTES: Final = 8 * 1024
"""Parts of a message up to this size share a record."""


class TlsConn(StreamConn):
    """A connection whose bytes OpenSSL encrypts.

    Attributes:
        key_bytes: After so many bytes sent the connection is broken, and the session
            goes on over another one with new keys: one key of AES-GCM should encrypt
            no more than 2^24.5 records, and Python has no call to change it.
    """

    key_bytes: ClassVar[int] = 256 << 30
    _link: TlsLink

    def __init__(self, link: StreamLink, address: str, news: What) -> None:
        super().__init__(link, address, news)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._dry = False  # the socket has been found empty
        self._key_left = self.key_bytes
        server = news is What.ACCEPTED
        with undivided():
            self._ssl = self._link.context(server).wrap_bio(
                self._incoming,
                self._outgoing,
                server_side=server,
                server_hostname=None if server else self._link.name_of(address),
            )

    def describe(self) -> Mapping[str, str]:
        with undivided():
            found: Any = self._ssl.getpeercert() or {}
        subject = [pair for part in found.get("subject", ()) for pair in part]
        names = ",".join(value for key, value in subject if key == "commonName")
        return {"certificate": names, "version": self._ssl.version() or ""}

    def start(self, sock: socket.socket) -> None:
        super().start(sock)
        self._send = self._encrypt
        self._receive_into = self._decrypt

    def _establish(self) -> bool:
        while not self._shake():
            if not self._pull():
                return False
        return True

    def _shake(self) -> bool:
        """A step of the handshake; whether it was the last."""
        try:
            with undivided():
                self._ssl.do_handshake()
            # OpenSSL keeps those of 1.2, and Python has no call that forbids it.
            if self._ssl.session_reused:
                raise OSError("the peer resumes a session of TLS, which no member does")
            return True
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLEOFError as error:
            raise ConnectionError(explain(error)) from error
        except ssl.SSLError as error:
            raise OSError(explain(error)) from error
        finally:
            self._push()  # an alert, too, which tells the peer why

    def _encrypt(self, parts: Sequence[Any], *_: object) -> int:
        """Like `sendmsg`; what was taken and has not left is in `_sealed`."""
        if self._sealed and not self._push():
            raise BlockingIOError
        if self._key_left < 0:
            raise OSError("its keys have encrypted as much as they may")
        if len(parts) > 1 and len(parts[0]) + len(parts[1]) <= _SMALL_BYTES:
            parts = (b"".join(parts[:2]), *parts[2:])
        taken = 0
        for part in parts:
            view, at = memoryview(part), 0
            while at < len(view):
                at += self._ssl.write(view[at : at + _RECORD_BYTES])
                if self._outgoing.pending >= _PIECE_BYTES and not self._push():
                    self._key_left -= taken + at
                    return taken + at
            taken += at
        self._key_left -= taken
        self._push()
        return taken

    def _push(self) -> bool:
        """Send what is encrypted; whether all of it has left."""
        assert self._socket is not None
        sealed, outgoing = self._sealed, self._outgoing
        try:
            while sealed or outgoing.pending:
                if not sealed:
                    sealed = memoryview(outgoing.read())
                sealed = sealed[self._socket.send(sealed, QUIET) :]
        except BlockingIOError:
            pass
        self._sealed = sealed
        return not sealed

    def _decrypt(self, target: memoryview) -> int:
        """Like `recv_into`, but stops short of the end only where nothing is left."""
        at, size = 0, len(target)
        while at < size:
            count = self._read(target[at:] if at else target)
            if count < 0:
                if self._pull():
                    continue
                if not at:
                    raise BlockingIOError
            if count <= 0:
                break
            at += count
        return at

    def _read(self, target: memoryview) -> int:
        """Decrypt up to a record; 0: the stream has ended; -1: more must come first."""
        try:
            return self._ssl.read(len(target), target)  # type: ignore[return-value]
        except ssl.SSLWantReadError:
            return -1
        except ssl.SSLEOFError:
            return 0
        except ssl.SSLError as error:
            raise OSError(explain(error)) from error

    def _pull(self) -> bool:
        """Receive what is to be decrypted; whether there was any, or the end."""
        assert self._socket is not None
        if self._dry:
            self._dry = False
            return False
        buffer = self._link.sealed
        try:
            count = self._socket.recv_into(buffer)
        except BlockingIOError:
            return False
        self._dry = count < len(buffer)
        if count:
            self._incoming.write(buffer[:count])
        else:
            self._incoming.write_eof()
        return True


class TlsLink(TcpStreamLink):
    """TLS 1.3 over TCP; both ends must show a certificate.

    Args:
        certificate: PEM file of this member's certificate, and of those that lead from
            it to an authority.
        private_key: PEM file of its key, without a password.
        authorities: PEM file of the certificates that peers' must be signed by.
        server_name: The name in the certificate of every member that is dialled; None:
            the host of the address, so that it must be in the certificate.
        oldest_version: "1.3", or "1.2" to accept that, too.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(reach="network", encrypted=True)
    scheme = "tls"
    conn_class = TlsConn

    def __init__(
        self,
        *,
        certificate: str = "",
        private_key: str = "",
        authorities: str = "",
        server_name: str | None = None,
        oldest_version: str = "1.3",
    ) -> None:
        super().__init__()
        self._paths = pem_files("tls", certificate, private_key, authorities)
        if oldest_version not in _VERSIONS:
            raise ValueError(
                f"oldest_version is '1.2' or '1.3', not {oldest_version!r}"
            )
        self.sealed = memoryview(bytearray(_PIECE_BYTES))
        self._server_name = asked_name(server_name)
        self._oldest = _VERSIONS[oldest_version]

    def open(
        self, poller: Poller, listen: Sequence[str], directory: str | None
    ) -> list[str]:
        self._server, self._client = contexts("tls", self._paths, self._oldest)
        check_dates("tls", self._paths)
        return super().open(poller, listen, directory)

    def context(self, server: bool) -> ssl.SSLContext:
        """How this end of a connection proves who it is, and asks the other end."""
        return self._server if server else self._client

    def name_of(self, address: str) -> str:
        """The name that the certificate of a dialled member must have."""
        return self._server_name or addresses.split(address)[0].strip("[]")
