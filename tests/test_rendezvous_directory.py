"""A rendezvous in a directory: whose it is, and what stays in it."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import re
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from meeting import (
    DEADLINE,
    eventually,
    meet,
    names,
    no_descriptors,
    no_space,
    process_of,
    record,
    runtime,
)

from mq import paths as place
from mq.errors import ConnectRefused, PeerLost, TransportUnavailable
from mq.process import here
from mq.rendezvous import Rendezvous, directory
from mq.rendezvous.directory import DirectoryStore
from mq.rendezvous.record import Cell

__all__ = ["runtime"]  # fixtures


def _come_and_go(rounds: int, incarnation: str, pipe: Connection) -> None:
    pipe.send("ready")
    pipe.recv()
    faults = []
    for _ in range(rounds):
        with contextlib.closing(meet(None)) as rendezvous:
            assert rendezvous.directory is not None
            mine = rendezvous.claim(record(incarnation, incarnation))
            key = Path(rendezvous.directory, "key").read_bytes()
            if mine.holder is not None or key != rendezvous.secret:
                faults.append("another key")
            if incarnation not in names(rendezvous):
                faults.append("no record")
    pipe.send(faults)


def test_leaving_last_never_harms_who_just_joins(runtime: Path) -> None:
    """While members come and go, each finds its key and record; at the end nothing."""
    with process_of(_come_and_go, 150, "a") as (_, one):
        with process_of(_come_and_go, 150, "b") as (_, two):
            assert (one.recv(), two.recv()) == ("ready", "ready")
            one.send("go")
            two.send("go")
            assert one.poll(DEADLINE)
            assert one.recv() == []
            assert two.poll(DEADLINE)
            assert two.recv() == []
    assert list(runtime.iterdir()) == []


def test_a_process_out_of_descriptors_is_told_so(runtime: Path) -> None:
    """Which is nothing that the file system could be blamed for."""
    with contextlib.closing(meet(None)) as rendezvous:
        rendezvous.claim(record("x"))
        with no_descriptors(), pytest.raises(PeerLost, match="ulimit -n") as caught:
            rendezvous.records()

        assert rendezvous.description in str(caught.value)
        assert "permissions" not in str(caught.value)
        assert names(rendezvous) == ["x"]


def test_who_cannot_write_leaves_nothing_behind(runtime: Path) -> None:
    """Neither where it would have been the first, nor with others there."""
    with no_space(), pytest.raises(TransportUnavailable, match="too large"):
        meet(None)
    assert list(runtime.iterdir()) == []
    with contextlib.closing(meet(None)) as rendezvous:
        rendezvous.claim(record("x"))
        before = sorted(runtime.rglob("*"))
        with contextlib.closing(meet(None)) as late, no_space():
            with pytest.raises(PeerLost, match="too large"):
                late.claim(record("y"))
        assert sorted(runtime.rglob("*")) == before
        assert names(rendezvous) == ["x"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_file_system_that_is_full_is_not_told_to_be_made_writable(
    code: int, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is so already; what it needs is room."""

    def fail(path: str, mode: int = 0o777) -> None:
        raise OSError(code, os.strerror(code), path)

    monkeypatch.setattr(os, "mkdir", fail)
    with pytest.raises(TransportUnavailable, match="; make room there, or give"):
        meet(None)


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP])
def test_a_file_system_without_hard_links_is_not_told_to_be_made_writable(
    code: int, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As FAT and some that are shared; files can be made there."""

    def fail(source: str, target: str) -> None:
        raise OSError(code, os.strerror(code), source, None, target)

    monkeypatch.setattr(os, "link", fail)
    with pytest.raises(
        TransportUnavailable, match=r"; choose a .* with hard links, or"
    ):
        meet(None)
    assert list(runtime.iterdir()) == []


@pytest.mark.parametrize("name", ["lock", "key"])
def test_what_is_in_place_of_a_file_is_to_be_removed(name: str, tmp_path: Path) -> None:
    """Whatever made a directory of that name."""
    with contextlib.closing(meet(tmp_path.as_uri())):
        (group,) = tmp_path.iterdir()
    Path(group, name).mkdir(parents=True)
    group.chmod(0o700)
    with pytest.raises(TransportUnavailable, match=f"{name}'; remove it, or"):
        meet(tmp_path.as_uri())


def test_who_cannot_open_a_file_leaves_nothing_behind(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even its lock; the remedy is the one for that."""
    opened = os.open

    def refuse(path: str, *args: Any, **options: Any) -> int:
        if str(path).endswith("lock"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)
        return opened(path, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(TransportUnavailable, match=r"open files.*ulimit -n"):
        meet(None)
    assert list(runtime.iterdir()) == []


def test_a_removed_directory_is_made_again(runtime: Path) -> None:
    """A cleaner of /tmp costs nothing but a renewal; the key stays the same."""
    with contextlib.closing(meet(None)) as one, contextlib.closing(meet(None)) as two:
        mine, theirs = one.claim(record("x")), two.claim(record("y"))
        assert one.directory is not None
        shutil.rmtree(one.directory)
        assert one.renew(mine.record)
        assert two.renew(theirs.record)
        with contextlib.closing(meet(None)) as three:
            assert names(three) == ["x", "y"]
            assert one.secret == two.secret == three.secret


def test_the_key_is_random_and_private(runtime: Path) -> None:
    """Each life of a group has another key, and only the owner may read it."""
    with contextlib.closing(meet(None)) as one:
        first = one.secret
        assert one.directory is not None
        for path in (Path(one.directory), Path(one.directory, "key")):
            assert path.stat().st_mode & 0o077 == 0
    with contextlib.closing(meet(None)) as two:
        assert len(first) == len(two.secret) == 32
        assert first != two.secret


def test_a_directory_open_to_others_is_refused(runtime: Path) -> None:
    """The error names the directory, what is wrong, and the remedy."""
    base = Path(place.local_base())
    base.mkdir(mode=0o755)
    with pytest.raises(TransportUnavailable, match=f"{base} is open.*0755.*remove it"):
        meet(None)


def test_a_symlink_in_place_of_the_directory_is_refused(runtime: Path) -> None:
    """Nobody can direct a member to a directory of their choice."""
    target = runtime / "elsewhere"
    target.mkdir(mode=0o700)
    Path(place.local_base()).symlink_to(target)
    with pytest.raises(TransportUnavailable, match="is not a directory"):
        meet(None)


def test_a_directory_of_another_user_is_refused(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory that somebody else made in our name is not trusted."""
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    Path(place.local_base()).mkdir(mode=0o700)
    with pytest.raises(TransportUnavailable, match=f"belongs to user {owner}, not"):
        meet(None)


def test_a_given_directory_open_to_others_is_refused_with_its_remedy(
    runtime: Path,
) -> None:
    """Where it was given, no variable of the environment moves it."""
    group = runtime / place.safe_name("g")
    group.mkdir(mode=0o755)
    told = re.escape(str(group)) + " is open.*; remove it, or give .* file://"
    with pytest.raises(TransportUnavailable, match=told) as caught:
        meet(f"file://{runtime}")
    assert "TMPDIR" not in str(caught.value)


def test_a_shared_directory_must_exist(runtime: Path) -> None:
    """A misspelt path is an error and not a group of one."""
    with pytest.raises(TransportUnavailable, match="does not exist; create it"):
        meet(f"file://{runtime}/missing")


def test_a_shared_directory_must_be_one(runtime: Path) -> None:
    """A file is there, so creating it would be no remedy."""
    Path(runtime, "file").touch()
    with pytest.raises(TransportUnavailable, match="is not a directory; give one"):
        meet(f"file://{runtime}/file")


def test_a_shared_directory_behind_a_closed_one_may_exist(runtime: Path) -> None:
    """To create it would be no remedy where this user may not look."""
    closed = runtime / "closed"
    closed.mkdir(mode=0o000)
    user = os.geteuid()
    os.seteuid(user or 65534)  # root may look everywhere
    try:
        with pytest.raises(TransportUnavailable, match="may not enter; give one"):
            place.check_shared(f"{closed}/shared")
    finally:
        os.seteuid(user)


def test_a_path_that_leads_nowhere_is_no_missing_directory(runtime: Path) -> None:
    """The error says what the system says."""
    Path(runtime, "loop").symlink_to(Path(runtime, "loop"))
    with pytest.raises(TransportUnavailable, match=r"Too many levels.*give one"):
        meet(f"file://{runtime}/loop")


def test_a_file_system_that_takes_no_directories_is_no_race(runtime: Path) -> None:
    """It says that there is no such file, as where the last member has just left."""
    with pytest.raises(TransportUnavailable, match=r"cannot meet in /proc.*another"):
        meet("file:///proc")


def _make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.symlink_to("/dev/null"),
        Path.mkdir,
        os.mkfifo,
        _make_socket,
    ],
    ids=["symlink", "directory", "fifo", "socket"],
)
def test_what_is_no_file_holds_the_name_that_it_stands_for(
    make: Callable[[Path], object], runtime: Path
) -> None:
    """Until whoever reads which it is has removed it."""
    with contextlib.closing(meet(None)) as one:
        one.claim(record("x"))
        assert one.directory is not None
        (file,) = Path(one.directory).glob("m-*")
        file.unlink()
        make(file)
        told = f"{file} cannot be read: it is no regular file.*remove it"
        with contextlib.closing(meet(None)) as two:
            for call in (two.records, lambda: two.claim(record("x", "b"))):
                with pytest.raises(ConnectRefused, match=told):
                    call()
            assert two.claim(record("y", "b")).holder is None
        if file.is_dir():
            file.rmdir()


@contextlib.contextmanager
def _listening(meeting: Rendezvous) -> Iterator[Path]:
    """A socket file in the directory on which somebody listens; it stays there."""
    assert meeting.directory is not None
    path = Path(meeting.directory, "x.zmq")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        yield path


def test_the_socket_file_of_who_is_only_silent_stays(runtime: Path) -> None:
    """Who was stopped goes on listening there, and has no other place for peers."""
    with contextlib.closing(meet(None)) as one:
        with _listening(one) as path:
            stopped = record("stopped", addresses=(f"ipc://{path}",), lease=20.0)
            one.claim(stopped)
            _age(one, 15.0)
            one.sweep(stopped.name, stopped.incarnation, proven=False)
            assert path.exists()
            one.sweep(stopped.name, stopped.incarnation)
            assert not path.exists()


def test_the_socket_file_of_who_listens_no_more_goes_with_the_record(
    runtime: Path,
) -> None:
    """In another container nobody can prove more; every newcomer would dial it."""
    with contextlib.closing(meet(None)) as one:
        with _listening(one) as path:
            pass
        killed = record("killed", addresses=(f"ipc://{path}",), lease=20.0)
        one.claim(killed)
        one.sweep(killed.name, killed.incarnation, proven=False)
        assert names(one) == ["killed"]
        _age(one, 15.0)
        one.sweep(killed.name, killed.incarnation, proven=False)
        assert names(one) == []
        assert not path.exists()


def test_who_leaves_last_need_not_wait_for_a_lease_of_the_dead(runtime: Path) -> None:
    """In a given directory, where locks may not reach other hosts."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    dead = dataclasses.replace(here(), pid=child)
    place = runtime / "given"
    place.mkdir()
    with contextlib.closing(meet(f"file://{place}")) as one:
        one.claim(record("dead", process=dead, lease=1000.0))
        one._mine.clear()  # it is not this member's to give back
        assert names(one) == ["dead"]
    assert not list(place.iterdir())


def test_a_lock_that_another_host_removed_is_no_lock(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS says ESTALE of the open file."""
    place_of_lock = runtime / "lock"
    place_of_lock.touch()

    def stale(fd: int) -> os.stat_result:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", stale)
        assert place.is_current(0, str(place_of_lock)) is False


@pytest.mark.parametrize("character", "\t\n\r\x01")
def test_a_path_with_a_control_character_is_to_be_encoded(character: str) -> None:
    """Some of them would be left out in silence."""
    with pytest.raises(ValueError, match=f"control character.*%{ord(character):02X}"):
        place.shared_path(f"file:///a{character}b")
    assert place.shared_path(f"file:///a%{ord(character):02X}b") == f"/a{character}b"


def test_a_path_of_bytes_is_what_pathlib_says_of_it() -> None:
    """It need not be UTF-8."""
    path = Path(os.fsdecode(b"/a/\xe9"))
    assert place.shared_path(path.as_uri()) == str(path)
    assert place.shared_path(f"file://{path}") == str(path)


def test_a_record_does_not_go_for_its_age(runtime: Path) -> None:
    """Who stood still for hours goes on; and the clock may have been set forward."""
    with contextlib.closing(meet(None)) as one, _listening(one) as path:
        one.claim(record("x", addresses=(f"ipc://{path}",)))
        one.claim(record("y", addresses=("tcp://127.0.0.1:1",)))
        _age(one, 10000.0)
        assert names(one) == names(one) == ["x", "y"]
        assert path.exists()


def test_who_stood_still_for_hours_does_not_take_its_name_back(runtime: Path) -> None:
    """Not even where it had many lives, and the next holder only this one."""
    with contextlib.closing(meet(None)) as one, contextlib.closing(meet(None)) as two:
        for before, now in zip("cab", "abd", strict=True):
            mine = one.claim(record("x", now), replaces=before * 16).record
        two.sweep("x", mine.incarnation)
        _age(two, 10000.0)
        assert names(two) == []
        theirs = two.claim(record("x", "e")).record
        assert theirs.generation > mine.generation
        assert not one.renew(mine)
        assert two.renew(theirs)


def test_a_renewal_is_of_what_is_there(runtime: Path) -> None:
    """Cleaners remove old files one by one, so that a name may begin anew."""
    with contextlib.closing(meet(None)) as one, contextlib.closing(meet(None)) as two:
        mine = one.claim(record("x", "a")).record
        assert names(one) == ["x"]
        assert one.directory is not None
        (file,) = Path(one.directory).glob("m-*")
        file.unlink()
        two.claim(record("x", "b"))
        assert file.exists()
        assert not one.renew(mine)


def test_who_finds_the_directory_made_anew_reads_it_anew(runtime: Path) -> None:
    """Other members may have names and generations that were known of before."""
    with contextlib.closing(meet(None)) as one:
        one.claim(record("x", "a"))
        assert names(one) == ["x"]
        assert one.directory is not None
        shutil.rmtree(one.directory)
        with contextlib.closing(meet(None)) as two:
            two.claim(record("x", "b"))
            assert one.records()[0].record.incarnation == "b" * 16


def test_a_lease_ends_also_where_the_clock_was_set_back(runtime: Path) -> None:
    """By hours, maybe; who ended before would be waited for all that time."""
    with contextlib.closing(meet(None)) as one:
        one.claim(record("ended", lease=1e-6))
        _age(one, -10000.0)
        one.records()
        eventually(lambda: one.records()[0].expired, 10.0)


def _age(rendezvous: Rendezvous, seconds: float) -> None:
    """Nobody has renewed its lease for so long."""
    assert rendezvous.directory is not None
    then = time.time() - seconds
    for file in Path(rendezvous.directory).glob("m-*"):
        os.utime(file, (then, then))


def test_socket_files_go_with_the_record(runtime: Path) -> None:
    """What SIGKILL leaves of a member is swept; nothing outside is touched."""
    outside = runtime / "outside.sock"
    with contextlib.closing(meet(None)) as one, socket.socket(socket.AF_UNIX) as s:
        assert one.directory is not None
        inside = Path(one.directory, "dead.sock")
        s.bind(str(inside))
        outside.touch()
        addresses = (f"ipc://{inside}", f"ipc://{outside}", "tcp://127.0.0.1:1")
        dead = one.claim(record("dead", addresses=addresses)).record
        one.sweep("dead", dead.incarnation)
        assert not inside.exists()
        assert outside.exists()
        outside.unlink()


def test_without_locks_claims_hold_and_the_directory_stays(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system without flock loses only the removal at the end."""

    def refuse(*_: object) -> None:
        raise OSError(95, "no locks here")

    monkeypatch.setattr("fcntl.flock", refuse)
    spec = f"file://{runtime}"
    with contextlib.closing(meet(spec)) as one, contextlib.closing(meet(spec)) as two:
        assert one.claim(record("x", "a")).holder is None
        assert two.claim(record("x", "b")).holder is not None
    left = [path.name for path in runtime.rglob("*") if not path.name.startswith("m-")]
    assert sorted(left) == sorted([place.safe_name("g"), "key", "lock"])


def test_names_that_were_given_back_have_one_file_soon(runtime: Path) -> None:
    """They do not pile up; that one tells the highest generation."""
    with contextlib.closing(meet(None)) as one:
        assert one.directory is not None
        for times in (2, 1, 3):
            for name in ("given back", "often"):
                one.claim(record(name))
                one.sweep(name, "a" * 16)
            for _ in range(times):
                one.claim(record("often"))
                one.sweep("often", "a" * 16)
            Path(one.directory, "free-1").touch()  # by two who have done it at once
            _age(one, 60.0)
            one.records()
        files = {path.name for path in Path(one.directory).iterdir()}
        assert files - {"key", "lock"} == {"free-18"}
        assert one.claim(record("new")).record.generation == 19


def test_who_was_stopped_in_the_middle_of_a_claim_compares_anew(runtime: Path) -> None:
    """Whether the name had a file of its own by then, or there was none at all."""
    store = DirectoryStore(place.local_base(), "g", shared=False, timeout=5.0)
    with contextlib.closing(store), contextlib.closing(meet(None)) as other:
        for name in ("first", "x"):
            before, token = store.read(name)
            other.claim(record(name))
            other.sweep(name, "a" * 16)
            if name == "x":
                before, token = store.read(name)
                other.claim(record(name))
                other.sweep(name, "a" * 16)
            _age(other, 10000.0)
            other.records()
            late = Cell(1 if before is None else before.generation + 1, record(name))
            assert not store.swap(name, token, late)
            assert list(Path(store.path).glob("m-*")) == []


def test_of_a_claim_beside_a_release_one_is_done(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sees the other's state, and both would take back their own."""
    published = {"release": threading.Event(), "claim": threading.Event()}
    released = threading.Event()
    publish = directory.publish_file

    def slowly(path: str, name: str, content: bytes) -> bool:
        done = publish(path, name, content)
        me = threading.current_thread().name
        if me in published and not published[me].is_set():
            published[me].set()
            waits = published["claim"] if me == "release" else released
            assert waits.wait(DEADLINE)
        return done

    with contextlib.closing(meet(None)) as one, contextlib.closing(meet(None)) as two:
        one.claim(record("x"))
        monkeypatch.setattr(directory, "publish_file", slowly)

        def release() -> None:
            one.sweep("x", "a" * 16)
            released.set()

        thread = threading.Thread(target=release, name="release")
        thread.start()
        assert published["release"].wait(DEADLINE)
        claims: list[Any] = []
        claimant = threading.Thread(
            target=lambda: claims.append(two.claim(record("x", "b"))), name="claim"
        )
        claimant.start()
        claimant.join()
        thread.join()
        assert claims[0].holder is None
        assert [r.record.incarnation for r in two.records()] == ["b" * 16]


def test_names_that_were_given_back_stay_where_there_is_no_room(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who lists the members needs none, and what is there must not be lost."""

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with contextlib.closing(meet(None)) as one:
        mine = one.claim(record("x")).record
        one.sweep("x", mine.incarnation)
        _age(one, 10000.0)
        with monkeypatch.context() as patch:
            patch.setattr(os, "link", fail)
            assert names(one) == []
        assert one.claim(record("x")).record.generation > mine.generation


def test_groups_that_died_long_ago_are_removed(runtime: Path) -> None:
    """Where the last member was killed, a member of any other group cleans up."""
    dead = [meet(None, group) for group in ("dead", "lives on", "died lately")]
    for rendezvous in dead:
        rendezvous.claim(record("x"))
        assert rendezvous.directory is not None
        if rendezvous is not dead[2]:
            os.utime(Path(rendezvous.directory, "lock"), (0, 0))
        if rendezvous is not dead[1]:
            rendezvous._store.abandon()  # as the end of the process closes the lock
    with contextlib.closing(meet(None)) as living:
        assert living.directory is not None
        left = {path.name for path in Path(living.directory).parent.iterdir()}
    assert left == {place.safe_name(g) for g in ("g", "lives on", "died lately")}
    dead[1].close()


def test_long_runtime_directories_are_passed_over(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A socket path in the directory of a group has room for a file name."""
    long = runtime / ("d" * 100)
    long.mkdir()
    for variable in ("XDG_RUNTIME_DIR", "TMPDIR"):
        monkeypatch.setenv(variable, str(long))
    monkeypatch.setattr(tempfile, "tempdir", None)
    path = os.path.join(place.local_base(), place.safe_name("g" * 100))
    assert len(os.fsencode(path)) <= 70


@given(st.lists(st.text(min_size=1, max_size=100), unique=True, max_size=20))
def test_safe_names_are_short_and_do_not_collide(groups: list[str]) -> None:
    """Groups that differ in anything, case or slashes, get different directories."""
    groups = [group for group in groups if group.isprintable()]
    safe = {place.safe_name(group).lower() for group in groups}
    assert len(safe) == len(groups)
    assert all(re.fullmatch(r"[a-z0-9_]{1,12}-[0-9a-f]{16}", name) for name in safe)
