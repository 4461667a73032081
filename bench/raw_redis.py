"""Redis publish/subscribe through redis-py, over a unix socket to a server of its own.

A payload is joined into one ``bytes``, as for NNG. The server keeps nothing on disk,
and its limits on slow subscribers are off: with the default of 32 MB it cuts a
subscriber off at the first large tensor.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import redis

from bench.payloads import Payload
from bench.peer import Peer
from bench.raw import decode, encode
from bench.raw_nng import join, split
from bench.wire import Wire

_SETTINGS = {
    "--port": ["0"],
    "--save": [""],
    "--appendonly": ["no"],
    "--client-output-buffer-limit": ["pubsub 0 0 0"],
}
_PR_SET_PDEATHSIG = 1


class RedisWire(Wire):
    """A channel for each direction; the hub starts and ends the server."""

    def __init__(self, peer: Peer, quiet: float) -> None:
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        self._quiet = quiet
        self._server: subprocess.Popen[str] | None = None
        path = os.path.join(peer.directory, "redis")
        sending, receiving = ("out", "back") if peer.rank == 0 else ("back", "out")
        self._channel = sending
        if peer.rank == 0:
            self._server = _serve(path, peer.directory)
        peer.meet()
        self._client: Any = redis.Redis(unix_socket_path=path)
        self._subscriber = self._client.pubsub()
        self._subscriber.subscribe(receiving)
        if not self._subscriber.get_message(timeout=quiet):
            raise TimeoutError("raw redis: the server confirmed no subscription")
        peer.meet()

    def send(self, payload: Payload) -> None:
        self._client.publish(self._channel, join(encode(payload)))

    def recv(self) -> Payload:
        end = time.monotonic() + self._quiet
        while (left := end - time.monotonic()) > 0:
            message = self._subscriber.get_message(timeout=left)
            if message is not None:
                return decode(split(message["data"]))
        raise TimeoutError("raw redis: no message came in time")

    def bulk(self, payload: Payload) -> AbstractContextManager[Callable[[], int]]:
        raise TypeError("a call to the server ends before the next one")

    def close(self) -> None:
        self._subscriber.close()
        self._client.close()
        if self._server is not None:
            self._server.kill()
            self._server.communicate()


def _serve(path: str, directory: str) -> subprocess.Popen[str]:
    """Start a server, which says when it is ready and dies with this process."""
    arguments = ["redis-server", "--unixsocket", path, "--dir", directory]
    for name, values in _SETTINGS.items():
        arguments += [name, *values]
    libc = ctypes.CDLL(None)
    server = subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
    )
    assert server.stdout is not None
    said = []
    for line in server.stdout:
        said.append(line)
        if "eady to accept connections" in line:
            return server
    raise RuntimeError(f"redis-server ended: {' '.join(said[-3:]).strip()}")
