"""A TensorPipe agent: the only file that touches the private API of torch's RPC.

`torch.distributed.rpc.init_rpc` is not used: one killed member makes every later join
of its dynamic group fail for ever, and it can neither be bounded nor interrupted.
Instead the agent is made directly, over a store of this process alone, and peers are
added to it one by one. All queues of the process share it (`_torchrpc_shared`).

**Aborts.** TensorPipe ends the process where it should raise. So `basic` and `uv` are
always among the channels and transports; URLs are checked before they are used; no
future is resolved after the agent is gone; no peer is met without descriptors for it;
nothing is pending when the interpreter exits; a forked child lets go of the
agent without destroying it.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import importlib
import itertools
import pickle
import secrets
import threading
from typing import Any, Final

import torch

from mq.devices import aside
from mq.errors import first_line
from mq.log import Log
from mq.sigpipe import blocked
from transports import _torchrpc_native as native
from transports import _torchrpc_net as net
from transports._torchrpc_aliases import Aliases, Pairs
from transports._torchrpc_calls import Peer, echo, lifelines, rpc, total
from transports._torchrpc_descriptors import Descriptors, check_start, pipe_size
from transports._torchrpc_endings import ends_within, is_in
from transports._torchrpc_listener import Listener
from transports._torchrpc_options import CHANNELS, TRANSPORTS, Options
from transports._torchrpc_stuck import end_stuck

logger = Log(__name__)

UNAVAILABLE = ""
"""Why torch has no RPC here, or not the private interface that is needed."""
# Untyped, since most of what is used has no declaration.
dist: Any = None
private: Any = None
try:
    dist = importlib.import_module("torch.distributed")
    private = importlib.import_module("torch._C._distributed_rpc")
    internal: Any = importlib.import_module("torch.distributed.rpc.internal")
    autograd: Any = importlib.import_module("torch.distributed.autograd")
except (ImportError, AttributeError, RuntimeError) as error:
    UNAVAILABLE = f"{type(error).__name__}: {error}"

TESTED: Final = "torch 2.4, 2.6, 2.11, 2.13 and 2.14"
ENDING_SECONDS: Final = 10.0
"""How long the application's end of an agent is waited for."""
MAX_PEERS: Final = 32767
"""Ids of peers are 16 bits wide and never used again."""

_PRIVATE: Final = (
    "TensorPipeAgent",
    "WorkerInfo",
    "_get_current_rpc_agent",
    "_invoke_rpc_python_udf",
    "_is_current_rpc_agent_set",
    "_reset_current_rpc_agent",
)


def channels_here(names: tuple[str, ...]) -> tuple[str, ...]:
    """Those channels that this build of torch has; all that the platform lacks, too."""
    found = []
    for name in names:
        with contextlib.suppress(RuntimeError):  # Unknown channel
            rpc.TensorPipeRpcBackendOptions(_channels=[name])
            found.append(name)
    return tuple(found)


def gpus(indices: tuple[int, ...]) -> list[torch.device]:
    """These GPUs as TensorPipe takes them."""
    return [torch.device("cuda", index) for index in indices]


def unusable() -> str | None:
    """Why torch's RPC cannot be used in this installation, in words, or None."""
    where = f"torch {torch.__version__}"
    if UNAVAILABLE or rpc is None:
        return (
            f"{where} was built without torch.distributed.rpc and TensorPipe "
            f"({UNAVAILABLE or 'rpc.is_available() is False'}); install a Linux wheel "
            "that has them, or use another transport"
        )
    missing = [name for name in _PRIVATE if not hasattr(private, name)]
    agent = getattr(private, "TensorPipeAgent", None)
    for owner, name in (
        (agent, "_update_group_membership"),
        (rpc.api, "_finalize_shutdown"),
        (rpc.api, "_init_rpc_states"),
        (autograd, "_init"),
        (internal, "PythonUDF"),
    ):
        if not hasattr(owner, name):
            missing.append(name)
    if missing:
        return (
            f"{where} lacks {', '.join(missing)} of torch.distributed.rpc, which this "
            f"transport was written for (tested with {TESTED})"
        )
    return None


def application_ends_one() -> bool:
    """Whether the application is shutting an agent down at this moment."""
    return is_in(rpc.api._finalize_shutdown, others=True)


def runs() -> bool:
    """Whether this process has an agent, if only one that its application started."""
    return bool(private._is_current_rpc_agent_set())


_abandoned: list[object] = []
"""Agents that a forked child must not destroy, and their lifelines."""


