"""What is looked at before a queue is made."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import itertools
import math
import os
import re
import select
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from fresh_python import output_of
from meeting import (
    DEADLINE,
    eventually,
    free_port,
    freeze,
    held_elsewhere,
    meet,
    names,
    no_descriptors,
    process_of,
    record,
    runtime,
)
from nng_links import nng_runs
from refusals import unknown_host
from tls_files import tls_options

import mq
from mq import process
from mq.addresses import has_listener
from mq.arrival import LOOK_SECONDS, PROBE_SECONDS, Arrival
from mq.errors import TransportUnavailable
from mq.mesh.dial import Dial
from mq.mesh.greeting import Greetings
from mq.rendezvous import Rendezvous, claimants, open_rendezvous
from mq.rendezvous.directory import DirectoryStore
from mq.rendezvous.record import Entry, Record
from mq.testing import wait_until
from mq.transport import Event, Link, What

__all__ = ["nng_runs", "runtime"]


def test_descriptors_that_go_while_it_connects_are_told_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another thread may take them after they were counted."""
    monkeypatch.setattr("mq.join.check_descriptors", lambda: None)
    mq.connect("tcp", group="g").close()  # so that all it needs is loaded
    with no_descriptors():
        with pytest.raises(TransportUnavailable, match=r"open files.*`ulimit -n`"):
            mq.connect("tcp", group="g")


