"""The payloads of the golden files, and the program that writes missing files.

Run ``python tests/make_golden.py`` after adding a payload. A file that exists is never
rewritten: it holds the format of released versions.
"""

from __future__ import annotations

import datetime
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import mq.codec

FOLDER = Path(__file__).parent / "golden"


class Transition(NamedTuple):
    """A registered type."""

    observation: Any
    reward: float


mq.codec.add_safe_types(Transition, name="golden:Transition")

NAN = struct.unpack(">d", bytes.fromhex("7ff8000000000123"))[0]
EAST = datetime.timezone(datetime.timedelta(hours=5, minutes=30))

PAYLOADS: dict[str, Any] = {
    "none": None,
    "small-dict": {"step": 3, "reward": 0.5, "done": False, "info": "x" * 20},
    "numbers": [0, -1, 2**63, -(2**63), 2**64, -(2**70), 1.5, NAN, float("inf"), 2j],
    "strings": ["", "naïve", b"", b"\x00\xff", bytearray(b"abc")],
    "large": [b"b" * 65536, "s" * 65537, bytearray(b"a" * 65538)],
    "containers": [[], (), {}, (1, (2, [3])), {1, 2}, frozenset({3}), {(1, 2): 3}],
    "ordered": OrderedDict([("b", 1), ("a", (2,))]),
    "times": [
        datetime.datetime(2024, 2, 29, 12, 30, 15, 250),
        datetime.datetime(2024, 2, 29, 12, 30, tzinfo=EAST),
        datetime.datetime(2024, 10, 27, 2, 30, fold=1),
        datetime.date(1, 1, 1),
        datetime.time(23, 59, 59, 999999, tzinfo=datetime.timezone.utc),
        datetime.timedelta(days=-1, microseconds=1),
    ],
    "arrays": [
        np.arange(6, dtype="<i4").reshape(2, 3),
        np.array(1.5, dtype=">f8"),
        np.zeros((0, 3), dtype=np.uint8),
        np.array(["2024-02-29", "NaT"], dtype="<M8[D]"),
        np.array(["a", "bc"], dtype="<U2"),
        np.array([(1, 2.5)], dtype=[("a", "<i2"), ("b", "<f4", (2,))]),
    ],
    "scalars": [
        np.float64(0.5),
        np.bool_(True),
        np.int8(-3),
        np.str_("s"),
        np.bytes_(b"b"),
    ],
    "tensors": {
        "float32": torch.arange(6, dtype=torch.float32).reshape(2, 3),
        "bfloat16": torch.tensor([1.0, -2.0], dtype=torch.bfloat16),
        "float8": torch.tensor([0.5, 2.0]).to(torch.float8_e4m3fn),
        "bool": torch.tensor(True),
        "empty": torch.empty(0, 4, dtype=torch.complex64),
    },
    "registered": [Transition(np.arange(2, dtype="<f4"), 1.0), Transition(None, 0.0)],
}


def main() -> None:
    """Write the files that are missing."""
    FOLDER.mkdir(exist_ok=True)
    for name, payload in PAYLOADS.items():
        path = FOLDER / f"{name}.v1.bin"
        if not path.exists():
            path.write_bytes(mq.codec.Codec().encode(payload).pack())
            print(path.name)


if __name__ == "__main__":
    main()
