"""Tensors that stay on their device: cut into pieces here, put together there.

Nothing here waits for a device but `Piece.copy_to` and `check_device`. Each piece
carries an event of the stream that filled it, and whoever uses it next makes its own
stream wait for that. The copies of arriving pieces, and what TensorPipe does with
leaving ones, are ordered on a stream of this module's, so that it does not matter which
of the application's threads happens to move them. On the CPU the same code runs without
streams.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import torch

from mq import extensions as ext
from mq.errors import CodecError, first_line
from mq.frames import align_area

_streams: Final[dict[torch.device, Any]] = {}
_leaving: Final[dict[torch.device, Any]] = {}
"""Where what leaves is waited for, and nothing else: that may take long."""


class Piece:
    """A part of an area.

    Attributes:
        tensor: 1-D, uint8, contiguous, with a storage of exactly its bytes.
        ready: The event after which it holds its bytes; None: it does.
        problem: Why it never will, or "".
        lacks_room: Whether that is for want of memory; there may be some later.
        is_ours: Whether its memory was taken for what this module does `aside`.
    """

    __slots__ = ("is_ours", "lacks_room", "problem", "ready", "tensor")

    def __init__(
        self, tensor: torch.Tensor, ready: Any = None, is_ours: bool = False
    ) -> None:
        self.tensor = tensor
        self.ready = ready
        self.problem = ""
        self.lacks_room = False
        self.is_ours = is_ours

    @classmethod
    def arrived(cls, tensor: torch.Tensor) -> Piece:
        """What the current stream has filled; who uses it learns of a problem."""
        try:
            return cls(tensor, filled(tensor.device))
        except RuntimeError as error:
            return cls.missing(len(tensor), tensor.device, error)

    @classmethod
    def missing(cls, nbytes: int, device: torch.device, error: RuntimeError) -> Piece:
        """In the place of one that does not come; who uses it learns of that."""
        piece = cls(torch.empty(nbytes, dtype=torch.uint8, device="meta"))
        piece.fail(device, error)
        return piece

    @classmethod
    def of_host(cls, content: bytes | torch.Tensor, device: torch.device) -> Piece:
        """The same bytes on a device, of host memory that nobody else has."""
        try:
            with torch.inference_mode(False), aside([device]):
                host = content
                if isinstance(host, bytes):
                    host = torch.frombuffer(bytearray(host), dtype=torch.uint8)
                # From pageable memory: it waits.
                return cls(host.to(device), is_ours=True)
        except RuntimeError as error:
            return cls.missing(len(content), device, error)

    def __len__(self) -> int:
        return self.tensor.numel()

    def fail(self, device: torch.device, error: RuntimeError) -> None:
        """It does not come, for what happened on a device."""
        self.problem = f"a piece on {device} did not arrive: {first_line(error)}"
        self.lacks_room = isinstance(error, torch.cuda.OutOfMemoryError)
        self.ready = None

    def copy_to(self, view: memoryview) -> None:
        """Copy it into host memory of its size; waits until it is there.

        Raises:
            RuntimeError: The device has failed.
        """
        # Aside, for what the application has given its own stream may take long.
        streams = None if self.ready is None else _leaving
        with aside([self.tensor.device], streams):
            wait_for(self.ready, self.tensor.device)
            host = torch.frombuffer(view, dtype=torch.uint8)
            host.copy_(self.tensor)  # into pageable memory: it waits for the stream

    def begin(self, nbytes: int) -> Landing:
        """An area of so many bytes on the device where this piece is."""
        return Landing(nbytes, self.tensor.device)


class Landing:
    """An area on its way in, and afterwards where its tensors are."""

    __slots__ = ("_device", "_nbytes", "_ready", "_tensor")

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._nbytes = nbytes
        self._device = device
        self._tensor: torch.Tensor | None = None
        self._ready: Any = None

    def __len__(self) -> int:
        return self._nbytes

    def add(self, start: int, piece: Piece) -> None:
        """Put a piece in its place; doing so again changes nothing.

        Raises:
            MemoryError: It had no room to arrive.
            ValueError: It is on another device, or that has no room for the area, or
                has failed.
        """
        if piece.lacks_room:
            raise MemoryError(piece.problem)
        if piece.problem:
            raise ValueError(piece.problem)
        if piece.tensor.device != self._device:
            raise ValueError(
                f"a piece on {piece.tensor.device} of an area on {self._device}"
            )
        if len(piece) == self._nbytes:
            self._tensor, self._ready = piece.tensor, piece.ready
            return
        try:
            self._copy(start, piece)
        except RuntimeError as error:
            raise ValueError(
                f"a piece on {self._device} cannot be put in its place: "
                f"{first_line(error)}"
            ) from error

    def _copy(self, start: int, piece: Piece) -> None:
        # The thread that happens to move pieces may be in inference mode. A tensor made
        # there is one that nothing outside of it may write to or train with.
        with torch.inference_mode(False), aside([self._device]):
            if self._tensor is None:
                try:
                    self._tensor = torch.empty(
                        self._nbytes, dtype=torch.uint8, device=self._device
                    )
                except RuntimeError as error:
                    raise ValueError(
                        f"no room for {self._nbytes} bytes on {self._device}: "
                        f"{first_line(error)}"
                    ) from error
            wait_for(piece.ready, self._device)
            self._tensor[start : start + len(piece)].copy_(piece.tensor)
            if not piece.is_ours:
                used_here(piece.tensor)
            self._ready = filled(self._device)

    def claim(self) -> torch.Tensor:
        """Its bytes, ready on the current stream; call once all pieces were added."""
        assert self._tensor is not None
        wait_for(self._ready, self._device)
        used_here(self._tensor)
        return self._tensor


class Area:
    """The tensors of a payload that are on one device.

    Attributes:
        device: As torch names it.
        nbytes: A multiple of `ext.AREA_ALIGNMENT`, at least that.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = str(device)
        self.nbytes = ext.AREA_ALIGNMENT
        self._device = device
        self._end = 0
        self._parts: list[torch.Tensor] = []
        self._pieces: list[Piece] | None = None

    def append(self, flat: torch.Tensor) -> int:
        """Take a tensor in: 1-D, uint8, contiguous. Returns where it begins."""
        start = align_area(self._end)
        if flat.numel():
            self._pad(start - self._end)
            self._parts.append(flat)
            self._end = start + flat.numel()
            self.nbytes = align_area(self._end)
        return start

    def _pad(self, nbytes: int) -> None:
        if nbytes:  # zeros, not what the device's memory held before
            self._parts.append(
                torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
            )

    def pieces(self, most: int) -> Sequence[Piece]:
        """Its pieces, of `most` bytes but for the last: made by the first call.

        Raises:
            CodecError: The device has failed.
        """
        if self._pieces is None:
            try:
                self._pad(self.nbytes - self._end)
                copies = [torch.cat(parts) for parts in _cut(self._parts, most)]
                ready = filled(self._device)
            except torch.cuda.OutOfMemoryError:
                raise  # which says more, and of which the application may make room
            except RuntimeError as error:
                raise CodecError(
                    f"the tensors on {self.device} cannot be copied: "
                    f"{first_line(error)}; nobody got the message"
                ) from error
            self._pieces = [Piece(copy, ready) for copy in copies]
            self._parts.clear()
        return self._pieces


