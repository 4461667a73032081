"""Tensors that stay on their device, as they go into a call and come out of one.

In a call's list of bodies a piece is a tuple of one tensor, which tells it from host
memory that travels as a tensor; or, where there is a lane (`_torchrpc_lanes`), one of
five numbers and names, which tell where it is, or of where to and a small one's bytes,
or of where to and why it does not come.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import torch

from mq.devices import Piece
from mq.transport import PIECE_BYTES
from transports._torchrpc_bodies import Body, is_plain, size_of
from transports._torchrpc_outboxes import INLINE_BYTES, Inline, Parcel

HOST_SHARE: Final = 4
"""A piece counts as this fraction of its bytes among those ahead of the wire: what
moves it from GPU to GPU is several times as fast as what moves host memory. By host
memory it counts the same, for it is several times as large as other bodies."""


def weight(body: Body) -> int:
    """What a body counts among the bytes that are ahead of the wire."""
    if body is None:
        return 0
    if isinstance(body, Piece) and len(body) > INLINE_BYTES:
        return len(body) // HOST_SHARE
    return len(body)


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


def wrapped(
    bodies: Sequence[Body],
) -> tuple[list[Body], list[Piece], list[Parcel]]:
    """The bodies as they go into a call, and the pieces and parcels among them."""
    pieces = [body for body in bodies if isinstance(body, Piece)]
    parcels = [body for body in bodies if isinstance(body, Parcel)]
    return [_wrapped(body) for body in bodies], pieces, parcels


def _wrapped(body: Body) -> Body:
    if isinstance(body, Piece):
        return (body.tensor,)
    return body.body() if isinstance(body, Parcel | Inline) else body


def is_inline(body: Body) -> bool:
    """Whether a piece came for it as host memory, or a text that none does."""
    if type(body) is not tuple or len(body) != 2 or type(body[0]) is not str:
        return False
    content = body[1]
    if type(content) is str:
        return True
    if isinstance(content, torch.Tensor):
        return _is_flat(content, PIECE_BYTES) and not content.is_cuda
    return type(content) is bytes and 0 < len(content) <= INLINE_BYTES


def is_small(body: Body) -> bool:
    """Whether an answer may have brought it."""
    return is_plain(body) or (is_inline(body) and not isinstance(body[1], torch.Tensor))


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
        if is_inline(body):
            if body[0] not in devices:
                return False
            bodies[index] = _of_host(body[1], torch.device(body[0]))
            continue
        if len(body) != 1 or not isinstance(body[0], torch.Tensor):
            return False
        (tensor,) = body
        if not _is_flat(tensor, most) or str(tensor.device) not in devices:
            return False
        bodies[index] = Piece.arrived(tensor)
    return True


def _of_host(content: bytes | torch.Tensor | str, device: torch.device) -> Piece:
    if isinstance(content, str):
        error = RuntimeError(f"its sender could not copy it: {content}")
        return Piece.missing(1, device, error)
    return Piece.of_host(content, device)


def _is_flat(tensor: torch.Tensor, most: int) -> bool:
    return (
        tensor.dtype == torch.uint8
        and tensor.dim() == 1
        and tensor.is_contiguous()
        and not tensor.requires_grad
        and 0 < len(tensor) <= most
    )
