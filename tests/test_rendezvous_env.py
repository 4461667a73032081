"""A rendezvous in the store of torchrun."""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from meeting import (
    DEADLINE,
    eventually,
    free_port,
    libuv,
    meet,
    names,
    open_store,
    record,
    store_port,
)
from refusals import unknown_host

from mq.errors import ConnectTimeout, PeerLost
from mq.rendezvous import Rendezvous, open_rendezvous, torchrun

__all__ = ["libuv", "store_port"]  # fixtures


@pytest.mark.parametrize("missing", torchrun.VARIABLES)
def test_env_names_the_missing_variable(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outside torchrun the error says which variable is not set."""
    for variable in torchrun.VARIABLES:
        monkeypatch.setenv(variable, "1")
    assert torchrun.is_under_torchrun(os.environ)
    monkeypatch.delenv(missing)
    assert not torchrun.is_under_torchrun(os.environ)
    with pytest.raises(ValueError, match=f"needs {missing} in the environment"):
        open_rendezvous("env://", group="g", secret=None, timeout=1.0)


def test_env_gives_up_in_time_where_no_store_listens() -> None:
    """The store's own wait, which nothing can interrupt, is never entered."""
    environ = dict.fromkeys(torchrun.VARIABLES, "1") | {"MASTER_ADDR": "127.0.0.1"}
    environ["MASTER_PORT"] = str(free_port())
    begin = time.monotonic()
    with pytest.raises(ConnectTimeout, match="nobody listens at torchrun's store"):
        torchrun.TorchrunStore("g", 0.5, environ)
    assert time.monotonic() - begin < 10


def test_env_says_who_begins_the_store_that_no_agent_hosts() -> None:
    """As torchrun has it where TORCH_DISABLE_SHARE_RDZV_TCP_STORE is 1."""
    environ = dict.fromkeys(torchrun.VARIABLES, "1") | {"MASTER_ADDR": "127.0.0.1"}
    environ |= {"MASTER_PORT": str(free_port())}
    environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    with pytest.raises(ConnectTimeout, match=r"call .*init_process_group before"):
        torchrun.TorchrunStore("g", 0.5, environ)


def test_env_names_an_unknown_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens there, but that is not what is wrong."""
    monkeypatch.setattr(socket, "getaddrinfo", unknown_host)
    environ = dict.fromkeys(torchrun.VARIABLES, "1")
    environ["MASTER_ADDR"] = "unknown.invalid"
    with pytest.raises(ConnectTimeout, match=r"'unknown.invalid' .* no known host"):
        torchrun.TorchrunStore("g", 0.5, environ)


def test_env_names_the_loading_of_torch_that_used_up_the_time(
    store_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is well, and so are the variables."""
    passed = [0.0]

    def load_slowly(name: str) -> ModuleType:
        passed[0] += 90
        return sys.modules[name]

    environ = dict.fromkeys(torchrun.VARIABLES, "1") | {"MASTER_ADDR": "127.0.0.1"}
    environ |= {"MASTER_PORT": str(store_port)}
    importlib.import_module("torch.distributed")
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed[0])
    monkeypatch.setattr(torchrun, "time", clock)
    monkeypatch.setattr("mq.rendezvous.store.time", clock)
    monkeypatch.setattr(
        torchrun, "importlib", SimpleNamespace(import_module=load_slowly)
    )
    with pytest.raises(ConnectTimeout, match=r"loading torch took 90.* import torch "):
        torchrun.TorchrunStore("g", 60.0, environ)


@pytest.mark.parametrize("host", ["a..b", "a" * 64])
def test_env_refuses_what_can_be_no_host(host: str) -> None:
    """No time will make it one."""
    environ = dict.fromkeys(torchrun.VARIABLES, "1") | {"MASTER_ADDR": host}
    with pytest.raises(ValueError, match=f"MASTER_ADDR '{host}' can be no host"):
        torchrun.TorchrunStore("g", DEADLINE, environ)


