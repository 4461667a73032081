"""What transports are measured beside: bare libraries, other systems, limits."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.wire import Wire

EVERYTHING = frozenset(
    {"latency", "rate", "fanout", "fanin", "stream", "mixed", "mixed-busy"}
)
_TO_ONE = frozenset({"latency", "stream"})
_RATE = frozenset({"rate"})
_WHOLE = frozenset({"latency", "fanout"})

BUS = "raw:nng-bus"
"""What DI-engine's queue does with NNG, over unix sockets as by its default."""

QUEUES = "raw:torch.multiprocessing"

_QUIET = EVERYTHING - {"mixed", "mixed-busy"}
_LARGE = 1_000_000


@dataclass(frozen=True)
class Baseline:
    """One thing to compare with.

    Attributes:
        wire: ``module:class`` of its `Wire`.
        workloads: What it can run.
        lossy: Whether it drops messages that are not taken in time.
        most: The largest payload in bytes that it carries; 0: any.
        quick: The largest payload in bytes that a quick run gives it; 0: any.
        module: What must be importable, where that is not the library's own need.
        package: What pip installs it by.
        program: What must be on the PATH.
        served: Whether servers do part of the work, which are no processes of the cell.
    """

    wire: str
    workloads: frozenset[str] = EVERYTHING
    lossy: bool = False
    most: int = 0
    quick: int = 0
    module: str = ""
    package: str = ""
    program: str = ""
    served: bool = False


_NNG, _ZMQ = "bench.raw_nng:RawNngWire", "bench.raw:RawZmqWire"
_RPC, _SOCKET = "bench.raw_torchrpc:RawRpcWire", "bench.limits:SocketWire"
COPIES = ("limit:memcpy", "limit:cuda")
"""One copy by a single process: of the host's memory, and of a GPU's."""

BASELINES = {
    **{f"raw:nng:{wire}": Baseline(_NNG) for wire in ("ipc", "tcp")},
    **{
        f"raw:nng:{wire}:pubsub": Baseline(_NNG, _RATE, lossy=True, quick=100)
        for wire in ("ipc", "tcp")
    },
    # 640 MB take it 40 s.
    BUS: Baseline(
        "bench.raw_nng:NngBusWire", _TO_ONE | _RATE, lossy=True, quick=20_000_000
    ),
    **{f"raw:zmq:{wire}": Baseline(_ZMQ) for wire in ("ipc", "tcp")},
    **{
        f"raw:zmq:{wire}:pubsub": Baseline(_ZMQ, _RATE, lossy=True, quick=100)
        for wire in ("ipc", "tcp")
    },
    # Larger ones say nothing new.
    **{
        f"raw:zmq:{wire}:copy": Baseline(_ZMQ, _WHOLE, quick=10_000_000)
        for wire in ("ipc", "tcp")
    },
    "raw:zmq:tcp:curve": Baseline(_ZMQ, _TO_ONE | _RATE, quick=100_000_000),
    **{f"raw:torchrpc{wire}": Baseline(_RPC) for wire in ("", ":tcp")},
    "raw:torchrpc:cuda": Baseline("bench.raw_torchrpc:CudaRpcWire"),
    "raw:torchrpc:staged": Baseline("bench.raw_torchrpc:StagedRpcWire"),
    QUEUES: Baseline("bench.raw_multiprocessing:QueueWire"),
    "raw:iceoryx2": Baseline(
        "bench.raw_iceoryx2:IceoryxWire", _QUIET, module="iceoryx2", package="iceoryx2"
    ),
    "raw:iceoryx2:loan": Baseline(
        "bench.raw_iceoryx2:IceoryxWire", _WHOLE, module="iceoryx2", package="iceoryx2"
    ),
    "raw:ray": Baseline(
        "bench.raw_ray:RayWire", _QUIET, module="ray", package="ray", served=True
    ),
    "raw:redis": Baseline(
        "bench.raw_redis:RedisWire",
        _QUIET,
        lossy=True,
        most=512 << 20,
        module="redis",
        package="redis",
        program="redis-server",
        served=True,
    ),
    "raw:zenoh": Baseline(
        "bench.raw_zenoh:ZenohWire", _QUIET, module="zenoh", package="eclipse-zenoh"
    ),
    **dict.fromkeys(COPIES, Baseline("", _TO_ONE)),
    "limit:unix": Baseline(_SOCKET, _TO_ONE),
    "limit:tcp": Baseline(_SOCKET, _TO_ONE),
}
MODES = {
    "view": frozenset({"latency", "fanout", "stream"}),
    "loan": _WHOLE,
}
"""Ways to use a transport that shares memory, as in "shm+view", and their workloads.

view: subscribers read the publisher's memory; loan: it is filled in place, too.
"""

OPTIONAL = ("raw:ray", "raw:redis", "raw:zenoh")
"""Other systems: beside no transport, in a full run where they are installed."""


