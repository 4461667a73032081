"""How two members greet each other on a new connection, before any session.

The dialler sends HELLO, the listener answers CHALLENGE with its proof of the secret,
the dialler sends GREETING with its own proof, the listener WELCOME or REFUSED; where
the listener's proof is wrong the dialler sends REFUSED in place of GREETING. Nothing
but fixed-size fields is looked at before the peer has proven that it knows the secret:
each proof is an HMAC-SHA256 (RFC 2104) under the secret over both fresh nonces, the
frame's kind and the frame's content, so neither side's proof can be played back.
"""

from __future__ import annotations

import hmac
import os
import re
import struct
from itertools import chain
from typing import Final

import msgspec
from msgspec import structs

from mq.log import printable
from mq.mesh import wire
from mq.mesh.wire import Malformed
from mq.process import ProcessId

NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32
MAX_GREETING_BYTES: Final = 64 * 1024
MAX_NAME_CHARACTERS: Final = 255
_PREFIX = struct.Struct("<B6sH")  # kind, magic, protocol version
_INCARNATION: Final = re.compile("[0-9a-f]{32}")


class Greeting(msgspec.Struct, frozen=True, kw_only=True):
    """What a member tells of itself when a connection begins.

    `session` and `received` offer (GREETING) or grant (WELCOME) the resumption of a
    session whose connection broke; an empty `session` asks for a new one. `probe`
    only asks who is there: no session follows. A member that is `leaving` only wants
    to resume a session, to deliver what it still has. `to` is the incarnation that is
    looked for, since an address may have become another member's; "": whoever it is.
    """

    group: str
    name: str
    incarnation: str
    generation: int
    backend: str
    process: ProcessId
    labels: list[str]
    since: float
    addresses: list[str]
    peer_timeout: float | None
    max_message_bytes: int
    accepts: list[str]
    versions: dict[str, str]
    session: str = ""
    received: int = 0
    probe: bool = False
    leaving: bool = False
    to: str = ""


class Refusal(msgspec.Struct, frozen=True, array_like=True):
    """Why a connection is refused; `code` is one of the constants below."""

    code: str
    text: str


VERSION = "version"
SECRET = "secret"
GROUP = "group"
BACKEND = "backend"
NAME_TAKEN = "name taken"
NAME_WAITS = "name waits"
DUPLICATE = "duplicate"
OTHER = "other"
SELF = "self"
REPLACED = "replaced"
LEAVING = "leaving"
FULL = "full"
RESET = "reset"
LINK = "link"
"""Never sent: the links of both ends do not fit."""
UNCOUNTED: Final = frozenset({DUPLICATE, SECRET, SELF, LEAVING, OTHER, NAME_WAITS})
"""Refusals of no stranger, or that are counted apart, or may not be the last word."""

_greeting = msgspec.msgpack.Decoder(Greeting)
_refusal = msgspec.msgpack.Decoder(Refusal)
_encode = msgspec.msgpack.Encoder().encode


def _prefix(kind: int) -> bytes:
    return _PREFIX.pack(kind, wire.MAGIC, wire.PROTOCOL_VERSION)


class VersionMismatch(Malformed):
    """The peer speaks another version of the protocol."""


def _check_prefix(raw: bytes, nbytes: int) -> None:
    if len(raw) < _PREFIX.size or len(raw) > nbytes:
        raise Malformed("handshake frame of a wrong size")
    _, magic, version = _PREFIX.unpack_from(raw)
    if magic != wire.MAGIC:
        raise Malformed("not a member of a group: wrong magic")
    if version != wire.PROTOCOL_VERSION:
        raise VersionMismatch(
            f"it speaks version {version} of the protocol and this member version "
            f"{wire.PROTOCOL_VERSION}; install the same version of tensormq on both"
        )


def _check_texts(greeting: Greeting) -> None:
    """Raises: Malformed, if what logs, errors and `members` show is not fit for it."""
    name, host = greeting.name, greeting.process.host
    if not 1 <= len(name) <= MAX_NAME_CHARACTERS:
        raise Malformed(f"greeting of a member called {name[:50]!r}")
    if not _INCARNATION.fullmatch(greeting.incarnation):
        raise Malformed(f"greeting of an incarnation {greeting.incarnation[:50]!r}")
    versions = (text for pair in greeting.versions.items() for text in pair)
    lists = greeting.labels, greeting.addresses, greeting.accepts
    for text in (name, host, *chain(*lists), *versions):
        if not text.isprintable():
            raise Malformed(f"greeting with {text[:50]!r}, which cannot be printed")


