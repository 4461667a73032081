"""NNG's TLS streams, which its Pair0 can be given only one peer each to a port.

NNG's ``socket://`` takes no TLS, and its TLS listener hands every connection to the one
socket that it belongs to. So these connections are NNG's TLS streams themselves, with
the framing that its sockets have over TCP: the size of a message, 8 bytes, big-endian.

An operation of NNG ends in one of its threads, by a callback. Here that is libc's
`fflush`, of a pipe's stream that holds one byte: no Python runs in that thread, and the
pipe tells the poller.
"""

from __future__ import annotations

import ctypes
import os
import select
import socket
import stat
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pynng import ffi, lib

from transports._nng_pair import (
    HANG_UP,
    PREFIX_BYTES,
    Channel,
    check,
    explain,
    inode,
    unread,
)

_SIZE_BYTES = 8
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fdopen.restype = ctypes.c_void_p
for _function in (_libc.fflush, _libc.fclose):
    _function.argtypes = [ctypes.c_void_p]
_libc.fputc.argtypes = [ctypes.c_int, ctypes.c_void_p]
_flush = ffi.cast(
    "void (*)(void *)", ctypes.cast(_libc.fflush, ctypes.c_void_p).value or 0
)


class Operation:
    """One of NNG's asynchronous operations, repeated; `fd` is readable when it ended.

    Attributes:
        running: Whether it was begun and not yet taken note of.
    """

    def __init__(self) -> None:
        self.fd, self._writer = os.pipe2(os.O_CLOEXEC)
        self._file = _libc.fdopen(self._writer, b"w")
        self._aio = ffi.new("nng_aio **")
        self._iov = ffi.new("nng_iov *")
        self._poller = select.poll()
        self._poller.register(self.fd, select.POLLIN)
        self.running = False
        check(lib.nng_aio_alloc(self._aio, _flush, ffi.cast("void *", self._file)))

    def begin(
        self, start: Callable[[Any], object], pointer: Any = None, nbytes: int = 0
    ) -> None:
        """Start it, over this memory."""
        if pointer is not None:
            self._iov.iov_buf, self._iov.iov_len = pointer, nbytes
            check(lib.nng_aio_set_iov(self._aio[0], 1, self._iov))
        _libc.fputc(120, self._file)
        self.running = True
        start(self._aio[0])

    def has_ended(self) -> bool:
        """Whether it was begun and has ended; `fd` stays readable until `finish`."""
        if not self.running or not self._poller.poll(0):
            return False
        lib.nng_aio_wait(self._aio[0])  # for the callback, which has flushed already
        return True

    def wait(self) -> None:
        """Wait for its end, which somebody has caused."""
        lib.nng_aio_wait(self._aio[0])

    def finish(self) -> int:
        """Take note that it has ended; NNG's error code."""
        os.read(self.fd, 1)
        self.running = False
        return self.code()

    def code(self) -> int:
        """NNG's error code of what has ended."""
        return int(lib.nng_aio_result(self._aio[0]))

    def count(self) -> int:
        """How many bytes it has moved."""
        return int(lib.nng_aio_count(self._aio[0]))

    def output(self) -> Any:
        """The stream that it has made."""
        return ffi.cast("nng_stream *", lib.nng_aio_get_output(self._aio[0], 0))

    def close(self) -> None:
        """End it and free everything; idempotent."""
        if self._file:
            lib.nng_aio_stop(self._aio[0])
            lib.nng_aio_free(self._aio[0])
            _libc.fclose(self._file)
            self._file = None
            os.close(self.fd)

    def abandon(self) -> None:
        """In a forked child, whose exit flushes what is the parent's to flush."""
        if self._file:
            self._file = None
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._writer)
            os.close(null)
            os.close(self.fd)


class _Outgoing:
    """Messages on their way out, in memory that stays where it is."""

    def __init__(self, capacity: int) -> None:
        self._memory = bytearray(capacity)
        self.pointer = ffi.from_buffer(self._memory)
        self.sent = self.end = 0

    def append(
        self, head: bytes | bytearray | memoryview, body: memoryview | None
    ) -> bool:
        """Copy a message; False: it does not fit."""
        nhead, nbody = len(head), 0 if body is None else body.nbytes
        size = PREFIX_BYTES + nhead + nbody
        if self.end + _SIZE_BYTES + size > len(self._memory):
            return False
        at = self.end
        for part in (
            size.to_bytes(_SIZE_BYTES, "big"),
            nhead.to_bytes(PREFIX_BYTES, "little"),
            head,
            body or b"",
        ):
            self._memory[at : at + len(part)] = part
            at += len(part)
        self.end = at
        return True


