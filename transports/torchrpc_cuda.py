"""torch.distributed.rpc among processes with GPUs: device maps are checked here."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from mq.mesh.poller import Poller
from transports import _torchrpc_devices as devices
from transports._torchrpc_conns import RpcConn
from transports._torchrpc_control import BadNote, Greeting
from transports.torchrpc import TorchRpcLink

logger = logging.getLogger(__name__)


class TorchRpcCudaLink(TorchRpcLink):
    """`TorchRpcLink` among processes with GPUs.

    Tensors on a GPU are staged through host memory so far, as on every other link:
    the map is checked and reported, but nothing travels by it yet.

    Args:
        device_map: ``{peer: {local GPU: peer's GPU}}``, or text such as
            ``1_0_1,2_0_2``; for other peers each GPU goes to that of the same index.
        local_devices: The GPUs of this process that take part; default: all visible.
        map_name: What the device maps of others call this process; default: `MQ_NAME`,
            else `RANK`, of the environment.
        options: Those of `TorchRpcLink`.
    """

    def __init__(
        self,
        *,
        device_map: str | Mapping[object, object] | None = None,
        local_devices: Sequence[object] | None = None,
        map_name: str | None = None,
        transports: Sequence[str] = ("uv",),
        channels: Sequence[str] = ("cma", "basic"),
        infiniband: bool = False,
        threads: int = 1,
        greeting_timeout: float = 5.0,
        trusted_network: bool = False,
    ) -> None:
        super().__init__(
            transports=transports,
            channels=channels,
            infiniband=infiniband,
            threads=threads,
            greeting_timeout=greeting_timeout,
            trusted_network=trusted_network,
        )
        environment = os.environ.get("MQ_NAME") or os.environ.get("RANK") or ""
        self._map_name = environment if map_name is None else map_name
        self._wanted = devices.parse(device_map)
        self._local_devices = local_devices
        self.resolved: devices.DeviceMap = {}

    @classmethod
    def unusable(cls) -> str | None:
        reason = super().unusable()
        if reason is None and not torch.cuda.is_available():
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            reason = f"torch {torch.__version__} sees no CUDA device"
            if torch.version.cuda is None:
                reason += ": it was built without CUDA; install a wheel that has it"
            elif visible is not None:
                reason += f" with CUDA_VISIBLE_DEVICES={visible!r}"
            reason += ", or use torchrpc:cpu"
        return reason

    def open(
        self, poller: Poller, listen: Sequence[str], directory: str | None
    ) -> list[str]:
        count = torch.cuda.device_count()
        self._local = devices.local_devices(self._local_devices, count)
        devices.check_local(self._wanted, self._local, count)
        return super().open(poller, listen, directory)

    def _greeting(self, conn: RpcConn, link: str = "") -> Greeting:
        return replace(
            super()._greeting(conn, link),
            member=self._map_name,
            cuda_devices=torch.cuda.device_count(),
        )

    def _check(self, peer: Greeting) -> None:
        super()._check(peer)
        try:
            found = devices.resolve(
                self._wanted, peer.member, self._local, peer.cuda_devices
            )
        except ValueError as error:
            raise BadNote(str(error)) from error
        if peer.member and self.resolved.get(peer.member) != found:
            self.resolved[peer.member] = found
            logger.info("device map: %s", devices.describe({peer.member: found}))