class Handshake:
    """One side of the exchange on one connection; the mesh moves the bytes.

    Args:
        secret: The group's secret; empty where the group has none.
        dialler: Whether this side dialled.
    """

    def __init__(self, secret: bytes, *, dialler: bool) -> None:
        self._secret = secret
        self.dialler = dialler
        self._mine = os.urandom(NONCE_BYTES)
        self._theirs = b""
        self.proven = False
        """Whether the peer has proven that it knows the secret."""

    def _proof(self, kind: int, content: bytes) -> bytes:
        nonces = (
            self._mine + self._theirs if self.dialler else self._theirs + self._mine
        )
        mac = hmac.new(self._secret, bytes([kind]) + nonces + content, "sha256")
        return mac.digest()

    def hello(self) -> bytes:
        """The dialler's first frame."""
        return _prefix(wire.HELLO) + self._mine

    def challenge(self, hello: bytes) -> bytes:
        """The listener's answer to HELLO."""
        self._check(hello, wire.HELLO, NONCE_BYTES)
        self._theirs = hello[_PREFIX.size :]
        return _prefix(wire.CHALLENGE) + self._mine + self._proof(wire.CHALLENGE, b"")

    def check_challenge(self, raw: bytes) -> bool:
        """Take the listener's nonce; whether its proof holds."""
        self._check(raw, wire.CHALLENGE, NONCE_BYTES + PROOF_BYTES)
        start = _PREFIX.size
        self._theirs = raw[start : start + NONCE_BYTES]
        proof = raw[start + NONCE_BYTES :]
        self.proven = hmac.compare_digest(proof, self._proof(wire.CHALLENGE, b""))
        return self.proven

    @staticmethod
    def distrust() -> bytes:
        """The dialler's answer to a CHALLENGE whose proof does not hold.

        It has no proof itself: whoever listens there could guess the secret by it.
        """
        return _prefix(wire.REFUSED)

    def check_distrust(self, raw: bytes) -> None:
        """Take the dialler's answer that the listener's proof does not hold."""
        self._check(raw, wire.REFUSED, 0)

    @staticmethod
    def _check(raw: bytes, kind: int, nbytes: int) -> None:
        _check_prefix(raw, _PREFIX.size + nbytes)
        if raw[0] != kind or len(raw) != _PREFIX.size + nbytes:
            raise Malformed(f"expected handshake frame {kind}, got {raw[0]}")

    def seal(self, kind: int, content: Greeting | Refusal) -> bytes:
        """A GREETING, WELCOME or REFUSED frame with its proof.

        A REFUSED frame before the nonces are known carries a proof nobody can check;
        its reader treats it as a hint only.
        """
        body = _encode(content)
        return _prefix(kind) + self._proof(kind, body) + body

    def _unseal(self, raw: bytes) -> bytes | None:
        """The content, if its proof holds."""
        _check_prefix(raw, _PREFIX.size + PROOF_BYTES + MAX_GREETING_BYTES)
        start = _PREFIX.size + PROOF_BYTES
        if len(raw) <= start:
            raise Malformed("handshake frame cut off")
        body = raw[start:]
        if not hmac.compare_digest(
            raw[_PREFIX.size : start], self._proof(raw[0], body)
        ):
            return None
        self.proven = True
        return body

    def greeting(self, raw: bytes) -> Greeting | None:
        """The peer's GREETING or WELCOME; None if its proof does not hold."""
        body = self._unseal(raw)
        if body is None:
            return None
        try:
            greeting = _greeting.decode(body)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise Malformed(f"greeting: {error}") from error
        _check_texts(greeting)
        return greeting

    def refusal(self, raw: bytes) -> tuple[Refusal, bool]:
        """The peer's refusal, and whether it is proven to come from the group."""
        body = self._unseal(raw)
        proven = body is not None
        if body is None:
            body = raw[_PREFIX.size + PROOF_BYTES :][:2048]
        try:
            code, text = structs.astuple(_refusal.decode(body))
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise Malformed(f"refusal: {error}") from error
        return Refusal(code, printable(text)), proven