class TlsChannel(Channel):
    """A TLS stream of NNG's.

    Args:
        stream: The stream; it is this channel's from now on.
        largest: Bytes of the largest message.
    """

    in_band = True

    def __init__(self, stream: Any, largest: int) -> None:
        self._stream = stream
        self._largest = largest
        ports = [_port(stream, name) for name in (b"local-address", b"remote-address")]
        self._receiving, self._sending = Operation(), Operation()
        self.recv_fd = self._receiving.fd
        # NNG 1.11 may leave its operations waiting for ever when the connection breaks
        # while it both sends and receives, but a copy of its descriptor tells.
        self._fd = next((fd for fd in _descriptors() if _ports_of(fd) == ports), -1)
        self._inode = inode(self._fd)
        self._copy = -1 if self._fd < 0 else os.dup(self._fd)
        self.watches = ((self._sending.fd, select.EPOLLIN), (self._copy, HANG_UP))
        self._in = bytearray(_SIZE_BYTES + largest)
        self._in_memory = ffi.from_buffer(self._in)
        # One leaves while the other fills, with two of the largest or many small.
        self._out, self._filling = _Outgoing(2 * largest), _Outgoing(2 * largest)
        self._start = self._end = 0  # of what was received and not taken
        self._taken = 0
        self._counted = False  # what the operation that has ended brought
        self._view: memoryview | None = None
        self._broken = self._fd < 0  # it has gone already
        self._refused = False
        self._full = False
        self._closed = False
        self._receive_more()

    # -- receiving ----------

    def _receive_more(self) -> None:
        rest = self._in[self._start : self._end]
        self._in[: len(rest)] = rest
        self._start, self._end = 0, len(rest)
        self._receiving.begin(
            lambda aio: lib.nng_stream_recv(self._stream, aio),
            self._in_memory + self._end,
            len(self._in) - self._end,
        )

    def _complete(self) -> int:
        """The size of the next message, if all of it is there, else -1."""
        have = self._end - self._start - _SIZE_BYTES
        if have < 0:
            return -1
        size = int.from_bytes(self._in[self._start : self._start + _SIZE_BYTES], "big")
        if not PREFIX_BYTES <= size <= self._largest:
            self._refused = self._broken = True
            return -1
        return size if size <= have else -1

    def _advance(self) -> int:
        """Receive until a message is there; its size, or -1.

        While there is one, the operation is not taken note of: so `recv_fd` tells.
        """
        while not self._broken:
            size = self._complete()
            if size >= 0 or self._broken:
                return size
            if not self._receiving.has_ended():
                return -1
            if code := self._receiving.code():
                self._fail(code)
                return -1
            if not self._counted:
                self._end += self._receiving.count()
                self._counted = True
                continue
            self._receiving.finish()
            self._counted = False
            self._receive_more()
        return -1

    def receive(self) -> memoryview | None:
        size = self._advance()
        if size < 0:
            return None
        begin = self._start + _SIZE_BYTES
        self._taken = _SIZE_BYTES + size
        self._view = memoryview(self._in)[begin : begin + size]
        return self._view

    def release(self) -> None:
        if self._view is not None:
            self._view.release()
            self._view = None
            self._start += self._taken

    # -- sending ----------

    def send(
        self, head: bytes | bytearray | memoryview, body: memoryview | None
    ) -> bool:
        if self._broken:
            return True
        self._full = not self._filling.append(head, body)
        if not self._sending.running:
            self._send_more()
        return not self._full

    def _send_more(self) -> None:
        if self._out.sent == self._out.end:
            self._out.sent = self._out.end = 0
            self._out, self._filling = self._filling, self._out
        out = self._out
        if out.end:
            self._sending.begin(
                lambda aio: lib.nng_stream_send(self._stream, aio),
                out.pointer + out.sent,
                out.end - out.sent,
            )

    def watched(self) -> bool:
        if self._sending.has_ended():
            if code := self._sending.finish():
                self._fail(code)
                return True
            self._out.sent += self._sending.count()
            self._full &= self._out.sent < self._out.end
            self._send_more()
        if self._is_cut() and not self._receiving.has_ended():
            self._broken = self._advance() < 0
        return self._broken

    def _is_cut(self) -> bool:
        """Whether the peer has gone, and NNG reads nothing more of what it left."""
        poller = select.poll()
        poller.register(self._copy, select.POLLRDHUP)
        for _, events in poller.poll(0):
            return bool(events & ~select.POLLRDHUP) or not unread(self._copy)
        return False

    def room_fd(self) -> int:
        return -1  # `watched` tells

    def has_room(self) -> bool:
        return not self._full

    # -- the end ----------

    def _fail(self, code: int) -> None:
        self.problem = self.problem or explain(code)
        self._broken = True

    def ended(self) -> bool:
        return self._advance() < 0 and self._broken

    def refused(self) -> bool:
        return self._refused

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.release()
            lib.nng_stream_close(self._stream)
            self._receiving.close()
            self._sending.close()
            lib.nng_stream_free(self._stream)
            if self._copy >= 0:
                os.close(self._copy)

    def describe(self) -> Mapping[str, str]:
        found = ffi.new("char **")
        if lib.nng_stream_get_string(self._stream, b"tls-peer-cn", found):
            return {}
        name: bytes = ffi.string(found[0])
        lib.nng_strfree(found[0])
        return {"certificate": name.decode(errors="replace")}

    def freed(self) -> bool:
        return self._fd < 0 or inode(self._fd) != self._inode

    def abandon(self) -> None:
        if not self._closed:
            self._closed = True
            self._receiving.abandon()
            self._sending.abandon()
            if self._copy >= 0:
                os.close(self._copy)
            if not self.freed():
                os.close(self._fd)


