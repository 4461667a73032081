"""A process that may begin no thread, or too few, is told so by every backend."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from mq.errors import TransportUnavailable
from mq.threads import check_threads

_UNPRIVILEGED = """
import importlib, os, resource, sys
import mq

backend, directory = sys.argv[1:]
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
        with mq.connect(backend, group="g"):
            break
    except mq.TransportUnavailable as error:
        assert "`ulimit -u`" in str(error), error
else:
    raise AssertionError(error)
print("connected at", threads)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("backend", ["inproc", "nng", "shm", "tcp", "torchrpc", "zmq"])
def test_whatever_is_allowed_nothing_aborts_and_the_remedy_is_named(
    backend: str,
) -> None:
    """With one thread more each time, until that is enough."""
    with tempfile.TemporaryDirectory() as directory:
        command = (sys.executable, "-c", _UNPRIVILEGED, backend, directory)
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
        check_threads("it", 1)
    assert not any(thread.is_alive() for thread in begun)
