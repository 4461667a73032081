"""`shm` where the system gives little: normal work or clear errors, never a crash."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from namespaces import with_mounts
from test_shm_memory import (
    HELD,
    MIB,
    drop,
    group_of,
    hold,
    look,
    publish,
    receive,
    shared,
    until_unused,
)

import mq
from mq import settings
from mq.testing import STEP, Group, wait_until

MEMORY = Path("/sys/fs/cgroup/memory")
UNIFIED = Path("/sys/fs/cgroup/cgroup.controllers")


def _start_listening(worker: Any) -> None:
    handler = logging.Handler()
    handler.emit = lambda record: HELD.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)


def _take_said(queue: mq.MQ) -> list[str]:
    said = [text for text in HELD if isinstance(text, str)]
    HELD[:] = [held for held in HELD if not isinstance(held, str)]
    return said


def _only(said: list[str]) -> str:
    assert len(said) == 1, said
    return said[0]


def _limit(worker: Any, which: int, limit: int) -> None:
    resource.setrlimit(which, (limit, limit))


def limit_more_memory(queue: mq.MQ, more: int) -> None:
    """Allow so many bytes of address space beyond those in use."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (used + more, most))


def allow_all_memory(queue: mq.MQ) -> None:
    """Undo that: the member's own end needs memory for a thread."""
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


SIZES = [50_000 + 37_000 * n for n in range(60)]
"""Nearly as many segments."""


def _publish_sizes(queue: mq.MQ) -> None:
    for number, nbytes in enumerate(SIZES):
        publish(queue, [number], nbytes)


def _open_files(queue: mq.MQ) -> int:
    """How many more files the application can open."""
    opened = []
    try:
        while True:
            opened.append(os.open("/", os.O_RDONLY))
    except OSError:
        return len(opened)
    finally:
        for fd in opened:
            os.close(fd)


def test_sixty_four_descriptors_are_enough() -> None:
    """Many sizes, held in place by one subscriber and copied by another."""
    with group_of() as group:
        a, b, c = (group.unconnected(name) for name in "abc")
        for member in (a, b, c):
            member.ask(_limit, resource.RLIMIT_NOFILE, 64).result()
            group.connecting(member).result()
        b.subscribe("t", zero_copy=True)
        c.subscribe("t")
        for _ in range(3):
            publishing = a.begin(_publish_sizes)
            assert b.run(receive, len(SIZES)) == list(range(len(SIZES)))
            assert c.run(receive, len(SIZES)) == list(range(len(SIZES)))
            publishing.result()
        assert a.run(shared)["segments"] <= 16
        for member in (a, b, c):
            assert member.run(_open_files) > 10
        b.call("unsubscribe", "t")
        b.subscribe("t", zero_copy=True, history=mq.keep_last(100))
        a.run(_publish_sizes)
        a.call("flush", timeout=STEP)
        assert b.run(hold, len(SIZES)) == list(range(len(SIZES)))
        b.run(drop, len(SIZES))


def _exhaust_descriptors(queue: mq.MQ) -> None:
    try:
        while True:
            HELD.append(os.open("/", os.O_RDONLY))
    except OSError:
        pass


def test_a_publisher_without_descriptors_sends_through_the_socket() -> None:
    """Segments cannot be made: it says so once, and nothing is lost."""
    with group_of() as group:
        a, b = group.unconnected("a"), group.unconnected("b")
        a.ask(_start_listening).result()
        for member in (a, b):
            member.ask(_limit, resource.RLIMIT_NOFILE, 64).result()
            group.connecting(member).result()
        a.run(publish, [0], 1000)  # what this loads needs descriptors
        b.subscribe("t", zero_copy=True)
        a.run(_exhaust_descriptors)
        numbers = list(range(20))
        publishing = a.begin(publish, numbers)
        assert b.run(receive, 20) == numbers
        publishing.result()
        said = _only(a.run(_take_said))
        assert "Too many open files" in said
        assert "shm_bytes" in said
        a.run(_drop_descriptors, 10)
        a.run(publish, [20])
        assert a.run(shared)["segments"] == 1
        assert b.run(receive, 1) == [20]
        a.run(_close_held)


def test_a_reader_without_descriptors_maps_with_the_one_it_keeps_spare() -> None:
    """Also a second segment; the application's lack of descriptors is logged once."""
    with group_of() as group:
        a, b = group.unconnected("a"), group.unconnected("b")
        b.ask(_start_listening).result()
        group.connecting(a).result()
        b.ask(_limit, resource.RLIMIT_NOFILE, 64).result()
        group.connecting(b).result()
        b.subscribe("t", zero_copy=True)
        a.run(publish, [0])
        assert b.run(receive, 1) == [0]
        group.breaks = True  # what finds no descriptor comes over a new connection
        b.run(_exhaust_descriptors)
        for number in range(1, 5):
            a.run(publish, [number], MIB * number)
            assert b.run(receive, 1) == [number]
        said = _only(b.run(_take_said))
        assert "ulimit -n" in said
        until_unused(a)
        b.run(_close_held)


def _close_held(queue: mq.MQ) -> None:
    while HELD:
        os.close(HELD.pop())


def _drop_descriptors(queue: mq.MQ, count: int) -> None:
    for _ in range(count):
        os.close(HELD.pop())


