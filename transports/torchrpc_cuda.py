"""torch.distributed.rpc among processes with GPUs: device maps are checked here."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from mq.mesh.poller import Poller
from transports import _torchrpc_devices as devices
from transports._torchrpc_conns import RpcConn
from transports._torchrpc_control import BadNote, Greeting
from transports.torchrpc import TorchRpcLink


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
        options: Those of `TorchRpcLink`, on top.
    """

    def __init__(
        self,
        *,
        device_map: str | Mapping[object, object] | None = None,
        local_devices: Sequence[object] | None = None,
        map_name: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        environment = os.environ.get("MQ_NAME") or os.environ.get("RANK") or ""
        self._map_name = environment if map_name is None else map_name
        self._wanted = devices.parse(device_map)
        self._local_devices = local_devices
        self._met = {self._map_name}

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
        size = os.environ.get("WORLD_SIZE", "")
        if size.isdecimal() and self._map_name == os.environ.get("RANK"):
            devices.check_ranks(self._wanted, int(size))
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
            self._resolve(peer)
        except ValueError as error:
            raise BadNote(str(error)) from error

    def _resolve(self, peer: Greeting) -> devices.DeviceMap:
        found = devices.resolve(
            self._wanted, peer.member, self._local, peer.cuda_devices
        )
        self._met.add(peer.member)
        return {peer.member: found}

    def describe(self) -> Mapping[str, str]:
        described = dict(super().describe())
        described["local devices"] = ",".join(f"cuda:{index}" for index in self._local)
        missing = {p: m for p, m in self._wanted.items() if p not in self._met}
        if missing:
            described["device map waits for"] = devices.describe(missing)
        return described

    def describe_peer(self, peer: Greeting) -> dict[str, str]:
        resolved = devices.describe(self._resolve(peer))
        return {**super().describe_peer(peer), "device map": resolved}
