"""What members tell each other first is pinned together with its version.

An entry is never changed: whoever adds, drops or changes a field, or gives one another
meaning, raises the version, and adds an entry for that. Else members of two versions
fail over the fields, or misread them, in place of being told what they are.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from mq.mesh import handshake, wire
from mq.process import ProcessId
from mq.rendezvous import record as records
from mq.rendezvous.record import Record

PROCESS_FIELDS = {
    "host": "str",
    "pid": "int",
    "boot_id": "str",
    "pid_namespace": "int",
    "time_namespace": "int",
    "started": "int",
}
"""In every version: they tell whether the owner of what cannot be read is dead."""

GREETINGS = {
    1: {
        "group": "str",
        "name": "str",
        "incarnation": "str",
        "generation": "int",
        "backend": "str",
        "process": "ProcessId",
        "labels": "list[str]",
        "since": "float",
        "addresses": "list[str]",
        "peer_timeout": "float | None",
        "max_message_bytes": "int",
        "accepts": "list[str]",
        "versions": "dict[str, str]",
        "session": "str",
        "received": "int",
        "probe": "bool",
        "leaving": "bool",
        "to": "str",
    },
}
"""By the version of the session protocol."""

RECORDS = {
    1: {
        "name": "str",
        "incarnation": "str",
        "generation": "int",
        "backend": "str",
        "addresses": "tuple[str, ...]",
        "process": "ProcessId",
        "labels": "tuple[str, ...]",
        "since": "float",
        "lease": "float",
    },
}
"""By their format."""

OWNER = ProcessId("host", 1, "boot", 2, 3, 4)
TOLD: dict[str, Any] = {
    "name": "x",
    "incarnation": "a" * 32,
    "generation": 5,
    "backend": "tcp",
    "addresses": ["tcp://h:1"],
    "process": dict(zip(PROCESS_FIELDS, ("host", 1, "boot", 2, 3, 4), strict=True)),
    "labels": ["red"],
    "since": 6.5,
}


def fields_of(kind: type) -> dict[str, str]:
    """The fields of a class, in their order, and their types."""
    return dict(kind.__annotations__)


def test_a_process_is_told_alike_in_every_version() -> None:
    """Nor may it be told in other words."""
    assert list(fields_of(ProcessId).items()) == list(PROCESS_FIELDS.items())


def test_another_greeting_is_another_version_of_the_protocol() -> None:
    """The fields are those of the version; that of all frames stands before them."""
    assert fields_of(handshake.Greeting) == GREETINGS[wire.PROTOCOL_VERSION]
    assert fields_of(handshake.Refusal) == {"code": "str", "text": "str"}
    assert handshake.Handshake.distrust() == b"\5MQMESH\1\0"


def test_a_greeting_travels_by_the_names_of_its_fields() -> None:
    """What stands in the table is what is sent."""
    more = {"group": "g", "peer_timeout": None, "max_message_bytes": 7}
    more |= {"accepts": ["t"], "versions": {"codec": "1"}, "session": "s"}
    more |= {"received": 8, "probe": True, "leaving": True, "to": "b"}
    sent = msgspec.msgpack.encode(TOLD | more)
    greeting = msgspec.msgpack.decode(sent, type=handshake.Greeting)
    assert greeting.process == OWNER
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(greeting)) == TOLD | more
    assert set(TOLD | more) == set(GREETINGS[wire.PROTOCOL_VERSION])


@pytest.mark.parametrize(("lease", "told"), [(9.5, 9.5), (float("inf"), None)])
def test_another_record_is_another_format(lease: float, told: float | None) -> None:
    """Beside the fields of the table it has the format itself."""
    assert fields_of(Record) == RECORDS[records.FORMAT]
    exact = {"addresses": ("tcp://h:1",), "labels": ("red",), "process": OWNER}
    text = Record(**{**TOLD, **exact, "lease": lease}).to_json()
    assert json.loads(text) == {"format": records.FORMAT, **TOLD, "lease": told}
    assert set(RECORDS[records.FORMAT]) == {*TOLD, "lease"}
