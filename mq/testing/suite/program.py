"""One program with everything at once: the same script on every transport.

Three publishers stream tensors and dictionaries to two subscribers, of which one joins
late; one publisher is killed in the middle. Every barrier is a message of the queue
itself.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import mq
from mq.testing.cases import case
from mq.testing.harness import Group
from mq.testing.member import Member
from mq.testing.waiting import STEP, wait_until

LIVE = ("alpha", "beta")
VICTIM = "gamma"
ENOUGH = 20
"""Messages of each publisher that a subscriber must have seen before the next act."""
SIZES = (3, 40_000, 0, 1, 400_000)
"""Elements of 8 bytes, in turn: from a part of a batch to several chunks."""


class Published(NamedTuple):
    """What a publisher did: the last number, and the next when it heard "joined"."""

    last: int
    joined: int


def _payload(number: int, last: bool = False) -> Any:
    import torch

    # By NumPy, since torch's threads would wait for each other on a busy machine.
    values = torch.from_numpy(np.full(SIZES[number % len(SIZES)], number))
    if number % 2 and not last:
        return values
    return {"number": number, "last": last, "nested": [values, ("text", number)]}


def _check(payload: Any, number: int) -> bool:
    """Compare a payload with what was published; whether it is the last."""
    last = isinstance(payload, dict) and payload["last"]
    wanted = _payload(number, last)
    values = payload
    if isinstance(wanted, dict):
        values, wanted_values = payload["nested"][0], wanted["nested"][0]
        payload["nested"][0] = wanted["nested"][0] = None
        assert payload == wanted, f"{payload} in place of {wanted}"
    else:
        wanted_values = wanted
    assert values.dtype == wanted_values.dtype
    equal = np.array_equal(values.numpy(), wanted_values.numpy())
    assert equal, f"message {number} has other values"
    return last


def _publish_until_told(queue: mq.MQ) -> Published:
    """Stream; "joined" is answered, "stop" ends it, and so does `close`."""
    number, joined = 0, -1
    try:
        while True:
            queue.publish("stream", _payload(number), timeout=STEP)
            number += 1
            try:
                told = queue.recv(timeout=0).payload
            except mq.RecvTimeout:
                continue
            if told == "stop":
                queue.publish("stream", _payload(number, last=True), timeout=STEP)
                return Published(number, joined)
            joined = number
            queue.publish("progress", ("heard", joined), timeout=STEP)
    except mq.Closed:
        return Published(number - 1, joined)


def _collect(queue: mq.MQ) -> dict[str, list[int]]:
    """Receive until each live publisher has ended; the numbers by publisher."""
    numbers: dict[str, list[int]] = defaultdict(list)
    living = set(LIVE)
    while living:
        sender, last = _take(queue, numbers, STEP)
        if last:
            living.discard(sender)
        if len(numbers[sender]) % ENOUGH == 0:
            counts = {name: len(found) for name, found in numbers.items()}
            queue.publish("progress", counts, timeout=STEP)
    wait_until(
        lambda: VICTIM not in {member.name for member in queue.members()},
        f"{VICTIM} to be forgotten",
    )
    with contextlib.suppress(mq.RecvTimeout):
        while True:  # what had arrived of it stays readable
            _take(queue, numbers, 0)
    return dict(numbers)


def _take(
    queue: mq.MQ, numbers: dict[str, list[int]], timeout: float
) -> tuple[str, bool]:
    message = queue.recv(timeout=timeout)
    numbers[message.sender].append(message.sequence)
    return message.sender, _check(message.payload, message.sequence)


class _Director:
    """The member that hears of everyone's progress."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.counts: dict[str, dict[str, int]] = {}
        self.heard: dict[str, int] = {}
        member.subscribe("progress")

    def until(self, holds: Callable[[], bool]) -> None:
        """Take in progress until it is so."""
        while not holds():
            message = self.member.recv()
            if isinstance(message.payload, tuple):
                _, self.heard[message.sender] = message.payload
            else:
                self.counts[message.sender] = message.payload

    def seen(self, subscriber: str, publishers: tuple[str, ...], more: int) -> bool:
        """Whether a subscriber has so many messages of each of the publishers."""
        counts = self.counts.get(subscriber, {})
        return all(counts.get(name, 0) >= more for name in publishers)


def _program(
    group: Group, end: Callable[[Member], None], says_goodbye: bool = False
) -> None:
    """Run it, ending the victim by `end`.

    Args:
        says_goodbye: Whether the victim delivers what it published before it ends.
    """
    director = _Director(group.member("director"))
    names = (*LIVE, VICTIM)
    publishers = dict(zip(names, group.members(*names), strict=True))
    early = group.member("early")
    for member in publishers.values():
        member.subscribe("control")
    early.subscribe("stream", depth=16)
    streams = {
        name: member.begin(_publish_until_told) for name, member in publishers.items()
    }
    collecting = {"early": early.begin(_collect)}
    director.until(lambda: director.seen("early", names, ENOUGH))

    before = dict(director.counts["early"])
    late = group.member("late")
    late.subscribe("stream", depth=16)
    late.call("wait_for_subscribers", "control", 3, timeout=STEP)
    late.publish("control", "joined")
    collecting["late"] = late.begin(_collect)
    director.until(lambda: director.heard.keys() == set(names))
    director.until(lambda: director.seen("late", names, ENOUGH))

    end(publishers[VICTIM])
    goals = {name: max(director.counts[name].values()) + ENOUGH for name in collecting}
    director.until(lambda: all(director.seen(n, LIVE, goals[n]) for n in goals))
    director.member.publish("control", "stop")

    published = {name: streams[name].result() for name in LIVE}
    if says_goodbye:
        published[VICTIM] = streams[VICTIM].result()
    got = {name: future.result() for name, future in collecting.items()}
    for name, (last, joined) in published.items():
        assert joined == director.heard[name]
        assert got["early"][name] == list(range(last + 1))
        _is_suffix(got["late"][name], before[name], joined, last)
    gone = got["early"][VICTIM]
    assert len(gone) >= ENOUGH
    assert gone == list(range(len(gone))), "a gap in what the victim had published"
    _is_suffix(got["late"][VICTIM], before[VICTIM], director.heard[VICTIM], None)


def _is_suffix(numbers: list[int], before: int, joined: int, last: int | None) -> None:
    """Without a gap, from a message that was committed while `subscribe` ran.

    Args:
        before: The first number that may be among them: others had received all below
            when the late subscriber connected.
        joined: The first that must be: it was committed after `subscribe` returned.
        last: The number of the last message; None: of one that nobody knows.
    """
    first = numbers[0]
    assert first >= before, f"{first} was published before {before}, which was too old"
    assert first <= joined, f"{joined} to {first} were published, but are lost"
    end = numbers[-1] if last is None else last
    assert numbers == list(range(first, end + 1))


def _program_with_a_leaver(group: Group) -> None:
    """Where members are threads: the victim closes, and all that it said arrives."""
    _program(group, lambda victim: victim.call("close"), says_goodbye=True)


@case("Membership", needs="separate_processes", otherwise=_program_with_a_leaver)
def one_program_runs_the_same_everywhere(group: Group) -> None:
    """Live publishers: all since `subscribe` returned; the killed: a gapless prefix."""
    _program(group, Member.kill)