def test_a_reader_that_cannot_map_copies() -> None:
    """Its address space is limited; another one hoards, so segments become many."""
    with group_of() as group:
        a, b, c = (group.unconnected(name) for name in "abc")
        b.ask(_start_listening).result()
        for member in (a, b, c):
            group.connecting(member).result()
        b.subscribe("t", zero_copy=True, depth=2)
        c.subscribe("t", zero_copy=True)
        a.run(publish, [0])
        assert b.run(receive, 1) == [0]
        b.run(limit_more_memory, 24 * MIB)
        numbers = list(range(1, 60))
        publishing = a.begin(publish, numbers)
        assert b.run(receive, len(numbers)) == numbers
        publishing.result()
        said = _only(b.run(_take_said))
        assert "cannot map" in said
        assert "Cannot allocate memory" in said
        assert "shm_bytes" in said
        assert c.run(hold, 60) == [0, *numbers]
        b.run(allow_all_memory)
        c.run(drop, 60)
        until_unused(a)


def _publish_and_catch(queue: mq.MQ, numbers: list[int], timeout: float) -> str:
    try:
        publish(queue, numbers, timeout=timeout)
    except mq.PublishTimeout as error:
        return str(error)
    return ""


def test_a_publisher_that_gets_no_more_memory_waits_for_readers() -> None:
    """As at its own limit; the error says what the system refused."""
    with group_of() as group:
        a, b = group.members("a", "b")
        b.subscribe("t", zero_copy=True)
        a.run(publish, [0])
        b.run(hold)
        a.run(limit_more_memory, 24 * MIB)
        text = a.run(_publish_and_catch, list(range(1, 100)), 0.2)
        assert "the system gives no more: [Errno 12]" in text
        assert "'b' holds" in text
        count = int(a.call("stats")["topics"]["t"]["published"])
        assert 5 < count < 60
        assert b.run(hold, count - 1) == list(range(count))
        waiting = a.begin(publish, numbers := list(range(100, 130)), main=True)
        assert not waiting.done(0.3)
        b.run(drop, count)
        assert b.run(receive, 30) == numbers
        waiting.result()
        a.run(allow_all_memory)


# -- a memory cgroup ----------


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A cgroup that allows 1 GiB; skips where none can be made."""
    name = f"mq-test-{os.getpid()}"
    unified = UNIFIED.exists()
    path = (UNIFIED.parent if unified else MEMORY) / name
    limit = "memory.max" if unified else "memory.limit_in_bytes"
    try:
        path.mkdir()
        (path / limit).write_text(str(1 << 30))
    except OSError as error:
        with contextlib.suppress(OSError):
            path.rmdir()
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield path
    wait_until(lambda: not (path / "cgroup.procs").read_text(), "its processes to end")
    path.rmdir()


def _enter(worker: Any, path: Path) -> int:
    (path / "cgroup.procs").write_text(str(os.getpid()))
    return settings.memory_bytes()


def _oom_kills(path: Path) -> int:
    for name in ("memory.events", "memory.oom_control"):
        with contextlib.suppress(OSError):
            for line in (path / name).read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0


def test_a_cgroup_is_a_limit_that_is_never_reached(cgroup: Path) -> None:
    """The default of shm_bytes is a quarter of it; a hoarder ends in a clear error."""
    with group_of() as group:
        _hoard_in(group, cgroup)
    assert _oom_kills(cgroup) == 0


def _hoard_in(group: Group, cgroup: Path) -> None:
    a, b = group.unconnected("a"), group.unconnected("b")
    for member in (a, b):
        assert member.ask(_enter, cgroup).result() == 1 << 30
        group.connecting(member).result()
    assert a.run(shared)["limit_bytes"] == 1 << 28
    b.subscribe("t", zero_copy=True, window_bytes=1 << 30)
    text = a.run(_publish_and_catch, list(range(250)) * 2, 0.3)
    assert f"of the {1 << 28} bytes of shared memory" in text
    count = int(a.call("stats")["topics"]["t"]["published"])
    assert 200 < count <= 256
    assert b.run(hold, count)[:3] == [0, 1, 2]
    assert -1 not in b.run(look)
    b.run(drop, count)
    a.run(publish, [5])
    assert b.run(receive, 1) == [5]


# -- a small /dev/shm ----------

_PROGRAM = """
import os, sys
import numpy as np
import mq
stat = os.statvfs("/dev/shm")
print(stat.f_blocks * stat.f_frsize)
with mq.connect("shm", group="g", name="a") as a:
    with mq.connect("shm", group="g", name="b") as b:
        b.subscribe("t", zero_copy=True)
        for number in range(4):
            a.publish("t", np.full(40 << 20, number, np.uint8), timeout=20)
        views = [b.recv(timeout=20).payload for _ in range(4)]
        print([int(view.max()) for view in views], os.listdir("/dev/shm"))
"""


def test_the_size_of_dev_shm_does_not_matter(tmp_path: Path) -> None:
    """Ten times as much is in use as a tmpfs of 16 MB there would hold."""
    mount = "mount -t tmpfs -o size=16m tmpfs /dev/shm"
    environment = {
        **os.environ,
        "XDG_RUNTIME_DIR": str(tmp_path),
        "TMPDIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    ended = subprocess.run(
        [*with_mounts(mount), sys.executable, "-c", _PROGRAM],
        env=environment,
        capture_output=True,
        timeout=60,
        check=False,
    )
    said = ended.stdout.decode().splitlines()
    assert said == [str(16 << 20), "[0, 1, 2, 3] []"], ended.stderr.decode()


def test_a_limit_on_address_space_counts_as_memory() -> None:
    """The defaults that are parts of the memory then keep below it."""
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        pytest.skip("the address space is limited already")
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30));"
        "from mq.settings import memory_bytes; print(memory_bytes())"
    )
    said = subprocess.check_output([sys.executable, "-c", program])
    assert int(said) <= 1 << 30
