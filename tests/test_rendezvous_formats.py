"""What another version, or nobody, has left where the members of a group meet."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from meeting import (
    DEADLINE,
    free_port,
    libuv,
    meet,
    names,
    process_of,
    record,
    runtime,
    spec,
    store_port,
)

import mq
from mq.errors import ConnectRefused
from mq.rendezvous import Rendezvous, service, states, torchrun, unread
from mq.rendezvous import record as records
from mq.rendezvous.record import Record

__all__ = ["libuv", "runtime", "spec", "store_port"]  # fixtures

SAME = "install the same version of tensormq everywhere"


def hear(pipe: Connection) -> Any:
    """What the other process says next."""
    assert pipe.poll(DEADLINE), "it did not say anything in time"
    return pipe.recv()


def _of_format(number: int) -> None:
    """Make this process one of another version."""
    for module in (records, service, unread):
        vars(module)["FORMAT"] = number


def _queue(spec: str | None, name: str) -> mq.MQ:
    where: dict[str, Any] = {"rendezvous": spec, "group": "formats"}
    return mq.connect("tcp", name=name, connect_timeout=DEADLINE, **where)


def _connect(spec: str | None, number: int, name: str, pipe: Connection) -> None:
    """Tell how a member of a version gets on, which stays until it is told to go."""
    _of_format(number)
    try:
        with _queue(spec, name) as queue:
            pipe.send("connected")
            pipe.recv()
            pipe.send([member.name for member in queue.members()])
    except ConnectRefused as error:
        pipe.send(f"refused: {error}")


@pytest.mark.parametrize("name", ["x", "y"])
def test_members_of_two_formats_are_no_group(spec: str | None, name: str) -> None:
    """Nor do they share a name: the second is told which versions there are."""
    with process_of(_connect, spec, 2, "x") as (_, newer):
        assert hear(newer) == "connected"
        with pytest.raises(ConnectRefused, match=f"format 2.* 1.*{SAME}"):
            _queue(spec, name)
        newer.send("go")
        assert hear(newer) == ["x"]
    with _queue(spec, "x") as older:
        with process_of(_connect, spec, 2, name) as (_, newer):
            told = hear(newer)
        assert re.match(f"refused: .*format 1.* 2.*{SAME}", told)
        with _queue(spec, "z") as same:
            older.wait_for_members(2, DEADLINE)
            assert [member.name for member in same.members()] == ["x", "z"]


def _left(text: str, meeting: Rendezvous) -> Path:
    """What somebody has left in place of the record of x."""
    assert meeting.directory is not None
    path = Path(meeting.directory, f"{states.hash_of('x')}-3")
    path.write_text(text)
    return path


def _of_another(**changes: Any) -> str:
    return json.dumps(json.loads(record("x").to_json()) | changes)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"name": "x"}', "the record has no format, and only 1 is read here"),
        (_of_another(format=2), "the record has format 2, and only 1"),
        (_of_another(format=True), "the record has format True, and only 1"),
        (_of_another(format="9" * 99), f"the record has format '{'9' * 19}, and"),
        (_of_another(more=1), "no record of a member: .*'more'"),
        (_of_another(name="y"), "the record of 'y'"),
        ("rubbish", "Expecting value"),
        ("9" * (1 << 17), "too long"),
    ],
    ids=["none", "other", "bool", "long", "more", "moved", "rubbish", "huge"],
)
def test_what_cannot_be_read_holds_the_name(
    runtime: Path, caplog: pytest.LogCaptureFixture, text: str, why: str
) -> None:
    """Whoever is there goes on, and says so once; nobody joins; nothing is removed."""
    with contextlib.closing(meet(None)) as one, caplog.at_level(logging.WARNING):
        mine = one.claim(record("a")).record
        path = _left(text, one)
        os.utime(path, (0, 0))
        for other in ("b", "c"):
            with contextlib.closing(meet(None)) as two:
                told = f"{path} cannot be read: .*{why}.*{SAME}.*remove it$"
                with pytest.raises(ConnectRefused, match=told):
                    two.claim(record("x", other))
                two.claim(record(other, other))
                with pytest.raises(ConnectRefused, match=told):
                    two.records()
                assert one.renew(mine)
                assert [e.record.name for e in one.recent()] == ["a", other]
        assert caplog.text.count(f"{path} cannot be read") == 1
        assert path.exists()
        path.unlink()
        assert names(one) == ["a"]
        assert one.claim(record("x", "d")).holder is None


def _leave(pipe: Connection) -> None:
    pipe.send(_of_another(format=2, more=1))


def test_a_name_is_free_once_its_owner_is_known_to_be_dead(runtime: Path) -> None:
    """Whatever else of its record cannot be read."""
    with contextlib.closing(meet(None)) as one:
        with process_of(_leave) as (child, pipe):
            path = _left(hear(pipe), one)
            child.join(DEADLINE)
        assert names(one) == []
        won = one.claim(record("x"))
        assert (won.holder, won.record.generation) == (None, 4)
        assert not path.exists()


def test_the_last_of_one_host_leaves_what_others_may_have_written(
    runtime: Path,
) -> None:
    """Locks may be of one host alone; so only leases tell of others."""
    with contextlib.closing(meet(f"file://{runtime}")) as one:
        assert one.description.startswith("directory ")
        group = Path(one.description.removeprefix("directory "))
        path = group / f"{states.hash_of('x')}-1"
        path.write_text(_of_another(format=2))
    assert path.exists()


def test_a_directory_of_this_host_goes_with_its_last_process(runtime: Path) -> None:
    """Its lock tells that nobody is left who could have written anything there."""
    with contextlib.closing(meet(None)) as one:
        _left("rubbish", one)
        with pytest.raises(ConnectRefused):
            one.records()
    assert list(runtime.iterdir()) == []


def _environ(port: int) -> dict[str, str]:
    environ = dict.fromkeys(torchrun.VARIABLES, "1")
    return environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def test_another_layout_of_the_store_is_refused(
    store_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else of it is read, nor anything written."""
    environ = _environ(store_port)
    with contextlib.closing(torchrun.TorchrunStore("g", DEADLINE, environ)) as store:
        store.claim(record("x"))
        with monkeypatch.context() as patch:
            patch.setattr(torchrun, "LAYOUT", 2)
            told = f"format '1' .key {store._prefix}/format.*of 2: {SAME}"
            with pytest.raises(ConnectRefused, match=told):
                torchrun.TorchrunStore("g", DEADLINE, environ)
        torchrun.TorchrunStore("g", DEADLINE, environ).close()


