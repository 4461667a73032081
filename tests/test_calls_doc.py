"""What docs/calls.md says of calls and options is all there, and runs as printed."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from fresh_python import printed_by
from nng_links import nng_runs

import mq
from mq import registry

__all__ = ["nng_runs"]

PAGE = (Path(__file__).parent.parent / "docs" / "calls.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
INTERNAL = {"abandon", "close_at_exit", "types_changed"}
"""Methods of a queue for the rest of the library."""
CALLS = {name for name in dir(mq.MQ) if not name.startswith("_")} - INTERNAL


def words() -> set[str]:
    """All that is written as code outside of the examples."""
    text = re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL)
    return set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", text))))


def test_the_example_of_retained_messages_prints_what_it_says(tmp_path: Path) -> None:
    """In the sentence below it."""
    printed = printed_by(EXAMPLES[0], tmp_path)
    says = re.search(r"^It prints (.*)\.$", PAGE, re.MULTILINE)
    assert says is not None
    assert printed == re.findall(r"`([^`]+)`", says[1])
    assert len(printed) == 4


def test_the_example_of_asyncio_runs_as_printed(tmp_path: Path) -> None:
    """Nothing is lost between the first message and the loop."""
    assert printed_by(EXAMPLES[1], tmp_path) == [
        "tensor([0, 0])",
        *(f"{step} tensor([{step}, {step}])" for step in range(1, 4)),
    ]
    assert len(EXAMPLES) == 2


def test_every_public_call_and_error_is_named() -> None:
    """Whoever adds one finds the table that lacks it."""
    public = {name for name in mq.__all__ if not name.startswith("_")}
    assert not (CALLS | public) - words()


def test_every_counter_is_named() -> None:
    """Nobody has to look for one in the source."""
    with (
        mq.connect("shm", group="calls", name="a") as a,
        mq.connect("shm", group="calls", name="b") as b,
    ):
        b.subscribe("t")
        a.publish("t", 1)
        b.recv(timeout=30)
        stats = b.stats()
    parts = [stats, *stats["topics"].values(), *stats["peers"].values()]
    parts += [stats["mesh"], *stats["shared"], stats["pool"]]
    names = {name for part in parts for name in part}
    assert len(names) > 40
    assert not names - words()


@pytest.mark.parametrize("name", ["connect", *sorted(CALLS)])
def test_every_option_of_a_call_is_named(name: str) -> None:
    """But for those of transports, which come below."""
    call = mq.connect if name == "connect" else getattr(mq.MQ, name)
    parameters = inspect.signature(call).parameters.values() if callable(call) else ()
    given = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD} - {"self"}
    assert not given - words()


@pytest.mark.parametrize("backend", registry.table)
def test_every_option_of_a_transport_is_named(backend: str) -> None:
    """As far as it can be imported here."""
    if reason := registry.check(backend):
        pytest.skip(reason)
    assert not set(registry.option_names(backend)) - words()
