"""What travels between the rendezvous service and its clients.

Both sides prove that they know the secret before anything else of them is parsed:

    service -> client   8 bytes magic, 32 bytes nonce
    client -> service   8 bytes magic, 32 bytes nonce, 32 bytes proof
    service -> client   32 bytes proof; zeros if the client's was wrong

A proof is HMAC-SHA256 over the role and both nonces. Frames follow, in turns: 4 bytes
length (big-endian), 32 bytes HMAC over direction, number and JSON, and that JSON. The
key of these is derived from both nonces, so no frame can be injected or repeated.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import struct
from typing import Any, Final

from mq.rendezvous.record import load_json

VERSION: Final = "1"
MAGIC: Final = f"mq-rdv{VERSION}\n".encode()
"""What both sides say first."""
NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32
SERVICE_HELLO_BYTES: Final = len(MAGIC) + NONCE_BYTES
CLIENT_HELLO_BYTES: Final = len(MAGIC) + NONCE_BYTES + PROOF_BYTES
REFUSED: Final = bytes(PROOF_BYTES)
MAX_FRAME_BYTES: Final = 1024 * 1024

_ANY_MAGIC: Final = re.compile(rb"mq-rdv(\w)\n?")
_HEADER: Final = struct.Struct(">I32s")


class Malformed(ConnectionError):
    """The other side sent something that no client or service of ours sends."""


def version_of(said: bytes | bytearray) -> str:
    """Which version of this protocol begins so; "": it is another protocol."""
    found = _ANY_MAGIC.fullmatch(said[: len(MAGIC)])
    return found[1].decode() if found else ""


def proof(
    secret: bytes, role: bytes, service_nonce: bytes, client_nonce: bytes
) -> bytes:
    """What shows that `role` (b"client" or b"service") knows the secret."""
    return _mac(secret, b"mq rendezvous " + role + service_nonce + client_nonce)


def is_proof(given: bytes, expected: bytes) -> bool:
    """Compare two proofs without telling by the time taken where they differ."""
    return hmac.compare_digest(given, expected)


def _mac(key: bytes, content: bytes) -> bytes:
    return hmac.new(key, content, hashlib.sha256).digest()


class Frames:
    """Seals what one side sends and opens what it receives, after the proofs.

    Args:
        secret: The shared secret.
        is_client: Which side this is.
        service_nonce: The service's nonce, of 32 bytes.
        client_nonce: The client's nonce, of 32 bytes.
    """

    def __init__(
        self, secret: bytes, is_client: bool, service_nonce: bytes, client_nonce: bytes
    ) -> None:
        self._key = proof(secret, b"session", service_nonce, client_nonce)
        self._out, self._in = (b"c", b"s") if is_client else (b"s", b"c")
        self._sent = 0
        self._received = 0

    def seal(self, content: dict[str, Any]) -> bytes:
        """One frame.

        Raises:
            ValueError: It is larger than `MAX_FRAME_BYTES`.
        """
        body = json.dumps(content, separators=(",", ":")).encode()
        if len(body) > MAX_FRAME_BYTES:
            raise ValueError(f"a frame of {len(body)} bytes is too large")
        mac = self._frame_mac(self._out, self._sent, body)
        self._sent += 1
        return _HEADER.pack(len(body), mac) + body

    def open(self, received: bytearray) -> dict[str, Any] | None:
        """Take the first frame out of `received`; None if it is not complete yet.

        Raises:
            Malformed: It is too large, forged, or no JSON object.
        """
        if len(received) < _HEADER.size:
            return None
        nbytes, mac = _HEADER.unpack_from(received)
        if nbytes > MAX_FRAME_BYTES:
            raise Malformed(f"it announced a frame of {nbytes} bytes")
        if len(received) < _HEADER.size + nbytes:
            return None
        body = bytes(received[_HEADER.size : _HEADER.size + nbytes])
        del received[: _HEADER.size + nbytes]
        if not is_proof(mac, self._frame_mac(self._in, self._received, body)):
            raise Malformed("it sent a forged frame")
        self._received += 1
        try:
            return load_json(body)
        except ValueError as error:
            raise Malformed(f"it sent no JSON object: {error}") from error

    def _frame_mac(self, direction: bytes, number: int, body: bytes) -> bytes:
        return _mac(self._key, direction + number.to_bytes(8, "big") + body)
