"""One TensorPipe agent per process: the only file that touches torch's private API.

`torch.distributed.rpc.init_rpc` is not used: one killed member makes every later join
of its dynamic group fail for ever, and it can neither be bounded nor interrupted.
Instead the agent is made directly, over a store of this process alone, and peers are
added to it one by one. All queues of the process share it; the last one closes it.

What runs in TensorPipe's threads is Python of necessity: `deliver`, `hold` and the
callbacks of `Peer.call`. They only append to a deque and wake a poller.

**Aborts.** TensorPipe ends the process where it should raise. So `basic` and `uv` are
always among the channels and transports; URLs are checked before they are used; no
future is resolved after the agent is gone; nothing is pending when the interpreter
exits; a forked child lets go of the agent without destroying it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import datetime
import functools
import importlib
import itertools
import os
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch

from mq.errors import ForkedProcess, TransportUnavailable
from transports import _torchrpc_net as net

UNAVAILABLE = ""
"""Why torch has no RPC here, or not the private interface that is needed."""
# Untyped, since most of what is used has no declaration.
dist: Any = None
rpc: Any = None
private: Any = None
try:
    dist = importlib.import_module("torch.distributed")
    rpc = importlib.import_module("torch.distributed.rpc")
    private = importlib.import_module("torch._C._distributed_rpc")
    autograd: Any = importlib.import_module("torch.distributed.autograd")
except (ImportError, AttributeError, RuntimeError) as error:
    UNAVAILABLE = f"{type(error).__name__}: {error}"

TRANSPORTS: Final = ("uv", "ibv", "shm")
CHANNELS: Final = ("cma", "basic", "mpt_uv")
MAX_PEERS: Final = 32767
"""Ids of peers are 16 bits wide and never used again."""
SELF_TEST_SECONDS: Final = 10.0

_WARNINGS_OFF: Final = 2
_PRIVATE: Final = (
    "TensorPipeAgent",
    "WorkerInfo",
    "_get_current_rpc_agent",
    "_is_current_rpc_agent_set",
    "_reset_current_rpc_agent",
)

Future = torch.futures.Future


@dataclass(frozen=True)
class Options:
    """How the agent of a process is set up.

    Attributes:
        host: The address of this host whose interface TensorPipe listens on.
        transports: TensorPipe's transports by name, best first.
        channels: Its channels by name, best first.
        threads: Threads that run handlers and callbacks; with one, order is kept.
    """

    host: str = "127.0.0.1"
    transports: tuple[str, ...] = ("uv",)
    channels: tuple[str, ...] = ("cma", "basic")
    threads: int = 1

    def check(self) -> None:
        """Raises: ValueError, if TensorPipe would refuse this or abort the process."""
        for what, known, always, given in (
            ("transports", TRANSPORTS, "uv", self.transports),
            ("channels", CHANNELS, "basic", self.channels),
        ):
            unknown = [name for name in given if name not in known]
            if unknown or len(set(given)) < len(given):
                raise ValueError(f"{what} are some of {known}, each once, not {given}")
            if always not in given:
                raise ValueError(
                    f"{what}={given} lack {always!r}, which every peer has: without "
                    "anything in common TensorPipe aborts both processes"
                )
        if not 1 <= self.threads <= 64:
            raise ValueError(f"threads is {self.threads}, but must be 1 to 64")


class Receiver(Protocol):
    """Where the calls of a peer go."""

    def arrive(self, sequence: int, heads: Any, bodies: Any) -> Any:
        """Take a batch; runs in a thread of TensorPipe's. Returns the answer."""


receivers: dict[bytes, Receiver] = {}
"""By the token that a connection's peer was told."""
_lifelines: list[Any] = []


def _later(function: Callable[..., Any]) -> Any:
    """Mark a function whose answer is a future, which may be resolved later."""
    return function if UNAVAILABLE else rpc.functions.async_execution(function)


@_later
def deliver(token: bytes, sequence: int, heads: Any, bodies: Any) -> Any:
    """What a peer calls to hand over a batch of messages.

    Returns:
        A future of True, or of False where the connection is closed; it resolves once
        there is room for more.
    """
    receiver = receivers.get(token)
    if receiver is None:
        return done(False)
    try:
        return receiver.arrive(sequence, heads, bodies)
    except Exception:  # torch would print it to stderr; the sender needs no more
        return done(False)


@_later
def hold() -> Any:
    """What a peer calls to learn of the end of this process: never answered."""
    future = Future[None]()
    _lifelines.append(future)
    return future


@_later
def echo(value: Any) -> Any:
    """What this process calls to see whether calls work."""
    return done(value)


def done(value: Any) -> Any:
    """A future that is resolved."""
    future = Future[Any]()
    future.set_result(value)
    return future


