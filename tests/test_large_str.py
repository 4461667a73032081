"""Long strings are found in what was encoded, and numbers not taken for them."""

from __future__ import annotations

import msgspec
import pytest
from payload_checks import CODEC, travel

from mq.codec import large_str


@pytest.mark.parametrize("nbytes", [1 << 16, 1 << 20, (1 << 24) - 1, 1 << 24, 3 << 24])
def test_a_large_str_among_numbers_is_a_buffer_of_its_own(nbytes: int) -> None:
    """Whichever bytes its length begins with, and whatever follows."""
    sent = [1 / 7, "x" * nbytes, "y", 2.5]
    encoded = CODEC.encode(sent)
    assert [buffer.nbytes for buffer in encoded.buffers] == [nbytes]
    assert travel(sent) == sent


def test_numbers_are_hardly_ever_taken_for_large_strs() -> None:
    """Their bytes often are the opcode; to look at each took ten times the encoding."""
    skeleton = msgspec.msgpack.encode([number / 7 for number in range(10_000)])
    assert skeleton.count(b"\xdb") > 1000
    assert len(large_str(len(skeleton)).findall(skeleton)) < 10
