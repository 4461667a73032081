"""What has arrived on a connection, as it is checked and as the mesh takes it."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from mq.devices import Piece
from mq.transport import PIECE_BYTES, Conn
from transports._torchrpc_arrivals import Arrivals
from transports._torchrpc_bodies import Body
from transports._torchrpc_pieces import unwrap, weight_of

if TYPE_CHECKING:
    from transports.torchrpc import TorchRpcLink


class ReadingConn(Conn):
    """The part of a connection that hands out messages."""

    keeps_body: ClassVar[bool] = True
    closed = broke_rules = False
    _link: TorchRpcLink
    _arrivals: Arrivals
    _body: Body = None

    @abstractmethod
    def fail(self, reason: str) -> None:
        """The connection is broken; from any thread."""

    def weigh(self, sequence: Any, heads: Any, bodies: Any) -> int | None:
        """What a batch counts that has come; None: it is none, and breaks this."""
        known = unwrap(bodies, self._link.devices, PIECE_BYTES)
        nbytes = weight_of(sequence, heads, bodies, self._link.chunk_bytes)
        if nbytes is None or not known:
            self.malformed()
            return None
        return nbytes

    def malformed(self) -> None:
        """Count what no peer sends, and break the connection."""
        self._link.malformed += 1
        self.broke_rules = True
        self.fail("the peer sent what no member does")

    def _sort(self) -> bool:
        """Whether a message can be taken."""
        return self._arrivals.sort() and self._body is None

    def receive(self) -> tuple[bytes, int] | None:
        if self.closed or self._body is not None:
            return None
        message = self._arrivals.next()
        if message is None:
            return None
        head, self._body = message
        return head, 0 if self._body is None else len(self._body)

    def receive_body(self, into: memoryview) -> bool:
        body, self._body = self._body, None
        if body is None:
            return False
        content = body if isinstance(body, bytes) else body.numpy()
        # NumPy copies without the GIL, which the next call needs.
        np.frombuffer(into, np.uint8)[:] = np.frombuffer(content, np.uint8)
        return True

    def take_body(self) -> memoryview | None:
        body = self._body
        if body is None or isinstance(body, bytes | Piece):
            return None
        self._body = None
        return memoryview(body.numpy())

    @property
    def holds_piece(self) -> bool:  # type: ignore[override]
        return isinstance(self._body, Piece)

    def take_piece(self) -> Piece:
        piece, self._body = self._body, None
        assert isinstance(piece, Piece)  # asked for where `holds_piece`
        return piece

    def discard_body(self) -> None:
        self._body = None