def _cut(parts: Iterable[torch.Tensor], most: int) -> Iterator[list[torch.Tensor]]:
    """Divide tensors into runs of `most` bytes together, but for the last."""
    run: list[torch.Tensor] = []
    room = most
    for part in parts:
        while part.numel() >= room:
            yield [*run, part[:room]]
            part, run, room = part[room:], [], most
        if part.numel():
            run.append(part)
            room -= part.numel()
    if run:
        yield run


def check_device(device: str) -> None:
    """See that tensors can be moved to a device.

    Raises:
        TypeError: It is no string.
        ValueError: Torch has no such device, this process cannot use it, or it holds
            no data.
    """
    if not isinstance(device, str):
        raise TypeError(f"device is a str such as 'cuda:0', not {device!r}")
    try:
        moved = torch.empty(1, device="cpu").to(device)
    except (RuntimeError, AssertionError, ImportError) as error:  # by kind of device
        raise ValueError(
            f"device is {device!r}, which cannot be used here: {first_line(error)}. "
            f"Torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices; "
            "name one of them or 'cpu', or leave device= out"
        ) from error
    if moved.is_meta:
        raise ValueError(
            f"device is {device!r}, where tensors have no data: what is received would "
            "be lost; leave device= out, and move to it what needs no data"
        )