def unusable() -> str | None:
    """Why torch's RPC cannot be used in this installation, in words, or None."""
    where = f"torch {torch.__version__}"
    if UNAVAILABLE or not rpc.is_available():
        return (
            f"{where} was built without torch.distributed.rpc and TensorPipe "
            f"({UNAVAILABLE or 'rpc.is_available() is False'}); install a Linux wheel "
            "that has them, or use another transport"
        )
    missing = [name for name in _PRIVATE if not hasattr(private, name)]
    agent = getattr(private, "TensorPipeAgent", None)
    for owner, name in (
        (agent, "_update_group_membership"),
        (rpc.api, "_init_rpc_states"),
        (autograd, "_init"),
    ):
        if not hasattr(owner, name):
            missing.append(name)
    if missing:
        return (
            f"{where} lacks {', '.join(missing)} of torch.distributed.rpc, which this "
            "transport was written for (tested with torch 2.13)"
        )
    return None


class Peer:
    """Another process as this one's agent knows it; shared by all connections to it."""

    def __init__(self, worker: Any, has_lifeline: bool) -> None:
        self.worker = worker
        self.lost = ""
        self.listeners: dict[object, Callable[[str], None]] = {}
        if has_lifeline:
            self.call(hold, (), self._ended)

    def call(
        self, function: Any, args: tuple[Any, ...], answered: Callable[[Any], None]
    ) -> None:
        """Call a function there; never waits.

        Args:
            function: `deliver`, `hold` or `echo`.
            args: Tensors among them must not change until the answer.
            answered: Called with the future, in a thread of TensorPipe's or at once.

        Raises:
            RuntimeError: The agent or the peer is gone.
        """
        future = rpc.rpc_async(self.worker, function, args=args, timeout=0)
        future.add_done_callback(answered)

    def _ended(self, future: Any) -> None:
        self.lost = failure(future) or "the peer ended the lifeline"
        for listener in list(self.listeners.values()):
            listener(self.lost)


def failure(future: Any) -> str:
    """Why a call failed, or "" if it was answered."""
    try:
        future.value()
    except Exception as error:  # a plain RuntimeError; its text has the C++ trace
        return str(error).partition("\n")[0].partition(" (this error orig")[0]
    return ""


