"""OpenSSL in a process that forks.

It has locks of its own. It takes them while it makes a context or shakes hands, and
once more as a thread that did so ends, when Python has done with that thread already. A
child that is forked meanwhile waits for them for ever: of 2,000 forks beside each of
the three 24, 4 and 13 did, with OpenSSL 3. Of 2,000 beside encrypting, decrypting or
hashing none did. So a fork waits for what goes on under the lock of `undivided`, and
for the ends of such threads.
"""

from __future__ import annotations

import os
import threading
import time

from mq.speed import Lock

PATIENCE_SECONDS = 1.0
"""How long a fork waits for the lock, and how long for the threads."""
_PAUSE_SECONDS = 0.0001

_lock = Lock()
_forking: int | None = None  # the thread that has the lock while it forks
_users: dict[int, threading.Thread] = {}  # by the system's number


def undivided() -> threading.Lock:
    """A lock for what the calling thread does with OpenSSL; a fork waits for it."""
    me, thread = threading.get_native_id(), threading.current_thread()
    if _users.get(me) is not thread:  # the system uses numbers again
        _forget_ended()
        _users[me] = thread
    return _lock


def _forget_ended() -> bool:
    """Drop the threads that are gone; whether some are ending still."""
    ending = False
    for number, thread in list(_users.items()):
        if thread.is_alive():
            continue
        if os.path.exists(f"/proc/self/task/{number}"):
            ending = True
        else:
            _users.pop(number, None)  # another thread may have been faster
    return ending


def _before_fork() -> None:
    global _forking
    if _lock.acquire(timeout=PATIENCE_SECONDS):
        _forking = threading.get_ident()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while _forget_ended() and time.monotonic() < deadline:
        time.sleep(_PAUSE_SECONDS)  # the system tells nobody of a thread's end


def _after_fork_in_parent() -> None:
    global _forking
    if _forking == threading.get_ident():
        _forking = None
        _lock.release()


def _after_fork_in_child() -> None:
    global _forking, _lock
    if _forking == threading.get_ident():
        _lock.release()
    else:
        _lock = Lock()  # who has it does not exist here
    _forking = None
    _users.clear()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)
