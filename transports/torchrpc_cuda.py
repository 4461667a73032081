"""torch.distributed.rpc among processes with GPUs: tensors travel by device maps."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final

import torch
from msgspec import structs

from mq.log import Log
from mq.mesh.poller import Poller
from mq.options import whole
from mq.transport import PIECE_BYTES, Capabilities
from transports import _torchrpc_agent as rpc_agent
from transports import _torchrpc_cuda_memory as cuda_memory
from transports import _torchrpc_devices as devices
from transports import _torchrpc_native as native
from transports import _torchrpc_shared as shared
from transports._torchrpc_aliases import Pairs
from transports._torchrpc_conns import RpcConn
from transports._torchrpc_control import Control, Greeting, Misfit
from transports._torchrpc_options import GPU_CHANNELS
from transports._torchrpc_outboxes import HEADER_BYTES, place_bytes
from transports._torchrpc_sharing import Sharing
from transports.torchrpc import TorchRpcLink

logger = Log(__name__)

CHANNELS: Final = ("cma", "basic")
"""By default, as far as torch has them. With one for GPUs each call, whatever it
carries, takes streams of all GPUs, and TensorPipe ends the process where one has no
memory for what comes; for `cuda_ipc` see `_torchrpc_lanes`."""
FALLBACK: Final = "cuda_basic"
"""The channel that works between any two GPUs. Where an end lacks it TensorPipe gets
nothing on a GPU: without a channel for it, it aborts both processes."""
LEAST_SHARED: Final = 1 << 20
"""Less is not worth a copy."""
ENGINE: Final = "TensorPipe"
HOST: Final = "host memory"
NAMELESS: Final = "peer"
"""What `describe` calls a peer that has said no name, so that its map can be read."""


class TorchRpcCudaLink(TorchRpcLink):
    """`TorchRpcLink` among processes with GPUs.

    A tensor on a GPU arrives on the GPU of the peer that the map names. What no map
    names is staged through host memory, as on other links.

    Args:
        device_map: ``{peer: {local GPU: peer's GPU}}``, or text such as
            ``1_0_1,2_0_2``; for other peers each GPU goes to that of the same index.
            What goes to a peer with an empty mapping is staged.
        local_devices: The GPUs of this process that take part, such as ``[0, 1]`` or
            ``"0,1"``; default: all visible.
        map_name: What the device maps of others call this process; default: the name
            of the member, and where a map does not name that, `RANK` of the
            environment.
        gpu_shared_bytes: Memory of each GPU that the other processes of this host map,
            by which tensors go to their GPUs (`_torchrpc_lanes`); taken at the first
            connect, until the process ends. 0, and where a peer does not see the GPU:
            by the host memory of both, or TensorPipe's channels, if it is given some.
        max_gpu_peers: Peers at a time, beside those that `device_map` names, to which
            TensorPipe carries tensors on GPUs, if `channels` has some for that. Each
            costs every call about 0.1 us.
        options: Those of `TorchRpcLink`, on top.
    """

    # The CUDA driver keeps threads and descriptors until the process ends.
    capabilities: ClassVar[Capabilities] = replace(
        TorchRpcLink.capabilities, devices=frozenset({"cpu", "cuda"}), engine_stays=True
    )
    _gpu: ClassVar[bool] = True

    def __init__(
        self,
        *,
        device_map: str | Mapping[object, object] | None = None,
        local_devices: str | int | Sequence[object] | None = None,
        map_name: str | None = None,
        gpu_shared_bytes: int = 128 << 20,
        max_gpu_peers: int = 64,
        **options: Any,
    ) -> None:
        if map_name is not None and not isinstance(map_name, str):
            raise TypeError(f"map_name is a str, not {map_name!r}")
        peers = whole("max_gpu_peers", max_gpu_peers, 0, 4096)
        options.setdefault("channels", rpc_agent.channels_here(CHANNELS))
        super().__init__(**options)
        self._max_gpu_peers = peers
        self._shared = whole("gpu_shared_bytes", gpu_shared_bytes, 0, 1 << 40)
        if 0 < self._shared < LEAST_SHARED:
            raise ValueError(
                f"gpu_shared_bytes is 0 or at least {LEAST_SHARED}, not {self._shared}"
            )
        if self._shared:
            most = place_bytes(self._shared) - HEADER_BYTES
            self.piece_bytes = min(most, PIECE_BYTES)
        self._map_name = map_name
        self._names = ("", "")
        self._wanted = devices.parse(device_map)
        self._local_devices = devices.chosen(local_devices)
        if self._local_devices == ():  # so that CUDA is not touched
            self._options = self._options.without(GPU_CHANNELS)
        self._met: set[str] = set()

    @classmethod
    def unusable(cls) -> str | None:
        reason = super().unusable()
        if reason is None and not torch.cuda.is_available():
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            reason = f"torch {torch.__version__} sees no CUDA device"
            if torch.version.cuda is None:
                reason += ": it was built without CUDA; install a wheel that has it, or"
            else:
                reason += (
                    f" with CUDA_VISIBLE_DEVICES={visible!r};"
                    if visible is not None
                    else ";"
                )
            reason += " use torchrpc:cpu"
        return reason

    def open(
        self, poller: Poller, listen: Sequence[str], directory: str | None
    ) -> list[str]:
        if self._local_devices != ():
            native.init_cuda()
        count = torch.cuda.device_count()
        self._local = devices.local_devices(self._local_devices, count)
        devices.check_local(self._wanted, self._local, count)
        rank, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
        if self._map_name is None:
            self._names = self.member_name, rank
        else:
            self._names = self._map_name, ""
        self._met = {*self._names}
        if size.isdecimal() and rank and rank in self._names:
            devices.check_ranks(self._wanted, int(size))
        if FALLBACK in self._options.channels:
            others = self._max_gpu_peers + 1  # this process is one, for the self-test
            self._options = replace(
                self._options,
                devices=self._local,
                maps=devices.all_declared(self._wanted, self._local, others),
            )
        found = super().open(poller, listen, directory)
        names = {index: f"cuda:{index}" for index in self._local}
        if self.agent.worker:
            return found
        if names:
            try:
                self.sharing = Sharing(names, self._shared, cuda_memory)
            except BaseException:  # Ctrl-C
                self.close()
                raise
        if self._options.devices or self.sharing is not None:
            self.devices = frozenset(names.values())
        return found

    def _greeting(self, conn: RpcConn, link: str = "") -> Greeting:
        return structs.replace(
            super()._greeting(conn, link),
            member=self._names[0],
            rank=self._names[1],
            cuda_devices=torch.cuda.device_count(),
            gpus=self._local,
            outboxes=() if self.sharing is None else self.sharing.offers(conn.whom),
        )

    def _check(self, peer: Greeting, sock: Control) -> None:
        super()._check(peer, sock)
        try:
            self._resolve(peer)
        except ValueError as error:
            raise Misfit(str(error)) from error

    def _resolve(self, peer: Greeting) -> devices.DeviceMap:
        name = devices.entry(self._wanted, peer.member, peer.rank)
        found = devices.resolve(
            self._wanted, name, self._local, peer.cuda_devices, peer.gpus
        )
        self._met.add(name)
        return {name or NAMELESS: found}

    def pairs(self, peer: Greeting) -> Pairs:
        carried = self.carried(peer, mapped=True)
        if not carried or self._way(peer, carried) != ENGINE:
            return ()  # a name would be spent on it for nothing
        name = devices.entry(self._wanted, peer.member, peer.rank)
        return devices.declared(self._wanted, name, self._local)

    def carried(self, peer: Greeting, mapped: bool) -> Mapping[str, str]:
        if not self.devices:
            return {}
        (pairs,) = self._resolve(peer).values()
        found = {f"cuda:{ours}": f"cuda:{theirs}" for ours, theirs in pairs.items()}
        by_engine = mapped and self._way(peer, found) == ENGINE
        return found if by_engine or self.sharing is not None else {}

    def _way(self, peer: Greeting, carried: Mapping[str, str]) -> str:
        """How tensors on these devices get to a peer, in words."""
        if self.sharing is not None and self.sharing.reaches(peer, carried):
            return "memory of a GPU that both have mapped"
        both = FALLBACK in self._options.channels and FALLBACK in peer.channels
        return ENGINE if both else HOST

    def describe(self) -> Mapping[str, str]:
        described = dict(super().describe())
        described["local devices"] = ",".join(f"cuda:{index}" for index in self._local)
        if shared.IPC in self._options.channels and not self.agent.worker:
            if shared.IPC not in self.agent.options.channels:
                described["channels left out"] = f"{shared.IPC}: {shared.NO_IPC}"
        if missing := self._missing():
            described["device map waits for"] = devices.describe(missing)
        return described

    def connected(self) -> None:
        if missing := self._missing():
            logger.warning(
                "the device map %s names members that are not there yet: %s",
                devices.describe(missing),
                ", ".join(map(repr, missing)),
            )

    def _missing(self) -> devices.DeviceMap:
        return {p: m for p, m in self._wanted.items() if m and p not in self._met}

    def describe_peer(
        self, peer: Greeting, carried: Mapping[str, str], mapped: bool
    ) -> dict[str, str]:
        described = super().describe_peer(peer, carried, mapped)
        described["device map"] = devices.describe(self._resolve(peer))
        described["tensors"] = "staged through host memory"
        if carried:
            pairs = (f"{ours} to {theirs}" for ours, theirs in carried.items())
            described["tensors"] = ", ".join(pairs)
            way = self._way(peer, carried)
            described["by"] = HOST if way == ENGINE and not mapped else way
        return described
