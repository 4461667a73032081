"""Raises KeyboardInterrupt at a chosen point of the code, as a Ctrl-C may."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

Point = tuple[int, int]
"""Which of the armed calls, and which line or bytecode of it in the mesh, from 1."""
Place = tuple[CodeType, int, int]
"""A line or bytecode, and for some whom it is called by."""
Trace = Callable[[FrameType, str, Any], Any]
_LOOKS_ALWAYS = sys.version_info >= (3, 13)
"""There not all bytecodes are seen where those before them were not looked at."""
_WATCHED = ("/mq/mesh/", "/mq/borrowing.py", "/mq/receiving.py")


class Interrupter:
    """Raises KeyboardInterrupt at one line (or bytecode) of the mesh, or of a call.

    Args:
        at: Where; None: nowhere, it only looks what is visited.
        opcodes: Whether points are bytecodes in place of lines.

    Attributes:
        visited: The points at which each place in the code was reached.
        where: The place of the interrupt; "" where there was none.
    """

    def __init__(self, at: Point | None, *, opcodes: bool = False) -> None:
        self.at = at
        self.opcodes = opcodes
        self.where = ""
        self.visited: dict[Place, list[Point]] = defaultdict(list)
        self._calls = self._count = 0

    def _call(self, frame: FrameType, event: str, arg: object) -> Trace | None:
        if not any(part in frame.f_code.co_filename for part in _WATCHED):
            return None
        frame.f_trace_opcodes = self.opcodes
        return self._line

    def _line(self, frame: FrameType, event: str, arg: object) -> Trace:
        if event == ("opcode" if self.opcodes else "line"):
            self._count += 1
            if self.at is None:
                place = (frame.f_code, frame.f_lasti, self._caller(frame))
                self.visited[place].append((self._calls, self._count))
            elif (self._calls, self._count) == self.at:
                name = frame.f_code.co_filename.rpartition("/")[2]
                self.where = f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
                raise KeyboardInterrupt
        return self._line

    @staticmethod
    def _caller(frame: FrameType) -> int:
        """What is atomic must be so wherever it is used."""
        if frame.f_code.co_filename.endswith("atomic.py") and frame.f_back is not None:
            return hash((frame.f_back.f_code, frame.f_back.f_lineno))
        return 0

    @contextmanager
    def armed(self) -> Iterator[None]:
        self._calls += 1
        self._count = 0
        passes = self.at is not None and self.at[0] != self._calls
        if passes and not (self.opcodes and _LOOKS_ALWAYS):
            yield  # tracing takes twice the time
            return
        before = sys.gettrace()
        sys._getframe().f_trace_opcodes = self.opcodes  # 3.12 looks for one first
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(before)
