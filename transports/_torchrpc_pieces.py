"""Tensors that stay on their device, as they go into a call and come out of one.

In a call's list of bodies a piece is a tuple of one tensor, which tells it from host
memory that travels as a tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import torch

from mq.devices import Piece
from transports._torchrpc_bodies import Body, size_of

HOST_SHARE: Final = 4
"""A piece counts as this fraction of its bytes among those ahead of the wire: what
moves it is several times as fast as what moves host memory."""


def weight(body: Body) -> int:
    """What a body counts among the bytes that are ahead of the wire."""
    if body is None:
        return 0
    return len(body) // HOST_SHARE if isinstance(body, Piece) else len(body)


def weight_of(
    sequence: object, heads: object, bodies: object, chunk_bytes: int
) -> int | None:
    """What a batch that has come counts among the bytes that are unread.

    None: it is none.
    """
    nbytes = size_of(heads, bodies, chunk_bytes)
    if nbytes is None or type(sequence) is not int:
        return None
    assert isinstance(bodies, list)
    return nbytes + sum(weight(body) for body in bodies if isinstance(body, Piece))


def wrapped(bodies: Sequence[Body]) -> tuple[list[Body], list[Piece]]:
    """The bodies as they go into a call, and the pieces among them."""
    pieces = [body for body in bodies if isinstance(body, Piece)]
    if not pieces:
        return list(bodies), pieces
    plain = [(b.tensor,) if isinstance(b, Piece) else b for b in bodies]
    return plain, pieces


def unwrap(bodies: object, devices: Collection[str], most: int) -> bool:
    """Put pieces in the place of what came for them; whether all were such.

    Runs where the call came in, whose current streams have filled the tensors.

    Args:
        devices: Where they may have arrived.
        most: Bytes of a piece at most.
    """
    if type(bodies) is not list:
        return False
    for index, body in enumerate(bodies):
        if type(body) is not tuple:
            continue
        if len(body) != 1 or not isinstance(body[0], torch.Tensor):
            return False
        (tensor,) = body
        if (
            tensor.dtype != torch.uint8
            or tensor.dim() != 1
            or not tensor.is_contiguous()
            or tensor.requires_grad
            or str(tensor.device) not in devices
            or not 0 < len(tensor) <= most
        ):
            return False
        bodies[index] = Piece.arrived(tensor)
    return True
