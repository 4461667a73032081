"""The harness of the conformance suite, tried without a queue."""

from __future__ import annotations

import functools
import gc
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fresh_python import ROOT, output_of

import mq
from mq import registry
from mq.testing import (
    Group,
    MemberDied,
    Proxy,
    StepTimeout,
    expect,
    run_case,
    waiting,
    worker,
)
from mq.testing.programs import pattern, peer_stats
from mq.testing.proxy import another
from mq.testing.suite import faults
from mq.testing.waiting import wait_until
from mq.threads import current_frames
from mq.transport import Capabilities
from transports.tcp import TcpLink


@pytest.fixture
def processes() -> Iterator[Group]:
    """A group whose members are processes."""
    group = Group("none", Capabilities(reach="host"), {})
    yield group
    group.end()


@pytest.fixture
def threads() -> Iterator[Group]:
    """A group whose members are threads."""
    capabilities = Capabilities(reach="process", separate_processes=False)
    group = Group("none", capabilities, {})
    yield group
    group.end()


def _pid(worker: Any) -> int:
    return os.getpid()


def _lose(worker: Any) -> None:
    raise mq.MessagesLost("a", ["t"], 3)


def _wait_for_ever(worker: Any) -> None:
    threading.Event().wait()


def _interruptible(worker: Any, seconds: float) -> str:
    try:
        threading.Event().wait(seconds)
    except KeyboardInterrupt:
        return "interrupted"
    return "not interrupted"


def _exit(worker: Any, status: int) -> None:
    os._exit(status)


def test_members_are_processes_or_threads_as_the_transport_says(
    processes: Group, threads: Group
) -> None:
    """The capability `separate_processes` decides where a member runs."""
    apart = processes.unconnected("a").ask(_pid).result()
    here = threads.unconnected("a").ask(_pid).result()

    assert apart != os.getpid()
    assert here == os.getpid()


@pytest.mark.parametrize("kind", ["processes", "threads"])
def test_errors_come_back_with_type_and_traceback(
    kind: str, request: pytest.FixtureRequest
) -> None:
    """Also those whose class cannot be pickled."""
    group: Group = request.getfixturevalue(kind)
    member = group.unconnected("a")

    with expect(mq.MessagesLost, "3 message(s)") as caught:
        member.ask(_lose).result()

    assert (caught[0].sender, caught[0].topics, caught[0].count) == ("a", ("t",), 3)
    assert "_lose" in str(caught[0].__cause__)


@pytest.mark.parametrize("kind", ["processes", "threads"])
def test_a_step_beyond_its_deadline_reports_all_stacks(
    kind: str, request: pytest.FixtureRequest
) -> None:
    """The report shows where the member waits."""
    group: Group = request.getfixturevalue(kind)
    member = group.unconnected("a")
    waiting = member.ask(_interruptible, 20 if kind == "processes" else 1)

    with pytest.raises(StepTimeout, match="_interruptible"):
        waiting.result(0.3)

    if kind == "processes":
        member.interrupt()
        assert waiting.result() == "interrupted"
    else:
        assert waiting.result() == "not interrupted"


def test_a_member_that_dies_is_reported_with_its_status(processes: Group) -> None:
    """A crash fails the step at once, and not by its deadline."""
    member = processes.unconnected("a")
    started = time.monotonic()

    with pytest.raises(MemberDied, match="exit status 3"):
        member.ask(_exit, 3).result()

    assert time.monotonic() - started < 10


def test_hung_and_stopped_members_are_ended(processes: Group) -> None:
    """Whatever state a failed case leaves its members in, no process survives."""
    hung, stopped = processes.unconnected("hung"), processes.unconnected("stopped")
    pids = [member.ask(_pid).result() for member in (hung, stopped)]
    hung.ask(_wait_for_ever)
    stopped.stop()

    processes.end()

    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


ORPHANS = """
from mq.testing import Group
from mq.transport import Capabilities
from test_harness import _pid, _wait_for_ever
member = Group("none", Capabilities(reach="host"), {}).unconnected("a")
print(member.ask(_pid).result(), flush=True)
member.ask(_wait_for_ever)
input()
"""


