"""What TensorPipe will still open counts before it does."""

from __future__ import annotations

import resource

import pytest
import torch

from mq.errors import TransportUnavailable
from transports import _torchrpc_descriptors as descriptors
from transports import _torchrpc_shared as shared
from transports._torchrpc_descriptors import SPARE, Descriptors, Promise
from transports._torchrpc_options import Options


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """So many descriptors are left, as it seems."""
    left = {"free": 0}
    monkeypatch.setattr(
        descriptors, "free_descriptors", lambda _: (left["free"], "a few are open")
    )
    return left


def test_a_promise_counts_until_each_direction_has_carried_a_call(
    free: dict[str, int],
) -> None:
    """Then what it took is open, and counted by the kernel."""
    free["free"] = SPARE + 9 + 4
    ledger = Descriptors(4)
    promise = ledger.promise()
    with pytest.raises(OSError, match=r"9 more are promised .* `ulimit -n`"):
        ledger.promise()
    call = torch.futures.Future[bool]()
    promise.call = call
    with pytest.raises(OSError, match="9 more are promised"):
        ledger.promise()
    call.set_result(True)
    with pytest.raises(OSError, match="5 more are promised"):
        ledger.promise()
    promise.heard = True
    assert promise.count() == 0
    assert ledger.promise().count() == 9


def test_a_promise_ends_with_its_connection(
    free: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once where the ends never met, else once TensorPipe has let go of it."""
    free["free"] = SPARE + 9
    ledger = Descriptors(4)
    ledger.promise().end(met=False)
    ledger.promise().end(met=True)
    with pytest.raises(OSError, match="9 more are promised"):
        ledger.promise()
    monkeypatch.setattr(descriptors, "GRACE_SECONDS", 0.0)
    promise = Promise(4)
    promise.end(met=True)
    ledger = Descriptors(4)
    ledger._promises.append(promise)
    assert ledger.promise().count() == 9


def test_an_agent_does_not_start_without_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`mpt_uv` takes more than a hundred for itself; nothing has been opened then."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (120, limit))
    with pytest.raises(
        TransportUnavailable, match=r"^\d+ file desc.*mpt_uv.*`ulimit -n`$"
    ):
        shared.acquire(Options(channels=("mpt_uv", "basic")))
    assert shared._current is None


def test_without_a_limit_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was promised."""
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda _: unlimited)
    ledger = Descriptors(10_000)
    assert [ledger.promise().count() for _ in range(3)] == [20_001] * 3
