"""How many descriptors a process may still open."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from meeting import no_descriptors, runtime

import mq
from mq import descriptors
from mq.addresses import origin
from mq.descriptors import check_descriptors, free_descriptors, pushed_out
from mq.errors import TransportUnavailable

__all__ = ["runtime"]

KERNELS = [
    pytest.param(
        True,
        marks=pytest.mark.skipif(
            not descriptors._COUNTS, reason="Linux before 6.2 does not count them"
        ),
    ),
    False,
]
"""Whether the kernel counts what is open."""


@pytest.fixture(params=KERNELS, ids=["counts", "does not count"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """The kernel, and what one before Linux 6.2 says; a million may be open."""
    counts: bool = request.param
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 20, 1 << 20))
    monkeypatch.setattr(descriptors, "_COUNTS", counts)
    return counts


@contextlib.contextmanager
def opened(count: int) -> Iterator[None]:
    """So many descriptors are open meanwhile, beside the others."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        yield


def draws(addresses: Sequence[str]) -> Counter[str]:
    """Who is pushed out of these, in many draws."""
    origins = {address: origin(address) for address in addresses}
    return Counter(pushed_out(origins) for _ in range(3000))


def test_who_floods_pushes_out_its_own() -> None:
    """By hosts, of which one of IPv6 has a network; whoever it is of one host."""
    flood = [f"tcp://10.0.0.2:{port}" for port in range(30)]
    few = ["tcp://10.0.0.1:1", "tcp://[::ffff:10.0.0.1]:2", "ipc://(pid 1 of user 0)"]
    gone = draws([*few, *flood])
    assert set(gone) == set(flood)
    flood = [f"tcp://[2001:db8:0:7:{host}::9%lo]:1" for host in range(30)]
    few += ["tcp://[2001:db8:0:8::9]:1", "tcp://[2001:db8:0:8::9]:2"]
    gone = draws([*few, *flood])
    assert set(gone) == set(flood)


def test_who_floods_from_everywhere_pushes_out_nobody_for_certain() -> None:
    """A host that has two connections by the way is not the one to go each time."""
    everywhere = [f"tcp://10.0.{host}.1:1" for host in range(100)]
    gone = draws([*everywhere, "tcp://10.1.0.1:1", "tcp://10.1.0.1:2"])
    assert gone["tcp://10.1.0.1:1"] + gone["tcp://10.1.0.1:2"] < 600


def test_what_is_free_is_exact_where_it_is_not_enough(kernel: bool) -> None:
    before, _ = free_descriptors(1 << 40)
    with opened(100):
        now, why = free_descriptors(1 << 40)
    assert now == before - 100
    assert "RLIMIT_NOFILE" in why


def test_where_enough_is_free_nothing_is_listed(
    kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And never more is said to be free than is."""
    exact, _ = free_descriptors(1 << 40)
    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", None)
        free, _ = free_descriptors(1)
    assert 1 <= free <= exact


def test_members_that_join_list_no_descriptors(
    runtime: None, kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which takes longer the more are open: a group took the fourth power of it."""
    listed: list[str] = []
    plain = os.listdir

    def listdir(path: str) -> list[str]:
        listed.append(path)
        return plain(path)

    monkeypatch.setattr(os, "listdir", listdir)
    with contextlib.ExitStack() as stack:
        for name in "abc":
            member = mq.connect("tcp", group="g", name=name)
            stack.enter_context(member)
        member.wait_for_members(3, timeout=30)
    assert "/proc/self/fd" not in listed


@pytest.mark.parametrize("counts", KERNELS)
def test_a_process_out_of_descriptors_is_told_so(
    counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where there is none left to count those that are open."""
    monkeypatch.setattr(descriptors, "_COUNTS", counts)
    with no_descriptors(), pytest.raises(TransportUnavailable, match="ulimit"):
        check_descriptors()


def test_where_it_cannot_be_known_there_are_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(path: str) -> os.stat_result:
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    monkeypatch.setattr(os, "stat", refuse)
    monkeypatch.setattr(os, "listdir", refuse)
    monkeypatch.setattr(descriptors, "_slots", lambda: float("inf"))
    check_descriptors()
