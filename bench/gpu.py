"""Payloads on a GPU, for the transports and baselines that are compared there.

All participants use the first GPU that they see, so one GPU is enough for a cell.
"""

from __future__ import annotations

import torch

from bench.payloads import Payload
from bench.peer import Unusable


class Gpu:
    """The device of one participant.

    Args:
        device: As torch names it.

    Raises:
        Unusable: It is not there.
    """

    def __init__(self, device: str = "cuda:0") -> None:
        self.device = torch.device(device)
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise Unusable(f"torch {torch.__version__} sees no CUDA device")
        self._placed: tuple[Payload, Payload] = (None, None)

    def place(self, payload: Payload) -> Payload:
        """A payload on the device; the same one again is not copied again."""
        if payload is None:
            return None
        if self._placed[0] is not payload:
            self._placed = (payload, move(payload, self.device))
            self.wait()
        return self._placed[1]

    def wait(self) -> None:
        """Return when the device has done everything that it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def move(payload: Payload, device: torch.device | str) -> Payload:
    """A payload with its tensors on a device."""
    if isinstance(payload, torch.Tensor):
        return payload.to(device)
    if payload is None:
        return None
    return {
        key: value.to(device) if isinstance(value, torch.Tensor) else value
        for key, value in payload.items()
    }
