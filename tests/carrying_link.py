"""torchrpc as it is between GPUs, but with tensors that are on the CPU."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from msgspec import structs

from mq.mesh.poller import Poller
from transports._torchrpc_conns import RpcConn
from transports._torchrpc_control import Greeting
from transports._torchrpc_sharing import Sharing
from transports.torchrpc import TorchRpcLink

# On a busy machine torch's threads wait for each other; a GPU's copies need none.
torch.set_num_threads(1)


class HostMapping:
    """Memory of another process, or of this one."""

    def __init__(self, fd: int, nbytes: int) -> None:
        memory = mmap.mmap(fd, nbytes)
        self.memory = torch.frombuffer(memory, dtype=torch.uint8)

    def close(self) -> None:
        """Let go of it."""
        del self.memory


class HostMemory:
    """Stands in for a GPU's: memory of the host that other processes can map."""

    def uuid(self, index: int) -> str:
        """There is one only."""
        return "the host"

    def allocate(self, index: int, nbytes: int) -> tuple[torch.Tensor, bytes]:
        """Memory for good, and the handle by which others map it."""
        fd = os.memfd_create("mq-outbox")
        os.truncate(fd, nbytes)
        return HostMapping(fd, nbytes).memory, f"/proc/{os.getpid()}/fd/{fd}".encode()

    def map(self, index: int, handle: bytes, nbytes: int) -> HostMapping:
        """Memory of another process."""
        try:
            fd = os.open(handle.decode(), os.O_RDWR)
        except OSError as error:
            raise RuntimeError(str(error)) from error
        try:
            return HostMapping(fd, nbytes)
        finally:
            os.close(fd)


class HostEvent:
    """Stands in for an event of a GPU: reached, or failed, once a test says so."""

    def __init__(self, reached: bool = False) -> None:
        self.reached = reached
        self.problem = ""

    def query(self) -> bool:
        """Whether it is reached."""
        if self.problem:
            raise RuntimeError(self.problem)
        return self.reached


MEMORY = HostMemory()
SHARED_BYTES = 16 << 20
# Made now, so that it is no leak of the first test.
Sharing({0: "cpu"}, SHARED_BYTES, MEMORY).close()


class CarryingLink(TorchRpcLink):
    """Moves tensors of the CPU as `TorchRpcCudaLink` moves those of a GPU.

    Args:
        takes: Whether tensors travel to this process so.
        way: "shared", by memory that both map; "host", by host memory that is not,
            or "engine", by TensorPipe.
        options: Those of `TorchRpcLink`.
    """

    # As CUDA does, the memory to share stays until the process ends.
    capabilities = replace(TorchRpcLink.capabilities, engine_stays=True)
    piece_bytes = 1024 * 1024

    def __init__(
        self, *, takes: bool = True, way: str = "shared", **options: Any
    ) -> None:
        super().__init__(**options)
        self._takes = takes
        self._way = way

    def open(
        self, poller: Poller, listen: Sequence[str], directory: str | None
    ) -> list[str]:
        found = super().open(poller, listen, directory)
        self.devices = frozenset({"cpu"})
        if self._way != "engine":
            nbytes = SHARED_BYTES if self._way == "shared" else 0
            self.sharing = Sharing({0: "cpu"}, nbytes, MEMORY)
        return found

    def _greeting(self, conn: RpcConn, link: str = "") -> Greeting:
        return structs.replace(
            super()._greeting(conn, link),
            cuda_devices=int(self._takes),
            outboxes=() if self.sharing is None else self.sharing.offers(conn.whom),
        )

    def carried(self, peer: Greeting, mapped: bool) -> Mapping[str, str]:
        return {"cpu": "cpu"} if peer.cuda_devices else {}