def split(transport: str) -> tuple[str, str]:
    """The backend string and the mode of "shm+view"; the mode is empty without one."""
    backend, _, mode = transport.partition("+")
    return backend, mode


def lends(transport: str) -> bool:
    """Whether a publisher fills its memory in place, which is not timed."""
    return split(transport)[1] == "loan"


def shares_memory(backend: str) -> bool:
    """Whether members on one host read each other's memory; `auto` finds out."""
    return backend.partition(":")[0] in ("shm", "auto")


def encrypts(backend: str) -> bool:
    """Whether a transport needs certificates."""
    return backend in ("tls", "nng:tls")


@lru_cache
def raw_of(transport: str) -> tuple[str, ...]:
    """The bare libraries that a transport is compared with, the nearest one first."""
    if lends(transport):  # the others copy within their time
        return ("raw:iceoryx2:loan",)
    transport, _ = split(transport)
    if transport in ("nng", "zmq"):  # they choose ipc between members on one host
        return (f"raw:{transport}:ipc",)
    if transport in ("torchrpc", "torchrpc:cpu"):
        return ("raw:torchrpc",)
    if transport in ("cuda", "torchrpc:cuda"):
        return ("raw:torchrpc:cuda", "raw:torchrpc:staged")
    if shares_memory(transport):  # what others use in its place on one host
        return ("raw:zmq:ipc", QUEUES, "raw:iceoryx2")
    if transport == "tls":
        return ("raw:zmq:tcp:curve",)
    name = f"raw:{transport}"
    return (name,) if name in BASELINES else ()


@lru_cache
def limit_of(transport: str) -> str:
    """What bounds a transport on one host; empty for a loan, which copies nothing."""
    if lends(transport):
        return ""
    transport, _ = split(transport)
    if transport in ("cuda", "torchrpc:cuda"):
        return "limit:cuda"
    if transport == "inproc" or shares_memory(transport):
        return "limit:memcpy"
    unix = transport in ("nng", "zmq") or transport.endswith(":ipc")
    return "limit:unix" if unix else "limit:tcp"


def reach_of(transport: str) -> str:
    """How far a transport of ours reaches: "process", "host" or "network"."""
    backend, _ = split(transport)
    if backend == "inproc":
        return "process"
    return "host" if backend == "shm" or backend.endswith(":ipc") else "network"


def measured_reach(transport: str) -> str:
    """How far the way reaches that members on one host take, which is what is measured.

    On one host `auto` shares memory, TensorPipe reads the sender's, and `nng` and `zmq`
    without a wire choose ipc: their times there say nothing of other hosts.
    """
    backend, _ = split(transport)
    name = backend.partition(":")[0]
    chosen = name in ("auto", "torchrpc", "cuda") or backend in ("nng", "zmq")
    return "host" if chosen else reach_of(transport)


def beside(transport: str, workload: str) -> list[str]:
    """What is measured beside a transport, in the same rounds."""
    found: list[str] = []
    for raw in raw_of(transport):
        # Of torchrpc: left to itself, TensorPipe reads other memory on one host.
        variants = (raw, f"{raw}:pubsub", f"{raw}:tcp")
        found += [name for name in variants if name in BASELINES]
    if transport in ("nng", "nng:ipc"):
        found.append(BUS)
    if transport.startswith("zmq"):
        found.append(f"{raw_of(transport)[0]}:copy")
    found += filter(None, [limit_of(transport)])
    return [name for name in found if workload in BASELINES[name].workloads]


def is_baseline(transport: str) -> bool:
    """Whether this is not the library but what it is compared with."""
    return transport.partition(":")[0] in ("raw", "limit")


def served(transport: str) -> bool:
    """Whether servers do part of the work, which are no processes of the cell."""
    return transport in BASELINES and BASELINES[transport].served


def may_lose(transport: str) -> bool:
    """Whether messages of a transport may get lost; all others must arrive."""
    return transport in BASELINES and BASELINES[transport].lossy


def can_run(transport: str, workload: str) -> bool:
    """Whether a transport or baseline has this workload."""
    _, mode = split(transport)
    if mode:
        return workload in MODES.get(mode, ())
    known = BASELINES.get(transport)
    return known is None or workload in known.workloads


def check(name: str) -> str | None:
    """Why a baseline cannot be used here, or None."""
    known = BASELINES[name]
    if known.module and importlib.util.find_spec(known.module) is None:
        return f"{known.module} is not installed: pip install {known.package}"
    if known.program and shutil.which(known.program) is None:
        return f"there is no program {known.program!r} on the PATH"
    return None


def queue_capacity(nbytes: int) -> int:
    """How many messages of a size a queue of multiprocessing holds."""
    return 4 if nbytes >= _LARGE else 1000


def wire_of(name: str) -> type[Wire]:
    """The class that carries a baseline's payloads."""
    module, _, attribute = BASELINES[name].wire.partition(":")
    found: type[Wire] = getattr(importlib.import_module(module), attribute)
    return found