@pytest.mark.parametrize(
    ("backend", "count"),
    [
        *itertools.product(["tcp", "shm", "nng:ipc", "zmq:ipc", "auto"], [1, 2]),
        ("zmq:ipc", 3),
    ],
)
def test_whatever_cannot_be_watched_with_is_told(
    nng_runs: None, backend: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what happens when the half of a link is closed that was never made."""
    made: list[object] = []
    epoll = select.epoll

    def make() -> select.epoll:
        made.append(None)
        if len(made) == count:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return epoll()

    monkeypatch.setattr(select, "epoll", make)
    with pytest.raises(TransportUnavailable, match=r"ulimit -n"):
        mq.connect(backend, group="g").close()


@pytest.mark.parametrize("backend", ["nng:ipc", "shm", "tcp", "zmq:ipc"])
def test_the_working_directory_may_have_been_removed(
    backend: str, tmp_path: Path, nng_runs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file of a queue's is looked for there."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    mq.connect(backend, group="g").close()


@pytest.mark.parametrize(
    ("module", "asked", "patch"),
    [
        ("gevent.monkey", "is_module_patched", "select"),
        ("gevent.monkey", "is_module_patched", "_thread"),  # "thread" it denies
        ("eventlet.patcher", "is_monkey_patched", "thread"),
        ("eventlet.patcher", "is_monkey_patched", "socket"),
    ],
)
def test_what_replaces_the_calls_that_threads_wait_in_is_named(
    module: str, asked: str, patch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread would wait for ever; where nothing is replaced all is well."""
    patched = {"socket"} if module == "gevent.monkey" else {"time"}
    fake = types.ModuleType(module)
    setattr(fake, asked, patched.__contains__)
    monkeypatch.setitem(sys.modules, module, fake)
    mq.connect("inproc", group="g").close()
    patched.add(patch)
    told = rf"{module.partition('.')[0]} has patched .*{patch.strip('_')}"
    with pytest.raises(TransportUnavailable, match=told):
        mq.connect("inproc", group="g")


EVERYWHERE: dict[str, tuple[str, dict[str, Any]]] = {
    "auto": ("tcp://0.0.0.0:0", {}),
    "nng": ("tcp://0.0.0.0:0", {}),
    "nng:tls": ("tls+tcp://0.0.0.0:0", tls_options()),
    "tcp": ("tcp://0.0.0.0:0", {}),
    "tls": ("tls://0.0.0.0:0", tls_options()),
    "zmq": ("tcp://*:*", {}),
}


@pytest.mark.parametrize("backend", EVERYWHERE)
def test_whom_other_hosts_can_reach_needs_a_secret(backend: str) -> None:
    """Or to be told that everyone may join; the error names both, and the address."""
    address, options = EVERYWHERE[backend]
    options = {"group": "g", "listen": address, **options}

    with pytest.raises(ValueError, match=re.escape(f"listen={address!r}")) as caught:
        mq.connect(backend, **options)

    assert "secret=" in str(caught.value)
    assert "insecure=True" in str(caught.value)
    for allowed in ({"secret": "long enough"}, {"insecure": True}):
        with mq.connect(backend, **options, **allowed) as queue:
            assert queue.describe()["rendezvous"] == "explicit"
            assert queue.describe()["addresses"]


@pytest.mark.parametrize("backend", EVERYWHERE)
def test_what_only_this_host_can_reach_needs_none(backend: str) -> None:
    """Its users are the machine's own."""
    address, options = EVERYWHERE[backend]
    local = re.sub(r"//.*:", "//127.0.0.1:", address)

    with mq.connect(backend, group="g", listen=local, **options) as queue:
        assert queue.describe()["addresses"]


@pytest.mark.parametrize("backend", [*EVERYWHERE, "torchrpc"])
def test_an_unknown_host_to_listen_on_is_named(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The resolver's own error says neither host nor address."""
    monkeypatch.setattr(socket, "getaddrinfo", unknown_host)
    address, options = EVERYWHERE.get(backend, ("torchrpc://h:0", {}))
    elsewhere = re.sub(r"//.*:", "//nowhere.invalid:", address).replace(":*", ":0")

    with pytest.raises(OSError, match=r"host 'nowhere\.invalid' cannot be") as caught:
        mq.connect(backend, group="g", listen=elsewhere, insecure=True, **options)

    assert elsewhere in str(caught.value) or backend == "torchrpc"
    assert "Name or service not known" in str(caught.value)


@pytest.mark.parametrize("backend", EVERYWHERE)
def test_a_name_that_is_no_host_to_listen_on_is_named(backend: str) -> None:
    """The error of one that is too long is of another kind."""
    address, options = EVERYWHERE[backend]
    elsewhere = re.sub(r"//.*:", f"//{'x' * 70}:", address).replace(":*", ":0")

    with pytest.raises(OSError, match=f"cannot listen on {re.escape(elsewhere)}"):
        mq.connect(backend, group="g", listen=elsewhere, insecure=True, **options)


@pytest.mark.parametrize("backend", [*EVERYWHERE, "torchrpc"])
def test_a_port_on_which_somebody_listens_is_named_as_it_was_given(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the variable that gave it, whatever the engine calls the host."""
    address, options = EVERYWHERE.get(backend, ("torchrpc://h:0", {}))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        at = f"127.1:{listener.getsockname()[1]}"
        monkeypatch.setenv("MQ_LISTEN", f"tcp://{at}")
        elsewhere = f"{address.partition(':')[0]}://{at}"

        told = f"MQ_LISTEN: cannot listen on {re.escape(elsewhere)}: "
        with pytest.raises(OSError, match=told) as caught:
            mq.connect(backend, group="g", **options)

    assert caught.value.errno == errno.EADDRINUSE


@pytest.mark.parametrize("backend", [*EVERYWHERE, "torchrpc"])
def test_an_address_of_tcp_is_taken_by_whatever_goes_over_it(backend: str) -> None:
    """So that who names addresses changes nothing but the backend."""
    _, options = EVERYWHERE.get(backend, ("", {}))
    options = {"group": "g", "secret": "long enough", **options}
    here = "tcp://127.0.0.1:0"
    with mq.connect(backend, listen=here, **options) as a:
        *_, address = a.describe()["addresses"]
        named = f"tcp://{address.partition('://')[2]}"
        with mq.connect(backend, attach_to=named, **options) as b:
            assert len(b.members()) == 2


@pytest.mark.parametrize("rest", ["127.0.0.1", "127.0.0.1:99999", ":5", "127.0.0.1:0"])
@pytest.mark.parametrize("backend", [*EVERYWHERE, "torchrpc"])
def test_an_address_that_nobody_can_have_is_refused_at_once(
    backend: str, rest: str
) -> None:
    """Not dialled until connect_timeout, as if somebody might still come there."""
    _, options = EVERYWHERE.get(backend, ("", {}))
    attach, begin = f"tcp://{rest}", time.monotonic()

    told = rf"//{re.escape(rest)}' is no address .*, over TCP with its port"
    with pytest.raises(ValueError, match=told):
        mq.connect(
            backend, group="g", attach_to=attach, connect_timeout=DEADLINE, **options
        )
    assert time.monotonic() - begin < DEADLINE / 2


def test_an_address_without_a_path_is_refused_at_once() -> None:
    """As one without a port is."""
    begin = time.monotonic()
    with pytest.raises(ValueError, match="'shm://' is no address of backend 'shm'"):
        mq.connect("shm", group="g", attach_to="shm://", connect_timeout=DEADLINE)
    assert time.monotonic() - begin < DEADLINE / 2


def test_who_lost_its_name_looks_after_nothing_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It greets nobody, which it could not; its calls say who has the name."""
    with mq.connect("tcp", group="lost", name="a") as queue:
        joined = queue._joined
        meeting = joined.meeting
        assert meeting is not None
        assert joined.record is not None
        late = dataclasses.replace(joined.record, name="b", incarnation="e" * 16)
        monkeypatch.setattr(meeting, "recent", lambda: [Entry(late, 0.0)])
        monkeypatch.setattr(meeting, "renew", lambda _: False)
        joined.upkeep()
        with pytest.raises(mq.Closed, match="replaced by another 'a'"):
            queue.recv()


ELSEWHERE = """
import os, mq
for name in "ab":
    try:
        mq.connect("inproc", group={group!r}, name=name, connect_timeout=2)
    except mq.TransportUnavailable as error:
        print(error)
    else:
        os._exit(0)  # which leaves its record
"""


def test_inproc_is_not_available_between_processes() -> None:
    """Who comes second is told at once, whatever it is called, and of whom."""
    group = f"elsewhere-{os.getpid()}"
    with mq.connect("inproc", group=group, name="a") as queue:
        told = output_of(ELSEWHERE.format(group=group)).splitlines()
        assert len(told) == 2
        for line in told:
            assert f"'a', pid {os.getpid()} on " in line
            assert "group of its own" in line
            assert "such as shm" in line
        with mq.connect("inproc", group=group, name="b", connect_timeout=2):
            wait_until(lambda: len(queue.members()) == 2, "the first to know of it")


def test_inproc_does_not_mind_what_an_ended_process_left() -> None:
    """Its record means nobody, and goes."""
    group = f"ended-{os.getpid()}"
    assert output_of(ELSEWHERE.format(group=group)) == ""
    for name in "ab":
        with mq.connect("inproc", group=group, name=name, connect_timeout=2) as queue:
            assert len(queue.members()) == 1


def record_another(queue: mq.MQ, **changes: Any) -> None:
    """Record a member `b` that is not there, like this one but for the changes."""
    meeting, record = queue._joined.meeting, queue._joined.record
    assert meeting is not None
    assert record is not None
    other = dataclasses.replace(record, name="b", incarnation="e" * 16, **changes)
    meeting.claim(other)


def test_a_member_on_another_host_that_cannot_be_reached_is_explained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing was tried; it says where it listens, and what to do.

    Nor is the rendezvous asked on and on: that member may come to dial this one.
    """
    options: dict[str, Any] = {"group": f"apart-{os.getpid()}"}
    looks: list[None] = []
    greet = Arrival._greet_recorded

    def look(arrival: Arrival) -> list[Entry]:
        looks.append(None)
        return greet(arrival)

    monkeypatch.setattr(Arrival, "_greet_recorded", look)
    with mq.connect("tcp", name="a", **options) as queue:
        record = queue._joined.record
        assert record is not None
        elsewhere = dataclasses.replace(record.process, boot_id="other", host="far")
        record_another(queue, process=elsewhere)
        with pytest.raises(mq.ConnectTimeout) as caught:
            mq.connect("tcp", name="c", connect_timeout=0.5, **options)
    address = record.addresses[0]
    assert f"on far, listens on {address}, which cannot be reached" in str(caught.value)
    assert len(looks) <= 2 + 0.5 / LOOK_SECONDS + 1  # the first is queue's own
    assert "must listen= (or MQ_LISTEN) where the other" in str(caught.value)


def test_a_loopback_where_nobody_answers_may_be_another_one() -> None:
    """Containers of one host have each their own, and the host's boot id."""
    options: dict[str, Any] = {"group": f"loopbacks-{os.getpid()}"}
    with mq.connect("tcp", name="a", **options) as queue:
        record_another(queue, addresses=(f"tcp://127.0.0.1:{free_port()}",))
        with pytest.raises(mq.ConnectTimeout, match=r"'b'.*namespace, one of the two"):
            mq.connect("tcp", name="c", connect_timeout=0.5, **options)


def test_an_address_where_nobody_answers_may_be_another_networks() -> None:
    """As that of a container behind address translation, which announces its own."""
    options: dict[str, Any] = {"group": f"translated-{os.getpid()}"}
    with mq.connect("tcp", name="a", **options) as queue:
        record_another(queue, addresses=("tcp://192.0.2.1:9",))
        told = r"'b'.*if tcp://192\.0\.2\.1:9 cannot be reached .*listen=.*attach_to="
        with pytest.raises(mq.ConnectTimeout, match=told):
            mq.connect("tcp", name="c", connect_timeout=0.5, **options)


def test_who_is_new_at_a_rendezvous_service_is_dialled_at_once() -> None:
    """Not only when it is next looked after: who cannot dial waits for that."""
    where: dict[str, Any] = {
        "group": "g",
        "rendezvous": f"tcp://127.0.0.1:{free_port()}",
    }
    with mq.connect("tcp", name="a", peer_timeout=4000.0, **where) as queue:
        driver, joined = queue._driver, queue._joined
        assert driver.lead.upkeep_seconds <= 5.0
        driver.lead.upkeep_seconds = 1000.0
        driver.lead._upkeep_at = math.inf  # none but those that are asked for
        assert joined.record is not None
        late = dataclasses.replace(joined.record, name="b", incarnation="e" * 16)
        service = open_rendezvous(
            where["rendezvous"], group="g", secret=None, timeout=30.0
        )
        with contextlib.closing(service):
            assert service.claim(late).holder is None
            joined.upkeep()
            dials = queue._mesh.dialling.dials
            assert driver.wait_until(
                lambda: any(dial.name == "b" for dial in dials), 20
            )


def test_who_was_killed_before_it_met_anybody_is_swept_and_not_dialled() -> None:
    """Its record would be a reason to dial it for ever."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    with mq.connect("tcp", name="a", group=f"dead-{os.getpid()}") as queue:
        joined = queue._joined
        assert joined.meeting is not None
        assert joined.record is not None
        dead = dataclasses.replace(joined.record.process, pid=child)
        record_another(queue, process=dead)
        joined.upkeep()
        assert not queue._mesh.dialling.dials
        joined.upkeep()
        assert [e.record.name for e in joined.meeting.records()] == ["a"]


def test_connect_has_one_deadline_at_the_rendezvous(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For all that it asks there; what a member asks later has time of its own."""
    deadlines: list[float] = []

    def noted(call: Callable[..., Any]) -> Callable[..., Any]:
        def ask(store: DirectoryStore, *args: object, **more: object) -> Any:
            deadlines.append(store.deadline())
            return call(store, *args, **more)

        return ask

    monkeypatch.setattr(DirectoryStore, "claim", noted(DirectoryStore.claim))
    monkeypatch.setattr(DirectoryStore, "records", noted(DirectoryStore.records))
    with mq.connect("tcp", group="deadline") as member:
        claim, records = deadlines[:2]
        assert claim == records
        assert member._joined.meeting is not None
        member._joined.meeting.records()
        assert deadlines[-1] > records


def test_a_member_knows_the_records_of_its_peers() -> None:
    """So it can tell a rendezvous that has lost them, if they do not themselves."""
    group = f"records-{os.getpid()}"
    with (
        mq.connect("tcp", group=group, name="a", labels=["x"]) as one,
        mq.connect("tcp", group=group, name="b", peer_timeout=3.0, labels=["y"]),
    ):
        one.wait_for_members(2, timeout=DEADLINE)
        meeting = one._joined.meeting
        assert meeting is not None
        theirs = [e.record for e in meeting.records() if e.record.name == "b"]
        assert one._joined.present() == meeting.present() == theirs


def _connected(options: dict[str, Any], pipe: Connection) -> None:
    """Be a member until the process is ended."""
    with mq.connect(**{"backend": "tcp", "name": "b"} | options):
        pipe.send("connected")
        pipe.recv()


def _of_another_boot(options: dict[str, Any], pipe: Connection) -> None:
    """The same in a container that has a boot id of its own."""
    process.boot_id = lambda: "another"
    _connected(options, pipe)


@pytest.mark.parametrize("backend", ["shm", "zmq:ipc", "nng:ipc", "auto"])
def test_whose_socket_file_is_here_is_met_whatever_its_boot_is_called(
    backend: str,
) -> None:
    """Containers may share the directory, and have boot ids of their own."""
    options = {"backend": backend, "group": f"boots-{os.getpid()}"}
    options |= {"connect_timeout": DEADLINE}
    with process_of(_of_another_boot, options) as (_, pipe):
        assert pipe.recv() == "connected"
        with mq.connect(name="a", **options) as queue:
            assert [member.name for member in queue.members()] == ["a", "b"]


def test_who_was_killed_on_another_host_comes_again_under_its_name() -> None:
    """Also where nothing but silence tells the others that it is dead."""
    options: dict[str, Any] = {
        "group": "g",
        "secret": b"known to all",
        "peer_timeout": 2,
    }
    with mq.connect("tcp", name="a", listen="tcp://127.0.0.1:0", **options) as queue:
        options["attach_to"] = queue.describe()["addresses"]
        with process_of(_of_another_boot, options) as (child, pipe):
            assert pipe.recv() == "connected"
            child.kill()
            child.join(DEADLINE)
            with process_of(_of_another_boot, options) as (successor, pipe):
                assert pipe.recv() == "connected"
                queue.wait_for_members(2, timeout=DEADLINE)
                assert [m.pid for m in queue.members()] == [os.getpid(), successor.pid]


def test_a_file_of_that_name_on_another_host_takes_no_name_away() -> None:
    """Whoever listens there, if anybody does, is not the member that is asked for."""
    with _held_far_away("shm") as (options, _):
        told = r"'x'.* held by pid \d+ on far.* cannot be asked from here.* lease of"
        with pytest.raises(mq.ConnectTimeout, match=told):
            mq.connect(name="x", connect_timeout=2 * PROBE_SECONDS, **options)


def _unable_to_prove(queue: mq.MQ) -> Rendezvous:
    """Have a member see no process, as from another container; where it meets."""
    queue._mesh.config.watch = lambda process: None
    meeting = queue._joined.meeting
    assert meeting is not None
    return meeting


@pytest.mark.parametrize("backend", ["tcp", "shm"])
def test_newcomers_need_not_wait_for_a_member_that_was_given_up(backend: str) -> None:
    """Its record goes then, also where nobody can prove that its process has ended."""
    options: dict[str, Any] = {"group": f"given-up-{backend}-{os.getpid()}"}
    options |= {"peer_timeout": 2.0, "backend": backend}
    with mq.connect(name="a", **options) as queue:
        meeting = _unable_to_prove(queue)
        with process_of(_connected, options) as (child, pipe):
            assert pipe.recv() == "connected"
            assert sorted(names(meeting)) == ["a", "b"]
            child.kill()
            eventually(lambda: names(meeting) == ["a"])


def test_who_stood_still_for_hours_is_found_again() -> None:
    """By who came meanwhile, and by who comes later."""
    options: dict[str, Any] = {"group": f"stood-{os.getpid()}", "backend": "shm"}
    with process_of(_connected, options) as (child, pipe):
        assert pipe.recv() == "connected"
        freeze(child.pid)
        with contextlib.closing(meet(None, options["group"])) as looking:
            assert looking.directory is not None
            for file in Path(looking.directory).glob("m-*"):
                os.utime(file, (0, 0))
            assert len(looking.records()) == 1
            with mq.connect(name="a", **options) as queue:
                assert [member.name for member in queue.members()] == ["a"]
                os.kill(child.pid, signal.SIGCONT)
                queue.wait_for_members(2, timeout=DEADLINE)
                eventually(lambda: names(looking) == ["a", "b"])
                (record,) = (
                    e.record for e in looking.records() if e.record.name == "b"
                )
                (address,) = record.addresses
                assert has_listener(address.partition("://")[2])
                with mq.connect(name="c", **options) as late:
                    assert [member.name for member in late.members()] == ["a", "b", "c"]


@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_who_stood_still_and_was_swept_is_found_again(runtime: Path, kind: str) -> None:
    """It writes its record anew, and who comes later need not be dialled by it."""
    kinds = {"file": f"file://{runtime}", "tcp": f"tcp://127.0.0.1:{free_port()}"}
    options: dict[str, Any] = {"group": "g", "rendezvous": kinds[kind]}
    options |= {"backend": "tcp", "peer_timeout": 2.0}
    with mq.connect(name="a", **options) as queue:
        meeting = _unable_to_prove(queue)
        with process_of(_connected, options) as (child, pipe):
            assert pipe.recv() == "connected"
            freeze(child.pid)
            eventually(lambda: names(meeting) == ["a"])
            with mq.connect(name="c", **options) as other:
                os.kill(child.pid, signal.SIGCONT)
                other.wait_for_members(3, timeout=DEADLINE)
                queue.wait_for_members(3, timeout=DEADLINE)
                assert sorted(names(meeting)) == ["a", "b", "c"]
                with mq.connect(name="d", **options) as late:
                    assert len(late.members()) == 4


def test_who_lives_is_met_though_its_lease_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So it is where it was the rendezvous that could not be reached for some time."""
    options: dict[str, Any] = {"group": f"lapsed-{os.getpid()}"}
    with mq.connect("tcp", name="a", **options):
        monkeypatch.setattr(Entry, "expired", True)
        with mq.connect("tcp", name="b", **options) as queue:
            assert [member.name for member in queue.members()] == ["a", "b"]


def lapsed(queue: mq.MQ, address: str) -> Record:
    """The record of a member that may have ended; its lease has."""
    record = queue._joined.record
    assert record is not None
    contained = dataclasses.replace(record.process, pid_namespace=1)
    return dataclasses.replace(
        record,
        name="lapsed",
        incarnation="e" * 16,
        addresses=(address,),
        process=contained,
        lease=1e-6,
    )


@pytest.mark.parametrize("connect_timeout", [3.0, DEADLINE])
def test_who_does_not_answer_after_its_lease_is_not_waited_for_again(
    connect_timeout: float,
) -> None:
    """Its record goes, whether there was time enough to be sure or not."""
    options: dict[str, Any] = {"group": f"silent-{os.getpid()}"}
    with (
        mq.connect("tcp", name="a", **options) as queue,
        socket.create_server(("127.0.0.1", 0)) as silent,
    ):
        meeting = queue._joined.meeting
        assert meeting is not None
        record = lapsed(queue, f"tcp://127.0.0.1:{silent.getsockname()[1]}")
        assert meeting.claim(record).holder is None
        options["connect_timeout"] = connect_timeout
        with mq.connect("tcp", name="b", **options):
            assert names(meeting) == ["a", "b"]
            silent.settimeout(DEADLINE)
            silent.accept()[0].close()  # it was dialled


def test_a_stranger_at_an_address_of_old_refuses_nobody() -> None:
    """Who had the address may be gone, and others use it with a secret of their own."""
    options: dict[str, Any] = {"group": f"strange-{os.getpid()}"}
    with (
        mq.connect("tcp", name="a", **options) as queue,
        mq.connect("tcp", group="g", listen="tcp://127.0.0.1:0") as stranger,
    ):
        meeting = queue._joined.meeting
        assert meeting is not None
        record = lapsed(queue, stranger.describe()["addresses"][0])
        assert meeting.claim(record).holder is None
        with mq.connect("tcp", name="b", **options) as newcomer:
            assert len(newcomer.members()) == 2
            assert newcomer.stats()["mesh"]["unauthenticated"] == 1


@contextlib.contextmanager
def beside_a_stranger(
    kind: str,
) -> Iterator[tuple[dict[str, Any], mq.MQ, Rendezvous, Record]]:
    """A group of one, "a": its options, a stranger of another group, and a's record."""
    options: dict[str, Any] = {"group": f"{kind}-{os.getpid()}"}
    with (
        mq.connect("tcp", name="a", **options) as queue,
        mq.connect("tcp", group="g", listen="tcp://127.0.0.1:0") as stranger,
    ):
        meeting, record = queue._joined.meeting, queue._joined.record
        assert meeting is not None
        assert record is not None
        yield options, stranger, meeting, record


def elsewhere(record: Record, stranger: mq.MQ, **changes: Any) -> Record:
    """That of a member in another container, at whose address a stranger listens."""
    return dataclasses.replace(
        record,
        name="elsewhere",
        incarnation="e" * 32,
        addresses=(stranger.describe()["addresses"][0],),
        process=dataclasses.replace(record.process, pid_namespace=1),
        **changes,
    )


@pytest.mark.parametrize("name", ["b", "elsewhere"])
def test_a_stranger_at_the_address_of_the_dead_refuses_nobody_while_they_are_recorded(
    name: str,
) -> None:
    """Its refusal proves nothing; the lease is waited for, as where nobody answers."""
    with beside_a_stranger("squatted") as (options, stranger, meeting, record):
        dead = elsewhere(record, stranger, lease=3.0)
        begin = time.monotonic()
        assert meeting.claim(dead).holder is None
        with mq.connect("tcp", name=name, **options) as newcomer:
            assert time.monotonic() - begin > 2.9
            assert [member.name for member in newcomer.members()] == ["a", name]


@pytest.mark.parametrize("name", ["b", "elsewhere"])
def test_who_is_refused_by_a_member_that_lives_is_told_why(name: str) -> None:
    """Its record is renewed after that, so it was no stranger."""
    with beside_a_stranger("refused") as (options, stranger, meeting, record):
        other = elsewhere(record, stranger, lease=60.0)
        other = meeting.claim(other).record
        done = threading.Event()

        def renew() -> None:
            while not done.wait(0.5):
                meeting.renew(other)

        renewing = threading.Thread(target=renew)
        renewing.start()
        try:
            with pytest.raises(mq.AuthenticationFailed, match="'elsewhere' at tcp://"):
                mq.connect("tcp", name=name, **options)
        finally:
            done.set()
            renewing.join()


@pytest.mark.parametrize("name", ["b", "elsewhere"])
def test_a_refusal_that_is_doubted_is_told_when_the_time_is_up(name: str) -> None:
    """A wrong secret is more likely than a stranger, where connect cannot wait."""
    with beside_a_stranger("doubted") as (options, stranger, meeting, record):
        assert meeting.claim(elsewhere(record, stranger, lease=60.0)).holder is None
        told = "'elsewhere' at tcp://.* secret .it, or a stranger who has that address"
        with pytest.raises(mq.AuthenticationFailed, match=told):
            mq.connect("tcp", name=name, connect_timeout=2.0, **options)


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_stranger_at_one_of_its_addresses_does_not_speak_for_a_member(
    name: str,
) -> None:
    """Which answers at another: it is met, and has its name."""
    with beside_a_stranger("beside") as (options, stranger, meeting, record):
        first = elsewhere(record, stranger)
        both = (*first.addresses, *record.addresses)
        assert meeting.renew(
            dataclasses.replace(record, addresses=both, process=first.process)
        )
        with contextlib.ExitStack() as stack:
            if name == "a":
                stack.enter_context(pytest.raises(mq.ConnectRefused, match="held by"))
            begin = time.monotonic()
            joined = stack.enter_context(mq.connect("tcp", name=name, **options))
            assert [member.name for member in joined.members()] == ["a", "b"]
        assert time.monotonic() - begin < 4


def test_a_silent_holder_of_a_name_is_named_when_the_time_is_up() -> None:
    """It may live, and has not had the time in which it must answer."""
    options: dict[str, Any] = {"group": f"silent-{os.getpid()}"}
    with process_of(_connected, options) as (child, pipe):
        assert pipe.recv() == "connected"
        freeze(child.pid)
        with pytest.raises(mq.ConnectTimeout, match=f"'b'.* held by pid {child.pid}"):
            mq.connect("tcp", name="b", connect_timeout=0.3, **options)


def test_a_holder_of_a_name_has_longer_to_answer_on_a_slow_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """How slow it is shows in how long a connection takes to open."""
    options: dict[str, Any] = {"group": f"slow-{os.getpid()}"}
    with process_of(_connected, options) as (child, pipe):
        assert pipe.recv() == "connected"
        wake = functools.partial(os.kill, child.pid, signal.SIGCONT)
        waking = threading.Timer(PROBE_SECONDS + 1.0, wake)
        handle = Greetings.handle

        def handle_from_afar(greetings: Greetings, event: Event) -> None:
            if event.what is What.OPENED and not waking.ident:
                threading.Event().wait(0.25 * PROBE_SECONDS)
                freeze(child.pid)
                waking.start()
            handle(greetings, event)

        monkeypatch.setattr(Greetings, "handle", handle_from_afar)
        with pytest.raises(mq.ConnectRefused, match=f"held by pid {child.pid}"):
            mq.connect("tcp", name="b", connect_timeout=DEADLINE, **options)
        waking.join(DEADLINE)


def test_who_could_not_be_greeted_in_time_is_named() -> None:
    """Also where the time ends in a question to the rendezvous."""
    where = {"group": "g", "rendezvous": f"tcp://127.0.0.1:{free_port()}"}
    with (
        mq.connect("tcp", name="a", **where),
        process_of(_connected, where) as (child, pipe),
    ):
        assert pipe.recv() == "connected"
        freeze(child.pid)
        told = r"could not greet .* 'b'.*raise connect_timeout, as a slow network needs"
        with pytest.raises(mq.ConnectTimeout, match=told):
            mq.connect("tcp", name="c", connect_timeout=1.5, **where)


@pytest.mark.parametrize(
    ("owner", "name", "found", "error", "told"),
    [
        (
            Rendezvous,
            "renew",
            lambda *_: False,
            mq.ConnectRefused,
            "could not join: replaced by another 'c'.*choose another name",
        ),
        (Link, "ended", "it broke", TransportUnavailable, "could not join: it broke$"),
    ],
)
def test_who_must_stop_before_it_has_joined_was_not_closed(
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    found: object,
    error: type[mq.MQError],
    told: str,
) -> None:
    """Its caller never had a queue: `connect` says that, and why."""
    where: dict[str, Any] = {"group": f"robbed-{os.getpid()}", "peer_timeout": 1.0}
    with process_of(_connected, where) as (child, pipe):
        assert pipe.recv() == "connected"
        freeze(child.pid)
        # As of an agent of RPC that the application has started.
        by_close = property(lambda link: "" if link._is_open else "it was closed")
        monkeypatch.setattr(Link, "ended", by_close)
        monkeypatch.setattr(owner, name, found)
        with pytest.raises(error, match=told):
            mq.connect("tcp", name="c", connect_timeout=DEADLINE, **where)


@pytest.mark.parametrize("backend", ["inproc", "shm", "tcp", "zmq"])
def test_a_process_without_room_for_a_thread_is_told_so(
    monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """And keeps nothing of the try, as every test."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "mq-keeper":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        mq.connect(backend, group="no threads", name="a")


def test_a_link_that_cannot_say_what_it_is_leaves_nothing(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the last that `connect` asks for, when the member is one already."""

    def fail(link: Link) -> dict[str, str]:
        raise ZeroDivisionError

    monkeypatch.setattr(Link, "describe", fail)
    with contextlib.closing(meet(None)) as here:
        threads = set(threading.enumerate())
        descriptors = os.listdir("/proc/self/fd")
        with pytest.raises(ZeroDivisionError):
            mq.connect("tcp", group="g", name="x")
        assert names(here) == []
        assert set(threading.enumerate()) == threads
        assert os.listdir("/proc/self/fd") == descriptors


def test_who_could_not_join_keeps_nothing_of_whom_it_met() -> None:
    """No test leaves a descriptor, as that which tells when a peer's process ends."""
    where: dict[str, Any] = {"group": f"met-{os.getpid()}"}
    with (
        process_of(_connected, where) as (_, met),
        process_of(_connected, where | {"name": "c"}) as (silent, pipe),
    ):
        assert (met.recv(), pipe.recv()) == ("connected", "connected")
        freeze(silent.pid)
        with pytest.raises(mq.ConnectTimeout, match=r"could not greet .* 'c'"):
            mq.connect("tcp", name="a", connect_timeout=1.5, **where)


def test_who_leaves_is_waited_for_no_longer_than_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is recorded until it has left, and begins nothing meanwhile."""
    monkeypatch.setattr("mq.arrival.LOOK_SECONDS", DEADLINE)
    where: dict[str, Any] = {"group": "g", "connect_timeout": 2 * DEADLINE}
    a = mq.connect("tcp", name="a", **where)
    a._driver.run(lambda: a._mesh.leave("soon"))
    refuse, refused = a._mesh.greetings._refuse, threading.Event()

    def refuse_and_tell(*arguments: Any) -> None:
        refuse(*arguments)
        refused.set()

    monkeypatch.setattr(a._mesh.greetings, "_refuse", refuse_and_tell)
    joined: list[mq.MQ] = []
    thread = threading.Thread(
        target=lambda: joined.append(mq.connect("tcp", name="b", **where)),
        name="mq-test-joining",
    )
    thread.start()
    assert refused.wait(DEADLINE)
    a.close()
    thread.join(DEADLINE)
    (b,) = joined
    b.close()


def test_all_addresses_to_attach_to_are_dialled_at_once() -> None:
    """One where nobody answers delays no other; the error names it, and why."""
    options: dict[str, Any] = {"group": "g", "secret": "a secret of this test"}
    errors: list[mq.ConnectTimeout] = []
    with (
        mq.connect("tcp", name="a", listen="tcp://127.0.0.1:0", **options) as a,
        socket.create_server(("127.0.0.1", 0)) as silent,
    ):
        silent_at = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        nobody_at = f"tcp://127.0.0.1:{free_port()}"
        (address,) = a.describe()["addresses"]

        def attach() -> None:
            attach_to = [silent_at, nobody_at, address]
            try:
                mq.connect("tcp", attach_to=attach_to, connect_timeout=5.0, **options)
            except mq.ConnectTimeout as error:
                errors.append(error)

        thread = threading.Thread(target=attach, name="mq-test-attaching")
        thread.start()
        a.wait_for_members(2, timeout=DEADLINE)
        thread.join(DEADLINE)
    (error,) = errors
    assert re.search(f"{silent_at} .*no answer", str(error))
    assert re.search(f"{nobody_at} .*Connection refused", str(error))
    assert address not in str(error)


def test_a_member_cannot_attach_to_itself() -> None:
    """Nor would it ever reach itself, so it is told at once."""
    own, begin = f"tcp://127.0.0.1:{free_port()}", time.monotonic()
    with pytest.raises(mq.ConnectRefused, match=f"{own} of attach_to is this member's"):
        mq.connect(
            "tcp", group="g", listen=own, attach_to=own, connect_timeout=DEADLINE
        )
    assert time.monotonic() - begin < DEADLINE / 2


def test_who_is_out_of_reach_is_not_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member of inproc that is there already leaves the telling to the other."""
    with mq.connect("inproc", group=f"reach-{os.getpid()}", name="a") as queue:
        joined = queue._joined
        meeting, record = joined.meeting, joined.record
        assert meeting is not None
        assert record is not None
        late = dataclasses.replace(record, name="b", incarnation="e" * 16)
        monkeypatch.setattr(claimants, "_open", {late.incarnation})  # it lives
        other = dataclasses.replace(record.process, boot_id="another")
        for process, dials in ((other, 0), (record.process, 1)):
            entry = Entry(dataclasses.replace(late, process=process), 0.0)
            monkeypatch.setattr(meeting, "recent", lambda entry=entry: [entry])
            joined.upkeep()
            assert len(queue._mesh.dialling.dials) == dials


def test_who_interrupts_close_takes_leave_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its peers need not wait until they give it up."""
    options = {"group": f"hurried-{os.getpid()}", "peer_timeout": None}
    with mq.connect("inproc", name="b", **options) as b:
        a = mq.connect("inproc", name="a", **options)
        b.subscribe("t")
        a.publish("t", 1)

        def interrupted(deadline: float | None) -> bool:
            raise KeyboardInterrupt

        # b cannot answer
        with monkeypatch.context() as patch, held_elsewhere(b._lead.lock):
            patch.setattr(a._lead, "sleep", interrupted)
            with pytest.raises(KeyboardInterrupt):
                a.close()
        assert b._driver.wait_until(lambda: not b._mesh.sessions, 10)
        assert b.recv(0).payload == 1


FORKING = """
import contextlib, os, socket, stat, sys, threading
import mq

def open_files():
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it was of the listing
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found

def listens(fd):
    with socket.socket(fileno=os.dup(fd)) as sock:
        return sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)

def left(before, every):
    new = open_files().items() - before.items()
    return [
        what
        for fd, what in new
        if every or what.startswith("socket:") and listens(fd)
    ]

backend, address, directory, options, every = arguments
mq.connect(backend, group="warm", **options).close()
server = socket.create_server(("127.0.0.1", 0))
errors = []

def connect():
    try:
        mq.connect(
            backend,
            group="g",
            rendezvous="file://" + directory,
            attach_to=address % server.getsockname()[1],
            connect_timeout=3,
            **options,
        )
    except mq.ConnectTimeout as error:
        errors.append(error)

before = open_files()
thread = threading.Thread(target=connect, daemon=True)
thread.start()
accepted, _ = server.accept()  # so that thread is in the middle of connect
before[accepted.fileno()] = open_files()[accepted.fileno()]
status = 1
while status and thread.is_alive():  # an engine tells a little later what it opened
    child = os.fork()
    if not child:
        sys.exit(len(left(before, every)))
    status = os.waitpid(child, 0)[1]
thread.join(15)
print(status, len(errors))
os._exit(0)
"""


@pytest.mark.parametrize(
    ("backend", "address", "options", "every"),
    [
        ("tcp", "tcp://127.0.0.1:%d", {}, True),
        ("tls", "tls://localhost:%d", tls_options(), True),
        ("auto", "tcp://127.0.0.1:%d", {}, True),
        ("zmq", "tcp://127.0.0.1:%d", {}, False),
        ("nng", "tcp://127.0.0.1:%d", {}, False),
        ("nng:tls", "tls+tcp://127.0.0.1:%d", tls_options(), False),
    ],
    ids=["tcp", "tls", "auto", "zmq", "nng", "nng:tls"],
)
def test_a_child_forked_during_connect_holds_nothing_of_it_and_harms_nobody(
    backend: str, address: str, options: dict[str, Any], every: bool, tmp_path: Path
) -> None:
    """Another thread is in the middle of connect, so there is no queue yet.

    The child exits as usual, which flushes what the parent's NNG waits for. It may keep
    what engines have for themselves, but no listening socket.
    """
    arguments = (backend, address, str(tmp_path), options, every)
    assert output_of(f"arguments = {arguments}" + FORKING, timeout=60) == "0 1\n"


@contextlib.contextmanager
def _held_far_away(
    backend: str = "tcp", **changes: Any
) -> Iterator[tuple[dict[str, Any], Record]]:
    """A group where a member of another host that this one cannot dial has a name."""
    options: dict[str, Any] = {"backend": backend, "group": f"far-{os.getpid()}"}
    with mq.connect(name="a", peer_timeout=60.0, **options) as queue:
        record = queue._joined.record
        meeting = queue._joined.meeting
        assert record is not None
        assert meeting is not None
        elsewhere = dataclasses.replace(record.process, boot_id="other", host="far")
        changes = {"name": "x", "incarnation": "e" * 16, **changes}
        far = dataclasses.replace(record, process=elsewhere, **changes)
        yield options, meeting.claim(far).record


def test_a_name_is_not_taken_from_a_holder_that_cannot_be_asked() -> None:
    """It was not silent, and whether it lives is seen by its lease."""
    with _held_far_away() as (options, far), contextlib.ExitStack() as stack:
        renewing = threading.Event()
        meeting = open_rendezvous(
            None, group=options["group"], secret=None, timeout=DEADLINE
        )
        stack.callback(meeting.close)

        def renew() -> None:
            while not renewing.wait(0.5):
                meeting.renew(far)

        thread = threading.Thread(target=renew, name="mq-test-renewing")
        thread.start()
        stack.callback(thread.join, DEADLINE)
        stack.callback(renewing.set)
        with pytest.raises(mq.ConnectRefused, match=r"'x'.* is held by pid \d+ on far"):
            mq.connect(name="x", connect_timeout=DEADLINE, **options)
        held = {e.record.name: e.record.incarnation for e in meeting.records()}
        assert held["x"] == far.incarnation


def test_who_waits_for_the_lease_of_a_holder_is_told_so() -> None:
    """It may have ended, and nobody here can tell before its lease has ended, too."""
    with _held_far_away() as (options, _):
        told = r"'x'.* held by pid \d+ on far.* cannot be asked from here.* lease of"
        with pytest.raises(mq.ConnectTimeout, match=told):
            mq.connect(name="x", connect_timeout=0.5, **options)


def test_a_name_is_free_when_the_lease_of_a_holder_has_ended() -> None:
    """Whoever it was, and wherever, it may be begun again under its name."""
    with _held_far_away(lease=1.0) as (options, _):
        with mq.connect(name="x", connect_timeout=DEADLINE, **options) as queue:
            assert [member.name for member in queue.members()] == ["a", "x"]


def test_whose_lease_has_ended_is_waited_for_from_when_it_is_dialled() -> None:
    """Not from when it was found: its dial may have waited for its turn meanwhile."""
    space = types.SimpleNamespace
    link = space(capabilities=space(reach="network"))
    mesh = space(sessions={}, config=space(backend="tcp"))
    driver = space(mesh=mesh, lead=space(lock=threading.Lock()))
    swept: list[str] = []
    meeting = space(sweep=lambda name, who, proven: swept.append(name))
    deadline = time.monotonic() + 60.0
    arrival = Arrival(None, driver, link, meeting, deadline)  # type: ignore[arg-type]
    found = record("gone", backend="tcp", addresses=("tcp://host:1",))
    routes: Any = [(link, "tcp://host:1")]
    dial = arrival._dials[found.incarnation] = Dial(routes, name="gone")
    dial.waits_its_turn = True
    assert not arrival._is_given_up(found)
    dial.waits_its_turn = False
    dial.next_route(time.monotonic())
    assert not arrival._is_given_up(found)
    assert not swept
    arrival._patience.clear()
    dial.first_at = time.monotonic() - PROBE_SECONDS - 1.0
    dial.waits_its_turn = True  # for another attempt
    assert arrival._is_given_up(found)
    assert swept == ["gone"]
