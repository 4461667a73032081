"""What a link that does not keep its contract costs, and what its author is told."""

from __future__ import annotations

from typing import Any

import pytest

import mq
from mq import registry
from transports.inproc import InprocLink


@pytest.mark.parametrize("answer", [None, "inproc://here", [1]])
def test_a_link_that_opens_without_a_list_of_addresses_is_told(
    answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an error that has what it returned in place of one."""

    class Faulty(InprocLink):
        def open(self, *arguments: Any) -> Any:
            super().open(*arguments)
            return answer

    monkeypatch.setitem(registry._TABLE, "faulty", registry.Entry(Faulty))
    with pytest.raises(TypeError, match=r"Faulty\.open returned .*no list of address"):
        mq.connect("faulty", group="faults")