class Agent:
    """This process as other agents see it.

    Attributes:
        id: Random, new for each start.
        url: Where other agents reach it, such as ``uv://127.0.0.1:40000``; "" for one
            that the application started.
        worker: Its name in the application's group; "" for one of ours.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.id = secrets.token_hex(16)
        self.url = self.worker = ""
        self.users = 0
        self._peers: dict[str, Peer] = {}
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._store: Any = None
        self._agent: Any = None

    @property
    def alive(self) -> bool:
        """Whether it can be called and its futures be resolved."""
        if self._agent is None or not private._is_current_rpc_agent_set():
            return False
        return private._get_current_rpc_agent() is self._agent

    def start(self) -> None:
        """Start, or use the agent that the application has started."""
        if private._is_current_rpc_agent_set():
            self._agent = private._get_current_rpc_agent()
            self.worker = self._agent.get_worker_info().name
            return
        options, name = self.options, f"mq-{self.id}"
        self._store = dist.HashStore()
        self._store.set_timeout(datetime.timedelta(seconds=5))
        backend = rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=options.threads,
            rpc_timeout=60,
            init_method="unused://",
            _transports=list(options.transports),
            _channels=list(options.channels),
        )
        try:
            autograd._init(0)
            with net.listen_on(options.host):
                self._agent = private.TensorPipeAgent(
                    self._store, name, 0, None, backend, {}, []
                )
                rpc.api._init_rpc_states(self._agent)
            self.url = self._store.get(f"addrs/{name}").decode()
        except BaseException:
            self._agent = None
            if private._is_current_rpc_agent_set():
                private._reset_current_rpc_agent()
            raise

    def peer(self, id: str, url: str, worker: str) -> Peer:
        """The process with an agent of this id.

        Raises:
            OSError: It cannot be added; the text says why.
        """
        with self._lock:
            known = self._peers.get(id)
            if known is not None and not known.lost:
                return known
            if self.worker:
                try:
                    info = self._agent.get_worker_info(worker)
                except RuntimeError as error:
                    raise OSError(
                        f"the application's RPC group has no worker {worker!r}"
                    ) from error
                known = Peer(info, has_lifeline=False)  # it would hang its shutdown
            else:
                known = self._add(url)
            self._peers[id] = known
            return known

    def _add(self, url: str) -> Peer:
        number = next(self._ids)
        if number > MAX_PEERS:
            raise OSError(
                f"this process has met {MAX_PEERS} others, more than an RPC agent can; "
                "close all its torchrpc queues to start a new one"
            )
        # Never removed: a removal races with calls under way in C++, and the id and
        # the name cannot be used again anyway.
        info = private.WorkerInfo(f"peer-{number}", number)
        self._store.set(f"addrs/{info.name}", url)
        self._agent._update_group_membership(info, [], {}, True)
        return Peer(info, has_lifeline=True)

    def self_test(self) -> None:
        """Call this process through its own URL.

        Raises:
            RuntimeError: No answer, or a wrong one.
        """
        answers: list[Any] = []
        answered = threading.Event()

        def note(future: Any) -> None:
            answers.append(failure(future) or future.value())
            answered.set()

        peer = self._add(self.url)
        peer.call(echo, ((b"mq", torch.arange(5)),), note)
        if not answered.wait(SELF_TEST_SECONDS):
            raise RuntimeError(f"no answer within {SELF_TEST_SECONDS:g} s")
        answer = answers[0]
        if not isinstance(answer, tuple) or answer[1].tolist() != [0, 1, 2, 3, 4]:
            raise RuntimeError(f"a call to itself was answered by {answer!r}")

    def close(self) -> None:
        """Stop; every call that is unanswered fails."""
        self._peers.clear()
        if self.worker or self._agent is None:
            self._agent = None
            return
        # Unresolved futures may be dropped, but not be resolved any more.
        _lifelines.clear()
        if self.alive:
            rpc.shutdown(graceful=False)
        self._agent = self._store = None

    def leak(self) -> None:
        """In a forked child: never destroy what has no threads here."""
        if self._agent is not None and not self.worker:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._agent))
            private._reset_current_rpc_agent()
        _abandoned.append((self, list(_lifelines)))


_lock = threading.Lock()
_current: Agent | None = None
_used_by = 0
_tested = False
_abandoned: list[object] = []


def acquire(options: Options) -> Agent:
    """The agent of this process, started if this is its first user.

    Raises:
        ForkedProcess: This process was forked from one that has used an agent.
        TransportUnavailable: TensorPipe cannot start here.
        ValueError: An agent with other options runs in this process.
    """
    global _current, _used_by
    with _lock:
        if _used_by not in (0, os.getpid()):
            raise ForkedProcess(
                f"torchrpc was used in process {_used_by}, of which this one is a "
                "fork, and TensorPipe does not survive that; start processes with the "
                "method 'spawn' or 'forkserver', or fork before the first connect"
            )
        if _current is None:
            if not _used_by:
                os.register_at_fork(after_in_child=_forked)
                atexit.register(_exit)
            _used_by = os.getpid()
            _current = _start(options)
        elif not _current.worker and _current.options != options:
            raise ValueError(
                f"another torchrpc queue of this process runs with {_current.options}, "
                f"this one asks for {options}; a process has one TensorPipe agent, so "
                "give all queues the same options"
            )
        _current.users += 1
        return _current


def release(agent: Agent) -> None:
    """Undo `acquire`; the last user stops the agent."""
    global _current
    with _lock:
        agent.users -= 1
        if agent.users == 0 and agent is _current:
            _current = None
            agent.close()
            _log_level.restore()


def _start(options: Options) -> Agent:
    global _tested
    agent = Agent(options)
    _log_level.raise_to_errors()
    try:
        agent.start()
        if not agent.worker:
            net.check_url(agent.url, options.transports)
            if not _tested:
                agent.self_test()
        _tested = True
    except OSError:
        _give_up(agent)
        raise
    except Exception as error:  # whatever a torch of another version raises
        _give_up(agent)
        first = str(error).partition("\n")[0]
        raise TransportUnavailable(
            f"TensorPipe of torch {torch.__version__} does not start with transports "
            f"{options.transports} and channels {options.channels}: {first}. Its "
            "private interface is used here, tested with torch 2.13; InfiniBand (ibv) "
            "needs a device"
        ) from error
    except BaseException:  # Ctrl-C
        _give_up(agent)
        raise
    return agent


def _give_up(agent: Agent) -> None:
    with contextlib.suppress(Exception):  # the first error is the one to tell
        agent.close()
    _log_level.restore()


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


class _LogLevel:
    """Keeps TensorPipe from writing a warning to stderr for every peer that leaves."""

    def __init__(self) -> None:
        self._before: int | None = None

    @functools.cached_property
    def _flag(self) -> ctypes.c_int | None:
        if "TORCH_CPP_LOG_LEVEL" in os.environ:  # the user has decided
            return None
        with contextlib.suppress(OSError, ValueError):
            return ctypes.c_int.in_dll(library("libc10.so"), "FLAGS_caffe2_log_level")
        return None

    def raise_to_errors(self) -> None:
        if self._flag is not None and self._before is None:
            self._before = self._flag.value
            self._flag.value = max(self._before, _WARNINGS_OFF)

    def restore(self) -> None:
        if self._flag is not None and self._before is not None:
            self._flag.value = self._before
            self._before = None


def library(name: str) -> ctypes.CDLL:
    """A shared library of torch's, which is loaded already."""
    return ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", name))


def _open_libuv() -> None:
    """Have libuv make now what it keeps for the life of the process: one pipe.

    Else the first queue of a process would seem to leave two descriptors.
    """
    with contextlib.suppress(OSError, AttributeError):  # linked in another way
        uv = library("libtorch_cpu.so")
        loop = ctypes.create_string_buffer(uv.uv_loop_size())
        if uv.uv_loop_init(loop) == 0:
            uv.uv_loop_close(loop)


_log_level = _LogLevel()
if not UNAVAILABLE:
    _open_libuv()
