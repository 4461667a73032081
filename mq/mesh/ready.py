"""What `recv` takes of messages that are decoded already."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from mq.mesh.inbox import Inbox
    from mq.mesh.lead import Lead

PopReady: TypeAlias = "Callable[[Lead, Inbox, list[Any]], bool]"


def pop_ready(lead: Lead, inbox: Inbox, box: list[Any]) -> bool:
    """Move the first message that is ready into a list of one element.

    The last one stays: it is for `Inbox.take`, which then counts. The compiled twin, in
    ``_speed.c``, does not wait for who has the lock, but leaves them, too.

    Returns:
        Whether there was one. After an exception, too, it is either there or here.
    """
    if len(inbox.ready) < 2:
        return False
    with lead.lock:
        ready = inbox.ready
        if len(ready) < 2 or lead.closing or lead.forked:
            return False
        try:
            box[0] = ready[0]
            ready.popleft()
        except BaseException:
            if ready[0] is box[0]:  # it is still there
                box[0] = None
            raise
    return True
