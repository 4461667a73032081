"""What is refused: groups, addresses of a rendezvous, and records."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from meeting import (
    record,
)

from mq.rendezvous import Record, open_rendezvous


@pytest.mark.parametrize("group", ["", "x" * 101, "a\nb", "a\0", "\ud800", 7, None])
def test_a_bad_group_is_refused(group: Any) -> None:
    """A group has 1 to 100 printable characters."""
    with pytest.raises((TypeError, ValueError), match="group"):
        open_rendezvous(None, group=group, secret=None, timeout=1.0)


@pytest.mark.parametrize(
    "spec",
    [
        *("redis://h:1", "127.0.0.1:80", "", "tcp://h", "tcp://:5", "tcp://h:0"),
        *("tcp://h:99999", "tcp://h:1/path", "tcp://u@h:1", "tcp://0.0.0.0:5"),
        *("tcp://*:5", "tcp://0:5", "tcp://[::]:5", "tcp://[::ffff:0.0.0.0]:5"),
        *("file://shared/x", "file://", "file:///", "env://x"),
        *("file:///tmp#run1", "file:///tmp?run=1", "file:///tmp#", "file:///tmp?"),
    ],
)
def test_a_malformed_rendezvous_is_refused(spec: str) -> None:
    """The error shows what was given and what would be right."""
    with pytest.raises(ValueError, match="rendezvous"):
        open_rendezvous(spec, group="g", secret=None, timeout=1.0)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(_json, st.sampled_from(sorted(json.loads(record("x").to_json()))))
def test_no_foreign_json_passes_for_a_record(value: Any, field: str) -> None:
    """Whatever stands in a field, a record is valid or a ValueError."""
    good = json.loads(record("x").to_json())
    for fields in (value, good | {field: value}, good["process"] | {field: value}):
        try:
            parsed = Record.from_json(json.dumps(fields))
        except ValueError:
            continue
        assert Record.from_json(parsed.to_json()) == parsed


@pytest.mark.parametrize("text", ["", "[" * 60000, '{"a":' + "9" * 9999 + "}", "NaN"])
def test_hostile_json_is_refused(text: str) -> None:
    """Depth and digits are bounded before they cost anything."""
    with pytest.raises(ValueError, match=r"\w"):
        Record.from_json(text)


@pytest.mark.parametrize(
    "fields",
    [
        *({"name": ""}, {"name": "x" * 256}, {"name": "a\nb"}, {"generation": -1}),
        *(
            {"generation": True},
            {"lease": 0.0},
            {"lease": math.nan},
            {"since": math.inf},
        ),
        *({"labels": ("a", 1)}, {"addresses": ["a"]}, {"addresses": ("",)}),
        *({"incarnation": "XYZ"}, {"process": None}),
    ],
)
def test_a_record_is_valid_or_not_made(fields: dict[str, Any]) -> None:
    """Types, sizes and ranges are checked wherever a record comes from."""
    with pytest.raises(ValueError, match=next(iter(fields))):
        record(**{"name": "x", **fields})


def test_importing_loads_neither_torch_nor_numpy() -> None:
    """A program that never uses env:// does not pay for torch."""
    code = (
        "import sys, mq.rendezvous.tcp, mq.rendezvous.torchrun\n"
        "sys.exit(not {'torch', 'numpy', 'zmq'}.isdisjoint(sys.modules))"
    )
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, check=False, timeout=60
    )
    assert done.returncode == 0