def test_a_hung_member_does_not_outlive_a_script_that_was_killed(
    tmp_path: Path,
) -> None:
    """It would use memory and the processor for ever."""
    folder = os.path.dirname(__file__)
    script = subprocess.Popen(
        [sys.executable, "-c", ORPHANS],
        env={**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", "TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with script:
        assert script.stdout is not None
        watch = os.pidfd_open(int(script.stdout.readline()))
        script.kill()
    ended, _, _ = select.select([watch], [], [], 60.0)
    os.close(watch)
    assert ended


BLOCKED = """
import signal
from multiprocessing import forkserver, resource_tracker
from mq.testing import run_case
resource_tracker.ensure_running()  # first, as it unblocks SIGINT
before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
forkserver.ensure_running()
signal.pthread_sigmask(signal.SIG_SETMASK, before)
run_case("tcp", "interrupt_ends_every_waiting_call")
"""


def test_members_hear_an_interrupt_that_their_server_does_not() -> None:
    """What starts processes may have been begun by who blocks it, for good."""
    assert output_of(BLOCKED) == ""


def test_a_file_that_glibc_reads_for_a_moment_is_no_leak(tmp_path: Path) -> None:
    """Whatever else is open is listed."""
    leaked = tmp_path / "leaked"
    with (
        Path("/proc/sys/vm/overcommit_memory").open(),
        leaked.open("w"),
    ):
        found = worker.descriptors()
    assert any(str(leaked) in name for name in found)
    assert not any("overcommit" in name for name in found)


def test_expect_names_what_an_error_does_not_say() -> None:
    """An error of the right type with the wrong text fails, and so does none."""
    with (
        pytest.raises(AssertionError, match=r"does not say.*peer"),
        expect(ValueError, "peer"),
    ):
        raise ValueError("text")
    with (
        pytest.raises(AssertionError, match="ValueError was not raised"),
        expect(ValueError),
    ):
        pass


class _FailingLink(TcpLink):
    def open(self, *arguments: Any) -> Any:
        raise TypeError("no way to open it")


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """`mq.register` for one test: makes its argument known as ``mine``."""
    monkeypatch.setitem(registry._TABLE, "mine", registry.Entry("no.module:None"))
    return functools.partial(mq.register, "mine", replace=True)


@pytest.mark.parametrize("target", [TcpLink, "transports.tcp:TcpLink"])
def test_members_know_a_transport_that_the_test_has_registered(
    register: Callable[[Any], None], target: Any
) -> None:
    """They are other processes, which no entry point tells of it."""
    register(target)
    run_case("mine", "unsubscribed_topics_are_not_sent")
    run_case("mine", "multiprocessing_child_without_close_delivers_and_leaves")


def test_whatever_a_transport_raises_its_case_fails_by_one_error(
    register: Callable[[Any], None],
) -> None:
    """The one that a caller is told to catch."""
    register(_FailingLink)
    with pytest.raises(AssertionError, match="TypeError: no way to open it"):
        run_case("mine", "topic_matches_exactly")


def test_a_connection_that_the_case_has_not_broken_must_not_break() -> None:
    """What a session mends is a fault all the same; those of the case are none."""
    group = Group("tcp", registry.capabilities("tcp"), {})
    try:
        _, dialler, proxy = group.proxied("listener", "dialler")
        assert proxy is not None
        proxy.cut()
        wait_until(
            lambda: dialler.run(peer_stats, "listener")["connections"] == 2,
            "the session to be resumed",
        )
        assert group.disturbed()
        proxy.breaks = False  # as if nobody had cut it
        with pytest.raises(AssertionError, match="'dialler' counts lost_connections 1"):
            group.close()
    finally:
        group.end()


def test_no_part_of_a_pattern_comes_twice() -> None:
    """So that a message whose parts have changed places differs from the pattern."""
    seen: set[bytes] = set()
    for number in range(3):
        raw = pattern(number, 30_000)
        assert raw == pattern(number, 30_000)
        seen.update(raw[n : n + 8] for n in range(len(raw) - 7))

    assert len(seen) == 3 * (30_000 - 7)
    assert [len(pattern(1, n)) for n in (0, 1, 8, 9)] == [0, 1, 8, 9]


class _Echo:
    """A server that sends back what it hears."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, name="mq-test-echo")
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with sock:
                try:
                    while piece := sock.recv(65536):
                        sock.sendall(piece)
                except OSError:  # it was cut
                    pass

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)


@pytest.fixture
def proxied(tmp_path: Any) -> Iterator[tuple[Proxy, socket.socket]]:
    """A proxy in front of an echo, and a client connected through it."""
    echo = _Echo()
    proxy = Proxy(echo.address, str(tmp_path / "p"))
    host, _, port = proxy.address.rpartition(":")
    client = socket.create_connection((host.partition("//")[2], int(port)), 5)
    yield proxy, client
    client.close()
    proxy.close()
    echo.close()


def _exchange(client: socket.socket, raw: bytes) -> bytes:
    sender = threading.Thread(target=client.sendall, args=(raw,), name="mq-test-send")
    sender.start()
    got = b""
    while len(got) < len(raw) and (piece := client.recv(65536)):
        got += piece
    sender.join(5)
    return got


def test_proxy_stands_in_for_sockets_that_it_can_be_before(tmp_path: Path) -> None:
    """Not for names that only look like those of socket files."""
    file = tmp_path / "s"
    free = str(tmp_path / "free")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(file))
        assert another(f"x://{file}", free) == f"x://{free}"
    assert another("x://[::1]:7", free) == "x://127.0.0.1:0"
    assert another("x:///no/such/file", free) is None
    os.mkfifo(tmp_path / "pipe")
    assert another(f"x://{tmp_path}/pipe", free) is None
    assert faults._sockets_to(f"x://{tmp_path}/pipe") == []
    assert another("x://name", free) is None


def test_proxy_passes_everything_unchanged(
    proxied: tuple[Proxy, socket.socket],
) -> None:
    """Without a fault it is as if it were not there."""
    _, client = proxied
    raw = os.urandom(3_000_000)

    assert _exchange(client, raw) == raw


def test_proxy_cuts_both_ends(proxied: tuple[Proxy, socket.socket]) -> None:
    """After `cut` the client's connection is broken."""
    proxy, client = proxied
    _exchange(client, b"x")

    assert proxy.cut() == 1

    try:
        left = client.recv(1)
    except ConnectionResetError:
        left = b""
    assert left == b""


def test_proxy_stalls_and_resumes(proxied: tuple[Proxy, socket.socket]) -> None:
    """Nothing passes in between, and nothing is lost."""
    proxy, client = proxied
    _exchange(client, b"x")
    proxy.stall()
    client.sendall(b"waits")
    client.settimeout(0.1)
    with pytest.raises(TimeoutError):
        client.recv(1)
    client.settimeout(5)

    proxy.resume()

    assert client.recv(5, socket.MSG_WAITALL) == b"waits"


def test_proxy_corrupts_as_many_pieces_as_asked(
    proxied: tuple[Proxy, socket.socket],
) -> None:
    """Bits flip in that many pieces, no byte is lost, and then it is honest again."""
    proxy, client = proxied
    proxy.corrupt(1)

    spoilt = _exchange(client, bytes(1000))

    assert spoilt != bytes(1000)
    assert len(spoilt) == 1000
    assert proxy.corrupted()
    assert _exchange(client, bytes(1000)) == bytes(1000)


def _on_one_core(worker: Any) -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def _spin_until_told(worker: Any) -> None:
    worker.told = False
    while not worker.told:
        pass


def _is_spinning(worker: Any) -> bool:
    return hasattr(worker, "told")


def _tell(worker: Any) -> None:
    worker.told = True


def _spin(worker: Any, seconds: float) -> float:
    """Use the processor so long; when that ended, by the clock of all processes."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass
    return time.monotonic()


def test_time_without_a_core_is_not_the_programs(processes: Group) -> None:
    """Two that want the same one get half of it each."""
    one, other = (processes.process(name) for name in ("one", "other"))
    for host in (one, other):
        host.ask(_on_one_core).result()
    busy = other.ask(_spin_until_told)
    waiting.wait_until(
        lambda: other.ask(_is_spinning, worker_main=False).result(),
        "the other to want the core",
    )
    watch = waiting.Stopwatch(one.pid)
    ended = one.ask(_spin, 0.3).result()
    assert watch.seconds(ended) < ended - watch.began - 0.1
    other.ask(_tell, worker_main=False).result()
    busy.result()
    assert sum(waiting.ready_seconds(one.pid).values()) > 0.1
    one.kill()
    assert waiting.ready_seconds(one.pid) == {}


def test_time_that_was_taken_from_the_machine_is_not_the_programs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the core that lost the most, as others may have stood still meanwhile."""
    assert all(seconds >= 0.0 for seconds in waiting.stolen_seconds())
    monkeypatch.setattr(waiting, "ready_seconds", lambda pid: {"a": 3.0})
    for now, expected in (
        ([10.0, 20.0], 0.5),
        ([10.25, 20.125], 0.25),
        ([10.0, 20.5, 7.0], 0.0),  # a core was added
        ([], 0.5),  # or such time is not counted
    ):
        monkeypatch.setattr(waiting, "stolen_seconds", lambda: [10.0, 20.0])
        watch = waiting.Stopwatch(os.getpid())
        began = watch.began
        monkeypatch.setattr(waiting, "stolen_seconds", lambda now=now: now)
        assert watch.seconds(began + 0.5) == pytest.approx(expected)
    monkeypatch.setattr(waiting, "ready_seconds", lambda pid: {"a": 3.25, "new": 0.125})
    assert watch.seconds(began + 0.5) == pytest.approx(0.125)


def test_frames_are_looked_at_without_the_garbage_collector() -> None:
    """It is on again afterwards, if it was."""
    seen: list[bool] = []
    real = sys._current_frames
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "_current_frames", lambda: seen.append(gc.isenabled()))
        current_frames()
    assert seen == [False]
    assert gc.isenabled()
    gc.disable()
    try:
        assert current_frames().keys() == real().keys()
        assert not gc.isenabled()
    finally:
        gc.enable()
