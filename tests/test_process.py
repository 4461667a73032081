"""Process identity and proof of death, on real processes."""

from __future__ import annotations

import dataclasses
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mq import process
from mq.process import ProcessId, ProcessWatch

_SLEEP = "import sys; sys.stdin.read()"


def identity(pid: int) -> ProcessId:
    """The identity of another process, as it would have written it itself."""
    stat = process._read_stat(pid)
    assert stat is not None
    return dataclasses.replace(process.here(), pid=pid, started=stat.started)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives until the test kills it."""
    with subprocess.Popen([sys.executable, "-c", _SLEEP], stdin=-1) as running:
        yield running
        running.kill()


def become_zombie(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)


def test_a_process_knows_itself() -> None:
    """`here` names this process, and agrees with what others see of it."""
    me = process.here()
    assert me.pid == os.getpid()
    assert me == identity(os.getpid())
    assert me.same_kernel(me)


def test_a_running_process_has_not_ended(child: subprocess.Popen[bytes]) -> None:
    """False means that the very process runs."""
    watch = ProcessWatch(identity(child.pid))
    assert watch.ended() is False
    watch.close()


def test_a_zombie_is_dead_and_wakes_a_poller(child: subprocess.Popen[bytes]) -> None:
    """A killed process counts as ended before its parent has waited for it."""
    watch = ProcessWatch(identity(child.pid))
    fd = watch.fileno()
    assert fd is not None
    become_zombie(child)
    assert select.select([fd], [], [], 10)[0] == [fd]
    assert watch.ended() is True
    assert ProcessWatch(identity(child.pid)).ended() is True
    watch.close()


def test_a_reaped_process_has_ended(child: subprocess.Popen[bytes]) -> None:
    """It makes no difference whether the watch began before the end or after it."""
    who = identity(child.pid)
    before = ProcessWatch(who)
    child.kill()
    child.wait()
    after = ProcessWatch(who)
    assert before.ended() is True
    assert after.ended() is True
    assert after.fileno() is None
    before.close()


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_reused_pid_is_another_process(shift: int) -> None:
    """A process that started at another time proves the end of the one before."""
    me = process.here()
    watch = ProcessWatch(dataclasses.replace(me, started=me.started + shift))
    assert watch.ended() is True
    assert watch.fileno() is None


@pytest.mark.parametrize(
    "change",
    [
        {"boot_id": "another"},
        {"boot_id": ""},
        {"pid_namespace": 1},
        {"time_namespace": 1},
        {"pid": 0},
    ],
)
def test_nothing_is_known_of_incomparable_processes(change: dict[str, int]) -> None:
    """A process of another boot or namespace is never declared dead or alive."""
    me = process.here()
    watch = ProcessWatch(dataclasses.replace(me, **change))  # type: ignore[arg-type]
    assert watch.ended() is None
    assert watch.fileno() is None


def test_nothing_is_known_across_time_namespaces() -> None:
    """There the same start of a process reads as another one."""
    if os.geteuid() != 0:
        pytest.skip("only root can make time namespaces")
    if shutil.which("unshare") is None:
        pytest.skip("no unshare to make a time namespace with")
    code = "import sys; from mq.process import here; print(here(), flush=True)"
    inside = ["unshare", "--time", "--boottime", "100000", sys.executable, "-c"]
    command = [*inside, f"{code}; sys.stdin.read()"]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as running:
        try:
            assert running.stdout is not None
            said = running.stdout.readline()
            if not said:
                pytest.skip("no time namespace here")
            watch = ProcessWatch(eval(said))
            assert watch.ended() is None
            watch.close()
        finally:
            running.kill()


@pytest.mark.parametrize("pid", [2**31, 2**40, 2**63])
def test_nothing_is_known_of_what_is_no_process_id(pid: int) -> None:
    """A peer may say any number; the system takes only some, and raises at others."""
    watch = ProcessWatch(dataclasses.replace(process.here(), pid=pid))

    assert watch.fileno() is None
    assert watch.ended() is None


def _refuse(_pid: int) -> int:
    raise PermissionError(1, "refused by a sandbox")


@pytest.mark.parametrize("pidfd_open", [None, _refuse])
def test_proc_serves_where_there_is_no_pidfd(
    child: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
    pidfd_open: Callable[[int], int] | None,
) -> None:
    """Old kernels and sandboxes lose the poller, not the answer."""
    if pidfd_open is None:
        monkeypatch.delattr(os, "pidfd_open")
    else:
        monkeypatch.setattr(os, "pidfd_open", pidfd_open)
    who = identity(child.pid)
    running, zombie, reaped = (ProcessWatch(who) for _ in range(3))
    assert running.ended() is False
    assert running.fileno() is None
    become_zombie(child)
    assert zombie.ended() is True
    child.wait()
    assert reaped.ended() is True
    assert ProcessWatch(who).ended() is True


def test_a_descriptor_that_is_the_process_s_own_says_all(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every member asks of every other four times a second: /proc is read just once."""
    watch = ProcessWatch(identity(child.pid))
    monkeypatch.setattr(process, "_read_stat", lambda pid: pytest.fail("/proc is read"))
    assert watch.ended() is False
    become_zombie(child)
    assert watch.ended() is True
    watch.close()


def test_a_hidden_proc_leaves_only_proof_of_death(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where /proc is not ours, life cannot be proven, death still can."""
    who = identity(child.pid)
    monkeypatch.setattr(process, "_proc_is_ours", lambda: False)
    watch = ProcessWatch(who)
    assert watch.ended() is None
    child.kill()
    child.wait()
    assert watch.ended() is True
    watch.close()


def test_a_command_name_cannot_disturb_the_start_time(tmp_path: Path) -> None:
    """The name in /proc/pid/stat may hold parentheses, spaces and digits."""
    odd = tmp_path / "a) Z 1 (2"
    odd.symlink_to("/bin/sleep")
    with subprocess.Popen([str(odd), "600"]) as child:
        watch = ProcessWatch(identity(child.pid))
        first = watch.ended()
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert (first, watch.ended()) == (False, True)
        watch.close()


def test_close_frees_the_descriptor_once_and_answers_go_on() -> None:
    """`close` is idempotent, and leaves /proc to answer."""
    before = sorted(os.listdir("/proc/self/fd"))
    watch = ProcessWatch(process.here())
    assert watch.fileno() is not None
    watch.close()
    watch.close()
    assert watch.fileno() is None
    assert watch.ended() is False
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_forked_child_is_another_process() -> None:
    """Nothing of the identity is remembered across a fork."""
    reader, writer = os.pipe()
    script = (
        "import os, sys\n"
        "from mq.process import here\n"
        "parent = here()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    child = here()\n"
        "    same = child.pid == os.getpid() != parent.pid\n"
        f"    os.write({writer}, b'1' if same else b'0')\n"
        "    os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
    )
    root = Path(__file__).resolve().parent.parent
    subprocess.run(
        [sys.executable, "-c", script],
        cwd=root,
        pass_fds=[writer],
        check=True,
        timeout=60,
    )
    os.close(writer)
    assert os.read(reader, 1) == b"1"
    os.close(reader)
