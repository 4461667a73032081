"""What a case is, which clauses there are, and how one case is run on one transport."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mq import speed
from mq.testing.harness import Group

Body = Callable[[Group], None]

CLAUSES = (
    "Order",
    "No echo",
    "Exact topics",
    "Subscribe is synchronous",
    "Keep all",
    "Keep last n",
    "Retain",
    "Nobody listening",
    "Reuse",
    "Ownership",
    "Sizes",
    "Payloads",
    "Devices",
    "Membership",
    "Death",
    "Blips",
    "Close",
    "Threads",
    "Fork",
    "Interrupt",
    "Bad input",
    "Errors",
    "edge: subscribe",
    "edge: unsubscribe",
    "edge: connect",
    "edge: Names",
    "edge: Windows",
    "edge: Two members that publish to each other",
    "edge: Keep-last",
    "edge: Retain",
    "edge: Zero copy",
    "edge: loan",
    "edge: Threads and asyncio",
    "edge: After close",
    "edge: Fork",
    "edge: Batching",
    "edge: inproc",
    "edge: Scale",
)
"""The clauses of the contract and its edges; each has at least one case."""


@dataclass(frozen=True)
class Case:
    """One rule of the contract, as a script that shows it.

    Attributes:
        name: The rule in a few words.
        clause: The clause of the contract that it belongs to, one of `CLAUSES`.
        body: The script.
        needs: The capability it needs: a field of `mq.transport.Capabilities`.
        otherwise: The script for transports that declare not to have it.
        memory: Bytes of memory that it takes, if many.
        compiled: Whether it needs the compiled part of mq.
    """

    name: str
    clause: str
    body: Body
    needs: str = ""
    otherwise: Body | None = None
    memory: int = 0
    compiled: bool = False

    @property
    def large(self) -> bool:
        """Whether it takes so much memory and time that it runs apart."""
        return self.memory > 0

    def unavailable(self) -> str | None:
        """Why this host cannot run the case, in words, or None."""
        if self.compiled and not speed.COMPILED:
            return "needs mq's compiled part, without which this is not promised"
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if self.memory > free:
            return f"needs {self.memory >> 20} MiB of memory, {free >> 20} are free"
        return None

    def __str__(self) -> str:
        return self.name


CASES: list[Case] = []
"""Every case, in the order of the contract."""


def case(
    clause: str,
    *,
    needs: str = "",
    otherwise: Body | None = None,
    memory: int = 0,
    compiled: bool = False,
) -> Callable[[Body], Body]:
    """Make a function, named after the rule it shows, a case.

    Args:
        clause: One of `CLAUSES`.
        needs: The capability that the case needs.
        otherwise: What a transport without that capability must do instead.
        memory: Bytes of memory needed, where that is more than a few hundred MiB.
        compiled: Whether the compiled part of mq is needed.
    """
    if clause not in CLAUSES:
        raise ValueError(f"no clause {clause!r}; known: {', '.join(CLAUSES)}")
    if bool(needs) != (otherwise is not None):
        raise ValueError("a case that needs a capability says what happens otherwise")

    def add(body: Body) -> Body:
        name = getattr(body, "__name__", "")
        CASES.append(Case(name, clause, body, needs, otherwise, memory, compiled))
        return body

    return add


def find(name: str) -> Case:
    """The case of that name.

    Raises:
        LookupError: There is none.
    """
    for known in CASES:
        if known.name == name:
            return known
    raise LookupError(f"no case {name!r}; mq.testing.CASES lists them")


def run_case(backend: str, case: Case | str, **options: Any) -> None:
    """Run one case on a transport and clean up, whatever happens.

    Args:
        backend: The transport's name, as for `mq.connect`.
        case: One of `CASES`, or its name.
        options: Options of the transport, passed to each `mq.connect`.

    Raises:
        AssertionError: The transport does not keep the rule; the text says what was
            observed, with the tracebacks or stacks of the members.
        UnknownTransport, TransportUnavailable: There is none of that name, or its
            module cannot be imported.
    """
    from mq import registry

    chosen = find(case) if isinstance(case, str) else case
    capabilities = registry.capabilities(backend)
    body = chosen.body
    if chosen.needs and not getattr(capabilities, chosen.needs):
        assert chosen.otherwise is not None
        body = chosen.otherwise
    group = Group(backend, capabilities, options)
    try:
        body(group)
        group.close()
    except AssertionError:
        raise
    except Exception as error:  # whatever somebody else's link or mq raises
        what = f"{chosen.name}: {type(error).__name__}: {error}"
        raise AssertionError(what) from error
    finally:
        group.end()
