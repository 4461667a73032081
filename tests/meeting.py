"""What the tests of the rendezvous share: records, processes, a torchrun-like store."""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mq.process import here
from mq.rendezvous import Record, Rendezvous, open_rendezvous
from mq.testing.harness import fork_server
from mq.testing.waiting import has_stopped

DEADLINE = 60.0


def record(name: str, incarnation: str = "a", **fields: Any) -> Record:
    """A record of this process."""
    known: dict[str, Any] = {
        "generation": 0,
        "backend": "zmq",
        "addresses": (),
        "labels": (),
    }
    known |= {"since": 0.0, "lease": 20.0, "process": here(), **fields}
    return Record(name=name, incarnation=incarnation * 16, **known)


def names(rendezvous: Rendezvous) -> list[str]:
    """Who is recorded."""
    return [entry.record.name for entry in rendezvous.records()]


def eventually(predicate: Callable[[], bool], deadline: float = DEADLINE) -> None:
    """Wait for what another thread or process does, up to a deadline."""
    end, pause = time.monotonic() + deadline, threading.Event()
    while not predicate():
        assert time.monotonic() < end, "it did not happen in time"
        pause.wait(0.005)


@contextlib.contextmanager
def held_elsewhere(lock: threading.Lock) -> Iterator[None]:
    """Another thread has the lock: who waits while it has one is refused that."""
    held, end = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            end.wait(DEADLINE)

    holder = threading.Thread(target=hold, name="mq-test-holder")
    holder.start()
    assert held.wait(DEADLINE)
    try:
        yield
    finally:
        end.set()
        holder.join()


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime directory of the test's own, short enough for socket paths."""
    directory = tempfile.mkdtemp(prefix="mq")
    monkeypatch.setenv("XDG_RUNTIME_DIR", directory)
    yield Path(directory)
    shutil.rmtree(directory)


@contextlib.contextmanager
def _limited(resource_: int, most: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource_)
    resource.setrlimit(resource_, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource_, (soft, hard))


def no_descriptors() -> contextlib.AbstractContextManager[None]:
    """This process can open nothing meanwhile."""
    return _limited(resource.RLIMIT_NOFILE, 3)


def no_space() -> contextlib.AbstractContextManager[None]:
    """This process can write nothing into files meanwhile, as on a full disk."""
    return _limited(resource.RLIMIT_FSIZE, 0)


def freeze(pid: int) -> None:
    """Stop a child process; a signal alone takes effect some time later."""
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: has_stopped(pid))


def free_port() -> int:
    """A port of this host that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def open_store(port: int = 0) -> Any:
    """A key-value store such as torchrun runs; it ends when it is dropped."""
    make = importlib.import_module("torch.distributed").TCPStore
    try:
        return make("127.0.0.1", port, None, True, wait_for_workers=False)
    except RuntimeError as error:
        if "libuv support" not in str(error):  # which Debian's torch is built without
            raise
    return make("127.0.0.1", port, None, True, wait_for_workers=False, use_libuv=False)


@pytest.fixture(scope="session", autouse=True)
def libuv() -> None:
    """Make what torch's store makes once per process, before resources are counted."""
    open_store()


@pytest.fixture
def store_port() -> Iterator[int]:
    """The port of a key-value store such as torchrun runs."""
    store = open_store()
    yield store.port
    del store


def meet(spec: str | None, group: str = "g") -> Rendezvous:
    """Open a rendezvous, with time for a loaded machine: env:// loads torch first."""
    return open_rendezvous(spec, group=group, secret=None, timeout=60.0)


def _run_as_here(
    environment: dict[str, str], cwd: str, target: Callable[..., None], *args: object
) -> None:
    """What a fork server knows is how the first test began."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    target(*args)


@contextlib.contextmanager
def process_of(target: Callable[..., None], *args: object) -> Iterator[Any]:
    """A process with a pipe to it; killed at the end if it still runs."""
    context = fork_server()
    ours, theirs = context.Pipe()
    of_test = (dict(os.environ), os.getcwd(), target)
    child = context.Process(target=_run_as_here, args=(*of_test, *args, theirs))
    child.start()
    theirs.close()
    try:
        assert ours.poll(DEADLINE), "the process did not report in time"
        yield child, ours
    finally:
        child.kill()
        child.join(DEADLINE)
        child.close()
        ours.close()


KINDS = ["local", "shared", "tcp", "env"]


@pytest.fixture(params=KINDS)
def spec(
    request: pytest.FixtureRequest, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> str | None:
    """The argument that chooses each kind of rendezvous."""
    if request.param == "env":
        port = str(request.getfixturevalue("store_port"))
        run = os.urandom(4).hex()
        for name, value in {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "TORCHELASTIC_RUN_ID": run,
        }.items():
            monkeypatch.setenv(name, value)
    known = {
        "local": None,
        "shared": f"file://{runtime}",
        "tcp": f"tcp://127.0.0.1:{free_port()}",
        "env": "env://",
    }
    return known[request.param]
