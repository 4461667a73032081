"""What is in place of a record, but cannot be read.

It may be that of a member of another version, which holds the name: so the name is
free only where that member's process is known to have ended. Who has no session yet is
refused, as it might not find all of its group; who has goes on with whom it can read.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from mq.errors import ConnectRefused
from mq.process import ProcessId, is_gone
from mq.rendezvous.record import FORMAT, Record, load_json

SAME_VERSION: Final = "install the same version of tensormq everywhere"


def refusal(where: str, error: Exception) -> ConnectRefused:
    """Why nobody can join a group.

    Args:
        where: The file or the key of what cannot be read.
        error: What is wrong with it.
    """
    return ConnectRefused(
        f"{where} cannot be read: {error}. If a member of another version has written "
        f"it, {SAME_VERSION}; if no such member runs, remove it"
    )


def of_service(service: str, answer: dict[str, Any]) -> ConnectRefused:
    """Why the rendezvous service refused a request."""
    reason = f"{service} refused: {str(answer['error'])[:500]}"
    found = answer.get("format")
    if found != FORMAT:
        other = "an unknown format" if found is None else f"format {found!r:.20}"
        reason += f"; its records have {other}, this member's {FORMAT}: {SAME_VERSION}"
    return ConnectRefused(reason)


def received(text: str) -> Record:
    """A record from the rendezvous service.

    Raises:
        ConnectRefused: It cannot be read.
    """
    try:
        return Record.from_json(text)
    except ValueError as error:
        raise ConnectRefused(
            f"the rendezvous service sent what cannot be read: {error}; {SAME_VERSION}"
        ) from error


def has_ended(text: str | bytes) -> bool:
    """Whether the process that a record tells of in any format is known to be dead."""
    try:
        told = load_json(text)["process"]
        known = {f.name: told[f.name] for f in dataclasses.fields(ProcessId)}
        return is_gone(ProcessId(**known))
    except (ValueError, KeyError, TypeError):
        return False
