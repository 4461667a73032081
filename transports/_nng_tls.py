"""NNG's TLS streams, which its Pair0 can be given only one peer each to a port.

NNG's ``socket://`` takes no TLS, and its TLS listener hands every connection to the one
socket that it belongs to. So these connections are NNG's TLS streams themselves, with
the framing that its sockets have over TCP: the size of a message, 8 bytes, big-endian.
"""

from __future__ import annotations

import mmap
import os
import select
from collections.abc import Mapping
from typing import Any

from pynng import ffi, lib

from mq import forks
from mq.stream.sockets import connected, inode, unpace
from transports._nng_aio import Operation
from transports._nng_pair import HANG_UP, PREFIX_BYTES, Channel, explain, unread
from transports._nng_streams import address_of

_SIZE_BYTES = 8
_GONE = (
    lib.NNG_ECLOSED,
    lib.NNG_ECONNSHUT,
    lib.NNG_ECONNRESET,
    lib.NNG_ECONNREFUSED,
)
_SIGNED = (
    "; the certificates must be in date, and each be signed by one that the other "
    "end's authorities= holds; that of who listens must have the name of its host, or "
    "what server_name= of who dials says"
)
_REMEDIES = {lib.NNG_ECRYPTO: _SIGNED, lib.NNG_EPEERAUTH: _SIGNED}


def _memory(nbytes: int) -> mmap.mmap:
    """Memory of which only what is used is taken: a stranger uses next to none.

    Raises:
        OSError: There is none.
    """
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class _Outgoing:
    """Messages on their way out, in memory that stays where it is."""

    def __init__(self, capacity: int) -> None:
        self._memory = _memory(capacity)
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
        self._operations: list[Operation] = []
        self._fd = self._copy = -1
        self._inode = 0
        self._start = self._end = 0  # of what was received and not taken
        self._taken = 0
        self._counted = False  # what the operation that has ended brought
        self._view: memoryview | None = None
        self._refused = False
        self._full = False
        self._heard = False
        self._closed = False
        forks.register(self)
        try:
            self._open()
        except BaseException:  # out of descriptors, most likely
            self.close()
            raise

    def _open(self) -> None:
        self._receiving, self._sending = self._operation(), self._operation()
        self.recv_fd = self._receiving.fd
        # NNG 1.11 may leave its operations waiting for ever when the connection breaks
        # while it both sends and receives, but a copy of its descriptor tells.
        self._find()
        unpace(self._copy)
        self.watches = ((self._sending.fd, select.EPOLLIN), (self._copy, HANG_UP))
        self._in = _memory(_SIZE_BYTES + self._largest)
        self._in_memory = ffi.from_buffer(self._in)
        # One leaves while the other fills, with two of the largest or many small.
        self._out = _Outgoing(2 * self._largest)
        self._filling = _Outgoing(2 * self._largest)
        self._broken = self._fd < 0  # it has gone already
        self._receive_more()

    def _operation(self) -> Operation:
        self._operations.append(Operation())
        return self._operations[-1]

    def _find(self) -> None:
        """Look for NNG's descriptor of the stream, and copy it.

        Raises:
            OSError: There is no descriptor to do so with.
        """
        ends = [
            address_of(lib.nng_stream_get_addr, self._stream, option)
            for option in (b"local-address", b"remote-address")
        ]
        os.close(os.dup(self.recv_fd))  # else nothing would be found
        found = (sock for sock in connected() if [sock.own, sock.peer] == ends)
        self._fd, self._inode, *_ = next(found, (-1, 0))
        if self._fd >= 0:
            self._copy = os.dup(self._fd)

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
                self._counted = self._heard = True
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
        # While the handshake lasts, NNG is about to say how it ended, and why.
        if self._heard and self._is_cut() and not self._receiving.has_ended():
            self._broken = self._advance() < 0
        return self._broken

    def _is_cut(self) -> bool:
        """Whether the peer has gone, and NNG reads nothing more of what it left."""
        if self._copy < 0:
            return True
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
        if code not in _GONE:
            self.problem = self.problem or explain(code) + _REMEDIES.get(code, "")
        self._broken = True

    def ended(self) -> bool:
        return self._advance() < 0 and self._broken

    def refused(self) -> bool:
        return self._refused

    def refusal(self) -> str:
        return self.problem

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.release()
            lib.nng_stream_close(self._stream)
            for operation in self._operations:
                operation.close()
            lib.nng_stream_free(self._stream)
            copy, self._copy = self._copy, -1
            if copy >= 0:
                os.close(copy)

    def describe(self) -> Mapping[str, str]:
        found = ffi.new("char **")
        failed = lib.nng_stream_get_string(self._stream, b"tls-peer-cn", found)
        if failed or found[0] == ffi.NULL:  # the latter where it has no such name
            return {}
        name: bytes = ffi.string(found[0])
        lib.nng_strfree(found[0])
        return {"certificate": name.decode(errors="replace")}

    def freed(self) -> bool:
        return self._fd < 0 or inode(self._fd) != self._inode

    def abandon(self) -> None:
        copy, self._copy = self._copy, -1
        if copy >= 0:
            os.close(copy)
        if not self.freed():
            os.close(self._fd)
