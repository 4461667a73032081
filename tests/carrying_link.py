"""torchrpc as it is between GPUs, but with tensors that are on the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from mq.mesh.poller import Poller
from transports._torchrpc_conns import RpcConn
from transports._torchrpc_control import Greeting
from transports.torchrpc import TorchRpcLink

# On a busy machine torch's threads wait for each other; a GPU's copies need none.
torch.set_num_threads(1)


class CarryingLink(TorchRpcLink):
    """Moves tensors of the CPU as `TorchRpcCudaLink` moves those of a GPU.

    Args:
        takes: Whether tensors travel to this process so.
        options: Those of `TorchRpcLink`.
    """

    piece_bytes = 1024 * 1024

    def __init__(self, *, takes: bool = True, **options: Any) -> None:
        super().__init__(**options)
        self._takes = takes

    def open(
        self, poller: Poller, listen: Sequence[str], directory: str | None
    ) -> list[str]:
        found = super().open(poller, listen, directory)
        self.devices = frozenset({"cpu"})
        return found

    def _greeting(self, conn: RpcConn, link: str = "") -> Greeting:
        return replace(super()._greeting(conn, link), cuda_devices=int(self._takes))

    def carried(self, peer: Greeting, mapped: bool) -> Mapping[str, str]:
        return {"cpu": "cpu"} if peer.cuda_devices else {}
