"""Bare iceoryx2, as its examples use it: a slice of bytes is loaned, filled and sent.

The payload's memory is copied once, into shared memory; the receiver's tensor lies over
it. A publisher waits for room (`RetryUntilDelivered`, the default) in buffers of 1000
messages, or of two of a megabyte and more. Who waits sleeps in a listener, which every
message notifies. Left out is mixed traffic: a publisher that waits does nothing else.
With ``:loan`` the slice is the application's own memory, which is filled outside the
timing: of a tensor only the header is written for each message.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import iceoryx2 as iox2
import numpy as np

from bench.payloads import Payload
from bench.peer import Peer, Unusable
from bench.raw import Parts, decode, encode
from bench.wire import Wire

_LARGE, _MANY, _FEW = 1_000_000, 1000, 2
_ALIGN = 64
_COUNT = struct.Struct("<q")


class IceoryxWire(Wire):
    """A service for each direction, and an event that tells of its messages."""

    def __init__(self, peer: Peer, quiet: float) -> None:
        self._quiet = quiet
        self._lends = peer.cell.transport.endswith(":loan")
        self._filled = False
        large = peer.cell.nbytes >= _LARGE
        self._depth = _FEW if large else _MANY
        _check_room((self._depth + 2) * peer.cell.nbytes)
        iox2.set_log_level(iox2.LogLevel.Fatal)
        self._node = _node(peer.directory)
        most = 2 * peer.cell.nbytes // (1 if large else 2) + 4096
        ways = ("out", "back") if peer.rank == 0 else ("back", "out")
        sending, receiving = (f"{peer.group}/{way}" for way in ways)
        outward = self._messages(sending, peer.size)
        self._publisher = outward.publisher_builder().initial_max_slice_len(most)
        self._publisher = self._publisher.create()
        inward = self._messages(receiving, peer.size)
        self._subscriber = inward.subscriber_builder().create()
        self._notifier = self._event(sending, peer.size).notifier_builder().create()
        self._listener = self._event(receiving, peer.size).listener_builder().create()
        peer.meet()
        self._publisher.update_connections()
        peer.meet()

    def _messages(self, name: str, size: int) -> Any:
        service = self._node.service_builder(iox2.ServiceName.new(name))
        return (
            service.publish_subscribe(iox2.Slice[ctypes.c_uint8])
            .payload_alignment(iox2.Alignment.new(_ALIGN))
            .enable_safe_overflow(False)
            .subscriber_max_buffer_size(self._depth)
            .max_publishers(size)
            .max_subscribers(size)
            .open_or_create()
        )

    def _event(self, name: str, size: int) -> Any:
        service = self._node.service_builder(iox2.ServiceName.new(name)).event()
        return service.max_notifiers(size).max_listeners(size).open_or_create()

    def send(self, payload: Payload) -> None:
        parts = encode(payload)
        sample = self._publisher.loan_slice_uninit(packed_size(parts))
        # Filled is the one message that the receiver checks, as by our loan.
        count = 1 if self._filled else len(parts)
        pack(parts, sample.payload().as_memory_view(), count)
        self._filled = self._lends and (self._filled or len(parts) > 1)
        sample.assume_init().send()
        self._notifier.notify()

    def recv(self) -> Payload:
        end = time.monotonic() + self._quiet
        while (sample := self._subscriber.receive()) is None:
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError("raw iceoryx2: no message came in time")
            wait = iox2.Duration.from_micros(int(left * 1e6))
            self._listener.timed_wait(wait)
        payload = sample.payload()
        owner: Any = (ctypes.c_uint8 * payload.len()).from_address(payload.as_ptr())
        owner.sample = sample  # else the next message overwrites what was received
        return decode(unpack(memoryview(owner).cast("B")))

    def bulk(self, payload: Payload) -> AbstractContextManager[Callable[[], int]]:
        raise TypeError("a publisher that waits for room does nothing else")

    def close(self) -> None:
        for port in (
            self._publisher,
            self._subscriber,
            self._notifier,
            self._listener,
        ):
            port.delete()


def _node(directory: str) -> Any:
    """A node whose files are the cell's own: what is left of them goes with it."""
    config = iox2.config.default()
    config.global_cfg.root_path = iox2.Path.new(directory)
    config.global_cfg.prefix = iox2.FileName.new(f"{os.path.basename(directory)}_")
    builder = iox2.NodeBuilder.new().config(config)
    builder = builder.signal_handling_mode(iox2.SignalHandlingMode.Disabled)
    return builder.create(iox2.ServiceType.Ipc)


def _check_room(nbytes: int) -> None:
    """Its engine dies of SIGBUS where shared memory is full."""
    free = shutil.disk_usage("/dev/shm").free
    if free < nbytes:
        raise Unusable(
            f"/dev/shm has {free / 1e9:.1f} GB free, iceoryx2 needs {nbytes / 1e9:.1f}"
        )


def packed_size(parts: Parts) -> int:
    """Bytes that parts take together."""
    return _aligned(_COUNT.size * (1 + len(parts))) + sum(
        _aligned(len(part)) for part in parts
    )


def pack(parts: Parts, area: memoryview, count: int) -> None:
    """Lay out parts one after the other, each aligned, their sizes before them.

    Args:
        count: How many of them are copied; the others have their places.
    """
    sizes = (len(parts), *(len(part) for part in parts))
    struct.pack_into(f"<{len(sizes)}q", area, 0, *sizes)
    start = _aligned(_COUNT.size * len(sizes))
    for part in parts[:count]:
        if len(part):  # by numpy: a slice of a ctypes view is assigned byte by byte
            target = np.frombuffer(area, np.uint8, len(part), start)
            target[:] = np.frombuffer(part, np.uint8)
        start += _aligned(len(part))


def unpack(area: memoryview) -> Parts:
    """The parts, over the same memory."""
    (count,) = _COUNT.unpack_from(area, 0)
    sizes = struct.unpack_from(f"<{count}q", area, _COUNT.size)
    start, parts = _aligned(_COUNT.size * (1 + count)), []
    for size in sizes:
        parts.append(area[start : start + size])
        start += _aligned(size)
    return parts


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
