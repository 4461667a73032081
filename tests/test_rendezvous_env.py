"""A rendezvous in the store of torchrun."""

from __future__ import annotations

import importlib
import os
import socket
import sys
import threading
import time
from types import ModuleType, SimpleNamespace

import pytest
from meeting import (
    DEADLINE,
    free_port,
    libuv,
    record,
    store_port,
)

from mq.errors import ConnectTimeout, PeerLost
from mq.rendezvous import open_rendezvous, torchrun

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


def test_env_names_an_unknown_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens there, but that is not what is wrong."""

    def unknown(*_: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
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
    """The records of a run that was restarted are those of another group."""
    environ = dict.fromkeys(torchrun.VARIABLES, "1") | {"MASTER_ADDR": "127.0.0.1"}
    environ |= {"MASTER_PORT": str(store_port), "TORCHELASTIC_RUN_ID": "restarted"}
    for attempt in ("0", "1"):
        environ["TORCHELASTIC_RESTART_COUNT"] = attempt
        store = torchrun.TorchrunStore("g", 20.0, environ)
        assert store.claim(record("x", attempt)).holder is None
        store.close()


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
