"""The two-term model of a transport: time = per message + bytes / bandwidth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from bench.summary import Row, Run

_SIZES = 3


class Model(NamedTuple):
    """What a message costs on a transport.

    Attributes:
        per_message_us: Microseconds that every message takes, whatever its size.
        gb_per_s: 10^9 bytes per second beyond that; None: the size costs nothing.
        worst: How many times a measured time is at most above or below the model's.
    """

    per_message_us: float
    gb_per_s: float | None
    worst: float


def fit(milliseconds: Mapping[int, float]) -> Model | None:
    """The model of times by size in bytes, or None for fewer than three sizes.

    Least squares of the relative errors, so that 1 KB counts as much as 1 GB; neither
    term below zero.
    """
    points = [(size, time) for size, time in milliseconds.items() if time > 0]
    if len(points) < _SIZES:
        return None
    # Minimize the sum of (a u + b v - 1)^2 with u = 1 / time, v = size / time.
    pairs = [(1 / time, size / time) for size, time in points]
    uu = sum(u * u for u, _ in pairs)
    uv = sum(u * v for u, v in pairs)
    vv = sum(v * v for _, v in pairs)
    su, sv = sum(u for u, _ in pairs), sum(v for _, v in pairs)
    divisor = uu * vv - uv * uv
    a = (su * vv - sv * uv) / divisor if divisor else 0.0
    b = (sv * uu - su * uv) / divisor if divisor else 0.0
    if a <= 0:
        a, b = 0.0, sv / vv
    elif b <= 0:
        a, b = su / uu, 0.0
    errors = [(a + b * size) / time for size, time in points]
    worst = max(max(error, 1 / error) for error in errors)
    return Model(a * 1000, 1e-6 / b if b else None, worst)


def models(run: Run) -> dict[str, Model]:
    """The model of each transport and baseline whose latency was measured."""
    rows: dict[str, list[Row]] = {}
    for row in run.of("latency"):
        rows.setdefault(row.transport, []).append(row)
    found = {}
    for transport, measured in rows.items():
        times = {row.nbytes: row.value for row in measured if row.value is not None}
        model = fit(times)
        if model is not None:
            found[transport] = model
    return found