class Agent:
    """This process as other agents see it.

    Attributes:
        id: Random, new for each start.
        url: Where other agents reach it, such as ``uv://127.0.0.1:40000``; "" for one
            that the application started.
        worker: Its name in the application's group; "" for one of ours.
        descriptors: Those that connections under way will still take.
        listener: Nothing is known of that of an agent that the application started.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.id = secrets.token_hex(16)
        self.url = self.worker = ""
        self.listener = Listener("")
        self.users = 0
        size = pipe_size(options.transports, options.channels)
        self.descriptors = Descriptors(size)
        self.heap = native.Heap()
        self._peers: dict[tuple[str, Pairs], Peer] = {}
        self._aliases = Aliases(options.maps)
        self._devices: list[torch.device] = []
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._store: Any = None
        self._agent: Any = None

    @property
    def was_ended(self) -> bool:
        """Whether the application has shut it down."""
        return self._agent is not None and not self.alive

    @property
    def alive(self) -> bool:
        """Whether it can be called and its futures be resolved."""
        if self._agent is None or not runs():
            return False
        try:
            return private._get_current_rpc_agent() is self._agent
        except RuntimeError:  # another thread has shut it down meanwhile
            return False

    def start(self) -> None:
        """Start, or use the agent that the application has started."""
        if runs():
            self._agent = private._get_current_rpc_agent()
            self.worker = self._agent.get_worker_info().name
            # What the application chose cannot be asked for: by default, everything.
            self.descriptors = Descriptors(pipe_size(TRANSPORTS, CHANNELS))
            return
        options, name = self.options, f"mq-{self.id}"
        options.make_fork_safe()
        check_start(options.transports, options.channels)
        self._store = dist.HashStore()
        self._store.set_timeout(datetime.timedelta(seconds=5))
        self._devices = gpus(options.devices)
        backend = rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=options.threads,
            rpc_timeout=60,
            init_method="unused://",
            device_maps=self._aliases.declared() or None,
            devices=self._devices or None,
            _transports=list(options.transports),
            _channels=list(options.channels),
        )
        try:
            with contextlib.suppress(RuntimeError):  # it keeps the application's rank
                autograd._init(0)
            with net.listen_on(options.host), blocked():  # its threads stay without
                self._agent = private.TensorPipeAgent(
                    self._store, name, 0, None, backend, {}, self._devices
                )
                rpc.api._init_rpc_states(self._agent)
            self.url = self._store.get(f"addrs/{name}").decode()
            self.listener = Listener(self.url)
        except BaseException:
            self._agent = None
            if runs():
                private._reset_current_rpc_agent()
            raise

    def peer(self, id: str, url: str, worker: str, pairs: Pairs = ()) -> Peer:
        """The process with an agent of this id.

        Args:
            pairs: One of `Options.maps`, by which GPU tensors go there. Where all its
                names are in use the peer is not `mapped`.

        Raises:
            OSError: It cannot be added; the text says why.
        """
        with self._lock:
            if not self.alive:
                raise OSError("the application has shut the RPC agent down")
            known = self._peers.get((id, pairs))
            if known is not None and not known.lost:
                if not end_stuck(url, self.url):
                    return known
                known.fail("TCP waits to repeat what is not acknowledged")
            if known is not None and known.mapped:  # `_alias` looks for its name
                self._peers[known.worker.name, pairs] = self._peers.pop((id, pairs))
            try:
                if self.worker:  # a lifeline would hang the application's shutdown
                    info = self._agent.get_worker_info(worker)
                    known = Peer(info, self._call, has_lifeline=False)
                else:
                    known = self._add(url, pairs)
            except (RuntimeError, ValueError) as error:  # C++: invalid_argument
                raise OSError(
                    f"the RPC agent does not take the peer: {first_line(error)}"
                ) from error
            self._peers[id, pairs] = known
            return known

    def _add(self, url: str, pairs: Pairs = ()) -> Peer:
        number = next(self._ids)
        if number > MAX_PEERS:
            raise OSError(
                f"this process has met {MAX_PEERS} others, more than an RPC agent can; "
                "close all its torchrpc queues to start a new one"
            )
        alias = self._alias(pairs) if pairs else ""
        info = private.WorkerInfo(alias or f"peer-{number}", number)
        self._store.set(f"addrs/{info.name}", url)
        # Own devices are always told: TensorPipe forgets those that are not.
        self._agent._update_group_membership(info, self._devices, {}, True)
        return Peer(info, self._call, has_lifeline=True, mapped=bool(alias))

    def _call(
        self, worker: Any, function: Any, args: tuple[Any, ...], with_tensors: bool
    ) -> Any:
        """What `Peer.call` does."""
        if not self.alive:  # torch would take the next agent, and another peer of that
            raise RuntimeError("the application has shut the RPC agent down")
        if with_tensors:
            return rpc.rpc_async(worker, function, args=args, timeout=0)
        # What torch does for such a call, but for its pickler, which seeks tensors.
        pickled = pickle.dumps(internal.PythonUDF(function, args, {}), 5)
        return private._invoke_rpc_python_udf(worker, pickled, [], 0.0, True)

    def _alias(self, pairs: Pairs) -> str:
        """A name with this device map, of a peer that is gone if need be."""
        alias = self._aliases.take(pairs)
        if alias:
            return alias
        # Only now, and only of peers to which nobody has a connection: in C++ a removal
        # races with calls under way. Ids and other names are never used again.
        for key, peer in list(self._peers.items()):
            if peer.mapped and peer.lost and not peer.listeners:
                info = peer.worker
                self._agent._update_group_membership(info, self._devices, {}, False)
                self._store.delete_key(f"addrs/{info.name}")
                del self._peers[key]
                self._aliases.give_back(info.name)
        alias = self._aliases.take(pairs)
        if not alias:
            logger.warning(
                "as many peers as there are names for use the device map %s: tensors "
                "to one more are staged through host memory; raise max_gpu_peers",
                pairs,
            )
        return alias

    def self_test(self) -> None:
        """Call this process through its own URL.

        Raises:
            RuntimeError: No answer, or a wrong one.
        """
        peer = self._add(self.url)
        for sent in ([b"mq"], [b"mq", torch.arange(5, device="cpu")]):
            answer = peer.ask(echo, (sent,), with_tensors=len(sent) > 1)
            if len(answer) != len(sent) or not all(map(_equal, sent, answer)):
                raise RuntimeError(f"a call to itself was answered by {answer!r}")
        self._test_gpus()

    def _test_gpus(self) -> None:
        pairs = tuple((index, index) for index in sorted(self.options.devices))
        if not pairs or pairs not in (known for known, _ in self.options.maps):
            return
        with aside(self._devices):  # the application's streams may be busy
            sent = [torch.ones(9, device=device) for device in self._devices]
            answer = self._add(self.url, pairs).ask(total, (sent,), with_tensors=True)
        if answer != [(str(device), 9) for device in self._devices]:
            raise RuntimeError(f"tensors on GPUs were answered by {answer!r}")

    def stop(self) -> None:
        """Every call that is unanswered fails."""
        if not self.alive or self.worker:
            return
        # Unresolved futures may be dropped, but not be resolved any more.
        lifelines.clear()
        # For each call that comes meanwhile torch would write that it has no agent.
        with native.log_level.silenced():
            self._end()

    def _end(self) -> None:
        agent = self._agent
        # To end an agent twice at once hangs, or ends the process. So nobody begins to
        # any more, and who has begun comes first: the application's `rpc.shutdown`.
        with contextlib.suppress(RuntimeError):
            private._reset_current_rpc_agent()
        is_alone = False
        try:
            is_alone = ends_within(rpc.api._finalize_shutdown, ENDING_SECONDS)
        finally:
            if not is_alone:
                self._keep()
        if is_alone:
            agent.shutdown()
        else:
            logger.warning(
                "the application's rpc.shutdown has not ended the RPC agent within "
                "%g s: its threads and its port stay until this process ends",
                ENDING_SECONDS,
            )

    def close(self) -> None:
        """Stop, and let go of it."""
        self._peers.clear()
        self.stop()
        self._agent = self._store = None

    def leak(self) -> None:
        """In a forked child: never destroy what has no threads here."""
        if self._agent is not None and not self.worker:
            self._keep()
            with contextlib.suppress(RuntimeError):  # the application has shut it down
                private._reset_current_rpc_agent()
        _abandoned.append((self, list(lifelines)))

    def _keep(self) -> None:
        """Never destroy it: with threads of its own, or without any, that aborts."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._agent))


def _equal(sent: Any, answer: Any) -> bool:
    if isinstance(sent, torch.Tensor):
        return isinstance(answer, torch.Tensor) and bool(sent.equal(answer))
    return bool(sent == answer)


if not UNAVAILABLE:
    native.open_libuv()
