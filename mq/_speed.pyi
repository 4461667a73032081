import socket
import threading
from collections import deque
from typing import Any

from mq.bell import Bell as Bell
from mq.mesh.gate import Gate as Gate
from mq.mesh.ready import PopReady
from mq.plain import DecodeRun
from mq.stream.passing import Received

decode_run: DecodeRun
pop_ready: PopReady

def encode_plain(payload: Any, /) -> bytes | None: ...
def copy(source: memoryview, target: memoryview, past_cache: bool, /) -> None: ...
def fill(
    pieces: list[tuple[int, memoryview]], target: memoryview, counter: memoryview, /
) -> None: ...
def follow(
    source: memoryview,
    counter: memoryview,
    done: int,
    stop: int,
    target: memoryview,
    /,
) -> int: ...
def hold_signals(numbers: list[int], /) -> int: ...
def signal_waits() -> bool: ...
def arrive_alone(
    head: bytes | memoryview,
    session: Any,
    by_id: dict[int, Any],
    limit: int,
    fifo: deque[Any],
    /,
) -> bool: ...
def receive_passing(sock: socket.socket, target: memoryview, /) -> Received: ...
def know_arrivals(run: type, arrivals: type, /) -> None: ...
def know_arrays(type: type, /) -> None: ...
def know_tensors(type: type, strided: Any, /) -> None: ...
def pack_repeated(payload: Any, headers: dict[Any, Any], /) -> bytes | None: ...
def take_aligned(nbytes: int, /) -> memoryview: ...
def unpack_repeated(
    area: memoryview, known: dict[bytes, Any], read_only: bool, /
) -> Any: ...

Lock = threading.Lock
