"""Every transport keeps every clause of the contract."""

from __future__ import annotations

import pytest
from tls_files import tls_options

from mq import registry
from mq.testing import CASES, CLAUSES, Case, run_case

BACKENDS = (
    "auto",
    "inproc",
    "shm",
    "nng:ipc",
    "nng:tcp",
    "tcp",
    "tls",
    "torchrpc:cpu",
    "torchrpc:cuda",
    "zmq:ipc",
    "zmq:tcp",
)


OPTIONS = {"tls": tls_options()}
FRAMED_AS = {"auto": "shm", "nng:tcp": "nng:ipc", "zmq:ipc": "zmq:tcp"}
"""What cuts large messages as another does, and passes on the same chunks."""


def _parameters() -> list[object]:
    return [
        pytest.param(
            backend,
            case,
            id=f"{backend}-{case.name}",
            marks=[pytest.mark.slow] * case.large
            + [pytest.mark.gpu] * backend.endswith(":cuda"),
        )
        for backend in BACKENDS
        for case in CASES
    ]


@pytest.mark.parametrize(("backend", "case"), _parameters())
def test_transport_keeps_the_contract(backend: str, case: Case) -> None:
    """Each case of the suite passes on each transport that works here."""
    reason = registry.check(backend) or case.unavailable()
    if reason is not None:
        pytest.skip(reason)
    if case.large and backend in FRAMED_AS:
        pytest.skip(f"{FRAMED_AS[backend]} runs it, which passes on the same chunks")

    run_case(backend, case, **OPTIONS.get(backend, {}))


def test_every_registered_transport_is_covered() -> None:
    """A transport in the registry is in the list above, or an alias of some there.

    `nng:tls` needs certificates, and runs what depends on it below; what the links of
    `auto:nng` and `auto:zmq` do is covered by their own names.
    """
    covered = {*BACKENDS, "auto:nng", "auto:zmq", "nng", "zmq", "nng:tls"}

    missing = {name for name in registry.table if name not in covered}

    assert not missing


@pytest.mark.parametrize("clause", CLAUSES)
def test_every_clause_has_a_case(clause: str) -> None:
    """The contract has no clause that is only written down."""
    names = [case.name for case in CASES if case.clause == clause]

    assert names


def test_names_of_cases_are_unique() -> None:
    """A case is found by its name."""
    names = [case.name for case in CASES]

    assert len(names) == len(set(names))


_TLS_CLAUSES = ("Blips", "Close", "Death", "Fork", "edge: Fork", "Interrupt", "Order")
_PROGRAM = "one_program_runs_the_same_everywhere"


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.clause in _TLS_CLAUSES or case.name == _PROGRAM],
    ids=str,
)
def test_nng_over_tls_keeps_the_clauses_that_depend_on_the_engine(case: Case) -> None:
    """The others are the mesh's, whatever it runs over."""
    if reason := case.unavailable():
        pytest.skip(reason)
    run_case("nng:tls", case, **tls_options())


@pytest.mark.parametrize("backend", ["auto:nng", "auto:zmq", "nng", "torchrpc", "zmq"])
@pytest.mark.parametrize(
    "name",
    [
        "order_is_fifo_per_publisher_and_topic",
        "members_that_connect_at_once_all_see_each_other",
        _PROGRAM,
        "blip_is_resumed",
    ],
)
def test_who_chooses_a_wire_by_itself_keeps_what_depends_on_it(
    backend: str, name: str
) -> None:
    """Engines without a wire in their name, combinations, and an alias."""
    run_case(backend, name)
