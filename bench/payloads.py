"""What travels in the cells, and the proof that it arrived unaltered."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec
import torch

Payload: TypeAlias = "torch.Tensor | dict[str, Any] | None"

_BLOCK = 1 << 16  # elements; below 2**24, so that float32 counts them exactly


def tensor(nbytes: int) -> torch.Tensor:
    """A float32 tensor of `nbytes` (rounded down to 4), 1-D, no two blocks alike."""
    filled = torch.empty(nbytes // 4, dtype=torch.float32)
    for number, block in enumerate(torch.split(filled, _BLOCK)):
        block.copy_(torch.arange(len(block)))
        block[0] = number
    return filled


def message(nbytes: int) -> dict[str, Any]:
    """A dictionary of `nbytes` as msgpack, or the smallest one of its keys."""
    built = {"step": 0, "reward": 0.5, "done": False, "note": ""}
    size = len(msgspec.msgpack.encode(built))
    note = max(0, nbytes - size)
    built["note"] = "x" * note
    excess = len(msgspec.msgpack.encode(built)) - nbytes
    if note and excess > 0:  # a longer string has a longer header
        built["note"] = "x" * (note - excess)
    return built


def batch(nbytes: int) -> dict[str, Any]:
    """A dictionary of four tensors, `nbytes` together: what an actor sends."""
    part = nbytes // 4
    return {
        "observation": tensor(part).reshape(1, -1),
        "next_observation": tensor(part).reshape(1, -1),
        "action": torch.arange(part // 8, dtype=torch.int64),
        "reward": tensor(part),
    }


def check(received: Payload, kind: str, nbytes: int) -> None:
    """Compare a received payload with the one that was sent.

    Args:
        kind: "tensor", "message" or "batch".

    Raises:
        ValueError: It is another one.
    """
    if kind == "tensor":
        _check_tensor(received, nbytes)
    elif not same(received, make(kind, nbytes)):
        raise ValueError(f"a {kind} of {nbytes} bytes arrived altered")


def make(kind: str, nbytes: int) -> Payload:
    """A payload of that kind: "tensor", "message" or "batch"."""
    if kind == "tensor":
        return tensor(nbytes)
    return message(nbytes) if kind == "message" else batch(nbytes)


def same(one: Payload, other: Payload) -> bool:
    """Whether two payloads are equal, tensors by value, dtype and shape."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())
    if isinstance(one, dict) and isinstance(other, dict):
        keys = list(one) == list(other)
        return keys and all(same(one[key], other[key]) for key in one)
    return type(one) is type(other) and one == other


def _check_tensor(received: Payload, nbytes: int) -> None:
    # Block by block: a whole second tensor would be counted as the receiver's memory.
    if not isinstance(received, torch.Tensor):
        raise ValueError(f"a {type(received).__name__} arrived in place of a tensor")
    if received.dtype != torch.float32 or received.shape != (nbytes // 4,):
        raise ValueError(
            f"a tensor of {received.dtype}, {tuple(received.shape)} arrived in place "
            f"of torch.float32, {(nbytes // 4,)}"
        )
    expected = torch.arange(_BLOCK, dtype=torch.float32)
    for number, block in enumerate(torch.split(received, _BLOCK)):
        expected[0] = number
        if not torch.equal(block.cpu(), expected[: len(block)]):
            raise ValueError(f"a tensor of {nbytes} bytes arrived altered")
