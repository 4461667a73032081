"""Where the two members of an application have their tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mq import registry

CUDA = "torchrpc:cuda"
DEVICES = ("cpu", "cuda")


def default() -> str:
    """A GPU if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def check(device: str, option: str) -> None:
    """Raise unless the device is there.

    Args:
        option: What chose it, for the error.

    Raises:
        ValueError: A GPU is asked for and there is none.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"torch {torch.__version__} sees no CUDA device: {option} cpu")


def place(device: str, rank: int) -> torch.device:
    """Where a member's tensors are: rank 1's on the second GPU, where there are two."""
    if device == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", rank % torch.cuda.device_count())


def options(
    transport: str, device: str, rank: int, names: Sequence[str]
) -> dict[str, Any]:
    """What `mq.connect` is told where tensors go from GPU to GPU: whose is whose.

    Args:
        names: What the two members call each other.
    """
    if registry.canonical(transport) != CUDA or device == "cpu":
        return {}
    here, there = place(device, rank).index, place(device, 1 - rank).index
    return {"device_map": {names[1 - rank]: {here: there}}, "map_name": names[rank]}


def wait(device: torch.device) -> None:
    """Return when the device has done everything that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