def _port(stream: Any, name: bytes) -> int:
    address = ffi.new("nng_sockaddr *")
    if lib.nng_stream_get_addr(stream, name, address):
        return -1
    return socket.ntohs(int(address.s_in.sa_port))


def _descriptors() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/fd")]


def _ports_of(fd: int) -> list[int]:
    """The ports at the ends of a TCP connection, or of a listener; else none."""
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return []
        with socket.socket(fileno=os.dup(fd)) as found:
            if found.family not in (socket.AF_INET, socket.AF_INET6):
                return []
            if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return [found.getsockname()[1]]
            return [found.getsockname()[1], found.getpeername()[1]]
    except OSError:
        return []


class Dialler:
    """One attempt to connect.

    Raises:
        OSError: NNG does not take the address.
    """

    def __init__(self, address: str, config: Any) -> None:
        self._operation = Operation()
        made = ffi.new("nng_stream_dialer **")
        try:
            check(lib.nng_stream_dialer_alloc(made, address.encode()))
        except OSError:
            self._operation.close()
            raise
        self._dialer: Any = made[0]
        check(lib.nng_stream_dialer_set_ptr(self._dialer, b"tls-config", config))
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

    def abandon(self) -> None:
        """Let go of it in a forked child."""
        self._operation.abandon()


class Listener:
    """A listening address, and the connections that come to it.

    Raises:
        OSError: It cannot be listened on.
    """

    def __init__(self, address: str, config: Any) -> None:
        made = ffi.new("nng_stream_listener **")
        check(lib.nng_stream_listener_alloc(made, address.encode()))
        self._listener: Any = made[0]
        self._operation = Operation()
        try:
            check(
                lib.nng_stream_listener_set_ptr(self._listener, b"tls-config", config)
            )
            check(lib.nng_stream_listener_listen(self._listener))
            port = ffi.new("int *")
            name = b"tcp-bound-port"
            check(lib.nng_stream_listener_get_int(self._listener, name, port))
        except OSError:
            self.close()
            raise
        self.port = int(port[0])
        self._accept()

    def _accept(self) -> None:
        self._operation.begin(
            lambda aio: lib.nng_stream_listener_accept(self._listener, aio)
        )

    def fileno(self) -> int:
        """Readable when somebody has connected."""
        return self._operation.fd

    def accept(self) -> Any:
        """The next connection's stream, or None."""
        operation = self._operation
        if not operation.has_ended():
            return None
        stream = None if operation.finish() else operation.output()
        self._accept()
        return stream

    def close(self) -> None:
        """Stop listening."""
        operation = self._operation
        lib.nng_stream_listener_close(self._listener)
        if operation.running:
            operation.wait()
            if not operation.code():
                lib.nng_stream_free(operation.output())
        operation.close()
        lib.nng_stream_listener_free(self._listener)

    def abandon(self) -> None:
        """Let go of it in a forked child."""
        self._operation.abandon()
        for fd in _descriptors():
            if _ports_of(fd) == [self.port]:
                os.close(fd)


class TlsOptions:
    """How members prove who they are, as NNG's configurations for both roles.

    Args:
        paths: PEM files: certificate, private key, authorities.
        server_name: The name to ask every dialled member for; None: its host.

    Raises:
        OSError: A file cannot be read, or is not what it must be.
    """

    def __init__(self, paths: Sequence[str], server_name: str | None) -> None:
        self._texts = []
        for path in paths:
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
        for code, what in (
            (own, "certificate and private_key"),
            (chain, "authorities"),
        ):
            if code:
                lib.nng_tls_config_free(config)
                raise OSError(0, f"NNG does not accept {what}: {explain(code)}")
        check(lib.nng_tls_config_auth_mode(config, lib.NNG_TLS_AUTH_MODE_REQUIRED))
        if name:
            check(lib.nng_tls_config_server_name(config, name.encode()))
        return config

    def close(self) -> None:
        """Free them."""
        for config in (self.server, *self._clients.values()):
            lib.nng_tls_config_free(config)
        self._clients.clear()
