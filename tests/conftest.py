"""What every test is held to: nothing may be left behind."""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.metadata
import logging
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import platform
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import torch
from needs import pytest_configure, pytest_runtest_makereport
from shared_memory import SlowSystem
from world import INLINE_BYTES

from mq import log, speed
from mq.errors import TransportUnavailable
from mq.mesh import faults
from mq.testing import worker

__all__ = ["pytest_configure", "pytest_runtest_makereport"]  # hooks

# How long an example takes says nothing on a loaded machine.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")

# libuv, in torch, keeps a pipe from its first use on; no test shall seem to leave it.
importlib.import_module("transports.torchrpc")
# CUDA keeps descriptors: some once it was asked for its devices, more of each in use.
if torch.cuda.is_available():
    for index in range(torch.cuda.device_count()):
        torch.ones(1, device=f"cuda:{index}").cpu()

# A shell starts its background jobs with SIGINT ignored, and so would be every process
# that a test starts and then interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

LIBRARIES = ("torch", "numpy", "pyzmq", "pynng", "msgspec", "hypothesis")


def pytest_report_header() -> str:
    """The versions that a result belongs to."""
    versions = ", ".join(_version(name) for name in LIBRARIES)
    system = f"{platform.system()} {platform.release()}, {os.cpu_count()} cores"
    compiled = "" if speed.COMPILED else "nothing "
    return f"mq: {compiled}compiled; {versions}; {system}"


def _version(name: str) -> str:
    try:
        return f"{name} {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{name} missing"


def pytest_collection_finish() -> None:
    """Each full collection would look through all of torch, and all of the tests."""
    gc.collect()
    gc.freeze()


def _threads() -> set[str]:
    return {f"thread {t.name} {t.ident}" for t in threading.enumerate()}


def _of_multiprocessing() -> set[int]:
    """Descriptors by which multiprocessing talks to its helpers, once they run."""
    server = multiprocessing.forkserver._forkserver
    tracker = multiprocessing.resource_tracker._resource_tracker
    fds = (server._forkserver_alive_fd, tracker._fd)  # type: ignore[attr-defined]
    return {fd for fd in fds if fd is not None}


def _descriptors() -> set[str]:
    helpers = _of_multiprocessing()
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that listed the directory
            target = os.readlink(f"/proc/self/fd/{fd}")
            # matplotlib keeps the fonts that it has used open.
            if int(fd) not in helpers and "/mpl-data/" not in target:
                found.add(f"descriptor {fd} {target}")
    return found


def _resources() -> set[str]:
    return _threads() | _descriptors()


@pytest.fixture(scope="session", autouse=True)
def _own_runtime_directory() -> Iterator[None]:
    """Groups of the same name in runs beside this one are others."""
    with (
        tempfile.TemporaryDirectory(prefix="mq") as directory,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("XDG_RUNTIME_DIR", directory)
        yield


@pytest.fixture(scope="session")
def gpus_run() -> None:
    """What the channels for GPUs keep is no leak of the first test."""
    with contextlib.suppress(TransportUnavailable):  # the tests say so
        worker.use_engine("torchrpc:cuda", {})


@pytest.fixture(autouse=True)
def _leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test leaves a thread or a descriptor, which is what shared memory has."""
    if request.node.get_closest_marker("gpu") is not None:
        request.getfixturevalue("gpus_run")
    before = _resources()
    yield
    if _resources() <= before:
        return
    for _ in range(2):  # what a finalizer puts into a queue goes with the next
        gc.collect()
    deadline = time.monotonic() + 2.0
    while left := _resources() - before:
        if time.monotonic() > deadline:
            pytest.fail(f"the test left {', '.join(sorted(left))}")
        threading.Event().wait(0.02)  # the end of an engine's thread tells nobody


class _Faults(logging.Handler):
    """What links have failed at, as the log was told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record)


@pytest.fixture(autouse=True)
def link_faults() -> Iterator[list[logging.LogRecord]]:
    """What a link raises stays in the mesh, though it says that it was misused.

    None is left at the end of a test; one that is about such faults takes them out.
    """
    handler = _Faults()
    logger = logging.getLogger(faults.__name__)
    logger.addHandler(handler)
    yield handler.told
    log.flush()
    logger.removeHandler(handler)
    failed = [record.getMessage() for record in handler.told]
    assert not failed, f"{', '.join(failed)}; the log has more"


class _Told:
    """pytest's `caplog`, which has all that the library has said when it is asked."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def __getattr__(self, name: str) -> Any:
        log.flush()
        return getattr(self._caplog, name)


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> Any:
    """The library has its log told by a thread; what others said is none of it."""
    log.flush()
    return _Told(caplog)


@pytest.fixture
def small_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the scripted network payloads above `world.INLINE_BYTES` are large ones."""
    monkeypatch.setattr("mq.mesh.publisher.INLINE_BYTES", INLINE_BYTES)
    for module in ("outgoing", "feed"):  # and those above half of it take turns
        monkeypatch.setattr(f"mq.mesh.{module}.SMALL_BYTES", INLINE_BYTES // 2)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowSystem]:
    system = SlowSystem(monkeypatch)
    yield system
    system.go_on()
