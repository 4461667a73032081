"""Ray, as its documentation has processes exchange messages: `ray.util.queue.Queue`.

The queue is an actor; a payload of a megabyte and more is put into the object store and
only its reference through the queue. Tensors travel as NumPy arrays, which Ray maps in
the receiver without a copy.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import ray
import torch
from ray.util.queue import Empty, Full, Queue

from bench.payloads import Payload
from bench.peer import Peer
from bench.wire import Wire

_LARGE, _MANY, _FEW = 1_000_000, 1000, 4
_STORE = 1 << 30  # bytes beside what the messages take


class RayWire(Wire):
    """A queue for each participant; the hub starts Ray, and ends it."""

    def __init__(self, peer: Peer, quiet: float) -> None:
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        self._quiet = quiet
        self._large = peer.cell.nbytes >= _LARGE
        most = _FEW if self._large else _MANY
        os.environ["RAY_AUTH_MODE"] = "disabled"  # else only its starter may join
        joined = {"log_to_driver": False, "logging_level": logging.ERROR}
        address = ""
        if peer.rank == 0:
            started = ray.init(
                address="local",
                num_cpus=peer.size + 1,
                include_dashboard=False,
                _node_ip_address="127.0.0.1",  # never the network
                object_store_memory=_STORE + (most + 2) * peer.cell.nbytes,
                **joined,
            )
            address = started.address_info["gcs_address"]
        address = peer.meet(address)[0]
        if peer.rank:
            ray.init(address=address, **joined)
        self._own: Any = Queue(maxsize=most, actor_options={"num_cpus": 0})
        made = peer.meet(ray.cloudpickle.dumps(self._own))
        queues = [ray.cloudpickle.loads(one) for one in made]
        self._others = queues[1:] if peer.rank == 0 else queues[:1]
        peer.meet()

    def send(self, payload: Payload) -> None:
        item = _outward(payload)
        if self._large and payload is not None:
            item = [ray.put(item)]  # in a list it stays a reference
        try:
            for other in self._others:
                other.put(item, timeout=self._quiet)
        except Full as error:
            raise TimeoutError("raw ray: the peer took nothing in time") from error

    def recv(self) -> Payload:
        try:
            item = self._own.get(timeout=self._quiet)
        except Empty as error:
            raise TimeoutError("raw ray: no message came in time") from error
        return _inward(ray.get(item[0]) if isinstance(item, list) else item)

    def bulk(self, payload: Payload) -> AbstractContextManager[Callable[[], int]]:
        raise TypeError("a call to the queue's actor ends before the next one")

    def close(self) -> None:
        ray.shutdown()


def _outward(payload: Payload) -> Any:
    if isinstance(payload, dict):
        return {key: _outward(value) for key, value in payload.items()}
    return payload.numpy() if isinstance(payload, torch.Tensor) else payload


def _inward(item: Any) -> Payload:
    if isinstance(item, dict):
        return {key: _inward(value) for key, value in item.items()}
    return torch.from_numpy(item) if isinstance(item, np.ndarray) else item