def test_what_is_no_name_in_the_list_is_somebody(
    store_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be all that can be seen of a member of another version."""
    store = torchrun.TorchrunStore("g", DEADLINE, _environ(store_port))
    with contextlib.closing(store), caplog.at_level(logging.WARNING):
        store.claim(record("x"))
        number = store._ask(lambda values: values.add(f"{store._prefix}/names", 1)) - 1
        assert [entry.record.name for entry in store.records()] == ["x"]
        key = store._place_key(number)
        store._ask(lambda values: values.compare_set(key, "", "name"))
        told = f"the key {key} in .*'name' is no name and its nonce.*remove it$"
        with pytest.raises(ConnectRefused, match=told):
            store.records()
        for _ in range(2):
            assert [entry.record.name for entry in store.recent()] == ["x"]
        assert caplog.text.count(key) == 1


def test_the_owner_of_a_key_is_looked_at_too(store_port: int) -> None:
    """A name is free once that is dead, and listed in its own place."""
    store = torchrun.TorchrunStore("g", DEADLINE, _environ(store_port))
    with contextlib.closing(store), process_of(_leave) as (child, pipe):
        text = hear(pipe)
        store.claim(record("x"))
        token = store.read("x")[1]
        fields = json.loads(token.text) | {"record": text}
        held, key = json.dumps(fields), store._key("x")
        store._ask(lambda values: values.compare_set(key, token.text, held))
        child.join(DEADLINE)
        assert store.records() == []
        won = store.claim(record("x", "b"))
        assert (won.holder, won.record.generation) == (None, 2)
        assert [e.record.incarnation for e in store.records()] == ["b" * 16]


def test_a_service_that_tells_no_format_is_of_another_version(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it says may be about that."""
    spec = f"tcp://127.0.0.1:{free_port()}"
    with contextlib.closing(meet(spec)) as one:
        answer = {"error": "no record of a member: unexpected keyword"}
        monkeypatch.setattr(service.Service, "_answer", lambda *_: answer)
        told = f"refused: no record of .*unknown format, this member's 1: {SAME}$"
        with pytest.raises(ConnectRefused, match=told):
            one.claim(record("x"))


def test_what_a_service_sends_is_read_or_refused(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would else be a bare error about the fields of some record."""
    spec = f"tcp://127.0.0.1:{free_port()}"
    with contextlib.closing(meet(spec)) as one:
        found = [{"record": _of_another(format=2), "age": 0.0}]
        answer = {"records": found, "more": False, "version": "1"}
        monkeypatch.setattr(service.Service, "_answer", lambda *_: answer)
        with pytest.raises(ConnectRefused, match=f"has format 2, and only 1.*{SAME}"):
            one.records()


def test_a_record_tells_its_format() -> None:
    """As the first of its keys, for people to see."""
    text = record("x").to_json()
    assert text.startswith(f'{{"format":{records.FORMAT},')
    assert Record.from_json(text) == record("x")
