"""The TensorPipe agent that all queues of a process share: its start and its end.

The first queue starts it and the last one closes it. No future is resolved after it is
gone, and nothing of it is pending when the interpreter exits, for that would abort the
process. A forked child lets go of it, and is refused one of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from typing import Final

import torch

from mq.errors import ForkedProcess, TransportUnavailable, first_line
from mq.log import Log
from mq.threads import check_threads
from transports import _torchrpc_native as native
from transports import _torchrpc_net as net
from transports._torchrpc_agent import TESTED, Agent, application_ends_one, runs
from transports._torchrpc_calls import receivers
from transports._torchrpc_descriptors import start_threads
from transports._torchrpc_options import Options

logger = Log(__name__)

IPC: Final = "cuda_ipc"
NO_IPC: Final = (
    "an agent of this process has had it before, and by the process's id its peers "
    "keep the memory on the GPU that it used; keep a queue open to keep the agent"
)
"""Why there is none."""

DEAF: Final = (
    "somebody has connected to TensorPipe's port at %s and left before saying anything "
    "whole, and so TensorPipe does not listen any more: another agent takes its place, "
    "and the connections of all torchrpc queues of this process are made again; keep "
    "port scanners and health checks away from torchrpc's ports"
)

ENDED: Final = (
    "the application has shut the RPC agent down (rpc.shutdown) as a queue started it; "
    "connect again"
)

_lock = threading.Lock()
_current: Agent | None = None
_used_by = 0
_tested: set[tuple[int, ...]] = set()
_had_ipc = False
"""Whether an agent of this process has had the channel `cuda_ipc`."""


def acquire(options: Options) -> Agent:
    """The agent of this process, started if this is its first user.

    Only one agent in the life of a process has the channel `cuda_ipc`: later ones are
    started without it.

    Raises:
        ForkedProcess: This process was forked from one that has used an agent, or CUDA.
        TransportUnavailable: TensorPipe cannot start here.
        ValueError: An agent with other options runs in this process.
    """
    global _current, _used_by, _had_ipc
    with _lock:
        if _used_by not in (0, os.getpid()):
            raise ForkedProcess(
                f"torchrpc was used in process {_used_by}, of which this one is a "
                "fork, and TensorPipe does not survive that; start processes with the "
                "method 'spawn' or 'forkserver', or fork before the first connect"
            )
        # In this order: who ends an agent has it listen no more before.
        is_deaf = _current is not None and _current.listener.is_closed
        if _current is not None and not _current.alive:
            _current = None  # the application has shut it down; `release` frees it
        options = _allowed(options)
        if _current is not None and not _current.worker:
            _check_alike(_current.options, options)
        if _current is not None and is_deaf:
            logger.warning(DEAF, _current.url)
            _current.stop()
            _current = None
            options = _allowed(options)
        if _current is None:
            if not _used_by:
                os.register_at_fork(after_in_child=_forked)
                atexit.register(_exit)
            _used_by = os.getpid()
            _current = _start(options)
            _had_ipc |= not _current.worker and IPC in options.channels
        _current.users += 1
        return _current


def _allowed(options: Options) -> Options:
    """Without the channel `cuda_ipc`, if another agent has had it."""
    has_it = _current is not None and IPC in _current.options.channels
    if IPC not in options.channels or has_it or not _had_ipc:
        return options
    if _current is None:
        logger.warning("%s is left out: %s", IPC, NO_IPC)
    return options.without([IPC])


def _check_alike(theirs: Options, options: Options) -> None:
    if theirs != options:
        raise ValueError(
            f"another torchrpc queue of this process runs with {theirs}, this one asks "
            f"for {options}; a process has one TensorPipe agent, so give all queues "
            "the same options"
        )


def threads_needed(options: Options) -> int:
    """How many threads `acquire` begins: none for an agent that runs already."""
    if runs():
        return 0
    return start_threads(options.transports, options.channels, options.threads)


def renew(agent: Agent, options: Options) -> Agent:
    """One that others reach, in place of one that was shut down or listens no more.

    Raises:
        OSError: There is none to be had.
    """
    try:
        check_threads("TensorPipe", threads_needed(options))
        found = acquire(options)
    except (TransportUnavailable, ValueError) as error:
        raise OSError(f"the RPC agent was shut down: {error}") from error
    release(agent)
    return found


def release(agent: Agent) -> None:
    """Undo `acquire`; the last user stops the agent."""
    global _current
    with _lock:
        agent.users -= 1
        if agent.users == 0:
            agent.close()
            if agent is _current:
                _current = None
                native.log_level.restore()


def _start(options: Options) -> Agent:
    agent = Agent(options)
    native.log_level.raise_to_errors()
    try:
        agent.start()
        if not agent.worker:
            net.check_url(agent.url, options.transports)
            if options.devices not in _tested:
                agent.self_test()
                _tested.add(options.devices)
        if agent.was_ended:
            raise TransportUnavailable(ENDED)
    except Exception as error:  # whatever a torch of another version raises
        was_ended = agent.was_ended or application_ends_one()
        _give_up(agent)
        if was_ended:
            raise TransportUnavailable(ENDED) from error
        if isinstance(error, (OSError, ForkedProcess, TransportUnavailable)):
            raise
        raise TransportUnavailable(
            f"TensorPipe of torch {torch.__version__} does not start with transports "
            f"{options.transports} and channels {options.channels}: "
            f"{first_line(error)}. Its private interface is used here, tested with "
            f"{TESTED}"
        ) from error
    except BaseException:  # Ctrl-C
        _give_up(agent)
        raise
    return agent


def _give_up(agent: Agent) -> None:
    with contextlib.suppress(Exception):  # the first error is the one to tell
        agent.close()
    native.log_level.restore()


def _forked() -> None:
    global _lock, _current
    _lock = threading.Lock()
    if _current is not None:
        _current.leak()
    _current = None
    receivers.clear()


def _exit() -> None:
    """Callbacks that are pending when the interpreter exits would abort it."""
    global _current
    agent, _current = _current, None
    if agent is not None and _used_by == os.getpid():
        agent.close()
