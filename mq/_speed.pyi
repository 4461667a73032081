from typing import Any

from mq.mesh.gate import Gate as Gate
from mq.message import Message

def encode_plain(payload: Any, /) -> bytes | None: ...
def decode_run(
    kind: type[Message],
    topic: str,
    sender: str,
    incarnation: str,
    first: int,
    times: tuple[float, ...],
    areas: list[memoryview],
    /,
) -> list[Message]: ...
def copy(source: memoryview, target: memoryview, /) -> None: ...
