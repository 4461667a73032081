"""What a link shares of its GPUs' memory, and what it has mapped of its peers'."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from mq.errors import first_line
from mq.log import Log, WarnOnce
from transports._torchrpc_arrivals import Arrivals
from transports._torchrpc_control import Greeting
from transports._torchrpc_lanes import Inbox, Lane
from transports._torchrpc_outboxes import Outbox
from transports._torchrpc_watch import Watch

if TYPE_CHECKING:
    from transports._torchrpc_conns import RpcConn

logger = Log(__name__)

_lock = threading.Lock()
_outboxes: Final[dict[tuple[int, object, int, int], Outbox]] = {}
"""By the process, where they come from, the index of the GPU, and their size."""


class Memory(Protocol):
    """Where memory comes from that others can map; in tests it is not a GPU's."""

    def uuid(self, index: int) -> str:
        """By which every process knows a GPU of this one."""

    def allocate(self, index: int, nbytes: int) -> tuple[torch.Tensor, bytes]:
        """Memory for good, and the handle by which others map it."""

    def map(self, index: int, handle: bytes, nbytes: int) -> Inbox:
        """Memory of another process."""


class _Own:
    """An outbox of this process, which cannot map it: two queues of one process."""

    def __init__(self, outbox: Outbox) -> None:
        self.memory = outbox.memory

    def close(self) -> None:
        """It is there for good."""


class Sharing:
    """Of one link.

    Args:
        devices: Those of this process that take part, by their index.
        nbytes: The size of each outbox; 0: there is none.
        memory: Where it comes from.

    Attributes:
        devices: What of it others may map.
        targets: Where tensors may arrive.
        watch: Tells lanes that a GPU is further.
    """

    def __init__(self, devices: Mapping[int, str], nbytes: int, memory: Memory) -> None:
        self._memory = memory
        self._nbytes = nbytes
        self.devices: dict[str, Outbox] = {}
        self._indices: dict[str, int] = {}
        self._offers: list[tuple[int, str, str, int]] = []
        self.watch = Watch()
        self.targets = frozenset(devices.values())
        # By agent, or by the address that was dialled: why; "" once it is in the log.
        self._refused: dict[str, str] = {}
        self._warn = WarnOnce(logger)
        for index, device in devices.items() if nbytes else ():
            try:
                uuid, outbox = memory.uuid(index), self._outbox(index)
            except RuntimeError as error:
                logger.warning(
                    "%s shares no memory with other processes (%s); tensors from there "
                    "leave by host memory, or by TensorPipe's channels for GPUs",
                    device,
                    first_line(error),
                )
                continue
            self.devices[device] = outbox
            self._indices[uuid] = index
            handle = outbox.handle.hex()
            self._offers.append((index, uuid, handle, len(outbox.memory)))

    def _outbox(self, index: int) -> Outbox:
        key = os.getpid(), self._memory, index, self._nbytes
        with _lock:
            found = _outboxes.get(key)
            if found is None:
                found = Outbox(*self._memory.allocate(index, self._nbytes))
                _outboxes[key] = found
            return found

    def failed(self, device: torch.device, error: RuntimeError) -> str:
        """What to tell a peer that cannot have what is on a device; logged once."""
        problem = f"{device}: {first_line(error)}"
        self._warn(
            device,
            "a tensor could not be copied for another member (of this device it is "
            "said once): %s",
            problem,
        )
        return problem

    def offers(self, whom: str) -> tuple[tuple[int, str, str, int], ...]:
        """What the greeting says of it.

        Args:
            whom: The address that is dialled, or who has dialled: its agent.
        """
        return () if whom in self._refused else tuple(self._offers)

    def reaches(self, peer: Greeting, carried: Mapping[str, str]) -> bool:
        """Whether the peer can map the memory of all devices whose tensors go there."""
        known = {uuid for _, uuid, *_ in peer.outboxes} & set(self._indices)
        devices = {index for index, uuid, *_ in self._offers if uuid in known}
        indices = {torch.device(device).index or 0 for device in carried}
        refused = peer.agent in self._refused
        return bool(carried) and not refused and indices <= devices

    def lane(self, conn: RpcConn, arrivals: Arrivals) -> Lane:
        """That of a new connection."""
        return Lane(arrivals, conn.weigh, conn.fail, conn.notice, self)

    def ends(
        self, peer: Greeting, carried: Mapping[str, str], whom: str
    ) -> tuple[Mapping[str, Outbox], Mapping[int, Inbox]]:
        """What a lane needs of both ends, for as far as tensors can go by one.

        Args:
            carried: Where at the peer those on each device of ours arrive.
            whom: To whom `offers` were made.

        Returns:
            By device the memory here; by the index of the peer's GPU the memory there.

        Raises:
            OSError: What the peer shares cannot be mapped.
        """
        inboxes: dict[int, Inbox] = {}
        if why := self._refused.get(peer.agent):  # it lives, and has come again
            self._refused[peer.agent] = ""
            logger.warning(
                "tensors between GPUs go to and from %s by host memory, or by "
                "TensorPipe's channels: its memory cannot be mapped (%s)",
                peer.url,
                why,
            )
        try:
            for index, uuid, handle, nbytes in peer.outboxes:
                if uuid in self._indices and self.offers(whom):
                    inboxes[index] = self._map(self._indices[uuid], handle, nbytes)
        except (RuntimeError, ValueError) as error:  # a handle may be none at all
            self.let_go([(inbox, []) for inbox in inboxes.values()])
            self._refused.setdefault(peer.agent, first_line(error))
            self._refused.setdefault(whom, "")
            raise OSError(
                f"memory of a GPU that the peer shares cannot be mapped: {error}"
            ) from error
        reached = self.offers(whom) and self.reaches(peer, carried)
        leaving = carried if reached else {}
        return {device: self.devices[device] for device in leaving}, inboxes

    def _map(self, index: int, handle: str, nbytes: int) -> Inbox:
        with _lock:
            for (process, *_), outbox in _outboxes.items():
                if process == os.getpid() and outbox.handle.hex() == handle:
                    return _Own(outbox)
        return self._memory.map(index, bytes.fromhex(handle), nbytes)

    def let_go(self, mapped: list[tuple[Inbox, list[Any]]]) -> None:
        """Close what was mapped, each after its events; see `Watch`."""
        self.watch.let_go([one for one in mapped if not isinstance(one[0], _Own)])

    def close(self) -> None:
        """The link is closed; what is under way keeps what it needs."""
        for outbox in self.devices.values():
            outbox.end(self)
        self.watch.close()
