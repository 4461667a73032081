"""torch.distributed.rpc: TensorPipe between processes and hosts.

The link listens on a socket of its own and learns over it, before TensorPipe meets the
peer, whether the two can talk (`_torchrpc_control`). Messages are calls of a function
of the peer's, in batches (`_torchrpc_conns`), by the one agent of the process
(`_torchrpc_agent`, `_torchrpc_shared`).

TensorPipe runs what a peer pickles and aborts on what it does not understand, whoever
connects to its port: it is for hosts on which everyone is trusted.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final

import torch

from mq import addresses, options
from mq.mesh.poller import Poller
from mq.transport import (
    LINGER_SECONDS,
    MAX_HEAD_BYTES,
    Capabilities,
    Conn,
    Event,
    Link,
    What,
)
from transports import _torchrpc_agent as rpc_agent
from transports import _torchrpc_control as control
from transports import _torchrpc_net as net
from transports import _torchrpc_shared as shared
from transports._torchrpc_aliases import Pairs
from transports._torchrpc_conns import RpcConn
from transports._torchrpc_control import BadNote, Control, Greeting, Misfit
from transports._torchrpc_options import Options
from transports._torchrpc_sharing import Sharing
from transports._torchrpc_signs import SIGN, SIGN_SECONDS, moving
from transports._torchrpc_sockets import Sockets

LOOK_SECONDS: Final = 0.05
CONTROL_SECONDS: Final = 0.001
"""While messages come, the sockets beside them are looked at no more often."""


class TorchRpcLink(Link):
    """Calls over the one TensorPipe agent of this process.

    Args:
        transports: TensorPipe's transports by name, best first: ``uv`` (TCP), ``ibv``
            (InfiniBand), ``shm`` (keeps a core busy even when idle); also as text,
            ``"uv,shm"``.
        channels: How it moves tensors, best first: ``cma`` (reads the sender's memory,
            one host), ``basic`` (over the transport), ``mpt_uv`` (many sockets).
            ``("basic",)`` forces TCP.
        infiniband: Whether TensorPipe may use InfiniBand, which it then tries first.
        threads: Threads of TensorPipe's that take calls in; one is the fastest.
        greeting_timeout: Seconds that a socket may take to greet.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        reach="network", survives_fork=False
    )
    # A call with a tensor costs half a millisecond, as much as copying several MiB.
    chunk_bytes = least_chunk_bytes = 12 * 1024 * 1024
    max_ahead = 3 * chunk_bytes
    scheme = "torchrpc"
    _gpu: ClassVar[bool] = False
    sharing: Sharing | None = None

    def __init__(
        self,
        *,
        transports: str | Sequence[str] = ("uv",),
        channels: str | Sequence[str] = ("cma", "basic"),
        infiniband: bool = False,
        threads: int = 1,
        greeting_timeout: float = 5.0,
    ) -> None:
        names = options.names("transports", transports)
        infiniband = options.switch("infiniband", infiniband)
        if "ibv" in names and not infiniband:
            raise ValueError(f"transports={names} with ibv need infiniband=True")
        if infiniband and "ibv" not in names:
            names = ("ibv", *names)
        self._options = Options(
            transports=names,
            channels=options.names("channels", channels),
            threads=options.whole("threads", threads, 1, 64),
            gpu=self._gpu,
        )
        self._options.check()
        self.malformed = 0
        self.agent: rpc_agent.Agent
        self.largest = MAX_HEAD_BYTES + self.chunk_bytes
        self.noticed: dict[RpcConn, None] = {}
        self._greeting_timeout = options.seconds(
            "greeting_timeout", greeting_timeout, 3600
        )
        self._id = secrets.token_hex(8)
        self._open = self._closing = False
        self._looked_at = self._told_at = 0.0
        self._woken = threading.Event()
        self._sockets: Sockets
        self._alive: dict[RpcConn, None] = {}
        self._again: dict[RpcConn, float] = {}
        self._leaving: dict[RpcConn, None] = {}

    @classmethod
    def unusable(cls) -> str | None:
        return rpc_agent.unusable()

    @property
    def engine_threads(self) -> int:  # type: ignore[override]
        return shared.threads_needed(self._options)

    # -- open ----------

    def open(
        self, poller: Poller, listen: Sequence[str], directory: str | None
    ) -> list[str]:
        wanted = list(listen) or [f"{net.SCHEME}127.0.0.1:0"]
        hosts = [net.split(address)[0] for address in wanted]
        for address in wanted:
            if self.is_routable(address) and not self.insecure:
                raise ValueError(
                    f"listen={address!r} can be reached from other hosts, and whoever "
                    "reaches TensorPipe's port can run code in this process, with or "
                    "without the secret: pass insecure=True if that is meant"
                )
        self._options = self._options.listening_on(hosts)
        self._poller = poller
        self._sockets = Sockets(self, self._greeting_timeout)
        try:
            self.agent = shared.acquire(self._options)
        except BaseException:
            self._sockets.close()
            raise
        self._open = True
        try:
            poller.register(self._sockets.epoll.fileno())
            self._check_host(hosts)
            return [self._listen(address) for address in wanted]
        except BaseException:
            self.close()
            raise

    def _revive(self) -> None:
        """Have an agent that others reach, where ours was shut down or listens no more.

        Raises:
            OSError: There is none to be had.
        """
        if not self.agent.listener.is_closed and self.agent.alive:  # in this order
            return
        if self.ended:
            raise OSError(self.ended)
        self.agent = shared.renew(self.agent, self._options)

    @property
    def ended(self) -> str:
        if self.agent.worker and not self.agent.alive:
            return "the application has shut down its RPC agent, used here"
        return ""

    def _check_host(self, hosts: Sequence[str]) -> None:
        bound = self.agent.url.partition("://")[2].rpartition(":")[0]
        outside = any(not addresses.is_loopback(host) for host in hosts)
        if self.agent.url and outside and addresses.is_loopback(bound):
            raise OSError(
                f"TensorPipe listens on {bound}, as it chose when it first started in "
                "this process, or by TP_SOCKET_IFNAME, even if that names no interface "
                "with a link; give its first torchrpc queue a routable listen address"
            )

    def _listen(self, address: str) -> str:
        host, port, _ = net.split(address)
        with addresses.listening(address):
            port = self._sockets.listen(host if host != "*" else "0.0.0.0", port)
        host = addresses.reachable_host(addresses.bracketed(host))
        return f"{net.SCHEME}{host}:{port}/{self._id}"

    def _greeting(self, conn: RpcConn, link: str = "") -> Greeting:
        agent = self.agent
        return Greeting(
            torch=control.release(torch.__version__),
            agent=agent.id,
            url=agent.url,
            worker=agent.worker,
            channels=agent.options.channels,
            token=conn.token.hex(),
            link=link,
        )

    # -- connections ----------

    def given(self, address: str) -> str:
        return net.without_id(super().given(address))

    def dial(self, address: str) -> Conn:
        host, port, link = net.split(address)
        self._revive()
        sock = control.unconnected(host)
        conn = RpcConn(self, address, sock)
        self._alive[conn] = None
        conn.whom = address
        try:
            conn.promise = self.agent.descriptors.promise()
            self._sockets.dial(sock, conn, host, port)
        except OSError as error:
            sock.close()
            conn.fail(f"cannot dial {address}: {error}")
            return conn
        conn.expect()
        self._sockets.send(sock, self._greeting(conn, link).note())
        return conn

    def read(self, sock: Control, note: dict[str, Any]) -> None:
        """Take a note in.

        Raises:
            BadNote, OSError: The socket must be closed; says why.
        """
        conn = self._sockets.conns.get(sock.fd)
        if sock.fd not in self._sockets.strangers:
            if conn is not None and note == SIGN:
                conn.signs.heard()
            elif conn is not None and "goodbye" in note:
                if type(note["goodbye"]) is not int or note["goodbye"] < 0:
                    raise BadNote("a goodbye that is none")
                conn.goodbye(note["goodbye"])
            else:
                raise BadNote("a note that nobody expects")
            return
        if conn is not None and isinstance(note.get("refused"), str):
            reason = f"refused: {note['refused']}"
            raise Misfit(reason) if note.get("final") is True else OSError(reason)
        greeting = control.greeting_of(note)
        sock.check_alive()
        if conn is None:
            self._revive()
        self._check(greeting, sock)
        if conn is not None:
            conn.begin(greeting, What.OPENED)
            return self._sockets.know(sock, conn)
        conn = RpcConn(self, sock.address, sock)
        conn.begin(greeting, What.ACCEPTED)
        self._alive[conn] = None
        self._sockets.know(sock, conn)
        conn.expect()
        sock.send(self._greeting(conn).note())

    def _check(self, peer: Greeting, sock: Control) -> None:
        """Refuse a peer that TensorPipe would abort the process for.

        Raises:
            BadNote, OSError: It says why.
        """
        # First: whoever else has got this port is not what was looked for.
        if peer.link not in ("", self._id):
            raise OSError("the link that was dialled does not listen here any more")
        release, agent = control.release(torch.__version__), self.agent
        control.compare(release, agent.worker, agent.options.channels, peer)
        if not peer.worker:
            try:
                net.check_url(peer.url, self._options.transports, sock.is_within_host)
            except ValueError as error:
                raise Misfit(str(error)) from error

    # -- what happened ----------

    def notice(self, conn: RpcConn) -> None:
        """Have `poll` look at a connection; from any thread, takes no lock."""
        if self._open:
            self.noticed[conn] = None
            if self._closing:
                self._woken.set()
            self._poller.wake()

    def look_again(self, conn: RpcConn) -> None:
        """Have a later `poll` look at a connection that waits for a moment."""
        self._again.setdefault(conn, time.monotonic() + LOOK_SECONDS)

    def forget(self, conn: RpcConn) -> None:
        """A connection is closed: report nothing more of it."""
        self._sockets.forget(conn.control)
        self._alive.pop(conn, None)
        self.noticed.pop(conn, None)
        self._again.pop(conn, None)
        if conn.unanswered:
            self._leaving[conn] = None

    def poll(self) -> Iterator[Event]:
        if not self._open:
            return
        now = time.monotonic()
        if not self.noticed or now - self._looked_at > CONTROL_SECONDS:
            self._looked_at = now
            self._sockets.look()
        if self._sockets.waits or self._again or self._leaving:
            self._look_after()
        if now - self._told_at > SIGN_SECONDS:
            self._told_at = now
            for conn in moving(self._alive):
                self._sockets.send(conn.control, SIGN)
        for conn in list(self.noticed):
            if conn in self.noticed:
                yield from conn.report()

    def _look_after(self) -> None:
        """What time brings: silent strangers, late batches, answers to the closed."""
        now = time.monotonic()
        self._sockets.expire(now)
        for conn in [conn for conn, at in self._again.items() if at < now]:
            del self._again[conn]
            self.noticed[conn] = None
        for conn in [conn for conn in self._leaving if not conn.unanswered]:
            del self._leaving[conn]

    def describe(self) -> Mapping[str, str]:
        used = self.agent.options
        if self.agent.worker:
            return {"agent": f"the application's, {self.agent.worker!r} of its group"}
        return {
            "agent": self.agent.url,
            "transports": ",".join(used.transports),
            "channels": ",".join(used.channels),
            "threads": str(used.threads),
        }

    def pairs(self, peer: Greeting) -> Pairs:
        """The device map by which the agent is to know a peer; empty: none."""
        return ()

    def carried(self, peer: Greeting, mapped: bool) -> Mapping[str, str]:
        """Devices whose tensors travel to a peer as they are, and where to.

        Args:
            mapped: Whether the agent knows the peer by `pairs`.
        """
        return {}

    def describe_peer(
        self, peer: Greeting, carried: Mapping[str, str], mapped: bool
    ) -> dict[str, str]:
        """How TensorPipe reaches a peer; `Conn.describe` says it."""
        if peer.worker:
            return {"agent": peer.worker}
        common = [name for name in self.agent.options.channels if name in peer.channels]
        return {"agent": peer.url, "channels": ",".join(common)}

    def rank(self, candidates: Sequence[str], same_host: bool) -> list[str]:
        usable = []
        for address in candidates:
            try:
                net.split(address)
            except ValueError:
                continue
            if same_host or self.is_routable(address):
                usable.append(address)
        return usable

    def is_routable(self, address: str) -> bool:
        return not addresses.is_loopback(net.split(address)[0])

    def trim(self, idle_seconds: float) -> None:
        self.agent.heap.trim(idle_seconds)

    # -- end ----------

    def close(self, linger: float = LINGER_SECONDS) -> None:
        if not self._open:
            return
        self._closing = True
        for conn in list(self._alive):
            conn.close()
        deadline = time.monotonic() + linger
        while any(conn.unanswered for conn in self._leaving):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            self._woken.clear()
            if any(conn.unanswered for conn in self._leaving):
                self._woken.wait(left)
        self._open = False
        self.noticed.clear()
        self._leaving.clear()
        self._poller.unregister(self._sockets.epoll.fileno())
        self._sockets.close()
        if self.sharing is not None:
            self.sharing.close()
        shared.release(self.agent)

    def abandon(self) -> None:
        # The agent and the sockets are let go of by the fork itself.
        self._open = False
