import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

from mq.bell import Bell as Bell
from mq.mesh.gate import Gate as Gate
from mq.mesh.ready import PopReady
from mq.plain import DecodeRun
from mq.repeated import Packed
from mq.stream.passing import Received

decode_run: DecodeRun
pop_ready: PopReady

def encode_plain(payload: Any, /) -> bytes | None: ...
def copy(source: memoryview, target: memoryview, past_cache: bool, /) -> None: ...
def expect_copy(nbytes: int, /) -> None: ...
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
def has_other_locks(lock: object, /) -> bool: ...
def take_back(lock: threading.Lock, given: deque[object], /) -> None: ...
def arrive_alone(
    by_id: dict[int, Any],
    limit: int,
    inbox: Any,
    session: Any,
    head: bytes | memoryview,
    now: float,
    /,
) -> bool: ...
def send_alone(session: Any, feed: Any, message: Any, now: float, /) -> bool: ...
def take_alone(inbox: Any, /) -> Any: ...

class Spinner:
    def __init__(self, fd: int, /) -> None: ...
    def spin(self, seconds: float, /) -> list[int]: ...
    def close(self) -> None: ...

def receive_passing(sock: socket.socket, target: memoryview, /) -> Received: ...
def know_arrivals(run: type, arrivals: type, entry: type, /) -> None: ...
def know_frames(frame: type, /) -> None: ...
def are_bools(memory: memoryview, /) -> bool: ...
def know_arrays(
    type: type,
    described: dict[bytes, Any],
    bytes_of: Callable[[Any], memoryview],
    starts: dict[type, bytes],
    makers: dict[bytes, Any],
    /,
) -> None: ...
def know_objects(
    tables: list[dict[Any, Any]],
    attempt: Callable[[Callable[[Any], Any], Any], Any],
    raised: type,
    build: Callable[[Any, Any], Any],
    fail: Callable[[Any, BaseException], NoReturn],
    /,
) -> None: ...
def know_tensors(
    type: type,
    strided: Any,
    described: dict[bytes, Any],
    bytes_of: Callable[[Any], memoryview],
    /,
) -> None: ...
def pack_mixed(
    payload: Any, described: dict[Any, Any], /
) -> Packed | list[Any] | None: ...
def pack_repeated(payload: Any, headers: dict[Any, Any], /) -> Packed | None: ...
def take_aligned(nbytes: int, /) -> memoryview: ...
def unpack_mixed(
    area: memoryview, read_only: bool, made: list[Any] | None = None, /
) -> Any: ...
def unpack_repeated(
    area: memoryview, known: dict[bytes, Any], read_only: bool, /
) -> Any: ...

Lock = threading.Lock
