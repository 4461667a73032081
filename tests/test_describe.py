"""`describe` and the log say how members are connected."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from meeting import libuv, store_port
from nng_links import nng_runs
from tls_files import tls_options

import mq
from mq.rendezvous import torchrun

__all__ = ["libuv", "nng_runs", "store_port"]

CASES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "inproc": ({}, {}),
    "zmq:ipc": ({}, {"wire": "ipc"}),
    "zmq:tcp": ({}, {"wire": "tcp"}),
    "nng:ipc": ({}, {"wire": "ipc"}),
    "nng:tcp": ({}, {"wire": "tcp"}),
    "nng:tls": (
        tls_options(),
        {"wire": "tls+tcp", "certificate": "localhost"},
    ),
    "tls": (
        tls_options(),
        {"certificate": "localhost", "version": "TLSv1.3"},
    ),
    "torchrpc:cpu": ({"channels": ("basic",)}, {"channels": "basic"}),
}


@pytest.mark.parametrize("backend", CASES)
def test_both_ends_say_how_they_are_connected(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Per peer: the wire, the certificate's name, TensorPipe's channels."""
    options, expected = CASES[backend]
    with (
        caplog.at_level("INFO"),
        mq.connect(backend, group="describe", name="a", **options) as a,
        mq.connect(backend, group="describe", name="b", **options) as b,
    ):
        found = a.describe()["peers"]["b"], b.describe()["peers"]["a"]
        listens = a.describe()["addresses"]
    assert found[1]["wire"] in listens
    for peer in found:
        assert expected.items() <= peer["connection"].items()
    for key, value in expected.items():
        lines = [line for line in caplog.messages if line.startswith("session with")]
        assert len(lines) == 2
        assert all(f"{key} {value}" in line for line in lines)
    assert any(f"listens on {listens[0]}" in line for line in caplog.messages)


def test_the_engine_of_torchrpc_is_described() -> None:
    """With what was chosen by default; nothing once it is closed."""
    with mq.connect("torchrpc", group="describe", name="a") as queue:
        described = queue.describe()["engine"]
    assert described.pop("agent").startswith("uv://127.0.0.1:")
    assert described == {"transports": "uv", "channels": "cma,basic", "threads": "1"}
    assert queue.describe()["engine"] == {}


@pytest.mark.parametrize(
    ("given", "source"),
    [
        ({}, "the rendezvous"),
        ({"secret": "long enough"}, "argument"),
        ({"listen": "tcp://127.0.0.1:0"}, "none"),
        ({"listen": "tcp://127.0.0.1:0", "secret": "long enough"}, "argument"),
    ],
)
def test_where_the_secret_is_from_is_not_said_of_none(
    given: dict[str, Any], source: str
) -> None:
    """Explicit addresses have no rendezvous that could keep one."""
    with mq.connect("tcp", group="describe", name="a", **given) as queue:
        assert queue.describe()["sources"]["secret"] == source


def test_torchruns_store_is_not_said_to_give_a_secret(
    store_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps none, since whoever reaches it could read it."""
    for variable in torchrun.VARIABLES:
        monkeypatch.setenv(variable, "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store_port))
    with mq.connect("tcp", group="describe", name="a") as queue:
        described = queue.describe()
    assert described["rendezvous"].startswith("torchrun's store")
    assert described["sources"]["secret"] == "none"


def test_counters_are_plain_enough_for_json() -> None:
    """Of the pool, and of memory that is lent, by name and not by place."""
    with mq.connect("shm", group="describe", name="a") as queue:
        counted = queue.stats()
    assert json.loads(json.dumps(counted)) == counted
    assert counted["pool"]["in_use_bytes"] == 0
    assert counted["shared"][0]["mapped_bytes"] == 0


@pytest.mark.parametrize("options", [{}, {"listen": "tcp://127.0.0.1:0"}])
def test_who_waits_for_others_in_vain_is_told_where_they_should_be(
    options: dict[str, Any],
) -> None:
    """Others with another environment meet in another directory."""
    with mq.connect(
        "tcp", group="describe", name="a", secret="a secret", **options
    ) as a:
        place = re.escape(a.describe()["rendezvous"])
        with pytest.raises(mq.MembersTimeout, match=f"rendezvous: {place}$"):
            a.wait_for_members(2, timeout=0)
        with pytest.raises(mq.MembersTimeout, match=f"rendezvous: {place}$"):
            a.wait_for_subscribers("t", 1, timeout=0)