# -- streams ----------


def filled(device: torch.device) -> Any:
    """An event of the current stream, after which what it fills now is there."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def is_to_come(event: Any) -> bool:
    """Whether an event has not been reached, on a device that has not failed."""
    try:
        return not is_reached(event)
    except RuntimeError:
        return False


def is_reached(event: Any) -> bool:
    """Whether an event has been reached; without one all is there.

    Raises:
        RuntimeError: The device has failed.
    """
    # In any thread, whatever its current GPU: by its source torch takes a query for
    # safe from every device, and sets none for it.
    return event is None or bool(event.query())


def wait_for(ready: Any, device: torch.device) -> None:
    """Have the current stream wait for an event; this thread does not."""
    if ready is not None:
        torch.cuda.current_stream(device).wait_event(ready)


def used_here(tensor: torch.Tensor) -> None:
    """Keep its memory from being used again before the current stream is done."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


@contextlib.contextmanager
def aside(
    devices: Iterable[torch.device], streams: dict[torch.device, Any] | None = None
) -> Iterator[None]:
    """Make a stream of this module's current on each of these devices."""
    found = [device for device in devices if device.type == "cuda"]
    if len(found) == 1 and _is_current(found[0]):
        # As torch's own context does, in a tenth of the time.
        new, index = _stream(found[0], streams), found[0].index
        before = torch._C._cuda_getCurrentStream(index)
        try:  # the call is in it, for a Ctrl-C may come right after
            _set_stream(new.stream_id, new.device_index, new.device_type)
            yield
        finally:
            _set_stream(*before)
        return
    with contextlib.ExitStack() as stack:
        for device in found:
            # First the device: a stream of another one would, in the end, set that
            # which a new thread begins with, GPU 0, and so take memory there.
            stack.enter_context(torch.cuda.device(device))
            stack.enter_context(torch.cuda.stream(_stream(device, streams)))
        yield


def _is_current(device: torch.device) -> bool:
    """Whether it is the current one, and its stream can be set by torch's own means."""
    names = ("_cuda_getDevice", "_cuda_getCurrentStream", "_cuda_setStream")
    if not all(hasattr(torch._C, name) for name in names):
        return False
    return bool(torch._C._cuda_getDevice() == device.index)


def _set_stream(stream_id: int, device_index: int, device_type: int) -> None:
    torch._C._cuda_setStream(
        stream_id=stream_id, device_index=device_index, device_type=device_type
    )


def _stream(device: torch.device, streams: dict[torch.device, Any] | None) -> Any:
    """The one of a device, whichever thread asks first: it orders what is done."""
    streams = _streams if streams is None else streams
    found = streams.get(device)
    if found is None:
        # Of the urgent ones, for of the others a process has few in all: one that the
        # application has made may be the same, and all that waits on it would count.
        new = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        found = streams.setdefault(device, new)
    return found


@contextlib.contextmanager
def leaving(pieces: Sequence[Piece]) -> Iterator[None]:
    """Have what uses the current streams in this block find these pieces filled."""
    with aside({piece.tensor.device: None for piece in pieces}, _leaving):
        for piece in pieces:
            wait_for(piece.ready, piece.tensor.device)
        yield