def test_env_does_not_see_an_earlier_attempt(store_port: int) -> None:
    """The records of one agent's run before a restart are those of another group."""
    environ = dict.fromkeys(torchrun.VARIABLES, "1") | {"MASTER_ADDR": "127.0.0.1"}
    environ |= {"MASTER_PORT": str(store_port), "TORCHELASTIC_RUN_ID": "restarted"}
    environ |= {"GROUP_WORLD_SIZE": "1"}
    for attempt in ("0", "1"):
        environ["TORCHELASTIC_RESTART_COUNT"] = attempt
        store = torchrun.TorchrunStore("g", 20.0, environ)
        assert store.claim(record("x", attempt)).holder is None
        store.close()


def test_env_does_not_split_a_group_by_the_restarts_of_its_nodes(
    store_port: int,
) -> None:
    """Each agent counts its own: members of one attempt may come with two counts."""
    environ = dict.fromkeys(torchrun.VARIABLES, "1") | {"MASTER_ADDR": "127.0.0.1"}
    environ |= {"MASTER_PORT": str(store_port), "TORCHELASTIC_RUN_ID": "two nodes"}
    environ |= {"GROUP_WORLD_SIZE": "2"}
    with contextlib.ExitStack() as stack:
        for count in ("0", "1"):
            environ["TORCHELASTIC_RESTART_COUNT"] = count
            store = torchrun.TorchrunStore("g", 20.0, environ)
            stack.enter_context(contextlib.closing(store))
            assert store.claim(record(count, count)).holder is None
        assert [entry.record.name for entry in store.records()] == ["0", "1"]


def test_a_list_of_names_without_end_is_not_read(store_port: int) -> None:
    """Whoever reaches that store can write to it: a wait for ever is no answer."""
    environ = dict.fromkeys(torchrun.VARIABLES, "1") | {"MASTER_ADDR": "127.0.0.1"}
    environ |= {"MASTER_PORT": str(store_port), "TORCHELASTIC_RUN_ID": "written to"}
    store = torchrun.TorchrunStore("g", 20.0, environ)
    assert store.claim(record("x")).holder is None
    assert [entry.record.name for entry in store.records()] == ["x"]
    store._ask(lambda values: values.add(f"{store._prefix}/names", 1 << 40))
    with pytest.raises(PeerLost, match="another program writes to it"):
        store.records()
    store.close()


