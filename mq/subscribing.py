"""What may be asked of a subscription."""

from __future__ import annotations

from mq.message import History, check_history
from mq.options import switch, whole

DEFAULT_DEPTH = 4096
"""1000 small messages last one to three milliseconds: where answers are slow both sides
would wait in turn (docs/performance.md, small messages)."""
DEFAULT_WINDOW_BYTES = 256 << 20
MAX_CREDIT = 2**62
"""What more stands for, as credit is sent in totals of 63 bits."""

Options = tuple[int | None, int, int, bool, str | None]
"""Messages to keep (None: all), depth, window in bytes, zero copy, device."""


def check_options(
    history: History,
    depth: int,
    window_bytes: int,
    zero_copy: bool,
    device: str | None,
) -> Options:
    """The arguments of `MQ.subscribe`, as the mesh and peers take them.

    Raises:
        TypeError, ValueError: One makes no sense, or the device is not there; names it.
    """
    keep = check_history(history)
    depth = min(whole("depth", depth, 1), MAX_CREDIT)
    window_bytes = min(whole("window_bytes", window_bytes, 1), MAX_CREDIT)
    if device is not None:
        from mq.devices import check_device  # it loads torch

        check_device(device)
    return keep, depth, window_bytes, switch("zero_copy", zero_copy), device
