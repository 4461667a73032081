"""A process that may begin no thread, or too few, is told so by every backend."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

import mq
from mq.errors import TransportUnavailable
from mq.threads import check_threads

_UNPRIVILEGED = """
import importlib, json, os, resource, sys
import mq

backend, options, directory = sys.argv[1:]
importlib.import_module(f"transports.{backend}")
mq.connect("tcp", group="g").close()  # what is imported may be for root to read alone
uid = 1_000_000 + os.getpid()  # who has no process but this one
os.chown(directory, uid, uid)
os.setgid(uid)
os.setuid(uid)
_, most = resource.getrlimit(resource.RLIMIT_NPROC)
for threads in range(1, 100):
    resource.setrlimit(resource.RLIMIT_NPROC, (threads, most))
    try:
        with mq.connect(backend, group="g", **json.loads(options)):
            break
    except mq.TransportUnavailable as error:
        assert "`ulimit -u`" in str(error), error
else:
    raise AssertionError(error)
print("connected at", threads)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(
    ("backend", "options"),
    [
        *((name, {}) for name in ("inproc", "nng", "shm", "tcp", "torchrpc", "zmq")),
        ("torchrpc", {"transports": "shm,uv", "channels": "mpt_uv,basic"}),
        ("zmq", {"io_threads": 3}),
    ],
)
def test_whatever_is_allowed_nothing_aborts_and_the_remedy_is_named(
    backend: str, options: dict[str, object]
) -> None:
    """With one thread more each time, until that is enough."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-c", _UNPRIVILEGED]
        command += [backend, json.dumps(options), directory]
        env = os.environ | {"XDG_RUNTIME_DIR": directory, "TMPDIR": directory}
        env |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        child = subprocess.run(
            command,
            cwd=Path(__file__).parents[1],
            env=env,
            capture_output=True,
            timeout=120,
            text=True,
        )
    assert child.returncode == 0, child.stderr
    assert "connected at" in child.stdout


@pytest.mark.parametrize(
    ("backend", "options", "needed"),
    [
        ("tcp", {}, 3),
        ("zmq", {}, 3 + 5),
        ("zmq", {"io_threads": 3}, 3 + 7),
        ("auto:zmq", {}, 3 + 5),
        ("torchrpc:cpu", {"channels": "mpt_uv,basic"}, 3 + 22),
    ],
)
def test_connect_tries_once_what_it_needs(
    backend: str,
    options: dict[str, Any],
    needed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error names the backend, not an option that has its default."""
    mq.connect(backend, group="g", **options).close()
    start, tried = threading.Thread.start, []

    def last_fails(thread: threading.Thread) -> None:
        if thread.name == "mq-trial":
            tried.append(thread)
            if len(tried) == needed:
                raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", last_fails)
    told = f"^a queue over {backend!r} needs {needed} threads, and {needed - 1} can be"
    with pytest.raises(TransportUnavailable, match=told):
        mq.connect(backend, group="g", **options).close()
    tried.append(tried[-1])  # there are enough again
    mq.connect(backend, group="g", **options).close()
    assert len(tried) == needed + 1 + needed


def test_an_engine_that_runs_already_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That of `torchrpc` is one for all queues of a process."""
    start, tried = threading.Thread.start, []

    def count(thread: threading.Thread) -> None:
        tried.extend([thread] * (thread.name == "mq-trial"))
        start(thread)

    with mq.connect("torchrpc", group="g"):
        monkeypatch.setattr(threading.Thread, "start", count)
        mq.connect("torchrpc", group="g").close()
    assert len(tried) == 3


def test_what_was_begun_for_the_trial_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No test leaves a thread."""
    start, begun = threading.Thread.start, []

    def third_fails(thread: threading.Thread) -> None:
        if len(begun) == 2:
            raise RuntimeError("can't start new thread")
        begun.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", third_fails)
    with pytest.raises(TransportUnavailable, match="it needs 4 threads, and 2 can be"):
        check_threads("it", 4)
    assert not any(thread.is_alive() for thread in begun)