def test_a_request_that_got_no_thread_is_over(
    store_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When threads are to be had again, as many requests are answered as before."""
    environ = dict.fromkeys(torchrun.VARIABLES, "1") | {"MASTER_ADDR": "127.0.0.1"}
    environ |= {"MASTER_PORT": str(store_port), "TORCHELASTIC_RUN_ID": "no thread"}
    store = torchrun.TorchrunStore("g", 20.0, environ)
    assert store.claim(record("x")).holder is None

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patches:
        patches.setattr(threading.Thread, "start", refuse)
        for _ in range(9):
            with pytest.raises(PeerLost, match="a request can have no thread"):
                store.version()
    store.remove("x", record("x").incarnation)
    assert store.records() == []
    store.close()


@pytest.fixture
def hosts() -> Iterator[list[Any]]:
    """The one process that hosts a store, if it is there."""
    hosts = [open_store()]
    yield hosts
    hosts.clear()


def _member_of(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> contextlib.closing[Rendezvous]:
    environ = dict.fromkeys(torchrun.VARIABLES, "1") | {"MASTER_ADDR": "127.0.0.1"}
    for name, value in (environ | {"MASTER_PORT": str(port)}).items():
        monkeypatch.setenv(name, value)
    return contextlib.closing(meet("env://"))


def test_a_store_that_is_begun_anew_is_told_who_is_there(
    hosts: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members of before and those who come later meet, and of one name one stays."""
    port = hosts[0].port
    with _member_of(port, monkeypatch) as old:
        kept = old.claim(record("kept")).record
        lost = old.claim(record("lost", "b")).record
        hosts.clear()
        hosts.append(open_store(port))
        with _member_of(port, monkeypatch) as new:
            for name in ("lost", "more"):
                assert new.claim(record(name, "c")).holder is None
            eventually(lambda: not old.renew(lost))
            assert old.renew(kept)
            eventually(lambda: sorted(names(new)) == ["kept", "lost", "more"])

            def seen() -> list[str]:
                return sorted(entry.record.name for entry in old.recent())

            eventually(lambda: old.renew(kept) and seen() == names(new))


def test_what_happened_twice_is_news_in_a_store_begun_anew(hosts: list[Any]) -> None:
    """The new one counts from the beginning, and comes to the same number."""
    port = hosts[0].port
    environ = dict.fromkeys(torchrun.VARIABLES, "1") | {"MASTER_ADDR": "127.0.0.1"}
    environ |= {"MASTER_PORT": str(port)}
    with contextlib.closing(torchrun.TorchrunStore("g", 60.0, environ)) as store:
        store.claim(record("x"))
        before = store.version()
        hosts.clear()
        hosts.append(open_store(port))
        store.claim(record("y", "b"))
        assert store.version() != before


def test_a_request_does_not_wait_for_a_store_that_is_gone(hosts: list[Any]) -> None:
    """It is often gone for good when its members close: with the rank that hosts it."""
    environ = dict.fromkeys(torchrun.VARIABLES, "1") | {"MASTER_ADDR": "127.0.0.1"}
    environ |= {"MASTER_PORT": str(hosts[0].port)}
    with contextlib.closing(torchrun.TorchrunStore("g", 1e6, environ)) as store:
        store.claim(record("x"))
        hosts.clear()
        for _ in range(2):
            with pytest.raises(PeerLost, match=r"does not answer: .*agent"):
                store.version()


def test_what_listens_and_is_no_store_is_tried_less_and_less_often(
    hosts: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """TCPStore prints a trace of the stack at each try; a store is found again."""
    environ = dict.fromkeys(torchrun.VARIABLES, "1") | {"MASTER_ADDR": "127.0.0.1"}
    environ |= {"MASTER_PORT": str(hosts[0].port)}
    clock = SimpleNamespace(monotonic=lambda: now, sleep=time.sleep, time=time.time)
    now = time.monotonic()
    with contextlib.closing(torchrun.TorchrunStore("g", 1e6, environ)) as store:
        tries: list[float] = []

        def refuse(*_: object, **options: object) -> None:
            tries.append(now)
            raise RuntimeError("Connection reset by peer")

        monkeypatch.setattr(torchrun, "time", clock)
        store._store = None
        with monkeypatch.context() as patches:
            patches.setattr("torch.distributed.TCPStore", refuse)
            for _ in range(300):
                with pytest.raises(PeerLost, match="as a TCPStore"):
                    store.version()
                now += 1.0
        assert 8 < len(tries) < 14
        assert tries[-1] - tries[-2] >= torchrun.MAX_PAUSE_SECONDS
        now += torchrun.MAX_PAUSE_SECONDS
        assert store.version()


def test_a_torch_that_was_built_without_libuv_reaches_the_store(
    store_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Debian's is; who only asks a store needs none of it."""
    real = importlib.import_module("torch.distributed").TCPStore

    def without_libuv(*args: Any, use_libuv: bool = True, **options: Any) -> Any:
        if use_libuv:
            raise RuntimeError("use_libuv was requested")
        return real(*args, use_libuv=use_libuv, **options)

    monkeypatch.setattr("torch.distributed.TCPStore", without_libuv)
    environ = dict.fromkeys(torchrun.VARIABLES, "1") | {"MASTER_ADDR": "127.0.0.1"}
    environ |= {"MASTER_PORT": str(store_port)}
    with contextlib.closing(torchrun.TorchrunStore("g", 60.0, environ)) as store:
        assert store.version()


def test_a_claim_that_was_given_up_does_not_come_true_later(store_port: int) -> None:
    """A store that stands still goes on when the member is gone."""
    environ = dict.fromkeys(torchrun.VARIABLES, "1") | {"MASTER_ADDR": "127.0.0.1"}
    environ |= {"MASTER_PORT": str(store_port)}
    store = torchrun.TorchrunStore("g", 60.0, environ)
    values: Any = store._store

    class Late:
        compare_set, set = values.compare_set, values.set

        def add(self, key: str, amount: int) -> int:
            store.close()
            return int(values.add(key, amount))

    store._store = Late()
    with pytest.raises(PeerLost):
        store.claim(record("x"))
    eventually(lambda: store._calls._turns._value == 4)
    with contextlib.closing(torchrun.TorchrunStore("g", 60.0, environ)) as other:
        assert other.read("x")[0] is None
