"""How an agent of TensorPipe is set up."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from mq import addresses
from transports._torchrpc_aliases import Pairs

TRANSPORTS: Final = ("uv", "ibv", "shm")
CHANNELS: Final = ("cma", "basic", "mpt_uv")
GPU_CHANNELS: Final = ("cuda_ipc", "cuda_gdr", "cuda_xth", "cuda_basic")


@dataclass(frozen=True)
class Options:
    """How the agent of a process is set up.

    Attributes:
        host: The address of this host whose interface TensorPipe listens on.
        transports: TensorPipe's transports by name, best first.
        channels: Its channels by name, best first.
        threads: Threads that run handlers and callbacks; with one, order is kept.
        gpu: Whether channels may be those for GPUs, which touch the CUDA driver.
        devices: The GPUs of this process whose tensors travel, by index.
        maps: Device maps that peers may need, and how many peers of each there may be.
    """

    host: str = "127.0.0.1"
    transports: tuple[str, ...] = ("uv",)
    channels: tuple[str, ...] = ("cma", "basic")
    threads: int = 1
    gpu: bool = False
    devices: tuple[int, ...] = ()
    maps: tuple[tuple[Pairs, int], ...] = ()

    def check(self) -> None:
        """Raises: ValueError, if TensorPipe would refuse this or abort the process."""
        for what, known, always, given in (
            ("transports", TRANSPORTS, "uv", self.transports),
            ("channels", CHANNELS + GPU_CHANNELS * self.gpu, "basic", self.channels),
        ):
            unknown = [name for name in given if name not in known]
            if unknown or len(set(given)) < len(given):
                raise ValueError(f"{what} are some of {known}, each once, not {given}")
            if always not in given:
                raise ValueError(
                    f"{what}={given} lack {always!r}, which every peer has: without "
                    "anything in common TensorPipe aborts both processes"
                )

    def listening_on(self, hosts: Sequence[str]) -> Options:
        """The same for an agent that whoever reaches these hosts can reach."""
        host = next((h for h in hosts if not addresses.is_loopback(h)), "127.0.0.1")
        return replace(
            self, host=addresses.numeric_host(addresses.reachable_host(host))
        )

    def without(self, channels: Sequence[str]) -> Options:
        """The same without these channels."""
        left = tuple(name for name in self.channels if name not in channels)
        return replace(self, channels=left)

    def make_fork_safe(self) -> None:
        """Tell the driver of InfiniBand, before its first use, that there may be forks.

        Else one corrupts its memory.
        """
        if "ibv" in self.transports:
            os.environ.setdefault("IBV_FORK_SAFE", "1")
            os.environ.setdefault("RDMAV_FORK_SAFE", "1")
