"""What the log of a member says of processes that it lets into no group."""

from __future__ import annotations

import os
import re
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from meeting import DEADLINE, eventually, process_of, runtime
from nng_links import nng_runs

import mq
from mq import log

__all__ = ["nng_runs", "runtime"]

BY_PROCESS = ["nng:ipc", "shm", "zmq:ipc"]
"""Strangers of these are known by process, others by connection."""


def _knock(
    backend: str, address: str, times: int, options: dict[str, Any], pipe: Connection
) -> None:
    """Ask to be let in, and be refused; tells how often."""
    refused = 0
    for _ in range(times):
        with pytest.raises((mq.AuthenticationFailed, mq.ConnectRefused)):
            mq.connect(
                backend, attach_to=[address], connect_timeout=DEADLINE, **options
            )
        refused += 1
    pipe.send(refused)


def _complaints(caplog: pytest.LogCaptureFixture, of: str) -> list[str]:
    log.flush()
    texts = [record.getMessage() for record in caplog.records]
    return [text for text in texts if of in text]


@pytest.mark.parametrize("backend", [*BY_PROCESS, "tcp", "zmq:tcp"])
def test_each_stranger_with_another_secret_is_logged_once(
    backend: str, runtime: Path, nng_runs: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Not the first alone, after whom others would be looked for in vain."""
    times = 2 if backend in BY_PROCESS else 1
    known, pids = {"group": "g", "secret": "that of the group"}, []
    with mq.connect(backend, listen=_listen(backend, runtime), **known) as queue:
        (address,) = queue.describe()["addresses"]
        asked = backend, address, times, known | {"secret": "quite another"}
        for _ in range(3):
            with process_of(_knock, *asked) as (child, pipe):
                pids.append(child.pid)
                assert pipe.recv() == times
        eventually(lambda: _mesh(queue)["unauthenticated"] == 3 * times)
        told = _complaints(caplog, "a handshake with another secret")
    assert len(told) == 3
    if backend in BY_PROCESS:
        found = [re.findall(r"pid (\d+) of user (\d+)", text) for text in told]
        assert found == [[(str(pid), str(os.geteuid()))] for pid in pids]


def _listen(backend: str, runtime: Path) -> list[str]:
    if backend not in BY_PROCESS:
        return []
    scheme = "shm" if backend == "shm" else "ipc"
    return [f"{scheme}://{runtime}/here"]


def _mesh(queue: mq.MQ) -> dict[str, int]:
    counters: dict[str, int] = queue.stats()["mesh"]
    return counters
