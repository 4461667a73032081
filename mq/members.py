"""What `MQ.members` tells of a member."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Member:
    """A member of a group, as another one knows it.

    Attributes:
        name: Its name.
        host: The host it runs on.
        pid: Its process id, in its own pid namespace.
        labels: What it said about itself when it connected.
        since: When it connected, in Unix seconds by its own clock.
        incarnation: Tells lives of members of the same name apart.
    """

    name: str
    host: str
    pid: int
    labels: tuple[str, ...]
    since: float
    incarnation: str
